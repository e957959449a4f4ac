"""Claims: initialisation is fast in a cold process.

(a) The shape pass, `jax.eval_shape(model.init, key, x)`, of a 12-block transformer-like stack: under 0.2 s.
(b) `init` of that stack is faster than the same in Flax NNX, Equinox and Haiku, eager or jitted, both as a Series of
    12 blocks and as Repeat(block, 12), whose peers are the other libraries' own stacked forms.
(c) 150 leaves of 150 distinct shapes, of 1e4 to 1e6 numbers each kernel: under 5 s.
(d) Equal shapes share one compiled initialiser: 12 blocks compile no more programs than 1 block.

Each measurement runs in a fresh process, the libraries taking turns; it starts after the imports and ends when all
leaves are there. A block holds 12 leaves: two layer norms, and linear maps 768 -> 2304, 768 -> 768, 768 -> 3072 and
3072 -> 768; the stack has 85 million numbers, float32. Each library draws what it draws by default: truncated
normals, but uniform numbers, which cost less, in Equinox; `mlax uniform` draws the latter.

    python benchmarks/init.py            # all; 5 minutes
    python benchmarks/init.py stack      # (a), (b) and (d) alone
    python benchmarks/init.py shapes     # (c) alone

Typical, on 2 shared cores: ...
"""

import sys
import time
from collections.abc import Callable
from typing import Any

from side_by_side import answer, compilations, fresh, in_turns, median, seconds, show, verdict

