"""Three well-known networks, whose FLOPs are published; `build` gives each with the shape of its input."""

import jax
import jax.numpy as jnp

import mlax
from mlax import nn


@mlax.frozen
class Bottleneck(mlax.Composite):
    """A residual block of ResNet-50 v1.5, which strides in its 3 x 3 convolution."""

    features: int
    strides: int
    project: bool  # whether the shortcut is a convolution

    def parts(self):
        conv = nn.Conv(self.features, 1, bias=False)
        parts = {
            "conv1": conv,
            "norm1": nn.BatchNorm(),
            "conv2": nn.Conv(self.features, 3, strides=self.strides, bias=False),
            "norm2": nn.BatchNorm(),
            "conv3": mlax.override(conv, nn.Conv, features=4 * self.features),
            "norm3": nn.BatchNorm(),
        }
        shortcut = nn.Conv(4 * self.features, 1, strides=self.strides, bias=False)
        return {**parts, "shortcut": shortcut, "norm": nn.BatchNorm()} if self.project else parts

    def wire(self, sub, x):
        y = jax.nn.relu(sub.norm1(sub.conv1(x)))
        y = sub.norm3(sub.conv3(jax.nn.relu(sub.norm2(sub.conv2(y)))))
        return jax.nn.relu(y + (sub.norm(sub.shortcut(x)) if self.project else x))


def resnet50():
    """ResNet-50 v1.5 on one image of 224 x 224 pixels."""
    sizes = {"stage1": (64, 3), "stage2": (128, 4), "stage3": (256, 6), "stage4": (512, 3)}
    blocks = {
        f"{stage}_{i}": Bottleneck(features, 2 if i == 0 and stage != "stage1" else 1, project=i == 0)
        for stage, (features, times) in sizes.items()
        for i in range(times)
    }
    model = mlax.Series(
        stem=nn.Conv(64, 7, strides=2, bias=False),
        norm=nn.BatchNorm(),
        relu=jax.nn.relu,
        pool=nn.MaxPool(3, strides=2, padding="SAME"),
        **blocks,
        mean=nn.GlobalPool(),
        head=nn.Linear(1000),
    )
    return model, jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)


def transformer(length, *, causal, mode="unroll", implementation=None):
    """The 12 blocks of BERT-base and of GPT-2 (124M), 768 wide, by their products: norms are before each part."""
    attend = nn.MultiHeadAttention(12, causal=causal, implementation=implementation)
    block = mlax.Series(
        attend=mlax.Residual(mlax.Series(norm=nn.LayerNorm(), attend=attend)),
        think=mlax.Residual(mlax.Series(norm=nn.LayerNorm(), mlp=nn.MLP((3072, 768), activation=jax.nn.gelu))),
    )
    return nn.LearnedPositions(length), mlax.Repeat(block, 12, mode=mode)


def bert(length):
    """BERT-base without the pooler, on one sequence."""
    positions, blocks = transformer(length, causal=False)
    model = mlax.Series(embed=nn.Embed(30522, 768), positions=positions, norm=nn.LayerNorm(), blocks=blocks)
    return model, jax.ShapeDtypeStruct((1, length), jnp.int32)


def gpt2(length=1024, **options):
    """GPT-2 (124M) with the logits of all tokens of one sequence, their kernel tied to the embedding."""
    positions, blocks = transformer(length, causal=True, **options)
    head = nn.Linear(50257, bias=False)
    model = mlax.Series(embed=nn.Embed(50257, 768), positions=positions, blocks=blocks, norm=nn.LayerNorm(), head=head)
    tie = mlax.Tie("head/kernel", to="embed/table", transpose=True)
    return mlax.Tied(model, tie), jax.ShapeDtypeStruct((1, length), jnp.int32)
