"""How models and trees of variables are printed: as text, as a repr, and as HTML in a notebook."""

import functools
import html.parser
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mlax
from mlax import dtypes, inspect, nn, optim, place, train

RNG = jax.random.key(0)


@mlax.frozen
class Block(mlax.Composite):
    width: int
    heads: int

    def parts(self):
        return {
            "norm": nn.LayerNorm(),
            "attend": nn.MultiHeadAttention(self.heads, causal=True),
            "up": nn.Linear(4 * self.width),
            "down": nn.Linear(self.width),
        }

    def wire(self, sub, x):
        x = x + sub.attend(sub.norm(x))
        return x + sub.down(jax.nn.gelu(sub.up(x)))


@mlax.frozen
class Heads(mlax.Composite):
    layers: tuple[mlax.Layer, ...]
    heads: dict[str, mlax.Layer]

    def wire(self, sub, x):
        for layer in sub.layers:
            x = layer(x)
        return {name: sub.heads[name](x) for name in ("policy", "value")}


GPT = mlax.Series(
    embed=nn.Embed(50257, 768),
    blocks=mlax.Repeat(Block(768, 12), 12, mode="remat"),
    norm=nn.LayerNorm(),
    head=nn.Linear(50257, bias=False),
)
TIED = mlax.Tied(GPT, mlax.Tie("head/kernel", to="embed/table", transpose=True))


def test_a_model_prints_as_an_indented_tree_of_what_differs_from_the_defaults():
    assert (
        str(dtypes.mixed_bfloat16(TIED))
        == """\
Mixed of Tied(Tie('head/kernel', 'embed/table', transpose=True)) of Series
  embed: Embed(50257, 768)
  blocks: Repeat(12, mode='remat') of Block(768, 12)
    norm: LayerNorm(accum_dtype='float32')
    attend: MultiHeadAttention(12, causal=True, accum_dtype='float32')
      query: Linear(?)
      key: Linear(?)
      value: Linear(?)
      attend: Attention(causal=True, accum_dtype='float32')
      out: Linear(?)
    up: Linear(3072)
    down: Linear(768)
  norm: LayerNorm(accum_dtype='float32')
  head: Linear(50257, bias=False)"""
    )


def test_equal_parts_that_are_numbered_print_as_one():
    model = mlax.Series(*[mlax.Residual(nn.Linear(8)) for _ in range(12)], nn.LayerNorm(), nn.Linear(8), nn.Linear(9))
    assert (
        str(model)
        == """\
Series
  residual_0 to 11: 12 x Residual
    layer: Linear(8)
  layer_norm_0: LayerNorm()
  linear_0: Linear(8)
  linear_1: Linear(9)"""
    )


def test_tuples_and_dicts_of_parts_print_under_their_paths():
    layers = (nn.Linear(3), nn.Linear(3), nn.Linear(4, bias=False))
    heads = {"policy": mlax.Series(nn.Linear(2), jnp.tanh), "value": nn.Linear(1)}
    assert (
        str(Heads(layers, heads))
        == """\
Heads
  layers/0 to 1: 2 x Linear(3)
  layers/2: Linear(4, bias=False)
  heads/policy: Series
    linear_0: Linear(2)
    f_0: tanh
  heads/value: Linear(1)"""
    )


def test_functions_print_as_their_author_wrote_them():
    double = mlax.F(lambda x: 2 * x)
    model = mlax.Series(
        mlax.F(functools.partial(jax.nn.gelu, approximate=False)), double, act=jax.nn.relu, flat=lambda x: x.reshape(-1)
    )
    assert repr(double) == "F(lambda x: 2 * x)"
    assert str(model).splitlines()[1:] == [
        "  f_0: partial(gelu, approximate=False)",
        "  f_1: lambda x: 2 * x",
        "  act: relu",
        "  flat: lambda x: x.reshape(-1)",
    ]
    assert repr(mlax.F(eval("lambda x: x"))) == "F(<lambda>)"  # no source


def test_the_repr_of_an_edited_composite_is_the_call_that_rebuilds_it():
    edited = mlax.replace(Block(8, 2), "up", nn.LoRA(nn.Linear(32), rank=4))
    assert repr(edited) == "Block(8, 2).with_parts({'up': LoRA(Linear(32), 4)})"
    for model in (edited, dtypes.mixed_bfloat16(TIED), nn.Stacked(mlax.Recurrent(nn.GRUCell(4)))):
        names = vars(nn) | vars(mlax.core) | {"Block": Block, "Mixed": dtypes.Mixed}
        assert eval(repr(model), names) == model
        assert "edits" not in repr(model) + str(model)


class Outline(html.parser.HTMLParser):
    """The texts of a page, and whether its tags are balanced."""

    def __init__(self, page):
        super().__init__()
        self.open, self.texts, self.tags = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


