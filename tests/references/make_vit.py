"""References for ViT and DeiT, from transformers and torchvision: logits and gradients of tiny models.

transformers 5 writes other names into files than its modules have; the references have those of the files.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch_stub  # noqa: F401
from safetensors.torch import load_file, save_file
from torchvision.models.vision_transformer import VisionTransformer
from transformers import DeiTConfig, DeiTForImageClassificationWithTeacher, ViTConfig, ViTForImageClassification
from zoo_weights import digest, draw, fill

FOLDER = Path(__file__).parent
CONFIG = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "image_size": [19, 13],
    "patch_size": 4,
    "num_labels": 7,
}
SQUARE = {**CONFIG, "image_size": 18, "layer_norm_eps": 1e-6}  # positions are interpolated from squares alone


def write_file(model, folder: str) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    return load_file(f"{folder}/model.safetensors")


def load_filled(kind, config) -> tuple[torch.nn.Module, dict]:
    """A model with the weights that its names in a file determine, and their shapes."""
    with tempfile.TemporaryDirectory() as folder:
        shapes = {name: tuple(tensor.shape) for name, tensor in write_file(kind(config), folder).items()}
        weights = {name: torch.asarray(fill(name, shape)) for name, shape in shapes.items()}
        save_file(weights, f"{folder}/model.safetensors", metadata={"format": "pt"})
        return kind.from_pretrained(folder).eval(), shapes


def named_gradients(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """The gradients by their names in files: saved as if they were the weights."""
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        for each in model.parameters():
            each.copy_(each.grad)
        return {f"grad {name}": digest(name, each.numpy()) for name, each in write_file(model, folder).items()}


def pixels(height: int, width: int) -> torch.Tensor:
    return torch.from_numpy(draw(0, (3, height, width, 3))).permute(0, 3, 1, 2)


def weighted(logits: torch.Tensor, seed: int) -> torch.Tensor:
    return (logits * torch.from_numpy(draw(seed, logits.shape))).sum()


def write(name: str, config: dict, shapes: dict, **arrays: np.ndarray) -> None:
    text = {"config": json.dumps(config), "shapes": json.dumps(shapes)}
    np.savez_compressed(FOLDER / f"{name}.npz", **text, **arrays)


def make_vit() -> None:
    model, shapes = load_filled(ViTForImageClassification, ViTConfig(**CONFIG))
    logits = model(pixels(19, 13)).logits
    weighted(logits, 1).backward()
    write("vit_transformers", CONFIG, shapes, logits=logits.detach().numpy(), **named_gradients(model))


def make_deit() -> None:
    model, shapes = load_filled(DeiTForImageClassificationWithTeacher, DeiTConfig(**SQUARE))
    larger = model(pixels(25, 15), interpolate_pos_encoding=True).logits.detach().numpy()
    output = model(pixels(18, 18))
    (weighted(output.cls_logits, 1) + weighted(output.distillation_logits, 2)).backward()
    arrays = {
        "logits": output.cls_logits.detach().numpy(),
        "distillation_logits": output.distillation_logits.detach().numpy(),
        "larger": larger,
    }
    write("vit_deit", {"model_type": "deit", **SQUARE}, shapes, **arrays, **named_gradients(model))


def make_torchvision() -> None:
    model = VisionTransformer(12, 4, 2, 4, 32, 40, num_classes=7).eval()
    shapes = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    model.load_state_dict({key: torch.asarray(fill(key, shape)) for key, shape in shapes.items()})
    logits = model(pixels(12, 12))
    weighted(logits, 1).backward()
    gradients = {f"grad {key}": digest(key, each.grad.numpy()) for key, each in model.named_parameters()}
    config = {**CONFIG, "image_size": 12, "layer_norm_eps": 1e-6}
    write("vit_torchvision", config, shapes, logits=logits.detach().numpy(), **gradients)


if __name__ == "__main__":
    make_vit()
    make_deit()
    make_torchvision()
