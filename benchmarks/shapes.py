"""What the GPU benchmark runs: the real SmolLM2, other models' shapes with random weights; and which commit it is."""

from __future__ import annotations

import subprocess
from pathlib import Path

import torch

from minillm import hub
from minillm.config import ModelConfig, RopeScaling
from minillm.model import Transformer
from minillm.weights import open_checkpoint, parameter_shapes

REAL = {"SmolLM2-135M": "smollm2-135m"}  # whose weights can be had without a hub
LLAMA3_ROPE = RopeScaling("llama3", 32.0)

# from each model's config.json
SHAPES = {
    "SmolLM2-135M": ModelConfig(
        "llama", 49152, 576, 1536, 30, 9, 3, 64, 8192, 1e-5, 100000.0, tie_word_embeddings=True
    ),
    "Qwen3-0.6B": ModelConfig(
        "qwen3", 151936, 1024, 3072, 28, 16, 8, 128, 40960, 1e-6, 1000000.0, qk_norm=True, tie_word_embeddings=True
    ),
    "Llama-3.2-1B": ModelConfig(
        "llama", 128256, 2048, 8192, 16, 32, 8, 64, 131072, 1e-5, 500000.0, LLAMA3_ROPE, tie_word_embeddings=True
    ),
    "Llama-3.1-8B": ModelConfig(
        "llama", 128256, 4096, 14336, 32, 32, 8, 128, 131072, 1e-5, 500000.0, RopeScaling("llama3", 8.0)
    ),
}  # fmt: skip


def make_model(name: str, dtype: torch.dtype, device: str) -> Transformer:
    """The model with its real weights, if they can be had, or with random ones that keep its numbers finite."""
    config = SHAPES[name]
    if name in REAL:
        return Transformer.from_state(config, open_checkpoint(hub.resolve(REAL[name])).state_dict(dtype, device))
    draw = torch.Generator(device).manual_seed(0)
    state = {}
    for weight, shape in parameter_shapes(config).items():
        if len(shape) == 1:
            state[weight] = torch.ones(shape, dtype=dtype, device=device)
        else:
            state[weight] = torch.empty(shape, dtype=dtype, device=device)
            state[weight].normal_(0.0, shape[-1] ** -0.5, generator=draw)
    return Transformer.from_state(config, state)


def commit() -> str | None:
    """The commit of this checkout, with -dirty if files changed."""
    folder = str(Path(__file__).resolve().parent)
    command = ["git", "-C", folder, "describe", "--always", "--dirty", "--abbrev=12", "--exclude", "*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
