"""From logits to tokens. Pure functions, in the order in which `sample` applies them:

penalties, forbidden ids, temperature, top-k, top-p, min-p, then one draw. The draw adds noise to the log
probabilities and takes the largest (the Gumbel-max trick). The noise is a function of (seed, position, token id), with
no hidden state, so a request's draw is the same alone, in any batch and after a preemption.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .request import Request

NEVER = float("-inf")


def penalize(
    logits: Tensor, prompt: Sequence[int], output: Sequence[int], repetition: float, presence: float, frequency: float
) -> Tensor:
    """Make tokens that occurred already less likely. logits: [V]; returns a new [V].

    repetition (Keskar et al. 2019, arXiv:1909.05858): tokens of prompt or output, once each however often they
    occurred: a positive logit is divided, a negative one multiplied. presence: subtracted once from each token of the
    output. frequency: subtracted for each time it occurred in the output.
    """
    logits = logits.clone()
    size = len(logits)
    seen = torch.tensor([t for t in set(prompt) | set(output) if t < size], dtype=torch.int64, device=logits.device)
    picked = logits[seen]
    logits[seen] = torch.where(picked > 0, picked / repetition, picked * repetition)
    counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=size)[:size].to(logits.device)
    return logits - presence * (counts > 0) - frequency * counts


def keep_top_k(logits: Tensor, k: Tensor) -> Tensor:
    """Keep exactly the k[r] largest of each row, the lower id first among equals; 0 keeps all. logits: [R, V]."""
    # exercise 08.1
    order = logits.argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(
        1, order, torch.arange(logits.shape[1], device=logits.device).expand_as(order)
    )
    return logits.masked_fill((rank >= k[:, None]) & (k[:, None] > 0), NEVER)
    # end exercise 08.1


def keep_top_p(logits: Tensor, p: Tensor) -> Tensor:
    """Keep the smallest set of likeliest tokens whose probabilities add up to at least p[r]. logits: [R, V].

    Nucleus sampling (Holtzman et al. 2019, arXiv:1904.09751). A token stays if those before it do not reach p yet, so
    at least one stays; p = 1 keeps all.
    """
    # exercise 08.2
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    probs = ordered.softmax(dim=-1)
    reached = probs.cumsum(dim=-1) - probs >= p[:, None]
    reached[:, 0] = False  # the likeliest stays, also where p is too small for float32
    drop = torch.empty_like(reached).scatter_(1, order, reached)
    return logits.masked_fill(drop & (p[:, None] < 1.0), NEVER)
    # end exercise 08.2


def keep_min_p(logits: Tensor, p: Tensor) -> Tensor:
    """Keep tokens at least p[r] times as likely as the likeliest (Nguyen et al. 2024, arXiv:2407.01082)."""
    probs = logits.softmax(dim=-1)
    return logits.masked_fill(probs < p[:, None] * probs.amax(dim=-1, keepdim=True), NEVER)


def gumbel_noise(seeds: Tensor, positions: Tensor, size: int) -> Tensor:
    """Standard Gumbel noise [R, size] float32, a pure function of seeds [R], positions [R] and the column.

    The three numbers are mixed by the finaliser of SplitMix64 (Steele, Lea, Flood 2014) in wrapping 64-bit arithmetic.
    """
    # exercise 08.3
    columns = torch.arange(size, dtype=torch.int64, device=seeds.device)
    start = _mix(_mix(seeds) + positions)
    bits = _mix(start[:, None] + columns * -7046029254386353131)
    uniform = (((bits >> 41) & (2**23 - 1)).float() + 0.5) * 2.0**-23  # in (0, 1), the ends excluded
    return -(-uniform.log()).log()
    # end exercise 08.3


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser: every input bit changes about half of the output bits."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * -4658895280553007687
    x = (x ^ ((x >> 27) & (2**37 - 1))) * -7723592293110705685
    return x ^ ((x >> 31) & (2**33 - 1))


def top_logprobs(logprobs: Tensor, chosen: int, count: int) -> dict[int, float]:
    """The chosen token's log probability and those of the `count` likeliest. logprobs: [V]."""
    values, ids = logprobs.topk(min(count, len(logprobs)))
    found = dict(zip(ids.tolist(), values.tolist(), strict=True))
    return {chosen: float(logprobs[chosen])} | found


def sample(logits: Tensor, requests: Sequence[Request], seeds: Sequence[int], num_ids: int) -> list[int]:
    """One token for each row. logits: [R, V] float32, finite. Row r belongs to requests[r] and draws with seeds[r].

    num_ids: ids from here on exist in the model's matrices but not in the tokenizer; they are never chosen.
    """
    changed: dict[int, Tensor] = {}
    for r, request in enumerate(requests):
        params = request.params
        if params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty:
            prompt = request.tokens[: request.num_prompt]
            penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
            changed[r] = penalize(logits[r], prompt, request.output, *penalties)
        if request.num_output < params.min_tokens and request.stop_ids:
            ends = torch.tensor(sorted(request.stop_ids), device=logits.device)
            changed[r] = changed.get(r, logits[r]).index_fill(0, ends, NEVER)
    if changed or num_ids < logits.shape[1]:
        logits = logits.clone()
        logits[:, num_ids:] = NEVER
    for r, row in changed.items():
        logits[r, :num_ids] = row[:num_ids]
    greedy = logits.argmax(dim=-1)
    drawn = [r for r, request in enumerate(requests) if request.params.temperature > 0]
    if not drawn:
        return greedy.tolist()

    def column(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([getattr(requests[r].params, name) for r in drawn], dtype=dtype, device=logits.device)

    # Extreme temperatures are clamped: logits / T must stay finite in float32, and nothing else changes.
    scaled = logits[drawn] / column("temperature", torch.float32).clamp(1e-5, 1e30)[:, None]
    sizes = [min(requests[r].params.top_k, logits.shape[1]) for r in drawn]
    top_k = torch.tensor(sizes, dtype=torch.int64, device=logits.device)
    top_p, min_p = column("top_p", torch.float32), column("min_p", torch.float32)
    filters = ((keep_top_k, top_k, top_k > 0), (keep_top_p, top_p, top_p < 1), (keep_min_p, min_p, min_p > 0))
    for keep, values, asked in filters:
        if bool(asked.any()):  # sorting is dear: only the rows that ask for it
            scaled[asked] = keep(scaled[asked], values[asked])
    positions = torch.tensor([len(requests[r].tokens) for r in drawn], dtype=torch.int64, device=logits.device)
    keys = torch.tensor([seeds[r] for r in drawn], dtype=torch.int64, device=logits.device)
    greedy[drawn] = (scaled + gumbel_noise(keys, positions, logits.shape[1])).argmax(dim=-1)
    return greedy.tolist()
