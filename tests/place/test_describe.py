"""describe: bytes before anything is allocated, which are the bytes that there are afterwards."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import mlax
from mlax import nn, optim, place, train
from mlax.core import Series
from tests.catalogue import optimizers
from tests.place.models import OPTIMIZER, cnn, gpt, objective_of

PLANS = {
    "data": lambda task: place.data(),
    "fsdp": lambda task: place.fsdp(min_size=1),
    "tensor": lambda task: place.data(2) * place.tensor(task.model, task.x, 4),
    "zero": lambda task: place.zero(),
    "1f1b": lambda task: place.pipeline(task.model, 4, microbatches=4) * place.data(2),
}


def held(tree, device):
    return sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
        if shard.device == device
    )


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.thorough) for name in ("data", "tensor", "zero", "1f1b")), "fsdp"]
)
def test_the_bytes_are_those_that_jax_reports(name):
    task = gpt()
    plan = PLANS[name](task)
    batch = {"x": task.x, "y": task.x}
    model = plan.parallelize(task.model, task.x)
    described = plan.describe(task.model, task.x, OPTIMIZER, batch, objective=objective_of(model))
    step = train.step(objective_of(model), OPTIMIZER, plan=plan)
    state = step.init(jax.random.key(0), *plan.init(task.model, jax.random.key(1), task.x))
    device = plan.mesh.devices.flat[-1]
    assert described.bytes_of("weights") == held((state.trainables, state.non_trainables), device)
    assert described.bytes_of("slots") == held(state.optimizer, device)
    compiled = step.aot.compile(state, batch)
    analysis = compiled.memory_analysis()
    reported = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes
    assert described.needed == pytest.approx(reported, rel=0.05)


def test_state_counts_with_the_weights_and_without_an_optimizer_the_description_is_of_inference():
    task = cnn()
    described = place.data().describe(task.model, task.x)
    variables = jax.tree.leaves(task.model.init(jax.random.key(0), task.x))
    assert described.bytes_of("weights") == sum(leaf.nbytes for leaf in variables)
    assert described.bytes_of("slots") == described.bytes_of("gradients") == described.bytes_of("activations") == 0
    assert described.working is not None and "needed" in str(described)


def test_a_transfer_that_layers_of_a_part_share_belongs_to_the_part():
    task = gpt()
    described = place.data().describe(task.model, task.x, OPTIMIZER)
    assert described.transfers is not None
    (total,) = (row.count for row in described.transfers.totals if row.kind == "all-reduce")
    shown = str(described).partition("transfers in a step")[2].splitlines()
    counts = [int(line.split("all-reduce")[1].split()[1]) for line in shown if "all-reduce" in line]
    assert sum(row.count for row in described.transfers.rows if row.layer.startswith("blocks/")) > total
    assert max(counts) == counts[-1] == total


def larger(task, shape):
    return task._replace(x=jax.ShapeDtypeStruct((*shape, *task.x.shape[len(shape) :]), task.x.dtype))


ESTIMATED = {
    "single": (lambda task: place.single(), "gpt", {}),
    "data": (lambda task: place.data(), "cnn", {}),
    "zero": (lambda task: place.zero(), "gpt", {}),
    "fsdp": (lambda task: place.fsdp(min_size=1), "cnn", {}),
    "expert": (lambda task: place.expert(task.model, task.x, 4) * place.data(2), "gpt", {"experts": 4}),
}


@pytest.mark.parametrize(
    "name",
    [*(pytest.param(name, marks=pytest.mark.thorough) for name in ("single", "data", "zero", "expert")), "fsdp"],
)
def test_without_compiling_the_need_of_a_plan_that_shards_examples_is_within_a_fifth(name):
    make_plan, kind, options = ESTIMATED[name]
    task = larger(gpt(width=32, depth=2, **options), (16, 32)) if kind == "gpt" else larger(cnn(), (16, 16, 16))
    plan = make_plan(task)
    estimated = plan.describe(task.model, task.x, OPTIMIZER, compile=False)
    assert not estimated.is_lower_bound and "unknown" not in str(estimated).partition("needed")[0]
    # from JAX 0.11 on, convolutions under fsdp compile to a quarter more than their operations add up to
    tolerance = 0.3 if name == "fsdp" and jax.__version_info__ >= (0, 11) else 0.2
    assert estimated.needed == pytest.approx(plan.describe(task.model, task.x, OPTIMIZER).needed, rel=tolerance)


UNKNOWN = {
    "tensor": lambda task: place.data(2) * place.tensor(task.model, task.x, 4),
    "sequence": lambda task: place.data(2) * place.sequence(4),
    "gpipe": lambda task: place.pipeline(task.model, 4, microbatches=4, schedule="gpipe"),
    "1f1b": lambda task: place.pipeline(task.model, 4, microbatches=4),
    "batch and time": lambda task: place.Plan({"data": 2, "time": 4}, batch=P("data", "time")),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_without_compiling_the_activations_of_other_plans_are_unknown_and_the_need_is_a_lower_bound(name):
    task = gpt()
    plan = UNKNOWN[name](task)
    bound = plan.describe(task.model, task.x, OPTIMIZER, compile=False)
    assert bound.is_lower_bound and bound.bytes_of("activations") == 0
    shown = str(dataclasses.replace(bound, memory=2 * bound.needed))
    assert "unknown" in shown and "at least" in shown and "pass compile=True to know" in shown
    plan.check_fits(task.model, task.x, OPTIMIZER, memory=bound.needed, compile=False)  # it may fit
    with pytest.raises(place.NotEnoughMemory, match="needs at least"):
        plan.check_fits(task.model, task.x, OPTIMIZER, memory=bound.needed - 1, compile=False)
    if name == "tensor":
        compiled = plan.describe(task.model, task.x, OPTIMIZER)
        assert not compiled.is_lower_bound and compiled.needed > bound.needed
        assert "unknown" in str(compiled) and "at least" not in str(compiled)


SMALL = Series(up=nn.Linear(8), head=nn.Linear(8)), jax.ShapeDtypeStruct((8, 4), "float32")
EVALUATING = (optim.SAM(optim.SGD(0.1)), optim.LBFGS(history=2), optim.Plateau(optim.SGD(0.1)))


@pytest.mark.parametrize("optimizer", [*EVALUATING, optim.Freeze(optim.SGD(0.1), "up/*")], ids=repr)
def test_optimizers_that_evaluate_the_loss_or_freeze_weights_are_described(optimizer):
    described = place.data().describe(*SMALL, optimizer)
    assert described.working is not None and described.fits


@mlax.frozen
class Variables(mlax.Layer):
    """A layer with the trainables of the catalogue of optimizers."""

    def init(self, rng, x):
        return optimizers.tree("float32"), None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        return x * optimizers.loss(trainables), non_trainables


def test_every_optimizer_is_described_with_the_bytes_of_its_slots():
    trainables = optimizers.tree("float32")
    for name, row in optimizers.ROWS.items():
        described = place.data().describe(
            Variables(), jax.ShapeDtypeStruct((8, 4), "float32"), row.optimizer, compile=False
        )
        slots = jax.tree.leaves(row.optimizer.init(trainables))
        assert described.bytes_of("slots") == sum(leaf.nbytes for leaf in slots), name
        assert described.needed > described.bytes_of("slots"), name


def test_auto_chooses_for_an_optimizer_that_evaluates_the_loss():
    said = []
    place.auto(*SMALL, jax.devices()[:2], EVALUATING[2], log=said.append)
    assert all("needs" in line for line in said[:-1])


def test_the_loss_is_that_of_a_step_masks_and_values_included():
    model, x = Series(head=nn.Linear(4)), jax.ShapeDtypeStruct((8, 4), "float32")
    batch = {"x": x, "mask": jax.ShapeDtypeStruct((8,), "bool")}

    def objective(batch, trainables, non_trainables, rng=None, inference_mode=False):
        y, new = model.fwd(batch["x"], trainables, non_trainables)
        return {"loss": (y**2).sum(-1), "size": abs(y).sum(-1)}, new

    assert place.data().describe(model, x, optim.SGD(0.1), batch, objective=objective).working is not None
    with pytest.raises(KeyError, match="no 'loss'; call the value to minimize 'loss'"):
        place.data().describe(model, x, optim.SGD(0.1), batch, objective=lambda *_, rng: ({"l": jnp.ones(8)}, None))


def test_slots_in_host_memory_are_counted_there():
    task = gpt()
    plan = place.Plan({"data": 8}, slots=[("**", place.host)], batch=P("data"))
    described = plan.describe(task.model, task.x, optim.AdamW(1e-3), compile=False)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(task.model.init(jax.random.key(0), task.x)[0]))
    assert described.bytes_of("slots", "host") == 2 * weights
    assert described.bytes_of("slots") == 4  # the number of steps
    assert "host, for each device" in str(described)


def test_activations_are_named_by_layer_and_remat_stores_less():
    stored = place.data().describe(gpt().model, gpt().x, OPTIMIZER, compile=False)
    again = place.data().describe(gpt(mode="remat").model, gpt().x, OPTIMIZER, compile=False)
    kept = {row.layer: row.activations for row in stored.rows}
    assert kept["blocks/stacked/mlp/linear_0"] > 0 and kept["blocks/stacked/attend/attend"] > 0
    assert set(kept) <= {"", *mlax.layers(gpt().model)}
    assert 4 * again.bytes_of("activations") < stored.bytes_of("activations")
    bigger = place.data().describe(gpt().model, gpt().x, OPTIMIZER, 32, compile=False)
    assert bigger.bytes_of("activations") == pytest.approx(2 * stored.bytes_of("activations"), rel=0.1)


def test_the_error_of_a_plan_that_does_not_fit_says_what_to_change():
    task = gpt(width=64)
    wide = task.model
    with pytest.raises(
        place.NotEnoughMemory, match=r"needs .* on each device, but cpu has 1 MiB.*optimizer slots: shard"
    ):
        place.data().check_fits(wide, jax.ShapeDtypeStruct((8, 2), "int32"), OPTIMIZER, memory=2**20, compile=False)
    with pytest.raises(place.NotEnoughMemory, match="gradients and activations: use smaller batches"):
        place.data().check_fits(wide, task.x, OPTIMIZER, 4096, memory=2**20, compile=False)
    place.data().check_fits(wide, task.x, OPTIMIZER, memory=2**30, compile=False)


def test_the_plot_is_a_png(tmp_path):
    task = gpt()
    plan = place.Plan({"data": 8}, slots=[("**", place.host)], batch=P("data"))
    plan.describe(task.model, task.x, optim.AdamW(1e-3), compile=False, memory=2**30).plot(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_auto_chooses_the_plan_that_fits_and_sends_least_and_says_why():
    model = Series(embed=nn.Embed(64, 64), mlp=nn.MLP((256, 64)), head=nn.Linear(64, bias=False))
    tokens = gpt().x
    said = []
    small = {"optimizer": OPTIMIZER, "log": said.append, "devices": jax.devices()[:2]}
    assert place.auto(model, tokens, **small, memory=2**30).name == "data"
    data = next(line for line in said if line.startswith("data (data 2)"))
    assert "sends" in data and "data: fits and sends least" in said[-1]
    needed = place.data(2).over(jax.devices()[:2]).describe(model, tokens, OPTIMIZER).needed
    chosen = place.auto(model, tokens, **small, memory=int(0.9 * needed))
    assert chosen.name != "data" and chosen.devices == tuple(jax.devices()[:2])
    with pytest.raises(place.NotEnoughMemory, match="no built-in plan fits"):
        place.auto(model, tokens, **small, memory=2**16)


def test_frozen_weights_count_neither_gradients_nor_slots_nor_inputs_of_their_layers():
    task = cnn()
    counts = [
        place.data().describe(task.model, task.x, optimizer, compile=False)
        for optimizer in (optim.Adam(1e-3), optim.Freeze(optim.Adam(1e-3), "**/kernel"))
    ]
    whole, frozen = ([each.bytes_of(kind) for kind in ("gradients", "slots", "activations")] for each in counts)
    assert 0 < frozen[0] < 0.5 * whole[0] and frozen[1] < 0.5 * whole[1] and frozen[2] < 0.9 * whole[2]