BLOCKS, WIDTH = 12, 768
LINEARS = ((WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
WIDTHS = range(100, 1001, 12)  # 76 of them: 75 linear maps, no two kernels and no two biases of one shape
CAP = 30.0  # seconds that a peer may take over (c)

Form = Callable[[], Any]  # makes a model and returns its leaves


def mlax_forms() -> dict[str, Form]:
    import jax
    import jax.numpy as jnp

    import mlax
    from mlax import nn

    def block(kernel_init: mlax.Initializer) -> mlax.Layer:
        return mlax.Series(
            norm1=nn.LayerNorm(),
            qkv=nn.Linear(3 * WIDTH, kernel_init=kernel_init),
            value=mlax.F(first_third),
            mix=nn.Linear(WIDTH, kernel_init=kernel_init),
            norm2=nn.LayerNorm(),
            up=nn.Linear(4 * WIDTH, kernel_init=kernel_init),
            gelu=mlax.F(jax.nn.gelu),
            down=nn.Linear(WIDTH, kernel_init=kernel_init),
        )

    def series(blocks: int = BLOCKS, kernel_init: mlax.Initializer = mlax.lecun()) -> mlax.Layer:
        return mlax.Series(**{f"block{i}": block(kernel_init) for i in range(blocks)})

    def repeat() -> mlax.Layer:
        return mlax.Repeat(block(mlax.lecun()), BLOCKS)

    def chain() -> mlax.Layer:
        return mlax.Series(*(nn.Linear(width) for width in WIDTHS[1:]))

    x, narrow = jax.ShapeDtypeStruct((1, WIDTH), jnp.float32), jax.ShapeDtypeStruct((1, WIDTHS[0]), jnp.float32)
    return {
        "shape pass": lambda: jax.eval_shape(series().init, jax.random.key(0), x),
        "stack": lambda: series().init(jax.random.key(0), x),
        "stack, uniform": lambda: series(kernel_init=mlax.lecun("uniform")).init(jax.random.key(0), x),
        "stack, jit": lambda: jax.jit(lambda key: series().init(key, x))(jax.random.key(0)),
        "one block": lambda: series(blocks=1).init(jax.random.key(0), x),
        "repeat, shape pass": lambda: jax.eval_shape(repeat().init, jax.random.key(0), x),
        "repeat": lambda: repeat().init(jax.random.key(0), x),
        "repeat, jit": lambda: jax.jit(lambda key: repeat().init(key, x))(jax.random.key(0)),
        "chain": lambda: chain().init(jax.random.key(0), narrow),
    }


def flax_forms() -> dict[str, Form]:
    import jax
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
            self.qkv, self.mix, self.up, self.down = (nnx.Linear(*sizes, rngs=rngs) for sizes in LINEARS)

    class Stack(nnx.Module):
        def __init__(self, rngs: nnx.Rngs, blocks: int = BLOCKS):
            self.blocks = nnx.List([Block(rngs) for _ in range(blocks)])

    class Chain(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            pairs = zip(WIDTHS[:-1], WIDTHS[1:], strict=True)
            self.linears = nnx.List([nnx.Linear(*sizes, rngs=rngs) for sizes in pairs])

    @nnx.split_rngs(splits=BLOCKS)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def stacked(rngs: nnx.Rngs) -> Block:
        return Block(rngs)

    return {
        "shape pass": lambda: nnx.state(nnx.eval_shape(lambda: Stack(nnx.Rngs(0)))),
        "stack": lambda: nnx.state(Stack(nnx.Rngs(0))),
        "stack, jit": lambda: nnx.state(nnx.jit(lambda: Stack(nnx.Rngs(0)))()),
        "one block": lambda: nnx.state(Stack(nnx.Rngs(0), blocks=1)),
        "repeat, shape pass": lambda: nnx.state(nnx.eval_shape(lambda: stacked(nnx.Rngs(0)))),
        "repeat": lambda: nnx.state(stacked(nnx.Rngs(0))),
        "repeat, jit": lambda: nnx.state(nnx.jit(lambda: stacked(nnx.Rngs(0)))()),
        "chain": lambda: nnx.state(Chain(nnx.Rngs(0))),
    }


def equinox_forms() -> dict[str, Form]:
    import equinox as eqx
    import jax

    class Block(eqx.Module):
        norms: list[eqx.nn.LayerNorm]
        linears: list[eqx.nn.Linear]

        def __init__(self, key: jax.Array):
            self.norms = [eqx.nn.LayerNorm(WIDTH) for _ in range(2)]
            keys = jax.random.split(key, len(LINEARS))
            self.linears = [eqx.nn.Linear(*sizes, key=key) for sizes, key in zip(LINEARS, keys, strict=True)]

    def stack(key: jax.Array, blocks: int = BLOCKS) -> list[Block]:
        return [Block(key) for key in jax.random.split(key, blocks)]

    def stacked(key: jax.Array) -> Block:
        return eqx.filter_vmap(Block)(jax.random.split(key, BLOCKS))

    def chain(key: jax.Array) -> list[eqx.nn.Linear]:
        triples = zip(WIDTHS[:-1], WIDTHS[1:], jax.random.split(key, len(WIDTHS) - 1), strict=True)
        return [eqx.nn.Linear(d, f, key=key) for d, f, key in triples]

    def arrays(model: Any) -> Any:
        return eqx.filter(model, lambda leaf: eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct))

    return {
        "shape pass": lambda: arrays(eqx.filter_eval_shape(stack, jax.random.key(0))),
        "stack": lambda: arrays(stack(jax.random.key(0))),
        "stack, jit": lambda: arrays(eqx.filter_jit(stack)(jax.random.key(0))),
        "one block": lambda: arrays(stack(jax.random.key(0), blocks=1)),
        "repeat, shape pass": lambda: arrays(eqx.filter_eval_shape(stacked, jax.random.key(0))),
        "repeat": lambda: arrays(stacked(jax.random.key(0))),
        "repeat, jit": lambda: arrays(eqx.filter_jit(stacked)(jax.random.key(0))),
        "chain": lambda: arrays(chain(jax.random.key(0))),
    }


def haiku_forms() -> dict[str, Form]:
    import haiku as hk
    import jax
    import jax.numpy as jnp

    def block(x: jax.Array) -> jax.Array:
        x = first_third(hk.Linear(3 * WIDTH)(hk.LayerNorm(-1, True, True)(x)))
        x = hk.LayerNorm(-1, True, True)(hk.Linear(WIDTH)(x))
        return hk.Linear(WIDTH)(jax.nn.gelu(hk.Linear(4 * WIDTH)(x)))

    def stack(x: jax.Array, blocks: int = BLOCKS) -> jax.Array:
        for _ in range(blocks):
            x = block(x)
        return x

    def stacked(x: jax.Array) -> jax.Array:
        return hk.experimental.layer_stack(BLOCKS)(block)(x)

    def chain(x: jax.Array) -> jax.Array:
        for width in WIDTHS[1:]:
            x = hk.Linear(width)(x)
        return x

    def init(model: Callable[..., jax.Array]) -> Callable[..., Any]:
        return hk.transform(model).init

    def x(width: int = WIDTH) -> jax.Array:
        return jnp.zeros((1, width))

    return {
        "shape pass": lambda: jax.eval_shape(init(stack), jax.random.key(0), x()),
        "stack": lambda: init(stack)(jax.random.key(0), x()),
        "stack, jit": lambda: jax.jit(init(stack))(jax.random.key(0), x()),
        "one block": lambda: init(lambda x: stack(x, blocks=1))(jax.random.key(0), x()),
        "repeat, shape pass": lambda: jax.eval_shape(init(stacked), jax.random.key(0), x()),
        "repeat": lambda: init(stacked)(jax.random.key(0), x()),
        "repeat, jit": lambda: jax.jit(init(stacked))(jax.random.key(0), x()),
        "chain": lambda: init(chain)(jax.random.key(0), x(WIDTHS[0])),
    }


def plain_forms() -> dict[str, Form]:
    """What one would write by hand: one draw of `jax.random` for each kernel."""
    import jax
    import jax.numpy as jnp

    def linear(key: jax.Array, d: int, f: int) -> list[jax.Array]:
        return [jax.random.truncated_normal(key, -2.0, 2.0, (d, f)) / (0.88 * d**0.5), jnp.zeros(f)]

    def block(key: jax.Array) -> list[jax.Array]:
        keys = jax.random.split(key, len(LINEARS))
        linears = [linear(key, *sizes) for sizes, key in zip(LINEARS, keys, strict=True)]
        norms = [jnp.ones(WIDTH), jnp.zeros(WIDTH)] * 2
        return sum(linears, norms)

    def stack(key: jax.Array, blocks: int = BLOCKS) -> list[Any]:
        return [block(key) for key in jax.random.split(key, blocks)]

    def stacked(key: jax.Array) -> list[jax.Array]:
        return jax.vmap(block)(jax.random.split(key, BLOCKS))

    def chain(key: jax.Array) -> list[Any]:
        triples = zip(WIDTHS[:-1], WIDTHS[1:], jax.random.split(key, len(WIDTHS) - 1), strict=True)
        return [linear(key, d, f) for d, f, key in triples]

    return {
        "shape pass": lambda: jax.eval_shape(stack, jax.random.key(0)),
        "stack": lambda: stack(jax.random.key(0)),
        "stack, jit": lambda: jax.jit(stack)(jax.random.key(0)),
        "one block": lambda: stack(jax.random.key(0), blocks=1),
        "repeat, shape pass": lambda: jax.eval_shape(stacked, jax.random.key(0)),
        "repeat": lambda: stacked(jax.random.key(0)),
        "repeat, jit": lambda: jax.jit(stacked)(jax.random.key(0)),
        "chain": lambda: chain(jax.random.key(0)),
        "chain, jit": lambda: jax.jit(chain)(jax.random.key(0)),
    }


def first_third(x: Any) -> Any:
    return x[..., : x.shape[-1] // 3]


LIBRARIES = {
    "mlax": mlax_forms,
    "plain JAX": plain_forms,
    "Flax NNX": flax_forms,
    "Equinox": equinox_forms,
    "Haiku": haiku_forms,
}


def measure(library: str, form: str) -> None:
    start = time.perf_counter()
    make = LIBRARIES[library]()[form]
    import jax

    compiled = compilations()
    jax.block_until_ready(jax.random.key(1))  # starts the device, which is nobody's initialisation
    compiled.clear()
    middle = time.perf_counter()
    leaves = jax.tree.leaves(make())
    if isinstance(leaves[0], jax.Array):
        jax.block_until_ready(leaves)
    answer(
        imports=middle - start,
        seconds=time.perf_counter() - middle,
        compilations=len(compiled),
        compiling=sum(seconds for _, seconds in compiled),
        leaves=len(leaves),
        numbers=sum(leaf.size for leaf in leaves),
    )
    for name, duration in compiled:
        print(f"{duration * 1e3:8.1f} ms  {name}", file=sys.stderr)


if __name__ == "__main__":
    measure(*sys.argv[1:])
