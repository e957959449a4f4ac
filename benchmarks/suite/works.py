"""The GPU set: each work with its sizes, the libraries that do it, and what mlax claims about it. Plain data."""

import dataclasses
from typing import Any, NamedTuple


class GPT2(NamedTuple):
    vocabulary: int = 50_257  # as published
    length: int = 1024
    width: int = 768
    depth: int = 12
    heads: int = 12
    batch: int = 32
    prompt: int = 128  # of decoding
    tokens: int = 512  # that decoding adds


class ResNet(NamedTuple):
    depths: tuple[int, ...] = (3, 4, 6, 3)
    image: int = 224
    classes: int = 1000
    batch: int = 256


class ViT(NamedTuple):
    image: int = 224
    patch: int = 16
    width: int = 768
    depth: int = 12
    heads: int = 12
    classes: int = 1000
    batch: int = 256


class LSTM(NamedTuple):
    width: int = 512
    depth: int = 2
    length: int = 256
    batch: int = 64


class MLP(NamedTuple):
    widths: tuple[int, ...] = (784, 512, 512, 10)
    batch: int = 128
    steps: int = 1  # in a call


TINY = {  # for checks on a CPU
    GPT2: {"vocabulary": 311, "length": 32, "width": 64, "depth": 2, "heads": 4, "batch": 4, "prompt": 9, "tokens": 20},
    ResNet: {"depths": (1, 2, 1, 1), "image": 32, "classes": 10, "batch": 8},
    ViT: {"image": 32, "patch": 8, "width": 64, "depth": 2, "heads": 4, "classes": 10, "batch": 8},
    LSTM: {"width": 32, "length": 12, "batch": 4},
    MLP: {"widths": (20, 16, 16, 10), "batch": 8},
}

MLAX, JAX, FLAX, EQUINOX, TORCH = "mlax", "plain JAX", "Flax NNX", "Equinox", "PyTorch"
MODULES = {MLAX: "mlax_programs", JAX: "jax_programs", FLAX: "flax_programs", EQUINOX: "equinox_programs"}
MODULES[TORCH] = "torch_programs"


class Entry(NamedTuple):
    """A library that does a work; several of one library differ by options and variant."""

    library: str
    variant: str = ""  # which follows the library in tables
    options: dict[str, Any] = {}  # of its program
    gib: float | None = None  # of device memory that it may take, if more than others
    packages: tuple[str, ...] = ()  # that its program imports beside those of the library

    @property
    def name(self) -> str:
        return f"{self.library}, {self.variant}" if self.variant else self.library


class Claim(NamedTuple):
    """A bound of an entry's metric: at most, or at least for rates."""

    entry: str
    bound: float
    of: str | None = None  # None: in the unit of the metric; PEERS: times the best of them; or times another entry
    metric: str = "time"


PEERS = "the best peer"


@dataclasses.dataclass(frozen=True)
class Work:
    """What is measured: a program of the library's module, called with a size."""

    name: str  # for --only
    title: str  # in tables
    program: str
    size: Any
    entries: tuple[Entry, ...]
    claims: tuple[Claim, ...] = ()
    gib: float = 2.0  # of device memory that an entry may take: much more than it needs, or XLA rematerializes
    calls: int = 10  # in a repetition
    repetitions: int = 5  # more where the host decides, which varies
    tolerance: float = 0.01  # relative, of the losses of bfloat16 steps
    alone: bool = False  # whether nothing may run beside it: it measures the start of a process

    @property
    def turns(self) -> int:
        """The repetitions that are run: the first one, in which the clock of the device rises, does not count."""
        return 0 if self.alone else 1 + self.repetitions


