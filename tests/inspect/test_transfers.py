"""What a compiled function sends, against counts by hand, and in the HLO of GPUs."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mlax
from mlax import nn, optim, train
from mlax.inspect import (
    TransferEvent,
    format_bytes,
    instruction_events,
    parse_hlo,
    program_events,
    summarize_events,
    transfers,
)

DEVICES, LAYERS = 8, 5
D, F, OUT = 32, 64, 16
BLOCK = mlax.Series(up=nn.Linear(F), down=nn.Linear(D))
MODEL = mlax.Series(blocks=mlax.Repeat(BLOCK, LAYERS), head=nn.Linear(OUT))
UP, DOWN, HEAD = 4 * (D * F + F), 4 * (F * D + D), 4 * (D * OUT + OUT)  # bytes of one layer's weights
HOST = "pinned_host"


def mesh(**axes):
    sizes = axes or {"data": DEVICES}
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def struct(shape, spec, over=None, memory_kind=None):
    sharding = NamedSharding(over or mesh(), spec, memory_kind=memory_kind)
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def variables(rule, over=None):
    shapes = jax.eval_shape(MODEL.init, jax.random.key(0), jnp.ones((1, D)))[0]
    return jax.tree.map_with_path(
        lambda path, leaf: struct(leaf.shape, rule([key.key for key in path], leaf), over), shapes
    )


def loss(trainables, x):
    y, _ = MODEL.fwd(x, trainables)
    return jnp.mean(y * y)


def gradient(trainables, x):
    return lax.with_sharding_constraint(jax.grad(loss)(trainables, x), shardings(trainables))


def shardings(tree):
    return jax.tree.map(lambda leaf: NamedSharding(mesh(), P()), tree)


def table(found):
    return {(row.layer, row.kind, row.group): (row.count, row.bytes, row.sent) for row in found.rows}


def test_data_parallel_training_reduces_each_gradient_once():
    found = transfers(gradient, variables(lambda path, leaf: P()), struct((64, D), P("data")))
    sizes = {
        "blocks/stacked/up": (LAYERS, LAYERS * UP),
        "blocks/stacked/down": (LAYERS, LAYERS * DOWN),
        "head": (1, HEAD),
    }
    assert table(found) == {
        (layer, "all-reduce", DEVICES): (count, size, round(size * 2 * 7 / 8)) for layer, (count, size) in sizes.items()
    }
    [total] = found.totals
    # XLA makes one of the four reductions of a block, so that both of its layers have a part in it
    assert total.count == LAYERS + 1 and total.bytes == LAYERS * (UP + DOWN) + HEAD


def test_sharded_weights_are_all_gathered_where_they_are_used():
    def rule(path, leaf):
        return P(None, "data") if path[0] == "blocks" else P("data")

    found = table(transfers(loss, variables(rule), struct((512, D), P("data"))))
    sizes = {"blocks/stacked/up": LAYERS * UP, "blocks/stacked/down": LAYERS * DOWN, "head": HEAD}
    for layer, size in sizes.items():
        leaves = 2 * (1 if layer == "head" else LAYERS)
        assert found.pop((layer, "all-gather", DEVICES)) == (leaves, size, size * 7 // 8)
    assert found == {("", "all-reduce", DEVICES): (1, 4, 7)}  # the mean of the losses


def test_tensor_parallel_layers_reduce_activations_forward_and_backward():
    over = mesh(data=2, model=4)

    def rule(path, leaf):
        if path[:3] == ["blocks", "stacked", "up"]:
            return P(*[None] * (leaf.ndim - 1), "model")
        return P(None, "model") if path == ["blocks", "stacked", "down", "kernel"] else P()

    weights, x = variables(rule, over), struct((16, D), P("data"), over)
    forward = transfers(lambda *args: MODEL.fwd(*args)[0], x, weights)
    size = LAYERS * 4 * (16 // 2) * D  # the activations of a device's part of the batch, once a block
    assert table(forward) == {("blocks/stacked/down", "all-reduce", 4): (LAYERS, size, size * 2 * 3 // 4)}
    both = table(transfers(jax.grad(lambda x, weights: loss(weights, x)), x, weights))
    assert both[("blocks/stacked/up", "all-reduce", 4)] == (LAYERS, size, size * 2 * 3 // 4)


def test_ppermute_and_all_to_all_send_their_operands():
    x = struct((8, 16), P("data"))

    def body(x):  # (1, 16) on each device
        with jax.named_scope("pass"):
            x = lax.ppermute(x, "data", [(i, (i + 1) % DEVICES) for i in range(DEVICES)])
        with jax.named_scope("exchange"):
            return lax.all_to_all(x, "data", 1, 0, tiled=True)

    function = jax.shard_map(body, mesh=mesh(), in_specs=P("data"), out_specs=P("data"))
    found = table(transfers(function, x))
    assert found[("pass", "collective-permute", DEVICES)] == (1, 64, 64)
    assert found[("exchange", "all-to-all", DEVICES)] == (1, 64, 56)


def test_one_device_sends_nothing():
    found = transfers(lambda x: x @ x, jnp.ones((8, 8)))
    assert found.rows == found.totals == ()
    assert str(found) == "No collectives and no host-device copies."


def test_a_weight_in_host_memory_is_fetched_once():
    def function(kernel, x):
        with jax.named_scope("up"):
            return x @ jax.device_put(kernel, jax.memory.Space.Device)

    found = transfers(function, struct((D, F), P(), memory_kind=HOST), struct((16, D), P("data")))
    assert table(found) == {("up", "host to device", 1): (1, 4 * D * F, 4 * D * F)}


def test_weights_that_a_scan_fetches_from_the_host_count_the_shard_of_one_device():
    def function(kernels, x):
        def body(x, kernel):
            with jax.named_scope("up"):
                return x @ jax.device_put(kernel, jax.memory.Space.Device), None

        with jax.named_scope("blocks"):
            x, _ = lax.scan(body, x, kernels)
        return jax.device_put(x, NamedSharding(mesh(), P("data"), memory_kind=HOST))

    found = transfers(function, struct((LAYERS, D, D), P(None, "data"), memory_kind=HOST), struct((16, D), P("data")))
    copies = {key: row for key, row in table(found).items() if "host" in key[1]}
    part = LAYERS * 4 * D * D // DEVICES
    back = 4 * 16 * D // DEVICES
    assert copies == {
        ("blocks/up", "host to device", 1): (LAYERS, part, part),
        ("", "device to host", 1): (1, back, back),
    }


def test_the_most_expensive_branch_of_a_conditional_counts():
    def function(x, w):
        return lax.cond(x[0, 0] > 0, lambda: x, lambda: jax.device_put(w, jax.memory.Space.Device))

    found = transfers(function, jnp.ones((4, 4)), jax.device_put(jnp.ones((4, 4)), jax.memory.Space.Host))
    assert table(found) == {("", "host to device", 1): (1, 64, 64)}


def test_a_step_reports_its_transfers_before_and_after_it_ran():
    def objective(batch, trainables, non_trainables, rng=None, inference_mode=False):
        y, non_trainables = BLOCK.fwd(batch, trainables, non_trainables)
        return jnp.mean(y * y), non_trainables

    step = train.step(objective, optim.SGD(0.1))
    with pytest.raises(ValueError, match="not compiled yet; pass a state and a batch"):
        transfers(step)
    whole = NamedSharding(mesh(), P())
    state = step.init(*jax.device_put((jax.random.key(0), BLOCK.init(jax.random.key(0), jnp.ones((1, D)))[0]), whole))
    batch = jax.device_put(jnp.ones((16, D)), NamedSharding(mesh(), P("data")))
    found = transfers(step, state, batch)
    assert {row.layer: row.bytes for row in found.rows if row.layer} == {"up": UP, "down": DOWN}
    state, _ = step(state, batch)
    assert transfers(step) == found


def test_transfers_of_a_step_are_those_for_the_given_batch():
    def objective(batch, trainables, non_trainables, rng=None, inference_mode=False):
        with jax.named_scope("fetched"):
            batch = jax.device_put(batch, jax.memory.Space.Device)
        y, non_trainables = BLOCK.fwd(batch, trainables, non_trainables)
        return jnp.mean(y * y), non_trainables

    step = train.step(objective, optim.SGD(0.1), compilations=2)
    state = step.init(jax.random.key(0), BLOCK.init(jax.random.key(0), jnp.ones((1, D)))[0])
    few, many = (jax.device_put(jnp.ones((rows, D)), jax.memory.Space.Host) for rows in (4, 64))
    sizes = [transfers(step, state, batch).rows[0].bytes for batch in (few, many, few)]
    assert sizes == [4 * 4 * D, 4 * 64 * D, 4 * 4 * D]


def test_a_copy_inside_shard_map_is_of_a_shard():
    def function(x):
        fetch = jax.shard_map(
            lambda x: jax.device_put(x, jax.memory.Space.Device) * 2,
            mesh=mesh(),
            in_specs=P("data"),
            out_specs=P("data"),
        )
        return fetch(x)

    found = transfers(function, struct((16, D), P("data"), memory_kind=HOST))
    assert table(found) == {("", "host to device", 1): (1, 4 * 2 * D, 4 * 2 * D)}


def test_a_compiled_function_is_accepted_without_arguments():
    args = variables(lambda path, leaf: P()), struct((64, D), P("data"))
    compiled = jax.jit(gradient).lower(*args).compile()
    assert transfers(compiled) == transfers(gradient, *args)
    with pytest.raises(TypeError, match="takes no arguments"):
        transfers(compiled, *args)
    with pytest.raises(TypeError, match="neither a function nor"):
        transfers(3)


def test_the_table_has_a_line_for_each_row_and_total():
    found = transfers(gradient, variables(lambda path, leaf: P()), struct((64, D), P("data")))
    lines = str(found).splitlines()
    assert len(lines) == 1 + len(found.rows) + len(found.totals) + 1
    assert lines[0].split() == ["layer", "kind", "devices", "count", "bytes", "sent", "per", "device"]
    assert re.fullmatch(r"blocks/stacked/up +all-reduce +8 +5 +41.2 KiB +72.2 KiB", lines[1])
    assert lines[-2].startswith("total")
    assert lines[-1] == "A collective of several layers counts in the row of each of them, and once in the total."


def test_the_table_mentions_shared_transfers_only_where_there_are_any():
    alone = TransferEvent("all-reduce", 8, (("up", 64),), 1.75)
    assert str(summarize_events([alone])).splitlines()[-1].startswith("total")
    shared = alone._replace(bytes_by_layer=(("up", 64), ("down", 64)))
    assert str(summarize_events([alone, shared])).splitlines()[-1].startswith("A collective of several layers")


def test_sizes_are_three_digits_and_a_unit():
    assert [format_bytes(size) for size in (7, 1536, 1023 * 1024, 3 * 2**30)] == [
        "7 bytes",
        "1.5 KiB",
        "1023 KiB",
        "3 GiB",
    ]


GPU = """HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[4,32,64]{2,1,0:S(5)})->f32[8,64]{1,0}}, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%fused_slice (p0: f32[4,32,64], p1: s32[]) -> f32[1,32,64] {
  %p0 = f32[4,32,64]{2,1,0:S(5)} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %ds = f32[1,32,64]{2,1,0} dynamic-slice(%p0, %p1, %zero, %zero), dynamic_slice_sizes={1,32,64}
}

