"""The layers of benchmarks/layers.py, as each library's own documentation has them.

Each library has one file, with a dict of its layers, and a `build` that makes of one of them what is measured.
"""
