"""How fast can a step be? FLOPs, bytes, and the roofline (Williams, Waterman, Patterson 2009) of a measured machine.

A step needs FLOPs and bytes. It cannot be faster than the slower of the two: flops / peak_flops, bytes / bandwidth.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from . import kv
from .config import ModelConfig


@dataclass(frozen=True)
class Machine:
    """Ceilings of one device: bandwidth in bytes/s (reading), flops in FLOP/s (matrix products, in `dtype`)."""

    name: str
    bandwidth: float
    flops: float

    @property
    def ridge(self) -> float:
        """FLOPs per byte above which this machine is limited by compute, not by memory."""
        return self.flops / self.bandwidth


def linear_params(config: ModelConfig) -> int:
    """Weights that every token is multiplied with: all matrices and the output head. An embedding is looked up."""
    heads = config.num_heads + 2 * config.num_kv_heads
    qkv = config.hidden_size * heads * config.head_dim
    out = config.num_heads * config.head_dim * config.hidden_size
    mlp = 3 * config.hidden_size * config.intermediate_size
    return config.num_layers * (qkv + out + mlp) + config.vocab_size * config.hidden_size


def flops_per_token(config: ModelConfig, context_len: int) -> int:
    """FLOPs of one token's forward pass that attends to `context_len` tokens, itself included.

    Two per weight (multiply, add), and attention's two products, scores and mixing, of every query head in every layer.
    """
    # exercise 01.1
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * context_len
    return 2 * linear_params(config) + attention
    # end exercise 01.1


def step_bytes(
    config: ModelConfig, context_lens: Sequence[float], weight_dtype_bytes: float, kv_dtype_bytes: int
) -> float:
    """Bytes that one step reads: the weights once, however many requests share the step, and each request's KV.

    context_lens: tokens in the cache of each request in the batch. Activations are small and left out.
    """
    # exercise 01.2
    per_token = kv.kv_bytes_per_token(config.num_layers, config.num_kv_heads, config.head_dim, kv_dtype_bytes)
    return linear_params(config) * weight_dtype_bytes + sum(context_lens) * per_token
    # end exercise 01.2


def arithmetic_intensity(flops: float, num_bytes: float) -> float:
    """FLOPs done for each byte moved."""
    return flops / num_bytes


def roofline_seconds(flops: float, num_bytes: float, machine: Machine) -> float:
    """The least time in which `machine` can do this work: the slower of computing and moving (they overlap)."""
    # exercise 01.3
    return max(flops / machine.flops, num_bytes / machine.bandwidth)
    # end exercise 01.3


def decode_tokens_per_second(
    config: ModelConfig, context_lens: Sequence[int], weight_dtype_bytes: float, kv_dtype_bytes: int, machine: Machine
) -> float:
    """Upper bound on output tokens per second of one decode step: one new token for each entry of context_lens."""
    # exercise 01.4
    flops = sum(flops_per_token(config, length) for length in context_lens)
    num_bytes = step_bytes(config, context_lens, weight_dtype_bytes, kv_dtype_bytes)
    return len(context_lens) / roofline_seconds(flops, num_bytes, machine)
    # end exercise 01.4


def measure_machine(device: str = "cpu", dtype: torch.dtype = torch.float32, repeats: int = 5) -> Machine:
    """Measure a device's ceilings: read bandwidth (a sum over a large array) and matrix-product FLOP/s. Medians.

    The array is far larger than the caches. Takes about a second on a laptop.
    """
    size = 2**26 if device == "cpu" else 2**29  # elements: 256 MiB of fp32 on CPU, 2 GiB on a GPU
    n = 1024 if device == "cpu" else 8192
    array = torch.ones(size, dtype=torch.float32, device=device)
    left, right = (torch.randn(n, n, dtype=dtype, device=device) for _ in range(2))
    bandwidth = array.numel() * array.element_size() / _seconds(lambda: array.sum(), device, repeats)
    flops = 2 * n**3 / _seconds(lambda: left @ right, device, repeats)
    name = torch.cuda.get_device_name() if device.startswith("cuda") else f"CPU ({platform.machine()})"
    return Machine(f"{name}, {torch.get_num_threads()} threads" if device == "cpu" else name, bandwidth, flops)


def _seconds(work, device: str, repeats: int) -> float:
    """Median wall time of `work()`, after one warm-up."""
    times = []
    for i in range(repeats + 1):
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        if i:
            times.append(time.perf_counter() - start)
    return statistics.median(times)
