import sys

from mlax.cli import HangDetector, Heartbeat, WorkerProcess


class Worker:
    """A fake process in the state that the test sets."""

    def __init__(self, index):
        self.index, self.status, self.state, self.last = index, None, "S", None

    def heartbeat(self):
        return self.last

    def beat(self, count, step, phase):
        self.last = Heartbeat(count, step, phase)

    def __str__(self):
        return f"process {self.index}"


def detect(count=2, hang=20, slow_timeout=100):
    now = [0.0]
    workers = [Worker(index) for index in range(count)]
    detector = HangDetector(workers, hang, slow_timeout, lambda: now[0])

    def after(seconds):
        now[0] += seconds
        return detector.check()

    return workers, after


def test_the_supervisor_reads_the_heartbeats_of_a_process():
    script = "from mlax import train; train.heartbeat(3); train.heartbeat(4, 'waiting for data')"
    process = WorkerProcess(0, [sys.executable, "-c", script])
    assert process.heartbeat() is None
    process.reap()
    assert process.status == 0 and process.heartbeat() == (2, 4, "waiting for data")
    process.drain()


def test_without_heartbeats_the_process_furthest_behind_hangs():
    (first, second), after = detect()
    first.beat(9, 3, "step")
    second.beat(8, 3, "waiting for data")
    assert after(0) is None and after(19) is None
    hung = after(2)
    assert hung.process is second
    assert "furthest behind, at step 3, waiting for data; process 0 at step 3, step" in hung.why


def test_no_process_hangs_while_any_sends_heartbeats():
    (first, second), after = detect()
    second.beat(1, 1, "step")
    for count in range(1, 10):
        first.beat(count, count, "step")
        assert after(15) is None


def test_compiling_and_saving_may_take_longer():
    (first, second), after = detect()
    for worker, count in ((first, 2), (second, 1)):
        worker.beat(count, 0, "compiling")
    assert after(0) is None and after(99) is None
    assert after(2).process is second


def test_a_script_without_heartbeats_does_not_hang():
    _, after = detect()
    assert after(10_000) is None


def test_a_stopped_process_hangs_even_if_others_progress():
    (first, second), after = detect()
    first.state = "T"
    for count in range(1, 20):
        second.beat(count, count, "step")
        assert after(1) is None
    assert after(2).process is first
    first.state = "S"
    assert after(1) is None


def test_a_process_that_exited_does_not_hang():
    (first, second), after = detect()
    first.beat(5, 5, "ending")
    first.status = 0
    second.beat(9, 5, "step")
    assert after(0) is None
    assert after(21).process is second
