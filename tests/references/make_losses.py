"""Write losses.npz, what PyTorch computes: `python tests/references/make_losses.py`, with PyTorch 2.13 on a CPU.

Every array is named `case/name`: the logits `x`, the losses `y` and the gradient `d_x` of the sum of `y * g`.
"""

from pathlib import Path

import numpy as np
import torch
from torch.nn import functional


def keep(found, case, **tensors):
    found.update({f"{case}/{name}": tensor.detach().numpy().copy() for name, tensor in tensors.items()})


def keep_loss(found, case, loss, x, **labels):
    y = loss(x)
    g = torch.randn(*y.shape, dtype=x.dtype)
    (d_x,) = torch.autograd.grad((y * g).sum(), x)
    keep(found, case, x=x, y=y, g=g, d_x=d_x, **labels)


def main():
    torch.manual_seed(0)
    found = {}
    x = (4 * torch.randn(3, 5, 7, dtype=torch.float64)).requires_grad_()
    classes = torch.randint(0, 7, (3, 5))
    probabilities = torch.randn(3, 5, 7, dtype=torch.float64).softmax(-1)
    padded = torch.where(torch.rand(3, 5) < 0.3, -100, classes)

    def cross_entropy(labels, **options):
        flat = labels.reshape(-1, 7) if labels.is_floating_point() else labels.reshape(-1)
        return lambda x: functional.cross_entropy(x.reshape(-1, 7), flat, reduction="none", **options).reshape(3, 5)

    keep_loss(found, "classes", cross_entropy(classes), x, labels=classes)
    keep_loss(found, "smoothed", cross_entropy(classes, label_smoothing=0.1), x, labels=classes)
    keep_loss(found, "probabilities", cross_entropy(probabilities), x, labels=probabilities)
    keep_loss(
        found, "smoothed_probabilities", cross_entropy(probabilities, label_smoothing=0.2), x, labels=probabilities
    )
    keep_loss(found, "padded", cross_entropy(padded), x, labels=padded)

    logits = torch.randn(5, 12, 6, dtype=torch.float64).requires_grad_()
    labels = torch.randint(1, 6, (5, 4))
    labels[0] = torch.tensor([2, 2, 3, 3])  # repeats need a blank in between
    logit_lengths, label_lengths = torch.tensor([12, 12, 9, 5, 7]), torch.tensor([4, 4, 2, 0, 3])

    def ctc(blank):
        return lambda x: functional.ctc_loss(
            x.log_softmax(-1).swapaxes(0, 1), labels, logit_lengths, label_lengths, blank=blank, reduction="none"
        )

    lengths = {"logit_lengths": logit_lengths, "label_lengths": label_lengths}
    keep_loss(found, "ctc", ctc(0), logits, labels=labels, **lengths)
    np.savez_compressed(Path(__file__).with_name("losses.npz"), **found)


if __name__ == "__main__":
    main()
