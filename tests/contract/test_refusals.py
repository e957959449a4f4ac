"""An input of a wrong rank, dtype or structure is computed or refused in words, never left to JAX's own errors."""

import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

import mlax

PACKAGE = Path(mlax.__file__).parent
TESTS = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def unchecked_ops():
    """Let the operations refuse arguments themselves, as they do for users, who do not check types."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def wrong_inputs(x):
    """(word, input) of inputs with one leaf of a wrong rank or dtype, or of another structure."""
    leaves, treedef = jax.tree.flatten(jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), x))
    for index, leaf in enumerate(leaves):
        shape, dtype = leaf.shape, leaf.dtype
        floating = jnp.issubdtype(dtype, jnp.floating)
        wrong = {
            "one axis more at the front": ((1, *shape), dtype),
            "one axis more at the end": ((*shape, 1), dtype),
            "one axis less at the front": (shape[1:], dtype),
            "one axis less at the end": (shape[:-1], dtype),
            "a scalar": ((), dtype),
            "booleans": (shape, jnp.bool_),
            "complex": (shape, jnp.complex64),
            "the other kind of number": (shape, jnp.int32 if floating else jnp.float32),
        }
        for word, other in wrong.items():
            struct = jax.ShapeDtypeStruct(*other)
            yield f"{word} in leaf {index}", treedef.unflatten([*leaves[:index], struct, *leaves[index + 1 :]])
    for word, other in {"a tuple": (leaves[0],) * 3, "a dict": {"a": leaves[0]}, "nothing": None}.items():
        yield word, other


def is_refused_in_words(error):
    """Whether the package raised the error itself, or code that the tests wrote as users do."""
    frames = [Path(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = [frame for frame in frames if PACKAGE in frame.parents or TESTS in frame.parents]
    raised_by_package = (
        frames[-1] == own[-1] and PACKAGE in own[-1].parents and isinstance(error, ValueError | TypeError)
    )
    return raised_by_package or own[-1] in (TESTS / "layers.py", *(TESTS / "catalogue").glob("*.py"))


def test_a_wrong_rank_dtype_or_structure_is_refused_in_words(row):
    layer, x, trainables, non_trainables = row.init("float32")
    filtering = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    raw = []
    try:
        for word, wrong in wrong_inputs(x):
            for call in (
                lambda wrong: layer.init(jax.random.key(0), wrong),
                lambda wrong: layer.fwd(wrong, trainables, non_trainables, rng=jax.random.key(1)),
            ):
                try:
                    jax.eval_shape(call, wrong)
                except Exception as error:
                    if not is_refused_in_words(error):
                        raw.append(f"{word}: {type(error).__name__}: {str(error)[:200]}")
    finally:
        jax.config.update("jax_traceback_filtering", filtering)
    assert not raw, "\n".join(raw)