%fused_on_host (q: f32[4,8,64]) -> f32[4,8,64] {
  %q = f32[4,8,64]{2,1,0:S(5)} parameter(0)
  %n = f32[4,8,64]{2,1,0} negate(%q)
  ROOT %m = f32[4,8,64]{2,1,0:S(5)} negate(%n)
}

%async_computation (p: f32[16,64]) -> f32[2,64] {
  %p = f32[16,64]{1,0} parameter(0)
  ROOT %rs = f32[2,64]{1,0} reduce-scatter(%p), channel_id=5, replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add, metadata={op_name="jit(step)/transpose(jvp(head))/dot_general"}
}

%body (arg: (s32[], f32[4,32,64], f32[4,8,64])) -> (s32[], f32[4,32,64], f32[4,8,64]) {
  %arg = (s32[], f32[4,32,64]{2,1,0:S(5)}, /*index=2*/f32[4,8,64]{2,1,0:S(5)}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %weights = f32[4,32,64]{2,1,0:S(5)} get-tuple-element(%arg), index=1
  %kept = f32[4,8,64]{2,1,0:S(5)} get-tuple-element(%arg), index=2
  %fetched = f32[1,32,64]{2,1,0} fusion(%weights, %i), kind=kLoop, calls=%fused_slice, metadata={op_name="jit(step)/jvp(blocks)/while/body/closed_call/up/device_put" source_file="a (b, c).py"}
  %made = f32[1,8,64]{2,1,0} custom-call(%fetched), custom_call_target="__cublas$gemm", metadata={op_name="jit(step)/jvp(blocks)/while/body/closed_call/up/dot_general"}
  %zero.1 = s32[] constant(0)
  %saved = f32[4,8,64]{2,1,0:S(5)} dynamic-update-slice(%kept, %made, %i, %zero.1, %zero.1), metadata={op_name="jit(step)/jvp(blocks)/while/body/closed_call/up/device_put"}
  %all-gather-start = (f32[1,8,64]{2,1,0}, f32[8,8,64]{2,1,0}) all-gather-start(%made), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}, metadata={op_name="jit(step)/jvp(blocks)/while/body/closed_call/down/dot_general"}
  %all-gather-done = f32[8,8,64]{2,1,0} all-gather-done(%all-gather-start), metadata={op_name="jit(step)/jvp(blocks)/while/body/closed_call/down/dot_general"}
  ROOT %out = (s32[], f32[4,32,64]{2,1,0:S(5)}, f32[4,8,64]{2,1,0:S(5)}) tuple(%i, %weights, %saved)
}