@pytest.mark.parametrize("shown", [TIED, mlax.tabulate(jax.eval_shape(Block(8, 2).init, RNG, jnp.ones((1, 2, 8))))])
def test_html_is_balanced_folded_below_the_first_level_and_without_scripts(shown):
    page = Outline(shown._repr_html_())
    details = [attributes for tag, attributes in page.tags if tag == "details"]
    assert not page.open
    assert [("open" in each) for each in details] == [True, *[False] * (len(details) - 1)]
    assert len(details) > 2
    assert {tag for tag, _ in page.tags} <= {"div", "details", "summary", "span"}
    for word in ("attend", "query"):
        assert any(word in text for text in page.texts)


def test_columns_of_a_folded_table_are_aligned_and_paths_without_branches_are_one_name():
    tree = {"blocks": {"stacked": {"up": {"kernel": jnp.ones((4, 16)), "bias": jnp.ones(4)}}}, "head": jnp.ones((2, 3))}
    page = Outline(mlax.tabulate(tree)._repr_html_())
    assert page.texts == [
        "3 leaves, 74 elements, 296 bytes",
        "blocks/stacked/up: ",
        "2 leaves  float32  272 bytes",
        "bias: ",
        "  (4,)     float32   16 bytes",
        "kernel: ",
        "(4, 16)  float32  256 bytes",
        "head: ",
        "             (2, 3)    float32   24 bytes",
    ]


def test_html_escapes_names():
    page = mlax.Series(mlax.F(lambda x: x if x.ndim < 3 else x[0]))._repr_html_()
    assert "x.ndim &lt; 3" in page


class Printer:
    """What IPython passes to `_repr_pretty_`."""

    def __init__(self, indentation=0):
        self.indentation = indentation
        self.shown = ""

    def text(self, text):
        self.shown += text


def test_ipython_prints_a_tree_or_a_table_and_in_a_list_the_repr():
    for shown in (GPT, optim.SGD(0.1).init({"w": jnp.ones(3)})):
        alone, in_a_list = Printer(), Printer(indentation=1)
        shown._repr_pretty_(alone, False)
        shown._repr_pretty_(in_a_list, False)
        assert (alone.shown, in_a_list.shown) == (str(shown), repr(shown))


def test_a_table_has_paths_shapes_dtypes_and_bytes_and_no_numbers():
    tree = {"up": {"kernel": jnp.full((3, 4), 7.5), "bias": jnp.zeros(4, jnp.bfloat16)}, "key": RNG, "none": None}
    assert (
        str(mlax.tabulate(tree))
        == repr(mlax.tabulate(tree))
        == """\
path       shape   dtype        bytes
key        ()      key<fry>   8 bytes
none       None
up/bias    (4,)    bfloat16   8 bytes
up/kernel  (3, 4)  float32   48 bytes
3 leaves, 17 elements, 64 bytes"""
    )


def test_a_table_shows_anything_that_a_pytree_may_hold():
    donated = jnp.ones(3)
    jax.jit(lambda x: x + 1, donate_argnums=0)(donated)
    seen = []
    jax.jit(lambda x: seen.append(str(mlax.tabulate({"w": x}))))(jnp.ones(3))
    tree = {"donated": donated, "numpy": np.ones(2), "number": 0.125, "text": "hidden", "spec": P("data", None)}
    lines = [line.split() for line in str(mlax.tabulate(tree)).splitlines()]
    assert ["donated", "(3,)", "float32", "12", "bytes", "deleted"] in lines
    assert ["numpy", "(2,)", "float64", "16", "bytes", "NumPy"] in lines
    assert ["number", "float"] in lines
    assert ["text", "str"] in lines
    assert ["spec", P.__name__, "P('data',", "None)"] in lines
    assert "traced" in seen[0]
    assert str(mlax.tabulate(None)) == str(mlax.tabulate({})) == "no leaves"
    assert "\n.     (3,)" in str(mlax.tabulate(jnp.ones(3)))


def test_a_table_shows_where_leaves_are_stored_unless_on_the_default_device():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    placed = {
        "default": jnp.ones(8),
        "other": jax.device_put(jnp.ones(8), jax.devices()[5]),
        "sharded": jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=NamedSharding(mesh, P("data", "model"))),
        "copied": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, P())),
        "host": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, P(), memory_kind="pinned_host")),
    }
    where = {leaf.path[0]: leaf.where for leaf in mlax.tabulate(placed).leaves}
    assert where == {
        "default": "",
        "other": "cpu:5",
        "sharded": "P('data', 'model')",
        "copied": "copied to 8 devices",
        "host": "copied to 8 devices in pinned_host",
    }
    assert mlax.tabulate(placed).summary() == "5 leaves, 96 elements, 384 bytes, 160 bytes on each device"


