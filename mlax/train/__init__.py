"""Training: compiled steps, feeds, checkpoints and the training loop."""

from typing import TYPE_CHECKING, Any

from mlax._compilation_cache import enable_compilation_cache
from mlax._malloc import keep_freed_memory
from mlax._metric import Metric, MetricSums
from mlax._objective import count_labels as count_labels
from mlax._objective import gradients as gradients
from mlax.core import missing_name_message as missing_name_message
from mlax.core import name_types as name_types
from mlax.train._aot import RetraceError
from mlax.train._classification import AUC, F1, ConfusionMatrix, Perplexity, Precision, Recall, accuracy
from mlax.train._curves import plot_curves
from mlax.train._curves import read_records as read_records
from mlax.train._curves import smooth_values as smooth_values
from mlax.train._divergence import Diverged
from mlax.train._divergence import Divergence as Divergence
from mlax.train._evaluation import Evaluation
from mlax.train._fingerprint import differences as differences
from mlax.train._fingerprint import fingerprint as fingerprint
from mlax.train._fit import Fitted, fit
from mlax.train._loggers import JSONLines, Logger, TensorBoard, WandB
from mlax.train._loop import Loop as Loop
from mlax.train._loss_scale import DynamicLossScale, LossScale, StaticLossScale
from mlax.train._metrics import Metrics
from mlax.train._metrics import MetricsLog as MetricsLog
from mlax.train._metrics import truncate_log as truncate_log
from mlax.train._monitor import peak_flops as peak_flops
from mlax.train._privacy import DifferentialPrivacy
from mlax.train._run import RunFolder as RunFolder
from mlax.train._run import compare_config as compare_config
from mlax.train._signals import Signals as Signals
from mlax.train._signals import default_grace as default_grace
from mlax.train._signals import heartbeat
from mlax.train._state import TrainState
from mlax.train._step import Step, step
from mlax.train.checkpoints._checkpoints import Checkpoints, Maximize, Minimize
from mlax.train.checkpoints._orbax import from_orbax, to_orbax
from mlax.train.checkpoints._restore import RestoredCheckpoint
from mlax.train.feeds._buckets import Buckets
from mlax.train.feeds._feed import Feed
from mlax.train.feeds._iterable import IterableFeed
from mlax.train.feeds._prefetch import BatchIterator, Position
from mlax.train.feeds._sequences import PackedSequences, pack_sequences
from mlax.train.feeds._source import ExampleSource, Source

__all__ = [
    "AUC",
    "F1",
    "BatchIterator",
    "Buckets",
    "Checkpoints",
    "ConfusionMatrix",
    "DifferentialPrivacy",
    "Diverged",
    "DynamicLossScale",
    "Evaluation",
    "ExampleSource",
    "Feed",
    "Fitted",
    "IterableFeed",
    "JSONLines",
    "Logger",
    "LossScale",
    "Maximize",
    "Metric",
    "MetricSums",
    "Metrics",
    "Minimize",
    "PackedSequences",
    "Perplexity",
    "Position",
    "Precision",
    "Recall",
    "RestoredCheckpoint",
    "RetraceError",
    "Source",
    "StaticLossScale",
    "Step",
    "TensorBoard",
    "TrainState",
    "WandB",
    "accuracy",
    "enable_compilation_cache",
    "fit",
    "from_orbax",
    "heartbeat",
    "keep_freed_memory",
    "pack_sequences",
    "plot_curves",
    "step",
    "to_orbax",
]

_ELSEWHERE = {  # names of other libraries: what to write here
    "Callback": "a function, passed as train.fit(..., each=function)",
    "DataLoader": "train.Feed",
    "Dataset": "train.ExampleSource, or pass arrays to train.Feed",
    "EarlyStopping": 'train.fit(..., best=train.Minimize("loss"), patience=5)',
    "ModelCheckpoint": 'train.fit(..., run="runs/x"), which saves checkpoints',
    "Trainer": "train.fit",
    "evaluate": "train.Evaluation",
}

if not TYPE_CHECKING:  # to type checkers a missing name stays missing

    def __getattr__(name: str) -> Any:
        raise AttributeError(missing_name_message("mlax.train", name, __all__, _ELSEWHERE))


name_types(globals())
