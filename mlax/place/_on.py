"""On: a layer computed on a device, on a mesh, or on the host, wherever its input comes from."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.experimental import compute_on
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mlax._jax import to_device, to_host
from mlax.core import Wrapper, frozen, jitted_init
from mlax.place._where import Where


@frozen
class On(Wrapper):
    """Compute `layer` somewhere: on a `jax.Device`, on a `Mesh` or a `NamedSharding`, or by `place.host` on the host.

    `init` makes the variables there. On devices or a mesh, `fwd` moves the input there, which has a gradient, runs
    the layer as one compiled call, and leaves the output there: jit the parts, as this does, and not the whole, since
    all of one compiled program runs on one set of devices. Inside of a jit that runs elsewhere JAX refuses it, as
    "incompatible devices". A `NamedSharding` says how the input is split; variables are on each device of a mesh. On
    the host, `fwd` works inside of jit too, the trainables are in host memory and the output is on the device.
    """

    where: Any

    def __post_init__(self) -> None:
        super().__post_init__()
        if _is_host(self.where) or isinstance(self.where, jax.Device | Mesh | NamedSharding):
            return
        raise TypeError(f"On: where is {self.where!r}, but must be a device, a Mesh, a NamedSharding or place.host.")

    def init(self, rng, x):
        if _is_host(self.where):
            trainables, non_trainables = self.layer.init(rng, x)
            return to_host(trainables), non_trainables
        _, everywhere = self._shardings()
        if isinstance(rng, Tracer):
            return _put(self.layer.init(rng, x), everywhere)
        if isinstance(self.where, jax.Device):
            with jax.default_device(self.where):
                return _put(self.layer.init(_put(rng, everywhere), x), everywhere)
        return jax.jit(jitted_init(self.layer, x), out_shardings=everywhere)(_put(rng, everywhere))

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        if _is_host(self.where):
            return self._on_host(x, trainables, non_trainables, rng, inference_mode)
        inputs, everywhere = self._shardings()
        x, (trainables, non_trainables, rng) = _put(x, inputs), _put((trainables, non_trainables, rng), everywhere)
        run = jax.jit(self.layer.fwd, static_argnames="inference_mode" if isinstance(inference_mode, bool) else ())
        return run(x, trainables, non_trainables, rng=rng, inference_mode=inference_mode)

    def _on_host(self, x: Any, trainables: Any, non_trainables: Any, rng: Any, mode: Any) -> tuple[Any, Any]:
        def run(x: Any, trainables: Any, non_trainables: Any, rng: Any) -> tuple[Any, Any]:
            return self.layer.fwd(x, trainables, non_trainables, rng=rng, inference_mode=mode)

        given = (x, to_device(trainables), non_trainables, rng)
        return _hosted(run)(*given)

    def _shardings(self) -> tuple[Any, Any]:
        """That of the input, and that of the variables."""
        if isinstance(self.where, jax.Device):
            single = jax.sharding.SingleDeviceSharding(self.where)
            return single, single
        mesh = self.where if isinstance(self.where, Mesh) else self.where.mesh
        everywhere = NamedSharding(mesh, PartitionSpec())
        return (everywhere if isinstance(self.where, Mesh) else self.where), everywhere


def _is_host(where: Any) -> bool:
    return isinstance(where, Where) and where.memory == "host"


def _put(tree: Any, sharding: Any) -> Any:
    """The arrays there; while a program is traced, a demand that this program runs there, since nothing can move."""
    traced = isinstance(jnp.zeros(()), Tracer)
    put = lax.with_sharding_constraint if traced else jax.device_put
    return jax.tree.map(lambda leaf: put(leaf, sharding), tree)


def _hosted(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function computed by the host, its results in the device's memory."""
    annotate = getattr(compute_on, "compute_on2", None) or compute_on.compute_on  # its name in JAX 0.10
    return annotate(function, compute_type="device_host", out_memory_spaces=jax.memory.Space.Device)  # pyright: ignore
