"""References for ResNet, from torchvision and transformers: logits, gradients and running statistics."""

import json
from pathlib import Path

import numpy as np
import torch
import torch_stub  # noqa: F401
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet
from transformers import ResNetConfig, ResNetForImageClassification
from zoo_weights import digest, draw, fill

FOLDER = Path(__file__).parent
CLASSES = 7
IMAGES = draw(0, (3, 33, 47, 3))
BASIC = {"depths": [1, 3], "widths": [8, 16], "block": "basic", "classes": CLASSES}
BOTTLENECK = {"depths": [3, 1], "widths": [32, 64], "reduction": 2, "groups": 2, "classes": CLASSES}
CONFIG = {"embedding_size": 8, "hidden_sizes": [16, 24], "depths": [2, 1], "num_labels": CLASSES}


class NarrowResNet(ResNet):
    """torchvision's, with two stages and an eighth of the channels after the stem."""

    def __init__(self, block, depths, **options):
        super().__init__(block, [*depths, 1, 1], **options)
        self.layer3 = self.layer4 = torch.nn.Identity()
        self.fc = torch.nn.Linear(16 * block.expansion, CLASSES)

    def _make_layer(self, block, planes, *rest, **options):
        return super()._make_layer(block, planes // 8, *rest, **options)


def write(name: str, model: torch.nn.Module, config: dict) -> None:
    """Logits and gradients in both modes, and the running statistics after one step of training."""
    shapes = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    arrays = {}
    for mode in ("eval", "train"):
        model.load_state_dict({key: torch.asarray(fill(key, shape)) for key, shape in shapes.items()})
        model.train(mode == "train")
        model.zero_grad()
        output = model(torch.from_numpy(IMAGES).permute(0, 3, 1, 2))
        logits = output if isinstance(output, torch.Tensor) else output.logits
        weights = torch.from_numpy(draw(1, logits.shape))
        (logits * weights).sum().backward()
        arrays[f"{mode} logits"] = logits.detach().numpy()
        arrays |= {f"{mode} grad {key}": digest(key, each.grad.numpy()) for key, each in model.named_parameters()}
    running = {key: each.numpy() for key, each in model.state_dict().items() if "running" in key}
    arrays |= {f"statistics {key}": digest(key, each) for key, each in running.items()}
    np.savez_compressed(FOLDER / f"{name}.npz", config=json.dumps(config), shapes=json.dumps(shapes), **arrays)


def main() -> None:
    write("resnet_basic", NarrowResNet(BasicBlock, BASIC["depths"]), BASIC)
    write("resnet_bottleneck", NarrowResNet(Bottleneck, BOTTLENECK["depths"], groups=2), BOTTLENECK)
    write("resnet_transformers", ResNetForImageClassification(ResNetConfig(**CONFIG)), CONFIG)


if __name__ == "__main__":
    main()
