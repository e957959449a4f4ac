"""Training: the step, the feed, checkpoints and the loop."""

from mlax.train._aot import RetraceError
from mlax.train._curves import plot_curves, read_records
from mlax.train._divergence import Diverged
from mlax.train._evaluation import Evaluation
from mlax.train._fit import Fitted, fit
from mlax.train._heartbeat import add_heartbeat_listener, heartbeat
from mlax.train._loss_scale import DynamicLossScale, LossScale, StaticLossScale
from mlax.train._metrics import Metrics
from mlax.train._state import TrainState
from mlax.train._step import Step, step
from mlax.train.checkpoints._best import Highest, Lowest
from mlax.train.checkpoints._checkpoints import Checkpoints
from mlax.train.checkpoints._orbax import from_orbax, to_orbax
from mlax.train.checkpoints._restored import Restored
from mlax.train.feeds._buckets import Buckets
from mlax.train.feeds._feed import Feed
from mlax.train.feeds._iterated import Iterated
from mlax.train.feeds._packed import Packed, packed
from mlax.train.feeds._source import Rows, Source
from mlax.train.feeds._stream import Position, Stream

__all__ = [
    "Buckets",
    "Checkpoints",
    "Diverged",
    "DynamicLossScale",
    "Evaluation",
    "Feed",
    "Fitted",
    "Highest",
    "Iterated",
    "LossScale",
    "Lowest",
    "Metrics",
    "Packed",
    "Position",
    "Restored",
    "RetraceError",
    "Rows",
    "Source",
    "StaticLossScale",
    "Step",
    "Stream",
    "TrainState",
    "fit",
    "from_orbax",
    "heartbeat",
    "packed",
    "plot_curves",
    "step",
    "to_orbax",
]
