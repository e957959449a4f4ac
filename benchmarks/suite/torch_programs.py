"""PyTorch: `torch.compile`, bfloat16 autocast, fused AdamW, flash attention, images channels-last."""

import torch
from torch import nn
from torch.nn import functional

from benchmarks.suite import B1, B2, DECAY, EPS, RATE
from benchmarks.suite.inputs import make_batch, make_decoder_weights, make_prompts, make_weights

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_float32_matmul_precision("high")  # TF32, as JAX does


def wait(result):
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return result


def peak_memory():
    return torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0


def gpt2(size, dtype):
    model, weights = GPT2(size), make_weights(size)
    transposed = {name: each.T if "c_" in name else each for name, each in weights.items()}  # there (in, out)
    model.load_state_dict({name: torch.from_numpy(each.copy()) for name, each in transposed.items()})
    return training(model, make_batch(size), dtype)


def start(size, dtype):
    return training(GPT2(size), make_batch(size), dtype)


def resnet(size, dtype):
    from torchvision.models.resnet import Bottleneck, ResNet

    torch.backends.cudnn.benchmark = True  # tries all algorithms of a convolution
    model = ResNet(Bottleneck, list(size.depths), size.classes)
    model.load_state_dict({name: torch.from_numpy(each) for name, each in make_weights(size).items()}, strict=False)
    return training(model.to(memory_format=torch.channels_last), make_batch(size), dtype)


def vit(size, dtype):
    from torchvision.models import VisionTransformer

    model = VisionTransformer(
        size.image, size.patch, size.depth, size.heads, size.width, 4 * size.width, num_classes=size.classes
    )
    model.load_state_dict({name: torch.from_numpy(each) for name, each in make_weights(size).items()})
    return training(model, make_batch(size), dtype)


def lstm(size, dtype):
    """cuDNN's, which torch.compile does not compile."""
    model = nn.LSTM(size.width, size.width, size.depth, batch_first=True)
    weights = {name.removeprefix("rnn."): torch.from_numpy(each) for name, each in make_weights(size).items()}
    model.load_state_dict(weights)

    def loss(x, wanted):
        return functional.mse_loss(model(x)[0].float(), wanted)

    return training(model, make_batch(size), dtype, loss, compiled=False)


def mlp(size, dtype):
    pairs = zip(size.widths, size.widths[1:], strict=False)
    layers = [layer for pair in pairs for layer in (nn.Linear(*pair), nn.ReLU())][:-1]
    model = nn.Sequential(*layers)
    model.load_state_dict({name: torch.from_numpy(each) for name, each in make_weights(size).items()})
    return training(model, make_batch(size), "float32", mode="reduce-overhead")


def adamw(size, dtype):
    weights = [nn.Parameter(torch.from_numpy(each).to(DEVICE)) for each in make_weights(size).values()]
    for each in weights:
        each.grad = each.detach() * 0.1
    optimizer = make_adamw(weights)

    def call():
        optimizer.step()
        return weights[-1].detach()[0]

    return call


def decode(size, dtype):
    """Generation by transformers with its static cache, which compiles the forward pass of a token."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"n_positions": size.length, "n_embd": size.width, "n_layer": size.depth, "n_head": size.heads}
    config = GPT2Config(vocab_size=size.vocabulary, **shape)
    model = GPT2LMHeadModel(config)
    weights = {name: torch.from_numpy(each) for name, each in make_decoder_weights(size).items()}
    model.load_state_dict({**weights, "lm_head.weight": weights["transformer.wte.weight"]})
    model = model.to(DEVICE, getattr(torch, dtype)).eval()
    model.generation_config.cache_implementation = "static"
    prompts = torch.from_numpy(make_prompts(size)).long().to(DEVICE)
    limits = {"max_new_tokens": size.tokens, "min_new_tokens": size.tokens, "do_sample": False, "pad_token_id": 0}
    return lambda: model.generate(prompts, attention_mask=torch.ones_like(prompts), **limits)[:, size.prompt :]


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(width, 3 * width), "c_proj": nn.Linear(width, width)})
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width)})

    def forward(self, x):
        b, t, d = x.shape
        qkv = self.attn["c_attn"](self.ln_1(x)).split(d, dim=-1)
        q, k, v = (each.view(b, t, self.heads, -1).transpose(1, 2) for each in qkv)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn["c_proj"](y.transpose(1, 2).reshape(b, t, d))
        y = functional.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh")
        return x + self.mlp["c_proj"](y)


class GPT2(nn.Module):
    def __init__(self, size):
        super().__init__()
        blocks = nn.ModuleList([Block(size.width, size.heads) for _ in range(size.depth)])
        embed, positions = nn.Embedding(size.vocabulary, size.width), nn.Embedding(size.length, size.width)
        parts = {"wte": embed, "wpe": positions, "h": blocks, "ln_f": nn.LayerNorm(size.width)}
        self.transformer = nn.ModuleDict(parts)

    def forward(self, tokens):
        parts = self.transformer
        x = parts["wte"](tokens) + parts["wpe"].weight
        for block in parts["h"]:
            x = block(x)
        return functional.linear(parts["ln_f"](x), parts["wte"].weight)


def make_adamw(parameters):
    return torch.optim.AdamW(parameters, RATE, (B1, B2), EPS, DECAY, fused=True)


def training(model, batch, dtype, loss=None, mode=None, compiled=True):
    model = model.to(DEVICE).train()
    x, y = (torch.from_numpy(each).to(DEVICE) for each in batch)
    if x.ndim == 4:
        x = x.permute(0, 3, 1, 2)  # channels-last in memory, as it comes
    y = y if y.is_floating_point() else y.long()

    def cross_entropy(x, y):
        logits = model(x)
        return functional.cross_entropy(logits.flatten(0, -2), y.flatten())

    loss = loss or cross_entropy
    loss = torch.compile(loss, mode=mode) if compiled and DEVICE == "cuda" else loss  # eager in checks on a CPU
    optimizer = make_adamw(model.parameters())

    def call():
        torch.compiler.cudagraph_mark_step_begin()  # the last loss is no longer read
        with torch.autocast(DEVICE, torch.bfloat16, enabled=dtype == "bfloat16"):
            value = loss(x, y)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return call