%condition (arg.1: (s32[], f32[4,32,64], f32[4,8,64])) -> pred[] {
  %arg.1 = (s32[], f32[4,32,64]{2,1,0:S(5)}, f32[4,8,64]{2,1,0:S(5)}) parameter(0)
  %i.1 = s32[] get-tuple-element(%arg.1), index=0
  %limit = s32[] constant(4)
  ROOT %less = pred[] compare(%i.1, %limit), direction=LT
}

ENTRY %main (w: f32[32,64], g: f32[16,64], stack: f32[4,32,64], rest: f32[4,8,64]) -> f32[32,64] {
  %w = f32[32,64]{1,0:S(5)} parameter(0), metadata={op_name="state[\\'w\\']"}
  %g = f32[16,64]{1,0} parameter(1)
  %b = f32[64]{0} parameter(4)
  %stack = f32[4,32,64]{2,1,0:S(5)} parameter(2)
  %rest = f32[4,8,64]{2,1,0:S(5)} parameter(3)
  %stays = f32[4,8,64]{2,1,0:S(5)} fusion(%rest), kind=kLoop, calls=%fused_on_host
  %zero.2 = s32[] constant(0)
  %copy-start = (f32[32,64]{1,0}, f32[32,64]{1,0:S(5)}, u32[]) copy-start(%w), metadata={op_name="jit(step)/jvp(head)/device_put"}
  %start = (s32[], f32[4,32,64]{2,1,0:S(5)}, f32[4,8,64]{2,1,0:S(5)}) tuple(%zero.2, %stack, %rest)
  %loop = (s32[], f32[4,32,64]{2,1,0:S(5)}, f32[4,8,64]{2,1,0:S(5)}) while(%start), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"4"}}
  %copy-done = f32[32,64]{1,0} copy-done(%copy-start)
  %left = f32[16,64]{1,0} negate(%g), metadata={op_name="jit(step)/transpose(jvp(one))/neg"}
  %right = f32[64]{0} negate(%b), metadata={op_name="jit(step)/transpose(jvp(two))/neg"}
  %all-reduce-start = (f32[16,64]{1,0}, f32[64]{0}) all-reduce-start(%left, %right), channel_id=2, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add, metadata={op_name="jit(step)/transpose(jvp(one))/neg"}
  %all-reduce-done = (f32[16,64]{1,0}, f32[64]{0}) all-reduce-done(%all-reduce-start)
  %scattered = ((f32[16,64]{1,0}), f32[2,64]{1,0}, u32[]) async-start(%g), calls=%async_computation
  %scattered.1 = f32[2,64]{1,0} async-done(%scattered), calls=%async_computation
  %permute = (f32[16,64]{1,0}, f32[16,64]{1,0}, u32[], u32[]) collective-permute-start(%g), source_target_pairs={{0,1},{1,2},{2,3}}, metadata={op_name="jit(step)/ring/ppermute"}
  %permuted = f32[16,64]{1,0} collective-permute-done(%permute)
  %counted = ((f32[2,64]{1,0}), f32[2,64]{1,0}, u32[]) call-start(%scattered.1), async_execution_thread="host", metadata={op_name="jit(step)/update/add"}
  ROOT %back = f32[32,64]{1,0:S(5)} copy(%copy-done), metadata={op_name="jit(step)/jvp(head)/device_put"}
}
"""  # noqa: E501

ON_GPU = {
    ("head", "host to device", 1): (1, 4 * 32 * 64, 4 * 32 * 64),
    ("head", "device to host", 1): (1, 4 * 32 * 64, 4 * 32 * 64),
    ("blocks/up", "host to device", 1): (4, 4 * 4 * 32 * 64, 4 * 4 * 32 * 64),
    ("blocks/up", "device to host", 1): (4, 4 * 4 * 8 * 64, 4 * 4 * 8 * 64),
    ("blocks/down", "all-gather", 8): (4, 4 * 4 * 8 * 8 * 64, 4 * 4 * 7 * 8 * 64),
    ("one", "all-reduce", 4): (1, 4 * 16 * 64, 4 * 16 * 64 * 6 // 4),
    ("two", "all-reduce", 4): (1, 4 * 64, 4 * 64 * 6 // 4),
    ("head", "reduce-scatter", 8): (1, 4 * 16 * 64, 4 * 14 * 64),
    ("ring", "collective-permute", 4): (1, 4 * 16 * 64, 4 * 16 * 64),
    ("update", "computed on the host", 1): (1, 2 * 4 * 2 * 64, 2 * 4 * 2 * 64),  # in and out
}


def counted(text):
    program = parse_hlo(text)
    return table(summarize_events(program_events(program, program.entry)))


def test_asynchronous_collectives_of_a_gpu_are_understood():
    assert counted(GPU) == ON_GPU


def test_a_loop_without_a_trip_count_is_counted_by_its_condition_or_once():
    unknown = GPU.replace(', backend_config={"known_trip_count":{"n":"4"}}', "")
    assert counted(unknown) == ON_GPU
    once = counted(unknown.replace("direction=LT", "direction=NE"))
    assert once[("blocks/down", "all-gather", 8)] == (1, 4 * 8 * 8 * 64, 4 * 7 * 8 * 64)


def test_copies_that_are_only_annotated_are_counted():
    marked = """HloModule m

