"""Feeds: batches of fixed shapes, prefetched to the devices, in an order given by a seed and a step."""

from mlax.train.feeds._buckets import Buckets
from mlax.train.feeds._feed import Feed
from mlax.train.feeds._iterable import IterableFeed
from mlax.train.feeds._prefetch import BatchIterator, Position
from mlax.train.feeds._sequences import PackedSequences, pack_sequences
from mlax.train.feeds._shuffle import BLOCK as BLOCK
from mlax.train.feeds._shuffle import epoch_ids as epoch_ids
from mlax.train.feeds._shuffle import permute as permute
from mlax.train.feeds._source import ExampleSource, Source

__all__ = [
    "BatchIterator",
    "Buckets",
    "ExampleSource",
    "Feed",
    "IterableFeed",
    "PackedSequences",
    "Position",
    "Source",
    "pack_sequences",
]
