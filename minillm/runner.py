"""From a plan of the scheduler to logits: builds the flat batch and runs the model."""

from __future__ import annotations

import torch
from torch import Tensor

from . import attention
from .kv import KVCache
from .model import Batch, Transformer
from .scheduler import Plan


class Runner:
    """Owns the model and the cache tensors. Knows nothing of queues, sampling or text."""

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        self.model, self.cache = model, cache
        self.device, self.dtype = model.embed.weight.device, model.embed.weight.dtype

    def build(self, plan: Plan) -> Batch:
        """Lay the chunks of a plan one after another."""
        size = self.cache.block_size
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        logit_rows: list[int] = []
        for chunk in plan.chunks:
            request, row = chunk.request, len(token_ids)
            token_ids += request.tokens[chunk.start : chunk.end]
            positions += range(chunk.start, chunk.end)
            slots += [request.block_table[p // size] * size + p % size for p in range(chunk.start, chunk.end)]
            logit_rows += range(row + chunk.end - chunk.start - chunk.num_logits, row + chunk.end - chunk.start)
        groups = attention.make_groups(
            [c.end - c.start for c in plan.chunks],
            [c.end for c in plan.chunks],
            [c.request.block_table for c in plan.chunks],
            size,
            self.model.windows,
            self.dtype,
            self.device,
        )

        def flat(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=self.device)

        return Batch(flat(token_ids), flat(positions), flat(slots), groups, flat(logit_rows))

    @torch.inference_mode()
    def run(self, plan: Plan) -> Tensor:
        """Logits [R, vocab] float32: for each chunk in turn its last `num_logits` positions."""
        for chunk in plan.chunks:
            for source, target in chunk.copies:
                self.cache.copy_block(source, target)
        batch = self.build(plan)
        hidden = self.model(batch, self.cache)
        return self.model.logits(hidden[batch.logit_rows])
