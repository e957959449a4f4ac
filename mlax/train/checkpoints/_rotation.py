"""Rotation: the steps that are not kept any longer go, each at once and then bit by bit."""

import os
from collections.abc import Iterable

from mlax.files import sync_folder
from mlax.train.checkpoints._step_folders import remove, step_folders


def rotate(folder: str, keep: int | None, also: Iterable[int], id: str) -> None:
    """Keep the last `keep` steps and those in `also`, and of each step the last save.

    A folder is renamed away before anything in it is deleted, so that a kill at any moment leaves whole steps.
    """
    found = step_folders(folder)
    newest = {each.step: each for each in found if each.whole}  # of one step the last save comes last
    kept = set(newest) if keep is None else {*sorted(newest)[-keep:], *also}
    leaving = [each for each in found if each.step not in kept or newest.get(each.step, each) != each]
    gone: list[str] = []
    for number, each in enumerate(leaving):
        gone.append(os.path.join(folder, f".removing-{each.step:08d}-{id}-{number}"))
        remove(gone[-1])  # a save before this one may have been kept from deleting it
        os.rename(each.path, gone[-1])
    if gone:
        sync_folder(folder)
    for path in gone:
        remove(path)
