"""The layers of benchmarks/layers.py, written as in each library's documentation.

Each library has one file, with a dict of its layers and a `build` that returns what is measured.
"""
