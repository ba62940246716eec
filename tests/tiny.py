"""Small stand-ins for tests: a tiny random model, a scripted one, and the plain path that everything must equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from minillm import attention
from minillm.config import ModelConfig
from minillm.kv import KVCache
from minillm.llm import LLM
from minillm.model import Batch, Transformer
from minillm.request import RequestOutput, SamplingParams
from minillm.weights import random_state_dict

TINY = ModelConfig(
    architecture="llama",
    vocab_size=96,
    hidden_size=64,
    intermediate_size=80,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    eos_token_ids=(0,),
)


def tiny_model(config: ModelConfig = TINY, seed: int = 0) -> Transformer:
    return Transformer.from_state(config, random_state_dict(config, seed))


def tiny_llm(config: ModelConfig = TINY, seed: int = 0, **engine: object) -> LLM:
    return LLM.from_parts(config, tiny_model(config, seed), None, **engine)


def full_logits(model: Transformer, tokens: Sequence[int]) -> Tensor:
    """Logits of every position, with a cache that is thrown away: [len(tokens), vocab]."""
    count = len(tokens)
    cache = KVCache(model.config, 1, count, torch.float32, "cpu")
    layout = attention.Layout([count], [count], [[0]], count)
    place = torch.arange(count)
    with torch.inference_mode():
        return model.logits(model(Batch(torch.tensor(tokens), place, place, layout, place), cache))


def greedy_reference(model: Transformer, prompt: Sequence[int], count: int) -> list[int]:
    """Full recompute for each token, alone, no cache: the plain path."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        tokens.append(int(full_logits(model, tokens)[-1].argmax()))
        if tokens[-1] in model.config.eos_token_ids:
            break
    return tokens[len(prompt) :]


class Scripted(nn.Module):
    """A model whose logits are `script(token, position)`: [vocab]. It isolates scheduler, sampler and text."""

    def __init__(self, script: Callable[[int, int], Tensor], config: ModelConfig = TINY) -> None:
        super().__init__()
        self.config, self.script = config, script
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        return torch.stack([batch.token_ids, batch.positions], dim=1)

    def logits(self, hidden: Tensor) -> Tensor:
        if not len(hidden):
            return torch.empty(0, self.config.vocab_size)
        return torch.stack([self.script(int(token), int(position)) for token, position in hidden])


def one_hot(token: int, size: int = TINY.vocab_size) -> Tensor:
    logits = torch.zeros(size)
    logits[token] = 10.0
    return logits


def run(
    llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[RequestOutput]:
    """`generate`, with every invariant checked after each step."""
    step = llm.step

    def checked() -> object:
        news = step()
        llm.scheduler.check()
        return news

    llm.step = checked  # type: ignore[method-assign, assignment]
    try:
        outputs = llm.generate([list(p) for p in prompts], params)
    finally:
        llm.step = step  # type: ignore[method-assign]
    assert llm.pool.num_free == len(llm.pool.blocks), "blocks leaked"
    return outputs


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in outputs]
