"""What the models are compared with: outputs and gradients of transformers and torchvision, with the same weights."""

import json
from pathlib import Path

import jax
import numpy as np

from mlax import zoo
from tests.references.zoo_weights import digest, fill

FOLDER = Path(__file__).parents[1] / "references"


class Reference:
    """One committed file: arrays, the configuration, and the names and shapes of the weights."""

    def __init__(self, name: str):
        with np.load(FOLDER / f"{name}.npz") as file:
            self.arrays = {key: file[key] for key in file.files}
        self.config = json.loads(str(self.arrays.pop("config")))
        self.shapes = {key: tuple(shape) for key, shape in json.loads(str(self.arrays.pop("shapes"))).items()}

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def state(self) -> dict[str, np.ndarray]:
        """The state dict that the reference was computed with, but for entries that are tied there."""
        return {name: fill(name, shape) for name, shape in self.shapes.items()}

    def check_round_trip(self, model, state, names=None) -> tuple:
        """Load a state dict, and check that it comes back bitwise; returns the variables."""
        variables = zoo.load_weights(model, state)
        back = zoo.state_dict(model, *variables, names=names)
        assert back.keys() == state.keys()
        for name, array in state.items():
            assert back[name].dtype == array.dtype and back[name].tobytes() == array.tobytes(), name
        return variables

    def check_gradients(self, model, trainables_gradient, tolerance=1e-4, names=None, kind="grad ") -> None:
        """Compare digests of all gradients, relative to the norm of each, or to that of all where it is nearly zero."""
        _, state = jax.eval_shape(model.init, jax.random.key(0), model.example_input())
        state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), state)
        gradients = zoo.state_dict(model, jax.device_get(trainables_gradient), state, names=names)
        wanted = {name.removeprefix(kind): each for name, each in self.arrays.items() if name.startswith(kind)}
        assert wanted and wanted.keys() <= gradients.keys()
        floor = 1e-3 * np.linalg.norm([each[0] for each in wanted.values()])  # a key's bias has no gradient
        for name, each in wanted.items():
            ours = digest(name, gradients[name])
            np.testing.assert_allclose(ours, each, rtol=tolerance, atol=tolerance * max(floor, each[0]), err_msg=name)