SCANNED = Entry(MLAX, "scanned", {"mode": "scan"})
UNROLLED = Entry(MLAX, "", {"mode": "unroll"})
TRANSFORMERS = Entry(TORCH, "static cache", packages=("transformers",))
WORKS = (
    Work(
        "gpt2",
        "GPT-2 124M, training step, B 32, T 1024",
        "gpt2",
        GPT2(),
        (UNROLLED, SCANNED, Entry(TORCH), Entry(JAX, gib=27), Entry(FLAX, gib=28), Entry(EQUINOX, gib=27)),
        (
            Claim(MLAX, 1.0, PEERS),
            Claim(MLAX, 57.0),
            Claim(MLAX, 15.0, metric="memory"),
            Claim(SCANNED.name, 1.05, MLAX),
            Claim(SCANNED.name, 1.05, MLAX, metric="memory"),
        ),
        gib=24,
        calls=5,
    ),
    Work(
        "gpt2-50304",
        "GPT-2 124M, training step, B 32, T 1024, vocabulary 50,304",
        "gpt2",
        GPT2(vocabulary=50_304),
        (UNROLLED, Entry(TORCH)),
        (Claim(MLAX, 1.0, PEERS), Claim(MLAX, 57.0)),
        gib=24,
        calls=5,
    ),
    Work(
        "gpt2-b64",
        "GPT-2 124M, training step, B 64, T 1024",
        "gpt2",
        GPT2(batch=64),
        (UNROLLED, Entry(TORCH), Entry(JAX, gib=50)),
        (Claim(MLAX, 1.0, PEERS), Claim(MLAX, 108.0)),
        gib=40,
        calls=5,
    ),
    Work(
        "resnet50",
        "ResNet-50, training step, B 256",
        "resnet",
        ResNet(),
        (Entry(MLAX), Entry(TORCH, gib=20, packages=("torchvision",)), Entry(FLAX)),
        (Claim(MLAX, 1.0, PEERS), Claim(MLAX, 36.0)),
        gib=18,
    ),
    Work(
        "vit",
        "ViT-B/16, training step, B 256",
        "vit",
        ViT(),
        (UNROLLED, SCANNED, Entry(TORCH, packages=("torchvision",)), Entry(FLAX, gib=35)),
        (Claim(MLAX, 1.0, PEERS), Claim(MLAX, 66.0), Claim(SCANNED.name, 1.05, MLAX)),
        gib=26,
        calls=5,
    ),
    Work(
        "decode-b1",
        "GPT-2 124M, decoding of 512 tokens, B 1",
        "decode",
        GPT2(batch=1),
        (Entry(MLAX), Entry(JAX), TRANSFORMERS),
        (Claim(MLAX, 1.0, PEERS, "rate"), Claim(MLAX, 2_500, metric="rate")),
        gib=3,
        calls=1,
    ),
    Work(
        "decode-b64",
        "GPT-2 124M, decoding of 512 tokens, B 64",
        "decode",
        GPT2(batch=64),
        (Entry(MLAX), Entry(JAX), TRANSFORMERS),
        (Claim(MLAX, 1.0, PEERS, "rate"), Claim(MLAX, 110_000, metric="rate")),
        gib=6,
        calls=1,
    ),
    Work(
        "lstm",
        "LSTM 2 x 512, training step, B 64, T 256",
        "lstm",
        LSTM(),
        (Entry(MLAX), Entry(TORCH, "cuDNN"), Entry(JAX, "unroll=8"), Entry(FLAX, "unroll=8")),
        (Claim(MLAX, 1.0, PEERS), Claim(MLAX, 7.0)),
        gib=3,
    ),
    Work(
        "mlp",
        "MLP 784-512-512-10, training step, B 128",
        "mlp",
        MLP(),
        (Entry(MLAX), Entry(JAX), Entry(FLAX), Entry(EQUINOX), Entry(TORCH)),
        (Claim(MLAX, 1.0, PEERS), Claim(MLAX, 0.13)),
        calls=200,
        repetitions=15,
    ),
    Work(
        "mlp-20",
        "MLP 784-512-512-10, training step, B 128, 20 steps in a call",
        "mlp",
        MLP(steps=20),
        (Entry(MLAX), Entry(JAX)),
        (Claim(MLAX, 1.0, PEERS), Claim(MLAX, 0.03)),
        calls=20,
        repetitions=15,
    ),
    Work(
        "adamw",
        "AdamW alone over the 148 leaves of GPT-2",
        "adamw",
        GPT2(),
        (Entry(MLAX), Entry(JAX, "Optax"), Entry(TORCH, "fused")),
        (Claim(MLAX, 1.0, "plain JAX, Optax"),),
        gib=5,
        calls=20,
        repetitions=15,
    ),
    Work(
        "start",
        "GPT-2 124M, start of the process to the end of the first step",
        "start",
        GPT2(),
        (
            Entry(MLAX),
            Entry(MLAX, "compilation cache"),
            Entry(TORCH),
            Entry(JAX),
        ),
        (
            Claim(MLAX, 1.0, PEERS),
            Claim(MLAX, 20.0),
            Claim("mlax, compilation cache", 5.0),
        ),
        alone=True,
    ),
)


def shrink(work: Work) -> Work:
    """The work with a tiny size, for a CPU, in float32."""
    return dataclasses.replace(work, size=work.size._replace(**TINY[type(work.size)]), tolerance=2e-4, calls=1)
