"""The same programs in each library, with the same weights, each in the fastest form that its documentation gives.

A program takes a size (works.py) and returns a function of nothing, which does one call and returns its result: the
loss of a training step, the tokens of decoding. `wait` waits for a result, `peak_memory` is in bytes.
"""

RATE, B1, B2, EPS, DECAY = 3e-4, 0.9, 0.95, 1e-8, 0.1  # of AdamW, with decay of all leaves
