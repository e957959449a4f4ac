"""Layouts: which axis of an input, and of a kernel, is which."""

from typing import Any, NamedTuple


class Layout(NamedTuple):
    """The axes of an input and of a kernel; spatial axes are in the order of the input."""

    batch: int
    channel: int
    spatial: tuple[int, ...]
    outputs: int
    inputs: int
    window: tuple[int, ...]

    def kernel_shape(self, outputs: int, inputs: int, window: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a kernel of these sizes."""
        sizes = {self.outputs: outputs, self.inputs: inputs, **dict(zip(self.window, window, strict=True))}
        return tuple(sizes[axis] for axis in range(len(sizes)))

    def non_channel_axes(self) -> tuple[int, ...]:
        """All axes of the input but the channels."""
        return tuple(sorted((self.batch, *self.spatial)))


def parse_layout(name: str, layout: str, x: Any) -> Layout:
    """The axes of inputs like `x` in a layout; `name` is the caller, for error messages.

    "channel_last" is (batch, spatial..., channel) with kernels (output, spatial..., input), and "channel_first"
    (batch, channel, spatial...) with kernels (output, input, spatial...). Any other is spelled out: "HWNC" is an input
    whose last axes are batch (N) and channel (C), and every other letter is a spatial axis. Its kernel has output (O)
    in place of N and input (I) in place of C, unless it is spelled out too: "NHWC/HWIO".
    """
    if len(x.shape) < 3:
        raise ValueError(
            f"{name}: the input {x.shape} has {len(x.shape)} axes, but needs a batch axis, spatial axes and a channel "
            "axis; for one example, add a batch axis of size 1."
        )
    letters = "".join(chr(ord("a") + axis) for axis in range(len(x.shape) - 2))
    image, kernel = _spell_out(layout, letters)
    spatial = [letter for letter in image if letter not in "NC"]
    if sorted(image) != sorted({*spatial, "N", "C"}) or sorted(kernel) != sorted({*spatial, "O", "I"}):
        raise ValueError(
            f"{name}: layout is {layout!r}, but must be 'channel_last', 'channel_first', or spelled out like 'NHWC' or "
            "'NHWC/HWIO', each axis once."
        )
    if len(image) != len(x.shape):
        raise ValueError(
            f"{name}: the layout {layout!r} has {len(image)} axes but the input {x.shape} has {len(x.shape)}; "
            "spell out the layout of the input."
        )
    return Layout(
        image.index("N"),
        image.index("C"),
        tuple(map(image.index, spatial)),
        kernel.index("O"),
        kernel.index("I"),
        tuple(map(kernel.index, spatial)),
    )


def kernel_output_axis(layout: str) -> int:
    """The axis of the outputs of a kernel in a layout."""
    return _spell_out(layout, "")[1].index("O")


def _spell_out(layout: str, spatial: str) -> tuple[str, str]:
    """The letters of the axes of an input and of a kernel; `spatial` are those of a layout that leaves them out."""
    spelled = {"channel_last": f"N{spatial}C", "channel_first": f"NC{spatial}"}.get(layout, layout)
    image, _, kernel = spelled.partition("/")
    return image, kernel or image.translate(str.maketrans("NC", "OI"))
