"""Every promise of an optimizer, over every row of the catalogue."""

import functools
import inspect
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlax import dtypes, optim
from mlax.core import with_fields
from tests.asserts import assert_close
from tests.catalogue import OPTIMIZERS
from tests.catalogue.optimizers import SHAPES, tree
from tests.catalogue.row import FLOATS

pytestmark = pytest.mark.every_row

STRUCTURE = jax.tree.structure(SHAPES, is_leaf=lambda node: isinstance(node, tuple))
WORDS = ("Optimizer", "Leafwise", "OptimizerWrapper")  # what authors subclass
# which `make test` also compiles in bfloat16: those that round, decompose, search or reduce; others share their frame
NARROW = ("SGD", "Adam", "AdamW master", "AdamW kahan", "AdamW stochastic", "Prodigy", "GaLore", "LAMB", "Adafactor")
NARROW += ("Muon", "SOAP", "LBFGS", "ClipGlobalNorm", "Accumulate", "FromOptax", "Everything")
compiled_in_each_dtype = pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype)
        if dtype == "float32" or (dtype == "bfloat16" and name in NARROW)
        else pytest.param(name, dtype, marks=pytest.mark.thorough)
        for name in OPTIMIZERS
        for dtype in FLOATS
    ],
    indirect=["dtype"],
)


def signature(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), tree)


def has_rate(row):
    def nest(optimizer):
        return [optimizer, *(one for inner in optimizer.inner_optimizers() for one in nest(inner))]

    return any(hasattr(one, "rate") for one in nest(row.optimizer))


def steps(row, dtype, count=3, seed=0):
    """The trainables and the state after some steps."""
    trainables = tree(dtype, seed)
    state = row.optimizer.init(trainables)
    for step in range(count):
        trainables, state = jax.jit(row.update)(tree(dtype, seed + step + 1), state, trainables)
    return trainables, state


def test_every_public_optimizer_has_a_row():
    public = {name for name in optim.__all__ if inspect.isclass(getattr(optim, name))}
    optimizers = {name for name in public if issubclass(getattr(optim, name), optim.Optimizer)} - set(WORDS)
    assert optimizers == {type(row.optimizer).__name__ for row in OPTIMIZERS.values()}


def test_equal_descriptions_are_equal_hash_equal_and_share_methods(row):
    again = (
        optim.from_optax(row.optimizer.transformation)
        if row.no_slot_declarations
        else pickle.loads(pickle.dumps(row.optimizer))
    )
    assert again == row.optimizer and hash(again) == hash(row.optimizer)
    assert again.update is row.optimizer.update
    assert repr(again) == repr(row.optimizer)


def test_an_update_is_pure(row):
    trainables, grads = tree("float32"), tree("float32", 1)
    state = row.optimizer.init(trainables)
    before = jax.tree.map(np.array, (grads, state, trainables))
    once, twice = (jax.jit(row.update)(grads, state, trainables) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, before, (grads, state, trainables))
    jax.tree.map(np.testing.assert_array_equal, once, twice)


def test_jit_equals_eager(row):
    trainables, grads = tree("float32"), tree("float32", 1)
    state = row.optimizer.init(trainables)
    eager, jitted = row.update(grads, state, trainables), jax.jit(row.update)(grads, state, trainables)
    free = dict.fromkeys(row.ambiguous_slots)
    eager, jitted = ((new, after._replace(**free)) for new, after in (eager, jitted))
    assert_close(eager, jitted, 2e-5, 2e-6)


def test_every_leaf_keeps_its_shape_dtype_and_weak_type(row, dtype):
    trainables = tree(dtype)
    state = row.optimizer.init(trainables)
    assert signature(jax.eval_shape(row.update, trainables, state, trainables)) == signature((trainables, state))


def test_a_weakly_typed_parameter_stays_weakly_typed():
    trainables = {"temperature": jnp.asarray(1.0)}
    state = optim.Adam(1e-2).init(trainables)
    new, _ = jax.jit(optim.Adam(1e-2).update)(trainables, state, trainables)
    assert jax.typeof(trainables["temperature"]).weak_type and signature(new) == signature(trainables)


def test_each_slot_has_the_tree_of_the_trainables(row):
    trainables = tree("bfloat16")
    state = row.optimizer.init(trainables)
    assert state._fields[0] == "step" and state.step.shape == () and state.step.dtype == jnp.int32
    slots = [field for field in state[1:] if not isinstance(field, jax.Array)]
    assert all(jax.tree.structure(slot) == STRUCTURE for slot in slots)
    assert all(field.shape == () for field in state[1:] if isinstance(field, jax.Array))
    assert steps(row, "float32", 2)[1].step == 2


def test_wrapping_moves_no_slot(row):
    trainables = tree("float32")
    for inner in row.optimizer.inner_optimizers():
        outer, own = row.optimizer.init(trainables)._asdict(), inner.init(trainables)._asdict()
        assert outer.keys() >= own.keys()
        if not row.no_inner_slots:
            jax.tree.map(np.testing.assert_array_equal, {name: outer[name] for name in own}, own)


