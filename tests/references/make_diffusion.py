"""References for the U-Net, the VAE and the samplers, from diffusers: tiny models with random weights."""

import json
from pathlib import Path

import numpy as np
import torch
import torch_stub  # noqa: F401
from diffusers import AutoencoderKL, DDIMScheduler, DDPMScheduler, UNet2DModel
from diffusers.schedulers import scheduling_ddim, scheduling_ddpm
from zoo_weights import digest, fill

FOLDER = Path(__file__).parent
LEVELS = {
    "block_out_channels": (8, 16),
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    "norm_num_groups": 4,
}
UNETS = {
    "unet": {**LEVELS, "layers_per_block": 1, "attention_head_dim": 8, "num_class_embeds": 5},
    "unet_ddpm": {  # as the published checkpoints
        **LEVELS,
        "layers_per_block": 1,
        "attention_head_dim": None,
        "downsample_padding": 0,
        "flip_sin_to_cos": False,
        "freq_shift": 1,
        "norm_eps": 1e-6,
    },
}
VAE = {
    "block_out_channels": (8, 16),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "norm_num_groups": 4,
    "layers_per_block": 1,
}


def load_weights(model):
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    model.load_state_dict({name: torch.from_numpy(fill(name, shape)) for name, shape in shapes.items()})
    return shapes


def images(*shape):
    """Random images, channels first."""
    return torch.from_numpy(np.float32(np.random.default_rng(0).standard_normal(shape)))


def save(name, model, config, shapes, output, **arrays):
    weights = np.random.default_rng(1).standard_normal(output.shape)
    (output * torch.from_numpy(weights)).sum().backward()
    gradients = {f"grad {each}": digest(each, value.grad.numpy()) for each, value in model.named_parameters()}
    options = {"config": json.dumps(config), "shapes": json.dumps(shapes), "output": output.detach().numpy()}
    np.savez_compressed(FOLDER / f"{name}.npz", **options, **gradients, **arrays)


def make_unets():
    for name, config in UNETS.items():
        model = UNet2DModel(**config).eval()
        shapes = load_weights(model)
        x, time = images(2, 3, 6, 8), torch.tensor([3, 987])
        labels = torch.tensor([4, 0]) if "num_class_embeds" in config else None
        save(name, model, dict(model.config), shapes, model(x, time, labels).sample)


def make_vae():
    model = AutoencoderKL(**VAE).eval()
    shapes = load_weights(model)
    x = images(2, 3, 6, 8)
    posterior = model.encode(x).latent_dist
    arrays = {"mean": posterior.mean.detach().numpy(), "log_variance": posterior.logvar.detach().numpy()}
    save("vae", model, dict(model.config), shapes, model(x).sample, **arrays)


def make_samplers():
    """Single steps with given predictions, and whole samples of a fixed function in place of a model."""
    arrays = {}
    x, predicted, noise = images(3, 2, 2, 2, 2).unbind(0)
    noise = torch.from_numpy(np.float32(np.random.default_rng(2).standard_normal(noise.shape)))
    scheduling_ddim.randn_tensor = scheduling_ddpm.randn_tensor = lambda *arguments, **options: noise
    for kind in ("epsilon", "sample", "v_prediction"):
        for schedule in ("linear", "squaredcos_cap_v2"):
            for variance in ("fixed_small", "fixed_large"):
                scheduler = DDPMScheduler(prediction_type=kind, beta_schedule=schedule, variance_type=variance)
                for time in (999, 500, 1, 0):
                    step = scheduler.step(predicted, time, x).prev_sample
                    arrays[f"ddpm {kind} {schedule} {variance} {time}"] = step.numpy()
            scheduler = DDIMScheduler(prediction_type=kind, beta_schedule=schedule)
            scheduler.set_timesteps(20)
            for eta in (0.0, 0.7):
                for time in (950, 500, 0):
                    step = scheduler.step(predicted, time, x, eta=eta).prev_sample
                    arrays[f"ddim {kind} {schedule} {eta} {time}"] = step.numpy()
            arrays[f"noisy {schedule}"] = scheduler.add_noise(x, noise, torch.tensor([7, 800])).numpy()
            arrays[f"velocity {schedule}"] = scheduler.get_velocity(x, noise, torch.tensor([7, 800])).numpy()
    np.savez_compressed(FOLDER / "samplers.npz", x=x, predicted=predicted, noise=noise, **arrays)


def main() -> None:
    make_unets()
    make_vae()
    make_samplers()


if __name__ == "__main__":
    main()