def test_a_long_table_fits_a_screen():
    block = jax.eval_shape(Block(8, 2).init, RNG, jnp.ones((1, 2, 8)))[0]
    other = {"kernel": jax.ShapeDtypeStruct((3, 4), jnp.float32), "bias": jax.ShapeDtypeStruct((4,), jnp.float32)}
    unrolled = {"first": other, **{f"block_{index:02}": block for index in range(12)}}
    text = str(mlax.tabulate(unrolled))
    assert len(text.splitlines()) <= 42
    assert "block_01/** and 10 more like block_00" in " ".join(text.split())
    deep = {f"stage_{index}": {"a": other, "b": {"c": {**other, "n": index}}} for index in range(9)}
    assert len(str(mlax.tabulate(deep, rows=20)).splitlines()) <= 22
    nested = {"trainables": {f"block_{index}": {**other, "size": other} for index in range(60)} | {"head": other}}
    assert [line.split()[0] for line in str(mlax.tabulate(nested)).splitlines()][-4:] == [
        "trainables/block_1/**",
        "trainables/head/bias",
        "trainables/head/kernel",
        "242",
    ]
    wide = {f"{index:03}": jax.ShapeDtypeStruct((index,), jnp.float32) for index in range(99)}
    assert str(mlax.tabulate(wide)).splitlines()[21] == "...   60 more rows"
    assert len(str(mlax.tabulate(wide)).splitlines()) == 42
    assert len(str(mlax.tabulate(wide, rows=None)).splitlines()) == 101


def test_tabulate_of_a_model_says_what_to_pass():
    with pytest.raises(TypeError, match=r"holds no arrays; print\(model\) shows its layers"):
        mlax.tabulate(GPT)


def test_the_state_of_an_optimizer_prints_by_slot_and_stays_a_named_tuple():
    trainables = jax.eval_shape(GPT.init, RNG, jnp.ones((1, 4), jnp.int32))[0]
    state = optim.AdamW(1e-3).init(trainables)
    assert repr(state) == f"OptimizerState({len(jax.tree.leaves(state))} leaves, 1.21 GiB)"
    lines = str(state).splitlines()
    assert lines[0] == "OptimizerState"
    assert lines[-2].split() == ["square/**", "like", "mean", "float32", "619", "MiB"]
    assert "<details" in state._repr_html_()
    real = optim.AdamW(1e-3).init({"kernel": jnp.ones(3)})
    again = pickle.loads(pickle.dumps(real))
    assert type(again) is type(real)
    assert real._replace(step=jnp.ones((), jnp.int32)).step == 1
    assert jax.tree.structure(again) == jax.tree.structure(real)


def test_reports_show_as_they_print_without_print(tmp_path):
    model, x = mlax.Series(nn.Linear(3), jax.nn.relu), jnp.ones((2, 4))
    trainables = model.init(RNG, x)[0]
    narrow = functools.partial(lambda x: (x.astype(jnp.bfloat16) + 1).astype(jnp.float32))
    plan = place.single()
    reports = {
        "describe of a plan": (plan.describe(model, x, optim.Adam(1e-3), compile=False), "needed"),
        "describe of an optimizer": (optim.Adam(1e-3).describe(trainables), "the state: 124 bytes"),
        "transfers": (inspect.transfers(jnp.sin, x), "No collectives"),
        "audit": (dtypes.audit(narrow, x), "bfloat16, declared float32"),
    }
    for name, (report, words) in reports.items():
        assert repr(report) == str(report), name
        assert words in str(report), name
    assert repr(dtypes.audit(jnp.sin, x)) == "every operation is in the declared dtype"
    assert dtypes.audit(jnp.sin, x) == ()
    checkpoints = train.Checkpoints(tmp_path)
    assert repr(checkpoints) == f"Checkpoints({str(tmp_path)!r}, keep=3)"
    checkpoints.save(3, trainables, metrics={"loss": 0.5})
    checkpoints.wait()
    restored = checkpoints.restore(trainables)
    assert repr(restored) == "RestoredCheckpoint(step=3, metrics={'loss': 0.5}; 2 leaves, 60 bytes)"
    assert "linear_0/kernel  (4, 3)" in str(restored)


def test_metrics_print_their_values_and_inside_jit_their_names():
    metrics = train.Metrics(("loss", "rate"), jnp.array([0.123456, 0.5]))
    assert repr(metrics) == "Metrics(loss=0.1235, rate=0.5)"
    seen = []
    jax.eval_shape(lambda metrics: seen.append(repr(metrics)), metrics)
    assert seen == ["Metrics(loss, rate)"]


def test_a_metric_prints_shapes_and_a_logger_its_target():
    labels = jnp.zeros(100, jnp.int32)
    assert repr(train.F1(labels, labels, classes=3)).startswith(
        "F1(predictions=int32[100], labels=int32[100], classes=3"
    )
    loggers = [train.TensorBoard(), train.JSONLines("more.jsonl"), train.WandB("digits")]
    assert repr(loggers) == "[TensorBoard(), JSONLines('more.jsonl'), WandB('digits')]"
