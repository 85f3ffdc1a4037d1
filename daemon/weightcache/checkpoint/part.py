"""The part: what one rank holds of a tensor that is cut, as a shape and as runs of bytes in the tensor's file."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from weightcache.checkpoint.header import DTYPES, TensorInfo

Range = tuple[int, int]
"""First element and the one after the last, along the dimension that is cut."""


class Part(NamedTuple):
    """Ranges of a tensor along one dimension, in order.

    Attributes:
        dim: which dimension, counted from the end.
        ranges: what is kept of it.
    """

    dim: int
    ranges: tuple[Range, ...]

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of this part of a tensor."""
        cut = len(whole) + self.dim
        return (*whole[:cut], sum(end - begin for begin, end in self.ranges), *whole[cut + 1 :])

    def runs(self, info: TensorInfo) -> Iterator[Range]:
        """Where its bytes are in the file, in order: first byte and length of each run.

        Rows are few long runs. Columns are as many short ones as there are rows.
        """
        cut = len(info.shape) + self.dim
        step = math.prod(info.shape[cut + 1 :]) * DTYPES[info.dtype].bits // 8
        for outer in range(math.prod(info.shape[:cut])):
            start = info.begin + outer * info.shape[cut] * step
            for begin, end in self.ranges:
                yield start + begin * step, (end - begin) * step
