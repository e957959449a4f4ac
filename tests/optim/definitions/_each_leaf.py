"""A decorator from algorithms for one array to algorithms for dicts of arrays."""

import functools

import numpy as np


def each_leaf(algorithm):
    """Apply an algorithm for one array to each leaf of dicts of arrays."""

    @functools.wraps(algorithm)
    def of_dicts(weights, *series, **settings):
        paths = {
            name: list(algorithm(np.asarray(w), *([step[name] for step in steps] for steps in series), **settings))
            for name, w in weights.items()
        }
        return [dict(zip(paths, leaves, strict=True)) for leaves in zip(*paths.values(), strict=True)]

    return of_dicts
