"""GradientNoise: Gaussian noise added to gradients."""

import jax

from mlax._jax import cast_scalar, named_key, with_auto_axes
from mlax.core import frozen
from mlax.optim._base import StepResult
from mlax.optim._hyperparams import NonNegative
from mlax.optim._wrappers import OptimizerWrapper


@frozen
class GradientNoise(OptimizerWrapper):
    """Gradient noise: add Gaussian noise of the variance `variance / t ** power` to the gradient at update `t`, counted
    from 1.

    The noise depends on `seed`, the update and the path of the leaf. The seed is stored in the state, so that members
    of an ensemble under `jax.vmap` can have different ones: `state._replace(noise_seed=jnp.arange(members))`.
    Equation 1 of https://arxiv.org/abs/1511.06807. Scalar: noise_seed.

    >>> optimizer = optim.GradientNoise(optim.SGD(0.1), variance=0.01)
    >>> optimizer.init({"kernel": jnp.ones((4, 3))})._fields
    ('step', 'noise_seed')
    """

    variance: NonNegative = 0.01  # of the noise at the first update
    power: NonNegative = 0.55  # of the update's number in the denominator
    seed: int = 0  # of the random numbers

    def extra_scalars(self):
        return {"noise_seed": self.seed}

    def update_leaves(self, context, grads, weights, slots):
        inner = {name: slot for name, slot in slots.items() if name != "noise_seed"}
        values = context.hyperparams(self)
        rng = jax.random.fold_in(jax.random.key(slots["noise_seed"]), context.step)

        def add_noise(path: str, g: jax.Array) -> jax.Array:
            t = cast_scalar(context.step + 1, g)
            deviation = (cast_scalar(values["variance"], g) * t ** -cast_scalar(values["power"], g)) ** 0.5
            return with_auto_axes(_add_normal, g, deviation, named_key(rng, path), like=g)

        noisy = {path: add_noise(path, g) for path, g in grads.items()}
        new, new_slots = self.optimizer.update_leaves(context, noisy, weights, inner)
        return StepResult(new, {**new_slots, "noise_seed": slots["noise_seed"]})


def _add_normal(g: jax.Array, deviation: jax.Array, rng: jax.Array) -> jax.Array:
    return g + deviation * jax.random.normal(rng, g.shape, g.dtype)
