"""Batches of like length in random order.

Contract: the order is a pure function of the seed and the epoch, so that a resumed run sees the same batches.
transformers' own length-grouped sampler goes from the longest batch of a stretch to the shortest; where length and
kind of task go together, a small model then sees one kind for many steps and forgets the others.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from torch.utils.data import Sampler

_BATCHES_PER_CHUNK = 16


class LengthGroupedBatchSampler(Sampler[int]):
    """Indices such that each run of `batch_size` of them has like lengths, and the runs come in random order.

    Args:
        lengths: Length of each example.
        batch_size: Examples that are padded to one length.
        seed: Seed of the order.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int = 0):
        self.lengths, self.batch_size, self.seed, self.epoch = list(lengths), batch_size, seed, 0

    def __len__(self) -> int:
        return len(self.lengths)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch; the dataloader calls it before each."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        rng = random.Random(f"{self.seed}/{self.epoch}")
        indices = list(range(len(self.lengths)))
        rng.shuffle(indices)
        chunk_size = self.batch_size * _BATCHES_PER_CHUNK
        batches: list[list[int]] = []
        for start in range(0, len(indices), chunk_size):
            chunk = sorted(indices[start : start + chunk_size], key=self.lengths.__getitem__)
            batches += [chunk[at : at + self.batch_size] for at in range(0, len(chunk), self.batch_size)]
        # What is not a whole batch must come last, or all batches after it would be shifted.
        partial = [batch for batch in batches if len(batch) < self.batch_size]
        whole = [batch for batch in batches if len(batch) == self.batch_size]
        rng.shuffle(whole)
        return (index for batch in [*whole, *partial] for index in batch)
