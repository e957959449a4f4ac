"""Training: the step, the feed, checkpoints and the loop."""

from mlax.train._beat import beat, heard_by
from mlax.train._curves import draw_curves, read_records
from mlax.train._evaluation import Evaluation
from mlax.train._fit import Fitted, fit
from mlax.train._memory import WouldNotFit
from mlax.train._metrics import Metrics
from mlax.train._once import Retraced
from mlax.train._scaling import DynamicScaling, Scaling, StaticScaling
from mlax.train._skipping import Diverged
from mlax.train._state import State
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
    "DynamicScaling",
    "Evaluation",
    "Feed",
    "Fitted",
    "Highest",
    "Iterated",
    "Lowest",
    "Metrics",
    "Packed",
    "Position",
    "Restored",
    "Retraced",
    "Rows",
    "Scaling",
    "Source",
    "State",
    "StaticScaling",
    "Step",
    "Stream",
    "WouldNotFit",
    "beat",
    "draw_curves",
    "fit",
    "from_orbax",
    "packed",
    "step",
    "to_orbax",
]