def test_every_wrapper_goes_around_every_optimizer():
    """Their slots and scalars have different names, in a nest and in groups."""
    structs = jax.eval_shape(lambda: tree("bfloat16"))
    optimizers = [row.optimizer for row in OPTIMIZERS.values() if not row.optimizer.nesting_error]
    wrappers = [optimizer for optimizer in optimizers if isinstance(optimizer, optim.OptimizerWrapper)]
    alone = [optimizer for optimizer in optimizers if optimizer not in wrappers]
    for wrapper in wrappers:
        for optimizer in alone:
            assert with_fields(wrapper, optimizer=optimizer).describe(structs)
    states = [optimizer.init(structs)._asdict() for optimizer in (*alone, *wrappers)]
    scalars = {name for state in states for name, field in state.items() if isinstance(field, jax.ShapeDtypeStruct)}
    assert all(isinstance(state[name], jax.ShapeDtypeStruct) for state in states for name in scalars & state.keys())


@pytest.mark.every_dtype
def test_no_intermediate_value_is_narrow(row, dtype):
    """All arithmetic is in float32, or in float64; what is narrower is cast once it is read, or when it is stored."""
    if row.no_slot_declarations:
        pytest.skip(row.no_slot_declarations)
    trainables = tree(dtype)
    wide = "float64" if dtype == "float64" else "float32"
    if "loss" in row.arguments:
        pytest.skip("the loss computes in the dtype of the weights")
    arguments = dict(row.arguments)
    if dtype == "float64" and has_rate(row):  # a schedule gives float32
        arguments["rate"] = jnp.asarray(0.1, wide)
    state = row.optimizer.init(trainables)
    update = functools.partial(row.optimizer.update, **arguments)
    found = dtypes.audit(update, trainables, state, trainables, dtype=wide)
    storing = ("convert_element_type", "select_n", "cond", "jit", "pjit")  # a choice between what is stored
    assert not [str(violation) for violation in found if violation.primitive not in storing]


@compiled_in_each_dtype
@pytest.mark.parametrize("first", [0.0, 1.0])
def test_zero_tiny_and_first_gradients_give_finite_values(name, dtype, first):
    row, trainables = OPTIMIZERS[name], tree(dtype)
    state = row.optimizer.init(trainables)
    for scale in (first, 0.0, 1e-7, 1.0):
        grads = jax.tree.map(lambda w, scale=scale: w * jnp.asarray(scale, w.dtype), trainables)
        trainables, state = jax.jit(row.update)(grads, state, trainables)
    finite = [name for name in state._fields if name not in row.unbounded_slots]
    for leaf in jax.tree.leaves((trainables, {name: getattr(state, name) for name in finite})):
        assert jnp.isfinite(leaf).all()


@pytest.mark.plain_rows
def test_the_rate_may_be_traced_and_changes_no_dtype(row):
    if not has_rate(row):
        pytest.skip("has no rate")
    trainables, rate = tree("float32"), jax.ShapeDtypeStruct((), "float32")
    state = row.optimizer.init(trainables)
    update = lambda grads, state, trainables, rate: row.update(grads, state, trainables, rate=rate)  # noqa: E731
    new = jax.eval_shape(update, trainables, state, trainables, rate)
    assert signature(new) == signature((trainables, state))  # so that the next step is the same compilation


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("Adam", "Adafactor", "Muon") else pytest.param(name, marks=pytest.mark.thorough)
        for name, row in OPTIMIZERS.items()
        if has_rate(row)
    ],
)
def test_a_hundred_steps_at_changing_rates_are_one_compilation(name):
    row, traces = OPTIMIZERS[name], 0

    @jax.jit
    def update(grads, state, trainables, rate):
        nonlocal traces
        traces += 1
        return row.update(grads, state, trainables, rate=rate)

    trainables, grads = tree("float32"), tree("float32", 1)
    state = row.optimizer.init(trainables)
    for step in range(100):
        trainables, state = update(grads, state, trainables, jnp.asarray(1e-3 / (step + 1), jnp.float32))
    assert traces == 1


@compiled_in_each_dtype
def test_the_state_can_be_restored_from_numpy_arrays(name, dtype):
    row = OPTIMIZERS[name]
    trainables, state = steps(row, dtype, 2)
    restored = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), (trainables, state))
    assert pickle.loads(pickle.dumps(jax.tree.map(np.asarray, state)))._fields == state._fields
    grads = tree(dtype, 7)
    update = jax.jit(row.update)
    ahead, again = update(grads, state, trainables), update(grads, restored[1], restored[0])
    jax.tree.map(np.testing.assert_array_equal, ahead, again)


@pytest.mark.plain_rows
def test_vmap_over_an_ensemble_equals_separate_updates(row):
    members = [steps(row, "float32", 1, seed) for seed in (0, 10)]
    grads = [tree("float32", seed) for seed in (3, 4)]
    each = [jax.jit(row.update)(g, state, trainables) for g, (trainables, state) in zip(grads, members, strict=True)]
    stack = lambda *leaves: jnp.stack(leaves)  # noqa: E731
    stacked_grads, (trainables, state) = jax.tree.map(stack, *grads), jax.tree.map(stack, *members)
    together = jax.jit(jax.vmap(row.update))(stacked_grads, state, trainables)
    wanted = jax.tree.map(stack, *each)
    assert_close(together, wanted, 2e-4, 2e-5)
