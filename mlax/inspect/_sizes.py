"""Sizes: numbers of bytes in words."""


def gib(size: float) -> str:
    """A number of bytes in words."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:{'.3g' if size < 999.5 * scale else '.0f'}} {unit}"
    return f"{size:.0f} bytes"
