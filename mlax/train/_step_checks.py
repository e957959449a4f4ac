"""Checks of the options of a training step, and of the batches of a call that runs several steps."""

from typing import TYPE_CHECKING, Any

from mlax._jax import leaves_with_paths
from mlax._objective import MASK, check_signature
from mlax.core import Layer, as_patterns, short_repr, signature
from mlax.optim import Optimizer
from mlax.place import Plan
from mlax.train._loss_scale import LossScale
from mlax.train._privacy import DifferentialPrivacy

if TYPE_CHECKING:
    from mlax.train._step import Step


def check_options(step: "Step") -> None:
    """Raise an error unless the fields of a `Step` are of the right types and agree with each other."""
    if isinstance(step.objective, Layer) or not callable(step.objective):
        raise TypeError(
            f"train.step: the objective is {short_repr(step.objective)}, but must be a function like `fwd`."
        )
    check_signature("train.step", step.objective, rng=None)
    if not isinstance(step.optimizer, Optimizer):
        raise TypeError(
            f"train.step: {step.optimizer!r} is not an optimizer of mlax; wrap one of Optax in optim.from_optax."
        )
    if step.train is not None:
        _check_train(step.train)
    for name in ("steps_per_call", "accumulate"):
        if not isinstance(getattr(step, name), int) or getattr(step, name) < 1:
            raise ValueError(f"train.step: {name} is {getattr(step, name)!r}, but must be an int of at least 1.")
    if step.scaling is not None and not isinstance(step.scaling, LossScale):
        raise TypeError(f"train.step: scaling is {step.scaling!r}; pass train.DynamicLossScale() or StaticLossScale().")
    if step.plan is not None and not isinstance(step.plan, Plan):
        raise TypeError(f"train.step: plan is {step.plan!r}, but must be a place.Plan, as place.fsdp() returns.")
    if step.accumulate > 1 and pipeline_with_backward(step) is not None:
        raise ValueError("train.step: the plan's pipeline splits batches into microbatches; leave accumulate at 1.")
    if step.privacy is not None:
        _check_privacy(step)
    if (step.sampled is None) != (step.optimizer.estimate_every() is None):
        _raise_sampled_error(step)
    if step.scaling is not None and not step.skip_nonfinite:
        raise ValueError("train.step: a scaled loss overflows now and then, so skip_nonfinite must stay True.")


def check_stacked(steps_per_call: int, batches: Any) -> None:
    """Raise an error unless each array of `batches` holds one batch for each step of a call."""
    mask = batches.get(MASK) if isinstance(batches, dict) else None
    for path, leaf in leaves_with_paths(batches):
        if leaf.ndim == 0 or leaf.shape[0] != steps_per_call or (mask is not None and mask.ndim < 2):
            raise ValueError(
                f"step: steps_per_call is {steps_per_call}, so each array holds {steps_per_call} batches on a leading "
                f"axis, but {path} is {signature(leaf)}; take the batches from "
                f"feed.stream(steps_per_call={steps_per_call})."
            )


def pipeline_with_backward(step: "Step") -> Any:
    """The pipeline of the plan, if it computes its own backward pass."""
    pipeline = None if step.plan is None else step.plan.pipeline
    return pipeline if pipeline is not None and pipeline.backward is not None else None


def _check_train(patterns: Any) -> None:
    if patterns == () or not all(isinstance(pattern, str) for pattern in as_patterns(patterns)):
        raise TypeError(
            f"train.step: train is {short_repr(patterns)}, but must be a pattern or a tuple of them, such as "
            '"**/lora/*" or ("!embed/**",); leave it out to train all leaves.'
        )


def _raise_sampled_error(step: "Step") -> None:
    if step.sampled is not None:
        raise ValueError(
            f"train.step: sampled= is for optimizers that estimate the curvature, such as optim.SophiaG, but "
            f"{short_repr(step.optimizer)} does not; leave it out."
        )
    raise TypeError(
        f"train.step: {short_repr(step.optimizer)} estimates the curvature from labels sampled from the predictions of "
        "the model; pass sampled=, an objective like the other one with the labels jax.random.categorical(rng, logits)."
    )


def _check_privacy(step: "Step") -> None:
    if not isinstance(step.privacy, DifferentialPrivacy):
        raise TypeError(
            f"train.step: privacy is {step.privacy!r}, but must be train.DifferentialPrivacy(clip=1.0, noise=1.1), say."
        )
    if step.sampled is not None:
        raise ValueError("train.step: privacy does not cover gradients from sampled labels; use another optimizer.")
    if step.accumulate > 1 or step.scaling is not None or pipeline_with_backward(step) is not None:
        raise ValueError(
            "train.step: privacy clips the gradient of each example, which accumulate, scaling and a pipeline's own "
            "backward pass do not compute; leave them out, and bound memory by DifferentialPrivacy(chunk=...)."
        )
