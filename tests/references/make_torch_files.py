"""Files that torch.save writes, in bytes, and the arrays that are in them."""

import io
from pathlib import Path

import numpy as np
import torch

STRIDED = {
    "transposed": lambda t: t.T,
    "sliced": lambda t: t[1:3, ::2],
    "parameter": torch.nn.Parameter,
    "frozen": lambda t: torch.nn.Parameter(t, requires_grad=False),
    "scalar": lambda t: t[1, 2],
    "empty": lambda t: t[:0],
    "one": lambda t: t[:1].expand(1, 6),
}
DTYPES = (
    *("float16", "float32", "float64", "bfloat16", "complex64", "complex128", "bool", "uint8", "uint16", "uint32"),
    *("uint64", "int8", "int16", "int32", "int64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"),
)


def saved(value, **options):
    file = io.BytesIO()
    torch.save(value, file, **options)
    return np.frombuffer(file.getvalue(), np.uint8)


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(3, 4))
    model[2].weight = model[0].weight
    state = model.state_dict()
    numbers = torch.arange(24.0).reshape(4, 6)
    nested = {
        "state_dict": state,
        "epoch": 3,
        "rate": 1e-3,
        "name": "résumé",
        "flags": (True, None, 2**80, torch.float32, torch.Size([2]), torch.device("cpu")),
        "history": [torch.ones(2), {"a": torch.zeros(1)}],
        "optimizer": torch.optim.SGD(model.parameters(), lr=1e-3).state_dict(),
    }
    script = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), script)
    files = {
        "state": saved(state),
        "protocol4": saved(state, pickle_protocol=4),
        "nested": saved(nested),
        "strided": saved({name: view(numbers) for name, view in STRIDED.items()}),
        "dtypes": saved({name: (numbers + 1).to(getattr(torch, name)) for name in DTYPES}),
        "legacy": saved(state, _use_new_zipfile_serialization=False),
        "module": saved(torch.nn.Linear(2, 2)),
        "tensor": saved(numbers),
        "expanded": saved({"a": torch.ones(1).expand(1000, 1000)}),
        "conjugate": saved({"a": torch.ones(2, dtype=torch.complex64).conj()}),
        "sparse": saved({"a": torch.ones(3).to_sparse()}),
        "script": np.frombuffer(script.getvalue(), np.uint8),
    }
    np.savez_compressed(
        Path(__file__).with_name("torch_files.npz"),
        numbers=numbers.numpy(),
        **{f"file {name}": content for name, content in files.items()},
        **{f"state {name}": tensor.numpy() for name, tensor in state.items()},
    )


if __name__ == "__main__":
    main()