ENTRY %main {
  %p = bf16[8,4]{1,0} parameter(0)
  %a = bf16[8,4]{1,0} custom-call(%p), custom_call_target="MoveToHost"
  %b = bf16[8,4]{1,0} custom-call(bf16[8,4]{1,0} %a), custom_call_target="annotate_device_placement", frontend_attributes={_xla_buffer_placement="device"}
  ROOT %c = bf16[8,4]{1,0} custom-call(%b), custom_call_target="annotate_device_placement", frontend_attributes={_xla_buffer_placement="pinned_host"}
}
"""  # noqa: E501
    assert counted(marked) == {("", "device to host", 1): (2, 128, 128), ("", "host to device", 1): (1, 64, 64)}


def test_a_collective_without_a_layer_in_its_name_belongs_to_its_consumer():
    gather = "all-gather(%p), replica_groups=[1,8]<=[8], dimensions={0}"
    found = counted(f"""HloModule m, num_partitions=8

ENTRY %main (p: f32[1,4]) -> f32[8,4] {{
  %p = f32[1,4]{{1,0}} parameter(0), metadata={{op_name="t[\\'up\\'][\\'kernel\\']"}}
  %a = f32[8,4]{{1,0}} {gather}, metadata={{op_name="t[\\'up\\'][\\'kernel\\']"}}
  %b = f32[8,4]{{1,0}} negate(%a), metadata={{op_name="jit(f)/jvp(up)/neg"}}
  %c = f32[8,4]{{1,0}} {gather}, metadata={{op_name="jit(f)/blocks/while/body/jit(dynamic_index_in_dim)/squeeze"}}
  %d = f32[8,4]{{1,0}} bitcast(%c)
  %e = f32[8,4]{{1,0}} negate(%d), metadata={{op_name="jit(f)/blocks/while/body/closed_call/down/neg"}}
  %g = f32[1,4]{{1,0}} negate(%p), metadata={{op_name="jit(f)/transpose(jvp(head))/neg"}}
  %h = f32[8,4]{{1,0}} {gather.replace("%p", "%g")}
  %i = f32[8,4]{{1,0}} {gather}, metadata={{op_name="jit(f)/reduce_sum"}}
  ROOT %j = f32[8,4]{{1,0}} add(%b, %i), metadata={{op_name="jit(f)/last/add"}}
}}
""")
    assert {layer for layer, _, _ in found} == {"up", "blocks/down", "head", ""}


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", 2),
        ("replica_groups={}", 8),
        ("replica_groups=[2,4]<=[8]", 4),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", 2),
        ("replica_groups=mesh['data'=2,'model'=4] {'model'}", 4),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}", 4),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_0'}", 4),
        ("replica_groups=mesh['axis_0'=8] {'axis_0':(1)2}", 2),
    ],
)
def test_groups_are_read_in_each_of_their_notations(written, size):
    text = f"""HloModule m, replica_count=1, num_partitions=8

ENTRY %main (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  ROOT %r = f32[8]{{0}} all-reduce(%p), channel_id=1, {written}, use_global_device_ids=true, to_apply=%add
}}
"""
    program = parse_hlo(text)
    main = program.computations["main"]
    [event] = instruction_events(program, main, main.root)
    assert (event.kind, event.group, event.bytes) == ("all-reduce", size, 32)


@pytest.mark.parametrize(
    ("dtype", "size"), [("pred", 12), ("s4", 6), ("bf16", 24), ("f8e4m3fn", 12), ("c64", 96), ("token", 0)]
)
def test_sizes_follow_the_dtype(dtype, size):
    program = parse_hlo(
        f"HloModule m\n\nENTRY %main {{\n  ROOT %p = {dtype}[3,4]{{1,0:T(8,128)S(1)}} parameter(0)\n}}\n"
    )
    [shape] = program.computations["main"].root.shapes
    assert (shape.bytes, shape.space) == (size, 1)
