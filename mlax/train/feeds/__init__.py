"""Feeds: batches of fixed shapes, brought to the devices ahead of time, in an order that a seed and a step decide."""

from mlax.train.feeds._buckets import Buckets
from mlax.train.feeds._feed import Feed
from mlax.train.feeds._iterated import Iterated
from mlax.train.feeds._packed import Packed, packed
from mlax.train.feeds._source import Rows, Source
from mlax.train.feeds._stream import Position, Stream

__all__ = ["Buckets", "Feed", "Iterated", "Packed", "Position", "Rows", "Source", "Stream", "packed"]
