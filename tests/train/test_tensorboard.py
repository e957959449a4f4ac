"""What TensorBoard shows of a run that was interrupted and resumed."""

import pytest

from mlax.train import TensorBoard

pytest.importorskip("tensorboardX")


def events(folder):
    """The events of a folder in the order in which TensorBoard reads them."""
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:  # 8 bytes of length, 4 of checksum, the event, 4 of checksum
            size = int.from_bytes(data[:8], "little")
            yield Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]


def visible_points(folder):
    """The visible points: a session that starts at a step hides those of that step and of later ones."""
    points = []
    for event in events(folder):
        if event.HasField("session_log"):
            points = [point for point in points if point[1] < event.step]
        points += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
    return points


def write_session(folder, start, steps, value):
    board = TensorBoard(folder)
    board.start(None, start, {})
    for step in steps:
        board.log(step, {"train/loss": value})
    board.close()


def test_points_of_steps_that_run_again_are_shown_once(tmp_path):
    write_session(tmp_path, 0, range(1, 6), 0.0)
    write_session(tmp_path, 3, range(4, 8), 1.0)
    write_session(tmp_path, 6, range(7, 9), 2.0)
    values = {1: 0, 2: 0, 3: 0, 4: 1, 5: 1, 6: 1, 7: 2, 8: 2}
    assert visible_points(tmp_path) == [("train/loss", step, value) for step, value in values.items()]


def test_without_a_folder_there_is_advice():
    with pytest.raises(ValueError, match=r"the run has no folder; pass run= to fit, or TensorBoard\(folder\)"):
        TensorBoard().start(None, 0, {})
