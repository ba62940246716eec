"""From a plan of the scheduler to hidden states and logits. Picks device, dtype and pool size."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Protocol

import psutil
import torch
from torch import Tensor

from . import attention, kv, sampler
from .config import EngineConfig, ModelConfig
from .errors import RequestError
from .kv import KVCache
from .model import Batch, Transformer
from .request import Request
from .scheduler import Plan

CPU_KV_LIMIT = 4 * 2**30  # bytes of KV cache on a CPU, unless num_kv_blocks asks for more


class Flight(Protocol):
    """A step that was started on a device. rows: whose token each row is; `tokens` waits for them."""

    plan: Plan
    rows: list[Request]

    def tokens(self) -> list[int]:
        """Sampled ids, one for each of `rows`; -1 where the logits were not finite."""
        ...


class Runner:
    """Owns the model and the cache tensors. Knows nothing of queues or text.

    samples: whether a step can also sample, without waiting (`start`, gpu_runner.py).
    """

    samples = False

    def __init__(self, model: Transformer, cache: KVCache, host: KVCache, attention_backend: str = "auto") -> None:
        self.model, self.cache, self.device = model, cache, model.embed.weight.device
        self.host = host  # where swapped-out blocks are
        self.attend = attention.pick(attention_backend, self.device, model.embed.weight.dtype)

    def build(self, plan: Plan) -> Batch:
        """Lay the chunks of a plan one after another. Padding goes last, to the spare block."""
        size = self.cache.block_size
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        logit_rows: list[int] = []
        for chunk in plan.chunks:
            request, row = chunk.request, len(token_ids)
            token_ids += request.tokens[chunk.start : chunk.end]
            positions += range(chunk.start, chunk.end)
            slots += kv.slots_for(request.block_table, chunk.start, chunk.end, size)
            logit_rows += range(row + chunk.end - chunk.start - chunk.num_logits, row + chunk.end - chunk.start)
        token_ids += [0] * plan.num_padding
        positions += [0] * plan.num_padding
        slots += [self.cache.num_blocks * size] * plan.num_padding
        layout = attention.Layout(
            [c.end - c.start for c in plan.chunks],
            [c.end for c in plan.chunks],
            [c.request.block_table for c in plan.chunks],
            size,
        )

        def flat(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=self.device)

        return Batch(flat(token_ids), flat(positions), flat(slots), layout, flat(logit_rows), self.attend)

    def move(self, plan: Plan) -> None:
        """Copy blocks as the plan says."""
        for move in plan.moves:
            origin = self.host if move.kind == "in" else self.cache
            target = self.host if move.kind == "out" else self.cache
            target.copy_block(move.source, move.target, origin)

    def start(self, plan: Plan, after: Flight | None = None) -> Flight:
        """Start a step that also samples, without waiting for it; `after` is the one whose tokens it begins with."""
        raise NotImplementedError

    @torch.inference_mode()
    def run(self, plan: Plan) -> Tensor:
        """Hidden states [R, hidden], for `logits`: of each chunk in turn its last `num_logits` positions."""
        self.move(plan)
        batch = self.build(plan)
        return self.model(batch, self.cache)[batch.logit_rows]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[R, vocab] float32 from rows of what `run` gave."""
        return self.model.logits(hidden)

    def sample(self, logits: Tensor, requests: Sequence[Request], num_ids: int) -> list[int]:
        """See `sampler.sample`."""
        return sampler.sample(logits, requests, num_ids)


def use_kernels(engine: EngineConfig, weight: Tensor) -> bool:
    """Whether the Triton kernels run this model: if they were asked for, or on a GPU that can."""
    wanted, device = engine.attention in ("auto", "triton"), weight.device.type
    able = os.environ.get("TRITON_INTERPRET") == "1"
    if device == "cuda":
        able = torch.cuda.get_device_capability(weight.device) >= (8, 0)
    able = able and find_spec("triton") is not None
    if engine.attention == "triton" and not able:
        raise RequestError("attention 'triton' needs a CUDA device (8.0 or newer) and the package triton; use auto.")
    if engine.kv_cache_dtype != "auto" and not (wanted and able):
        raise RequestError(f"kv_cache_dtype {engine.kv_cache_dtype!r} needs attention 'triton'.")
    return wanted and able and (engine.attention == "triton" or device == "cuda")


