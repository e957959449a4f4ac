"""Preset plans: each trains like one device, and no step changes a sharding."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mlax
from mlax import nn, optim, place
from mlax.core import flatten_paths
from tests.asserts import assert_close
from tests.place.models import OPTIMIZER, TASKS, Task, gpt, losses_on_one_device, perceptron, train_steps


class Case(NamedTuple):
    """A plan for a task, and what it is tested with."""

    plan: Callable[[Task], place.Plan]
    models: tuple[str, ...] = ("gpt", "cnn")  # of plans that are alike, and of products, `make test` trains one
    experts: int = 0  # of both models
    batch_norm: bool = True  # of the CNN; 1F1B normalizes each microbatch with its own statistics


CASES = {
    "single": Case(lambda task: place.single(jax.devices()[3]), models=()),
    "data": Case(lambda task: place.data(), models=("cnn",)),
    "zero": Case(lambda task: place.zero(min_size=1), models=("gpt",)),
    "fsdp": Case(lambda task: place.fsdp(min_size=1), models=("gpt",)),
    "tensor": Case(lambda task: place.tensor(task.model, task.x, 4) * place.data(2), models=("cnn",)),
    "sequence": Case(lambda task: place.sequence(4) * place.data(2), models=()),  # below, in a product of three
    "expert": Case(lambda task: place.expert(task.model, task.x, 4) * place.data(2), models=("cnn",), experts=4),
    "gpipe": Case(
        lambda task: place.pipeline(task.model, 4, microbatches=4, schedule="gpipe") * place.data(2), models=()
    ),
    "1f1b": Case(
        lambda task: place.pipeline(task.model, 4, microbatches=4, schedule="1f1b") * place.data(2),
        models=("gpt",),
        batch_norm=False,
    ),
    "pipeline x fsdp": Case(
        lambda task: place.pipeline(task.model, 2, microbatches=4) * place.fsdp(4, min_size=1),
        models=(),
        batch_norm=False,
    ),
    "gpipe x data x tensor": Case(
        lambda task: (
            place.pipeline(task.model, 2, microbatches=4, schedule="gpipe")
            * place.data(2)
            * place.tensor(task.model, task.x, 2)
        ),
        models=(),
    ),
    "fsdp x tensor x sequence": Case(
        lambda task: place.fsdp(2, min_size=1) * place.tensor(task.model, task.x, 2) * place.sequence(2),
        models=("gpt",),
    ),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=[] if kind in case.models else pytest.mark.thorough)
        for name, case in CASES.items()
        for kind in TASKS
    ],
)
def test_a_plan_trains_like_one_device_and_no_step_moves_anything(name, kind, thorough):
    case = CASES[name]
    options = {"experts": case.experts} if case.experts else {}
    if kind == "cnn" and not case.batch_norm:
        options["batch_norm"] = False
    task = TASKS[kind](**options)
    plan = case.plan(task)
    steps = 20 if thorough else 8
    found = train_steps(task, plan, steps=steps)
    np.testing.assert_allclose(found.losses, losses_on_one_device(kind, steps, **options), rtol=1e-5)
    moved = jax.tree.map(lambda leaf, before: leaf.sharding != before, found.state, found.before)
    assert not any(jax.tree.leaves(moved))
    planned = plan.slot_shardings(OPTIMIZER, found.state.trainables)
    for name, slot in found.state.optimizer._asdict().items():
        for leaf, sharding in zip(jax.tree.leaves(slot), jax.tree.leaves(getattr(planned, name)), strict=True):
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def specs(plan, task):
    trainables, _ = plan.variable_shardings(task.model, task.x)
    return {path: sharding.spec for path, sharding in flatten_paths(trainables).items()}


def test_fsdp_shards_the_largest_axis_and_tensor_shards_heads_and_hidden_features():
    task = gpt()
    found = specs(place.fsdp(2, min_size=1) * place.tensor(task.model, task.x, 4), task)
    assert found["blocks/stacked/attend/query/kernel"] == P(None, "data", "model")
    assert found["blocks/stacked/attend/out/kernel"] == P(None, "model", "data")
    assert found["blocks/stacked/mlp/linear_0/kernel"] == P(None, "data", "model")
    assert found["blocks/stacked/mlp/linear_1/kernel"] == P(None, "model", "data")
    assert found["blocks/stacked/mlp/linear_0/bias"] == P("data", "model")
    assert found["embed/table"] == P("model", "data")
    assert specs(place.fsdp(2), task)["norm/scale"] == P()  # too small to be sharded


def test_experts_are_sharded_along_their_axis_inside_a_repeat():
    task = gpt(experts=4)
    found = specs(place.expert(task.model, task.x, 2), task)
    assert found["blocks/stacked/mlp/experts/stacked/linear_0/kernel"] == P(None, "expert", None, None)
    assert found["blocks/stacked/mlp/experts/stacked/linear_0/bias"] == P(None, "expert", None)
    assert found["blocks/stacked/mlp/router/kernel"] == P()


def test_fsdp_all_gathers_weights_and_not_activations():
    task = gpt(width=32)
    moved = place.fsdp(min_size=1).describe(task.model, task.x, OPTIMIZER).transfers
    gathered = sum(row.bytes for row in moved.totals if row.kind == "all-gather")
    trainables, _ = jax.eval_shape(task.model.init, jax.random.key(0), task.x)
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(trainables))
    assert gathered == pytest.approx(2 * weights, rel=0.1)  # once forward, once backward


def test_experts_stay_and_tokens_are_sent_to_them_and_back():
    block = mlax.Series(mlp=nn.MoE(nn.MLP((16, 8)), 8, k=2, capacity_factor=4.0), first=mlax.F(lambda pair: pair[0]))
    model, x = mlax.Series(blocks=mlax.Repeat(block, 2)), jax.ShapeDtypeStruct((16, 4, 8), "float32")
    moved = place.expert(model, x, 8).describe(model, x, OPTIMIZER).transfers
    sent = {(row.layer, row.kind) for row in moved.rows if "experts" in row.layer}
    assert sent == {("blocks/stacked/mlp/experts", "all-to-all")}


def test_fsdp_all_gathers_experts_that_are_not_repeated():
    model, x = mlax.Series(moe=nn.MoE(nn.Linear(8), 2)), jnp.ones((8, 4, 8))
    plan = place.fsdp(8, min_size=1)
    trainables, _ = plan.init(model, jax.random.key(0), x)
    with jax.set_mesh(plan.mesh):
        found = jax.jit(lambda trainables, x: plan.parallelize(model, x).fwd(x, trainables)[0])(trainables, x)
    wanted = jax.jit(model.fwd)(x, jax.device_put(trainables, jax.devices()[0]))[0]
    assert_close(found, wanted, 1e-5, 1e-6)


@pytest.mark.parametrize("wrapped", [lambda layer: layer, mlax.Remat])
def test_experts_and_pipelines_may_be_wrapped_or_be_the_whole_model(wrapped):
    experts, x = wrapped(mlax.Map(nn.Linear(8), axis=1, variables=0)), jnp.ones((8, 8, 8))
    assert "ExpertAllToAll" in repr(place.expert(experts, x, 8).parallelize(experts, x))
    repeat = wrapped(mlax.Repeat(nn.Linear(8), 8))
    plan = place.pipeline(repeat, 8, microbatches=8)
    assert plan.variable_shardings(repeat, x)[0]["stacked"]["kernel"].spec == P("stage")


def test_a_tied_model_is_tensor_parallel_and_the_leaf_that_is_stored_is_sharded():
    tie = mlax.Tie("head/kernel", to="embed/table", transpose=True)
    for task, path in ((gpt(), "blocks/stacked/mlp/linear_0/kernel"), (perceptron(), "blocks/")):
        task = task._replace(model=mlax.Tied(task.model, tie))
        plan = place.tensor(task.model, task.x, 4) * place.data(2)
        shardings = flatten_paths(plan.variable_shardings(task.model, task.x)[0])
        assert "head/kernel" not in shardings and shardings["embed/table"].spec == P("model", None)
        assert next(each.spec[-1] for name, each in shardings.items() if name.startswith(path)) == "model"
    assert_close(train_steps(task, plan, steps=2).losses, train_steps(task, steps=2).losses, 1e-4)


@pytest.mark.parametrize(("transpose", "axis"), [(False, P(None, "model")), (True, P("model", None))])
def test_a_leaf_that_another_is_tied_to_takes_its_axis(transpose, axis):
    tie = mlax.Tie("up/kernel", to="cell/recurrent/kernel", transpose=transpose)
    tied = mlax.Tied(mlax.Series(cell=mlax.Recurrent(nn.RNNCell(8)), up=nn.Linear(8, bias=False)), tie)
    x = jnp.ones((2, 3, 8))
    shardings = flatten_paths(place.tensor(tied, x, 8).variable_shardings(tied, x)[0])
    assert shardings["cell/recurrent/kernel"].spec == axis


def test_auto_considers_tensor_parallelism_of_a_tied_model():
    model = mlax.Tied(
        mlax.Series(embed=nn.Embed(64, 32), head=nn.Linear(64, bias=False)),
        mlax.Tie("head/kernel", to="embed/table", transpose=True),
    )
    said = []
    place.auto(model, gpt().x, jax.devices()[:2], OPTIMIZER, log=said.append)
    (line,) = [line for line in said if line.startswith("tensor (model 2)")]
    assert "needs" in line


def test_a_plan_may_shard_every_variable_of_a_model():
    model, x = mlax.Series(blocks=mlax.Repeat(nn.Linear(8, bias=False), 8)), jnp.ones((8, 8))
    for plan in (place.pipeline(model, 8, microbatches=8), place.tensor(model, x, 8)):
        (sharding,) = jax.tree.leaves(plan.variable_shardings(model, x))
        assert any(sharding.spec)


def test_zero_shards_slots_and_replicates_weights():
    task = gpt()
    plan = place.zero(min_size=1)
    trainables, _ = plan.init(task.model, jax.random.key(0), task.x)
    kernel = trainables["blocks"]["stacked"]["mlp"]["linear_0"]["kernel"]
    slots = plan.slot_shardings(OPTIMIZER, trainables)  # which a training is shown to have, above
    mean = slots.mean["blocks"]["stacked"]["mlp"]["linear_0"]["kernel"]
    assert kernel.sharding.spec == P() and mean.spec == P(None, None, "data")


def test_factored_slots_of_adafactor_are_sharded_like_their_axes():
    task = gpt()
    plan = place.tensor(task.model, task.x, 4)
    optimizer = optim.Adafactor(1e-2)
    found = plan.slot_shardings(optimizer, jax.eval_shape(task.model.init, jax.random.key(0), task.x)[0])
    kernel = {
        name: flatten_paths(slot).get("blocks/stacked/mlp/linear_0/kernel") for name, slot in found._asdict().items()
    }
    spread = {str(place.spec) for place in kernel.values() if isinstance(place, NamedSharding)}
    assert any("model" in spec for spec in spread) and any("model" not in spec for spec in spread)


def test_a_model_without_experts_or_wide_layers_is_an_error():
    task = gpt()
    with pytest.raises(ValueError, match="no mixture of experts"):
        place.expert(task.model, task.x, 2)
    with pytest.raises(ValueError, match="experts, which 3 devices do not divide"):
        place.expert(gpt(experts=4).model, task.x, 3)
    with pytest.raises(ValueError, match="can be sharded over 7"):
        place.tensor(task.model, task.x, 7)


def test_a_schedule_on_a_mesh_where_xla_aborts_is_an_error():
    task = gpt()
    plan = place.pipeline(task.model, 2, microbatches=4) * place.data(2) * place.tensor(task.model, task.x, 2)
    with pytest.raises(ValueError, match="supports one further mesh axis, but there are data, model"):
        plan.init(task.model, jax.random.key(0), task.x)
