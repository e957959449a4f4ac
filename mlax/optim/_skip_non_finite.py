"""SkipNonFinite: no step where a gradient is not finite."""

import jax
import jax.numpy as jnp

from mlax._jax import count_non_finite
from mlax.core import frozen
from mlax.optim._around import Around
from mlax.optim._optimizer import Advanced


@frozen
class SkipNonFinite(Around):
    """If any gradient holds a number that is not finite, weights, slots and step stay; `skipped` counts how often.

    Scalar: skipped.
    """

    elementwise = True  # but for the count, which `now.total` sees to

    def adds_scalars(self):
        return {"skipped": 0}

    def advance(self, now, grads, weights, slots):
        inner = {name: slot for name, slot in slots.items() if name != "skipped"}
        fine = now.total(count_non_finite(grads)) == 0
        new, after = self.optimizer.advance(now, grads, weights, inner)
        before = {**inner, "step": now.step}

        def chosen(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(fine, new, old.astype(new.dtype))

        kept = {
            name: {path: chosen(leaf, before[name][path]) for path, leaf in slot.items()}
            if isinstance(slot, dict)
            else chosen(slot, before[name])
            for name, slot in after.items()
        }
        skipped = slots["skipped"] + (~fine).astype(jnp.int32)
        return Advanced({path: chosen(w, weights[path]) for path, w in new.items()}, {**kept, "skipped": skipped})