def make_runner(
    model: Transformer, cache: KVCache, host: KVCache, engine: EngineConfig, max_model_len: int, num_ids: int
) -> Runner:
    """The runner for this model's device."""
    if not use_kernels(engine, model.embed.weight):
        return Runner(model, cache, host, engine.attention)
    if model.head is not None and model.head.weight is None:
        raise RequestError("attention 'triton' needs plain weights: make the model with pack=False.")
    from .gpu_runner import GpuRunner

    return GpuRunner(model, cache, host, engine, max_model_len, num_ids)


def cache_dtype(name: str, weight: torch.dtype) -> torch.dtype:
    return {"auto": weight, "int8": torch.int8, "fp8": torch.float8_e4m3fn}[name]


def pick_device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # torch raises either
        raise RequestError(f"device {name!r} cannot be used here: {str(error).partition(chr(10))[0]}") from error
    if not name.startswith(("cpu", "cuda")):
        raise RequestError(f"device {name!r} is not supported; use auto, cpu or cuda.")
    return name


def pick_dtype(name: str, device: str) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.startswith("cuda") else torch.float32
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise RequestError(f"dtype {name!r} is unknown; use auto, {', '.join(known)}.")
    return known[name]


@contextmanager
def fits(what: str, num_bytes: int, device: torch.device | str) -> Iterator[None]:
    """Turn "out of memory" on a GPU into one sentence with the numbers."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        raise RequestError(
            f"{what} take {num_bytes / 1e9:.2f} GB, but {free / 1e9:.2f} of {total / 1e9:.2f} GB are free on {device}."
        ) from error


def block_bytes(config: ModelConfig, engine: EngineConfig, dtype: torch.dtype) -> int:
    """Bytes of one block of the KV cache, scales included. dtype: the model's."""
    size = cache_dtype(engine.kv_cache_dtype, dtype).itemsize
    per_token = kv.kv_bytes_per_token(config.num_layers, config.num_kv_heads, config.head_dim, size)
    scales = 2 * config.num_layers * config.num_kv_heads * 4 if size == 1 else 0
    return (per_token + scales) * engine.block_size


def default_num_swap_blocks(config: ModelConfig, engine: EngineConfig, num_blocks: int, dtype: torch.dtype) -> int:
    """Blocks in host memory for preempted requests: as many as there are, if half of the free memory holds them."""
    return max(1, min(num_blocks, psutil.virtual_memory().available // 2 // block_bytes(config, engine, dtype)))


def default_num_blocks(config: ModelConfig, engine: EngineConfig, max_model_len: int, model: Transformer) -> int:
    """As many blocks as the free memory allows, but not more than max_num_seqs of the longest requests could use.

    On a GPU one prompt as long as a step allows is run first, to see what its activations take.
    """
    weight = model.embed.weight
    each = block_bytes(config, engine, weight.dtype)
    if weight.device.type == "cuda":
        step = 0
        if use_kernels(engine, weight):
            from .gpu_runner import activation_bytes

            with torch.cuda.device(weight.device):
                step = activation_bytes(model, engine, max_model_len)
        torch.cuda.empty_cache()  # what torch keeps for later is not free
        room = int(torch.cuda.mem_get_info(weight.device)[0] * engine.memory_fraction) - step
    else:
        room = min(int(psutil.virtual_memory().available * engine.memory_fraction), CPU_KV_LIMIT)
    if room < each:
        raise RequestError(f"{max(0, room)} bytes are free for the KV cache, but one block takes {each}.")
    return min(room // each, kv.blocks_needed(max_model_len, engine.block_size) * engine.max_num_seqs)
