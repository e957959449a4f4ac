"""Loggers: where `fit` sends metrics and scores: TensorBoard, JSON lines, Weights & Biases, or a class like them."""

import importlib
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from mlax.core import DocumentedProtocol
from mlax.train._metrics import MetricsLog, truncate_log

Config = Mapping[str, Any]

NOT_LOGGED = ("step", "seconds")  # of a record


@runtime_checkable
class Logger(Protocol, metaclass=DocumentedProtocol):
    """Experiment tracking: any object with these three methods, which `fit` calls in the first process only.

    The names of values say where they come from: "train/loss" of a step, "evaluation/loss" of an evaluation, or
    "valid/loss" of the evaluation feed named "valid". A logger that raises is reported once, and training continues.
    """

    def start(self, run: Path | None, step: int, config: Config) -> None:
        """Called before the first step, with the folder of the run, if it has one, and the step to resume from.

        What was logged for later steps, before a kill say, is logged again.
        """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Called with the metrics of each step, and with the scores of each evaluation."""

    def close(self) -> None:
        """Called at the end, also if training fails."""


class TensorBoard:
    """Logs scalars for `tensorboard --logdir`, into the subfolder "tensorboard" of the run, or into `folder`.

    A resumed run hides the points of the steps that run again. Needs tensorboardX: `pip install 'mlax[train]'`.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None):
        self.folder = folder
        self._writer: Any = None

    def __repr__(self) -> str:
        return f"TensorBoard({'' if self.folder is None else repr(os.fspath(self.folder))})"

    def start(self, run: Path | None, step: int, config: Config) -> None:
        """Open an event file."""
        folder = self.folder if run is None else run / (self.folder or "tensorboard")
        if folder is None:
            raise ValueError("TensorBoard: the run has no folder; pass run= to fit, or TensorBoard(folder).")
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise ImportError("train.TensorBoard needs tensorboardX; pip install 'mlax[train]'.") from None
        # Points from `purge_step` on are hidden; the point of `step` itself is not written again. The suffix keeps
        # apart two files created within the same second, which would otherwise have the same name.
        self._writer = SummaryWriter(os.fspath(folder), purge_step=step + 1, filename_suffix=f".{step:012}")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write a point for each value."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is buffered."""
        self._writer.close()


class JSONLines:
    """Logs to a file of JSON lines, `{"step": 12, "seconds": 3.4, "train/loss": 0.3, ...}`, in the folder of the run.

    A resumed run drops the lines of the steps that run again. An absolute path, or a run without a folder, appends to
    a file that may hold other runs. `fit` itself writes all metrics to `metrics.jsonl`, in a similar format.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._log: MetricsLog | None = None

    def __repr__(self) -> str:
        return f"JSONLines({str(self.path)!r})"

    def start(self, run: Path | None, step: int, config: Config) -> None:
        """Drop the lines after `step` from the file of the run."""
        path = self.path if run is None else run / self.path
        if run is not None and path == run / "metrics.jsonl":
            raise ValueError('JSONLines: fit writes "metrics.jsonl" itself; choose another name.')
        path.parent.mkdir(parents=True, exist_ok=True)
        if run is not None and not self.path.is_absolute():
            truncate_log(path, step)
        self._log = MetricsLog(path)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append a line."""
        if self._log is not None:
            self._log.write({"step": step, **values})
            self._log.flush()

    def close(self) -> None:
        """Write lines that a full disk has delayed."""
        if self._log is not None:
            self._log.flush()


class WandB:
    """Logs to Weights & Biases (wandb.ai), with the configuration of the run. Needs `pip install 'mlax[wandb]'`.

    The run is named after its folder, which also keeps its id, so that a resumed run continues in the same charts.
    `mode` is "online", "offline" or "disabled"; None: as the environment says.
    """

    def __init__(
        self,
        project: str,
        *,
        name: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        mode: str | None = None,
    ):
        self.project, self.name, self.entity, self.group = project, name, entity, group
        self.tags, self.mode = tuple(tags), mode
        self._run: Any = None

    def __repr__(self) -> str:
        return f"WandB({self.project!r})"

    def start(self, run: Path | None, step: int, config: Config) -> None:
        """Create the run, or continue the one whose id is in the folder."""
        try:
            wandb = importlib.import_module("wandb")
        except ImportError:
            raise ImportError("train.WandB needs wandb; pip install 'mlax[wandb]'.") from None
        self._run = wandb.init(
            project=self.project,
            name=self.name or (None if run is None else run.name),
            entity=self.entity,
            group=self.group,
            tags=self.tags,
            mode=self.mode,
            config=dict(config),
            dir=None if run is None else os.fspath(run),
            id=None if run is None else _stored_id(run / "wandb-id"),
            resume=None if run is None else "allow",
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values; those of steps that run again, which are equal, W&B ignores."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Upload the rest."""
        self._run.finish()


def _stored_id(path: Path) -> str:
    """The id in a file, which is created if there is none."""
    if not path.exists():
        path.write_text(secrets.token_hex(8))
    return path.read_text().strip()


class LoggerGroup:
    """The loggers of a run, none of which can end it: the first failure of each is reported."""

    def __init__(self, loggers: Sequence[Logger], warn: Callable[[str], None]):
        self.loggers = list(loggers)
        self.warn = warn
        self._failed: set[int] = set()  # the ids of those that have been reported

    def start(self, run: Path | None, step: int, config: Config) -> None:
        """Start each logger. One that is used wrongly raises; one that fails otherwise is left out."""
        started: list[Logger] = []
        for logger in self.loggers:
            try:
                logger.start(run, step, config)
                started.append(logger)
            except (ImportError, TypeError, ValueError):  # a mistake, better seen now than after the training
                self.loggers = started
                self.close()
                raise
            except Exception as error:
                self.warn(f"{_name(logger)} could not start, and logs nothing: {_describe(error)}")
        self.loggers = started

    def log_record(self, record: Mapping[str, Any]) -> None:
        """Log the numbers in the record of a step."""
        if self.loggers:
            numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
            self.log(record["step"], {f"train/{name}": numbers[name] for name in numbers if name not in NOT_LOGGED})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log values by name."""
        for logger in self.loggers:
            try:
                logger.log(step, values)
            except Exception as error:
                self._report(logger, error)

    def close(self) -> None:
        """Close each logger."""
        for logger in self.loggers:
            try:
                logger.close()
            except Exception as error:
                self._report(logger, error)

    def _report(self, logger: Logger, error: Exception) -> None:
        if id(logger) not in self._failed:
            self._failed.add(id(logger))
            self.warn(f"{_name(logger)} failed, and training continues; reported once: {_describe(error)}")


def check_loggers(loggers: Any) -> Sequence[Logger]:
    """Refuse anything but a sequence of loggers."""
    if not isinstance(loggers, list | tuple):
        raise TypeError(f"fit: loggers is a {type(loggers).__name__}; pass a list: loggers=[train.TensorBoard()].")
    for logger in loggers:
        if isinstance(logger, type) or not isinstance(logger, Logger):
            what = f"the class {logger.__name__}" if isinstance(logger, type) else f"a {type(logger).__name__}"
            raise TypeError(
                f"fit: {what} is not a logger; pass an object with the methods start, log and close, such as "
                "train.TensorBoard()."
            )
    return loggers


def _name(logger: Logger) -> str:
    return f"the logger {type(logger).__name__}"


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
