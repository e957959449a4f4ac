"""References for ConvNeXt, from torchvision and transformers: logits and gradients of tiny models."""

import json
from pathlib import Path

import numpy as np
import torch
import torch_stub  # noqa: F401
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from transformers import ConvNextConfig, ConvNextForImageClassification
from zoo_weights import digest, draw, fill

CONFIG = {"hidden_sizes": [8, 12], "depths": [1, 3], "num_stages": 2, "layer_norm_eps": 1e-6, "num_labels": 7}


def write(name: str, model: torch.nn.Module) -> None:
    shapes = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    model.load_state_dict({key: torch.asarray(fill(key, shape)) for key, shape in shapes.items()})
    output = model.eval()(torch.from_numpy(draw(0, (3, 21, 35, 3))).permute(0, 3, 1, 2))
    logits = output if isinstance(output, torch.Tensor) else output.logits
    (logits * torch.from_numpy(draw(1, logits.shape))).sum().backward()
    gradients = {f"grad {key}": digest(key, each.grad.numpy()) for key, each in model.named_parameters()}
    np.savez_compressed(
        Path(__file__).with_name(f"{name}.npz"),
        config=json.dumps(CONFIG),
        shapes=json.dumps(shapes),
        logits=logits.detach().numpy(),
        **gradients,
    )


def main() -> None:
    write("convnext_transformers", ConvNextForImageClassification(ConvNextConfig(**CONFIG)))
    stages = [CNBlockConfig(8, 12, 1), CNBlockConfig(12, None, 3)]
    write("convnext_torchvision", ConvNeXt(stages, num_classes=7))


if __name__ == "__main__":
    main()
