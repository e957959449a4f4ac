"""What a training process and its supervisor, `mlax launch`, agree on. Without JAX, so that `mlax` starts fast."""

import enum
import re
import signal

TERMINATED = 128 + signal.SIGTERM  # the exit status that shells report
LOOPBACK = "127.0.0.1"  # where the processes of one machine meet: no other machine can reach them there
HEARTBEAT_VARIABLE = "MLAX_HEARTBEAT"  # the environment variable with the path of a process's heartbeat file
HEARTBEAT_BYTES = 64  # at the beginning of that file
FINISHED_OFFSET = 64  # where a process writes a byte once its script has ended
ALL_FINISHED_OFFSET = 65  # where the supervisor writes one once the scripts of all processes have ended
STEP_FOLDER = re.compile(r"step-(\d{8,18})(?:-(\d{1,9}))?")  # the name of a checkpoint: its step, and its version


class Phase(enum.StrEnum):
    """What a training process was about to do when it sent a heartbeat."""

    COMPILING = "compiling"
    STEP = "step"
    AFTER_STEP = "after a step"
    EVALUATION = "evaluation"
    CALLBACK = "callback"
    SAVING = "saving"
    WAITING_FOR_DATA = "waiting for data"
    ENDING = "ending"


SLOW_PHASES = (Phase.COMPILING, Phase.CALLBACK, Phase.SAVING, Phase.ENDING)  # may take long without a heartbeat
