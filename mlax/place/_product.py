"""Which plans cannot be multiplied, and what to do."""

from typing import Any


def refuse_product(plan: Any, other: Any) -> None:
    """Refuse what is no plan, and plans that cannot hold at once."""
    if not isinstance(other, type(plan)):
        raise TypeError(f"{plan!r} times {other!r}: multiply plans by plans, as place.data(2) * place.pipeline(...).")
    both = dict(plan.sizes).keys() & dict(other.sizes).keys()
    if both:
        raise ValueError(
            f"the plans {plan.name} and {other.name} both have a mesh axis {min(both)!r}; name that of one otherwise, "
            "as by place.fsdp(4, axis='fsdp')."
        )
    if plan.devices and other.devices and plan.devices != other.devices:
        raise ValueError(f"the plans {plan.name} and {other.name} are of different devices; give them to one only.")
    if plan.stages and other.stages:
        raise ValueError("two pipelines cannot be multiplied; make one of as many stages.")
