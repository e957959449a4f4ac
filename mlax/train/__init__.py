"""Training: the step, the feed, checkpoints and the loop."""

from mlax.train._beat import beat
from mlax.train._curves import draw_curves
from mlax.train._evaluation import Evaluation
from mlax.train._fit import Fitted, fit
from mlax.train._memory import WouldNotFit
from mlax.train._metrics import Metrics
from mlax.train._once import Retraced
from mlax.train._scaling import DynamicScaling, Scaling, StaticScaling
from mlax.train._skipping import Diverged
from mlax.train._state import State
from mlax.train._step import Step, step
from mlax.train.checkpoints import Checkpoints, Highest, Lowest, Restored, from_orbax, to_orbax
from mlax.train.feeds import Buckets, Feed, Iterated, Packed, Position, Rows, Source, Stream, packed

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
