"""mlax as a user writes it: models of the zoo, `dtypes.mixed_bfloat16`, `optim.AdamW`, `train.step`."""

from functools import partial

import jax
import jax.numpy as jnp

import mlax
from benchmarks.suite import B1, B2, DECAY, EPS, RATE
from benchmarks.suite.inputs import make_batch, make_decoder_weights, make_prompts, make_weights
from benchmarks.suite.jax_device import peak_memory, wait
from mlax import dtypes, nn, ops, optim, train, zoo

__all__ = ["adamw", "decode", "gpt2", "lstm", "mlp", "peak_memory", "resnet", "start", "vit", "wait"]
ADAMW = optim.AdamW(RATE, B1, B2, EPS, decay=DECAY, decayed=("**",))


def gpt2(size, dtype, mode):
    model = gpt2_model(size, dtype, mode)
    return training(language_objective(model), zoo.load_weights(model, make_weights(size)), make_batch(size))


def start(size, dtype, mode="unroll"):
    """A step of a model with fresh weights, which are initialized while the step compiles."""
    train.enable_compilation_cache()
    model, (x, y) = gpt2_model(size, dtype, mode), make_batch(size)
    step, batch = train.step(language_objective(model), ADAMW), {"x": jnp.asarray(x), "y": jnp.asarray(y)}
    return advancing(step, step.init_model(jax.random.key(0), model, batch["x"], batch), batch)


def gpt2_model(size, dtype, mode):
    model = zoo.GPT2(
        vocabulary=size.vocabulary, positions=size.length, width=size.width, depth=size.depth, heads=size.heads
    )
    return in_dtype(mlax.override(model, mlax.Repeat, mode=mode), dtype)


def resnet(size, dtype):
    model = in_dtype(zoo.ResNet(depths=size.depths, classes=size.classes), dtype)
    return training(objective_of(model, cross_entropy), zoo.load_weights(model, make_weights(size)), make_batch(size))


def vit(size, dtype, mode):
    model = in_dtype(mlax.override(vit_model(size), mlax.Repeat, mode=mode), dtype)
    return training(objective_of(model, cross_entropy), zoo.load_weights(model, make_weights(size)), make_batch(size))


def vit_model(size):
    return zoo.ViT(
        image_size=(size.image, size.image),
        patch=size.patch,
        width=size.width,
        depth=size.depth,
        heads=size.heads,
        hidden=4 * size.width,
        classes=size.classes,
    )


def lstm(size, dtype):
    layer = mlax.Recurrent(nn.LSTMCell(size.width, recurrent_bias=True))
    model, weights = in_dtype(mlax.Series(*[layer] * size.depth), dtype), make_weights(size)
    names = {"input": "ih", "recurrent": "hh"}
    shapes, _ = jax.eval_shape(model.init, jax.random.key(0), make_batch(size)[0])
    layers = [
        {
            part: {"kernel": weights[f"rnn.weight_{name}_l{i}"].T, "bias": weights[f"rnn.bias_{name}_l{i}"]}
            for part, name in names.items()
        }
        for i in range(size.depth)
    ]
    trainables = dict(zip(shapes, layers, strict=True))
    return training(objective_of(model, squared_error), (trainables, None), make_batch(size))


def mlp(size, dtype):
    model, weights = nn.MLP(size.widths[1:], activation=jax.nn.relu), make_weights(size)
    layers = range(len(size.widths) - 1)
    trainables = {
        f"linear_{i}": {"kernel": weights[f"{2 * i}.weight"].T, "bias": weights[f"{2 * i}.bias"]} for i in layers
    }
    objective = objective_of(model, cross_entropy)
    return training(objective, (trainables, None), make_batch(size), steps_per_call=size.steps)


def adamw(size, dtype):
    weights = {name: jnp.asarray(each) for name, each in make_weights(size).items()}
    update, state = jax.jit(ADAMW.update, donate_argnums=(1, 2)), ADAMW.init(weights)
    grads = jax.tree.map(lambda each: each * 0.1, weights)

    def call():
        nonlocal weights, state
        weights, state = update(grads, state, weights)
        return weights["transformer.ln_f.bias"][0]

    return call


def decode(size, dtype):
    model = gpt2_model(size, dtype, "scan")
    trainables, _ = zoo.load_weights(model, make_decoder_weights(size))
    model, trainables = mlax.unstack(model, dtypes.cast(trainables, dtype))
    prompts = jnp.asarray(make_prompts(size))
    generate = partial(zoo.generate, model, trainables, prompts, max_new_tokens=size.tokens)
    return lambda: generate().tokens


def in_dtype(model, dtype):
    return dtypes.mixed_bfloat16(model) if dtype == "bfloat16" else model


def language_objective(model):
    """The loss by the model itself, which has no need of logits."""

    def objective(batch, trainables, non_trainables, rng=None, inference_mode=False):
        inputs = batch["x"], None, batch["y"]
        return model.fwd(inputs, trainables, non_trainables, rng=rng, inference_mode=inference_mode)

    return objective


def objective_of(model, loss):
    def objective(batch, trainables, non_trainables, rng=None, inference_mode=False):
        y, new = model.fwd(batch["x"], trainables, non_trainables, rng=rng, inference_mode=inference_mode)
        return loss(y, batch["y"]), new

    return objective


def cross_entropy(logits, labels):
    return ops.softmax_cross_entropy(logits, labels, accum_dtype="float32")


def squared_error(y, wanted):
    return jnp.mean((y - wanted) ** 2)


def training(objective, variables, batch, **options):
    step = train.step(objective, ADAMW, **options)
    state = step.init(jax.random.key(1), *jax.tree.map(jnp.asarray, variables))
    return advancing(step, state, {"x": jnp.asarray(batch[0]), "y": jnp.asarray(batch[1])})


def advancing(step, state, batch):
    def call():
        nonlocal state
        state, metrics = step(state, batch)
        return metrics  # unread, as in a loop that logs every so many steps

    return call
