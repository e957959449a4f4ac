"""Plan: rules, meshes and shardings, and errors that say what is wrong with them."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from mlax import nn, optim, place, train
from mlax.core import F, Remat, Repeat, Series, flatten_paths
from tests.place.models import GPT, gpt, objective_of


def plan_of(variables, **mesh):
    return place.Plan(mesh or {"data": 4, "model": 2}, variables)


def test_plans_are_equal_and_hash_equal_by_value():
    rules = [("**/kernel", place.shard_last_axes("model")), ("**", P())]
    assert plan_of(rules) == plan_of(rules) and hash(plan_of(rules)) == hash(plan_of(rules))
    assert plan_of(rules) != plan_of(rules[1:])
    assert plan_of(rules) != place.data()


@pytest.fixture
def compiled_alike():
    """Forget draws that other tests had compiled with other options, which may differ in the last bit."""
    jax.clear_caches()


@pytest.mark.usefixtures("compiled_alike")
def test_plan_init_is_bitwise_equal_to_init_and_creates_each_variable_sharded():
    task = gpt()
    rules = [("**/mlp/linear_0/kernel", place.shard_last_axes("model")), ("embed/table", P("data")), ("**", P())]
    plan = plan_of(rules)
    rng = jax.random.key(3)
    made, wanted = plan.init(task.model, rng, task.x), task.model.init(rng, task.x)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), made, wanted)
    assert made[0]["embed"]["table"].sharding == NamedSharding(plan.mesh, P("data"))
    assert made[0]["blocks"]["stacked"]["mlp"]["linear_0"]["kernel"].sharding.spec == P(None, None, "model")


@pytest.mark.usefixtures("compiled_alike")
@pytest.mark.parametrize("key", [jax.random.key, jax.random.PRNGKey])
def test_plan_init_is_bitwise_equal_within_nested_repeats(key):
    model = Series(first=nn.Linear(6), deep=Repeat(Series(mid=Repeat(nn.Linear(6), 3)), 2))
    x = jnp.zeros((2, 6))
    made, wanted = place.data().init(model, key(7), x), model.init(key(7), x)
    jax.tree.map(np.testing.assert_array_equal, made, wanted)


def test_a_model_without_variables_has_none_under_a_plan():
    assert place.data().init(F(jnp.tanh), jax.random.key(0), jnp.zeros((2, 6))) == (None, None)


def test_init_allocates_only_shards(monkeypatch):
    lowered, jit = [], jax.jit

    class Recorded:
        """A jitted function that records what it lowers."""

        def __init__(self, *args, **kwargs):
            self.function = jit(*args, **kwargs)

        def lower(self, *args):
            lowered.append(self.function.lower(*args))
            return lowered[-1]

        def __call__(self, *args):
            return self.function(*args)

    monkeypatch.setattr(jax, "jit", lambda *args, **kw: (Recorded if "out_shardings" in kw else jit)(*args, **kw))
    x = jax.ShapeDtypeStruct((1, 520), jnp.float32)  # a size that no other test has initialized
    made, _ = place.fsdp(min_size=1).init(nn.Linear(72), jax.random.key(0), x)
    (text,) = (each.compile().as_text() for each in lowered)
    assert "f32[520,72]" not in text and "f32[65,72]" in text  # no device creates the whole kernel
    assert [shard.data.shape for shard in made["kernel"].addressable_shards] == [(65, 72)] * 8


def test_equal_parts_are_compiled_once_for_init(monkeypatch):
    compiled = []
    real = jax.jit
    monkeypatch.setattr(jax, "jit", lambda *args, **kwargs: compiled.append(kwargs) or real(*args, **kwargs))
    model = Series(**{f"linear{i}": nn.Linear(26) for i in range(6)})  # a size of this test alone
    place.data().init(model, jax.random.key(0), jnp.zeros((2, 26)))
    assert sum("out_shardings" in kwargs for kwargs in compiled) == 1


@pytest.mark.usefixtures("compiled_alike")
def test_variables_can_be_in_host_memory_and_on_one_device():
    model, x = Series(a=nn.Linear(8), b=nn.Linear(8)), jnp.zeros((2, 8))
    device = jax.devices()[5]
    plan = plan_of([("a/**", place.host), ("b/**", device)])
    made, _ = plan.init(model, jax.random.key(0), x)
    assert made["a"]["kernel"].sharding.memory_kind == "pinned_host"
    assert made["b"]["kernel"].devices() == {device}
    np.testing.assert_array_equal(made["b"]["kernel"], model.init(jax.random.key(0), x)[0]["b"]["kernel"])


def test_place_moves_arrays_that_are_elsewhere_and_returns_the_others():
    task = gpt()
    plan = place.fsdp(min_size=1)
    trainables, non_trainables = task.model.init(jax.random.key(0), task.x)
    moved = plan.place(trainables)
    assert moved["embed"]["table"].sharding.spec == P("data", None)
    again, _ = plan.place((moved, non_trainables))
    pointers = [shard.data.unsafe_buffer_pointer() for shard in moved["embed"]["table"].addressable_shards]
    assert pointers == [shard.data.unsafe_buffer_pointer() for shard in again["embed"]["table"].addressable_shards]


def test_the_first_matching_rule_applies():
    task = gpt()
    plan = plan_of(
        [("**/query/kernel", place.shard_last_axes("model")), ("**/kernel", place.shard_last_axes("data")), ("**", P())]
    )
    attend = plan.variable_shardings(task.model, task.x)[0]["blocks"]["stacked"]["attend"]
    assert attend["query"]["kernel"].spec == P(None, None, "model")
    assert attend["key"]["kernel"].spec == P(None, None, "data")


@pytest.mark.parametrize(
    ("rules", "error", "words"),
    [
        ([("**/kernal", P())], KeyError, "did you mean"),
        (
            [("**", P()), ("**/table", P("model"))],
            ValueError,
            "conflict: the first also matches every leaf of the second",
        ),
        (
            [("**/mlp/**", P()), ("**/kernel", place.shard_last_axes("model"))],
            ValueError,
            "conflict for 'blocks/stacked/mlp/linear_0/kernel'; put a rule for what both match",
        ),
        (
            [("**/scale", place.shard_last_axes("modle"))],
            ValueError,
            "names the mesh axis 'modle', but the mesh has 'data', 'model'; use one of these, or add it to the mesh. "
            "Did you mean 'model'?",
        ),
        ([("norm/scale", P(None, "model"))], ValueError, "has 2 entries; give at most 1"),
        ([("**/query/kernel", P("data", "data"))], ValueError, "uses 'data' twice"),
        (
            [("blocks/**/query/kernel", P(("data", "model")))],
            ValueError,
            "axis 0 has size 4, which mesh axes data (4) x model (2) = 8 does not divide; "
            "a size of 8 would work, or 2 or 4 shards.",
        ),
        ([("**", "model")], TypeError, "must be a PartitionSpec"),
        (["**"], TypeError, "must be a pair"),
        ([("norm/scale", place.shard_last_axes("model", None))], ValueError, "names 2 axes, but the array has 1"),
    ],
)
def test_invalid_rules_are_errors(rules, error, words):
    task = gpt()
    with pytest.raises(error, match=re.escape(words)):
        plan_of(rules).variable_shardings(task.model, task.x)


@pytest.mark.parametrize(
    "fields",
    [
        {"variables": [("**", place.shard_largest_axis("typo"))]},
        {"variables": [("**", P(None, ("data", "typo")))]},
        {"slots": [("**", place.shard_last_axes("typo", None))]},
        {"activations": [("*", P("data", "typo"))]},
        {"batch": P("typo")},
        {"all_gather": ("typo",)},
        {"all_gather": "typo"},
        {"all_to_all": ("data", "typo")},
        {"pipeline": place.PipelineConfig(2, 2, axis="typo")},
    ],
    ids=str,
)
def test_a_mesh_axis_that_does_not_exist_is_an_error_wherever_it_is_named(fields):
    (name,) = fields
    with pytest.raises(ValueError, match=f"Plan: .*{name}.* names the mesh axis 'typo', but the mesh has 'data'"):
        place.Plan({"data": 8}, **fields)


def test_one_axis_to_gather_may_be_given_without_a_tuple():
    assert place.Plan({"data": 8}, all_gather="data") == place.Plan({"data": 8}, all_gather=("data",))


def test_invalid_meshes_are_errors():
    with pytest.raises(
        ValueError, match=re.escape("data 3 needs a multiple of 3 devices, but 8 are available; the product")
    ) as few:
        place.data(3).mesh  # noqa: B018
    assert "Use some of them by plan.over(jax.devices()[:3]), or simulate more" in str(few.value)
    assert place.data(3).over(jax.devices()[:3]).mesh.size == 3
    with pytest.raises(ValueError, match=re.escape("1, 2, 4, 8. Simulate more on a CPU by jax.config.update(")):
        place.data(16).mesh  # noqa: B018
    with pytest.raises(ValueError, match="has the size -1 more than once"):
        place.Plan({"a": -1, "b": -1})
    with pytest.raises(ValueError, match="must be a number of devices"):
        place.Plan({"a": 0})
    with pytest.raises(ValueError, match=r"both have a mesh axis 'data'; .* as in place.fsdp\(4, axis='fsdp'\)"):
        place.data(2) * place.fsdp(4)
    assert (place.data(2) * place.fsdp(4, axis="fsdp")).shape == {"data": 2, "fsdp": 4}
    with pytest.raises(TypeError, match=r"Plan\(data: data 4\) times 2: multiply plans by plans"):
        place.data(4) * 2
    with pytest.raises(ValueError, match=r"batch, .* names the mesh axis"):
        place.Plan({"data": 2}, batch=P("rows"))


def test_a_missing_key_is_the_same_error_as_that_of_the_model():
    task = gpt()
    words = r"^Plan.init needs a key, but rng is 0; pass jax.random.key\(0\), for example\.$"
    with pytest.raises(TypeError, match=words):
        place.data().init(task.model, 0, task.x)
    with pytest.raises(TypeError, match=r"Are the arguments swapped\? The call is init\(model, rng, x\)\.$"):
        place.data().init(task.model, task.x, jax.random.key(0))


def test_a_mesh_axis_can_take_the_remaining_devices_and_devices_can_be_chosen():
    assert (place.data() * place.sequence(2)).shape == {"data": 4, "sequence": 2}
    four = place.data().over(jax.devices()[4:])
    assert four.shape == {"data": 4} and set(four.mesh.devices.flat) == set(jax.devices()[4:])


def test_a_batch_that_does_not_divide_into_shards_is_an_error():
    task = gpt()
    plan = place.data()
    step = train.step(objective_of(task.model), optim.SGD(0.1), plan=plan)
    state = step.init(jax.random.key(0), *plan.init(task.model, jax.random.key(1), task.x))
    batch = {name: array[:12] for name, array in task.arrays.items()}
    with pytest.raises(ValueError, match=re.escape("x is int32[12, 16], but the plan shards its axis 0 over 8")):
        step(state, batch)


def test_slots_are_put_in_host_memory_by_a_rule_or_by_name():
    task = gpt()
    trainables, _ = jax.eval_shape(task.model.init, jax.random.key(0), task.x)
    plan = place.Plan(
        {"data": 8}, [("**", place.shard_largest_axis("data", min_size=1))], slots=[("mean/**", place.host)]
    )
    found = plan.slot_shardings(optim.AdamW(1e-3), trainables)
    assert found.mean["embed"]["table"] == NamedSharding(plan.mesh, P("data", None), memory_kind="pinned_host")
    assert found.square["embed"]["table"].memory_kind != "pinned_host"
    with pytest.raises(KeyError, match="matches nothing"):
        place.Plan({"data": 8}, slots=[("moment/**", place.host)]).slot_shardings(optim.AdamW(1e-3), trainables)


def test_slots_in_host_memory_stay_with_the_device_of_their_parameter():
    device = jax.devices()[1]
    plan = place.Plan({"data": 8}, [("up/**", device), ("**", P())], slots=[("**", place.host)])
    trainables, _ = jax.eval_shape(Series(up=nn.Linear(3), down=nn.Linear(3)).init, jax.random.key(0), jnp.ones((1, 3)))
    found = plan.slot_shardings(optim.AdamW(1e-3), trainables)
    assert found.mean["up"]["kernel"] == SingleDeviceSharding(device, memory_kind="pinned_host")
    assert found.mean["down"]["kernel"] == NamedSharding(plan.mesh, P(), memory_kind="pinned_host")


@pytest.mark.parametrize("wrapped", [Remat, lambda layer: Repeat(layer, 3)])
def test_init_creates_streamed_weights_inside_wrappers_in_host_memory(wrapped):
    model, x = Series(blocks=wrapped(place.Stream(Repeat(nn.Linear(8), 2)))), jnp.ones((1, 8))
    wanted = model.init(jax.random.key(0), x)[0]
    found, _ = place.single().init(model, jax.random.key(0), x)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(found)} == {"pinned_host"}


def test_the_error_of_a_rule_that_matches_nothing_suggests_a_similar_path():
    model = Series(head=nn.Linear(2), hidden=nn.Linear(2))
    x = jnp.zeros((2, 2))
    with pytest.raises(KeyError) as caught:
        plan_of([("hiden/kernel", P())]).variable_shardings(model, x)
    assert str(caught.value).endswith("'hiden/kernel' matches nothing; did you mean 'hidden/kernel'?")
    with pytest.raises(
        KeyError, match="the rule for variables '!hiden/kernel' excludes nothing; did you mean '!hidden/"
    ):
        plan_of([("!hiden/kernel", P())]).variable_shardings(model, x)
    with pytest.raises(KeyError, match="matches nothing; there are head, hidden"):
        place.sequence(1, parts="nothing").parallelize(model, x)


def test_a_rule_with_an_exclamation_mark_is_for_all_other_leaves():
    model = Series(head=nn.Linear(2), hidden=nn.Linear(2))
    plan = plan_of([("!hidden/**", P()), ("hidden/*", P("model"))])
    found, _ = plan.variable_shardings(model, jnp.zeros((2, 2)))
    assert {path: flatten_paths(found)[path].spec for path in ("head/bias", "hidden/bias")} == {
        "head/bias": P(),
        "hidden/bias": P("model"),
    }
    alone = jax.eval_shape(lambda: {"head": {"bias": jnp.zeros(2)}})
    assert plan.shardings(alone)["head"]["bias"].spec == P()


def test_activations_are_sharded_as_the_plan_says():
    model = GPT()
    x = jax.ShapeDtypeStruct((16, 16), jnp.int32)
    plan = place.Plan({"data": 2, "time": 4}, activations=[("embed", P("data", "time")), ("blocks", P("data"))])
    parallel = plan.parallelize(model, x)
    assert {path: str(layer.spec) for path, layer in _constrained(parallel).items()} == {
        "embed": "P('data', 'time')",
        "blocks": "P('data',)",
    }
    weights = model.init(jax.random.key(0), x)
    tokens = jnp.ones((16, 16), jnp.int32)
    with jax.set_mesh(plan.mesh):
        same = jax.jit(parallel.fwd)(tokens, *weights)[0]
        text = jax.jit(parallel.fwd).lower(tokens, *weights).as_text()
    assert "sharding_constraint" in text
    np.testing.assert_allclose(same, model.fwd(tokens, *weights)[0], rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=re.escape("axis 1 P('data', 'time') shards over 4")), jax.set_mesh(plan.mesh):
        jax.eval_shape(parallel.fwd, jnp.ones((16, 15), jnp.int32), *weights)


def _constrained(model):
    return {name: part for name, part in dict(model.edits).items() if isinstance(part, place.ShardingConstraint)}


def test_many_steps_per_call_and_evaluation_follow_the_plan():
    task = gpt()
    plan = place.fsdp(min_size=1)
    step = train.step(
        objective_of(plan.parallelize(task.model, task.x)), optim.AdamW(1e-3), steps_per_call=2, plan=plan
    )
    state = step.init(jax.random.key(0), *plan.init(task.model, jax.random.key(1), task.x))
    feed = train.Feed(task.arrays, 16, seed=0, sharding=plan.batch_sharding)
    fitted = train.fit(step, state, feed, steps=4, evaluate=feed, show=False)
    assert fitted.step == 4 and np.isfinite(fitted.scores["loss"])
    leaf = fitted.state.trainables["embed"]["table"]
    assert leaf.sharding.spec == P("data", None)
    assert flatten_paths(fitted.state.optimizer.mean)["embed/table"].sharding.spec == P("data", None)


def test_a_step_of_a_grouped_convolution_warns_too():
    x, plan = jnp.ones((8, 4, 4, 8)), place.data(2) * place.fsdp(4, axis="fsdp", min_size=1)
    model = Series(conv=nn.Conv(8, 3, groups=2), pool=nn.GlobalPool(by="mean"))
    batch = jax.device_put({"x": x, "y": jnp.ones(8, jnp.int32)}, plan.batch_sharding)
    variables = plan.init(model, jax.random.key(1), x)
    for parallel in (False, True):
        step = train.step(objective_of(plan.parallelize(model, x) if parallel else model), optim.SGD(0.1), plan=plan)
        state = jax.eval_shape(lambda: step.init(jax.random.key(0), *model.init(jax.random.key(1), x)))
        with jax.set_mesh(plan.mesh):
            jaxpr = jax.make_jaxpr(step.advance)(state, batch)
        with contextlib.nullcontext() if parallel else pytest.warns(UserWarning, match="call plan.parallelize"):
            place.warn_unless_parallelized(plan, variables, jaxpr)


@pytest.mark.parametrize("parallel", [False, True])
def test_a_step_warns_if_the_model_was_not_parallelized_for_its_plan(parallel):
    x = jnp.ones((16, 8))
    model, plan = Series(up=nn.Linear(16), head=nn.Linear(8)), place.fsdp(min_size=1)
    step = train.step(objective_of(plan.parallelize(model, x) if parallel else model), optim.SGD(0.1), plan=plan)
    state = step.init(jax.random.key(0), *plan.init(model, jax.random.key(1), x))
    words = r"Plan\(fsdp: data all\) says how parts of a model are computed, .* call plan\.parallelize"
    with contextlib.nullcontext() if parallel else pytest.warns(UserWarning, match=words):
        step(
            state,
            {
                "x": jax.device_put(x, plan.batch_sharding),
                "y": jax.device_put(jnp.ones(16, jnp.int32), plan.batch_sharding),
            },
        )
