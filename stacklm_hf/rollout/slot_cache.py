"""A key-value cache of slots: one row per running episode, each row with its own length.

Contract: `transformers` sees an ordinary cache. Before each forward the engine names the rows, how many tokens
each of them holds and how many it gets; queries are aligned to the right, so that the last position is always
each row's newest token. What a padding query would have written is dropped.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

_GROWTH = 256


class SlotPlan:
    """Which rows take part in the next forward.

    Args:
        rows: Row of each batch entry, shape (batch,).
        starts: Tokens that each of them already holds, shape (batch,).
        counts: New tokens of each, shape (batch,); the forward is `max(counts)` wide, padded on the left.
    """

    def __init__(self, rows: list[int], starts: list[int], counts: list[int]):
        self.rows, self.starts, self.counts = rows, starts, counts
        self.width = max(counts)
        self.kv_length = max(start + count for start, count in zip(starts, counts, strict=True))
        # Rows 0..n-1 in order can be read as a view; anything else is gathered.
        self.is_prefix = rows == list(range(len(rows)))
        self.row_index = torch.tensor(rows)
        self.start_index = torch.tensor(starts)

    def position_ids(self) -> torch.Tensor:
        """Positions of the queries, shape (batch, width); padding queries get position 0."""
        ends = self.start_index + torch.tensor(self.counts)
        positions = ends[:, None] - self.width + torch.arange(self.width)[None, :]
        return positions.clamp_(min=0)

    def attention_mask(self, dtype: torch.dtype) -> torch.Tensor:
        """Additive mask, shape (batch, 1, width, kv_length): a query sees its row up to its own position."""
        visible = torch.arange(self.kv_length)[None, None, :] <= self.position_ids()[:, :, None]
        mask = torch.zeros(visible.shape, dtype=dtype)
        return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]


class _SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, shape (slots, heads, capacity, head_dim)."""

    def __init__(self, cache: SlotCache):
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        shape = (self.cache.num_slots, key_states.shape[1], self.cache.capacity)
        self.keys = key_states.new_zeros(*shape, key_states.shape[-1])
        self.values = value_states.new_zeros(*shape, value_states.shape[-1])
        self.is_initialized = True

    def _grow(self) -> None:
        assert self.keys is not None
        assert self.values is not None
        extra = self.cache.capacity - self.keys.shape[2]
        self.keys = torch.nn.functional.pad(self.keys, (0, 0, 0, extra))
        self.values = torch.nn.functional.pad(self.values, (0, 0, 0, extra))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        if self.keys.shape[2] < self.cache.capacity:
            self._grow()
        plan = self.cache.plan
        for store, new in ((self.keys, key_states), (self.values, value_states)):
            if plan.width == 1:
                store[plan.row_index.to(new.device), :, plan.start_index.to(new.device)] = new[:, :, 0]
                continue
            for entry, (row, start, count) in enumerate(zip(plan.rows, plan.starts, plan.counts, strict=True)):
                store[row, :, start : start + count] = new[entry, :, plan.width - count :]
        return self._read(self.keys, plan), self._read(self.values, plan)

    @staticmethod
    def _read(store: torch.Tensor, plan: SlotPlan) -> torch.Tensor:
        if plan.is_prefix:
            return store[: len(plan.rows), :, : plan.kv_length]
        return store[:, :, : plan.kv_length].index_select(0, plan.row_index.to(store.device))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.plan.kv_length, 0

    def get_seq_length(self) -> int:
        return max(self.cache.plan.starts)

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):
    """Rows of keys and values that episodes take and give back.

    Args:
        num_layers: Layers of the model.
        num_slots: Rows.
    """

    def __init__(self, num_layers: int, num_slots: int):
        self.num_slots = num_slots
        self.capacity = _GROWTH
        self.plan = SlotPlan([0], [0], [1])
        super().__init__(layers=[_SlotLayer(self) for _ in range(num_layers)])

    def prepare(self, plan: SlotPlan) -> None:
        """Sets what the next forward does; makes room for it."""
        self.plan = plan
        while self.capacity < plan.kv_length:
            self.capacity += _GROWTH
