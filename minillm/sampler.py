"""From logits to tokens. Pure functions, in the order in which `sample` applies them:

penalties, forbidden ids, temperature, top-k, top-p, min-p, then one draw. The draw adds noise to the log
probabilities and takes the largest (the Gumbel-max trick). The noise is a function of (seed, position, token id), with
no hidden state, so a request's draw is the same alone, in any batch and after a preemption.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .request import Request

NEVER = float("-inf")


def penalize(
    logits: Tensor,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Make tokens that occurred already less likely. logits: [R, V]; returns a new [R, V].

    prompts, outputs: each row's token ids. repetition, presence, frequency: [R] float32.
    repetition (Keskar et al. 2019, arXiv:1909.05858): tokens of prompt or output, once each however often they
    occurred: a positive logit is divided, a negative one multiplied. presence: subtracted once from each token of the
    output. frequency: subtracted for each time it occurred in the output.
    """
    size = logits.shape[1]

    def places(texts: Sequence[Sequence[int]]) -> np.ndarray:
        """Where these ids are in the flattened logits."""
        ids = np.fromiter(itertools.chain.from_iterable(texts), np.int64)
        return np.repeat(np.arange(len(texts)) * size, [len(text) for text in texts]) + ids

    prompt, output = places(prompts), places(outputs)
    occurred, group = np.unique(np.concatenate((prompt, output)), return_inverse=True)
    times = np.bincount(group[len(prompt) :], minlength=len(occurred))
    seen, counts = torch.from_numpy(occurred).to(logits.device), torch.from_numpy(times).to(logits.device)
    row, old = seen // size, logits.reshape(-1)[seen]
    new = torch.where(old > 0, old / repetition[row], old * repetition[row])
    new = new - presence[row] * (counts > 0) - frequency[row] * counts
    return logits.reshape(-1).index_put((seen,), new).view(logits.shape)


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


def top_logprobs(logprobs: Tensor, chosen: Sequence[int], counts: Sequence[int]) -> list[dict[int, float]]:
    """For each row the chosen token's log probability and those of the counts[r] likeliest. logprobs: [R, V]."""
    values, ids = logprobs.topk(min(max(counts), logprobs.shape[1]))
    own = logprobs.gather(1, torch.tensor(chosen, device=logprobs.device)[:, None])[:, 0]
    rows = zip(chosen, own.tolist(), ids.tolist(), values.tolist(), counts, strict=True)
    return [{token: value} | dict(zip(i[:count], v[:count], strict=True)) for token, value, i, v, count in rows]


def adjust(logits: Tensor, requests: Sequence[Request], num_ids: int) -> Tensor:
    """Logits after penalties, and -inf where an id may not be chosen. [R, V]; `logits` itself if nothing changes.

    num_ids: ids from here on exist in the model's matrices but not in the tokenizer. Before min_tokens no id may be
    chosen that ends the request.
    """
    rows = [r for r, request in enumerate(requests) if request.params.has_penalties]
    ends = [(r, i) for r, one in enumerate(requests) if one.num_output < one.params.min_tokens for i in one.stop_ids]
    if not rows and not ends and num_ids >= logits.shape[1]:
        return logits
    logits = logits.clone()
    if rows:
        some = [requests[r] for r in rows]
        names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        penalties = [_column(some, name, torch.float32, logits.device) for name in names]
        prompts, outputs = [one.tokens[: one.num_prompt] for one in some], [one.output for one in some]
        logits[rows] = penalize(logits[rows], prompts, outputs, *penalties)
    if ends:
        logits[tuple(torch.tensor(ends, device=logits.device).T)] = NEVER
    logits[:, num_ids:] = NEVER
    return logits


def _column(requests: Sequence[Request], name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor([getattr(one.params, name) for one in requests], dtype=dtype, device=device)


def sample(logits: Tensor, requests: Sequence[Request], num_ids: int) -> list[int]:
    """One token for each row. logits: [R, V] float32, finite. Row r belongs to requests[r]. num_ids: see `adjust`."""
    logits = adjust(logits, requests, num_ids)
    greedy = logits.argmax(dim=-1)
    drawn = [r for r, request in enumerate(requests) if request.params.temperature > 0]
    if not drawn:
        return greedy.tolist()
    some, device = [requests[r] for r in drawn], logits.device
    # Extreme temperatures are clamped: logits / T must stay finite in float32, and nothing else changes.
    scaled = logits[drawn] / _column(some, "temperature", torch.float32, device).clamp(1e-5, 1e30)[:, None]
    sizes = [min(one.params.top_k, logits.shape[1]) for one in some]
    top_k = torch.tensor(sizes, dtype=torch.int64, device=device)
    top_p, min_p = (_column(some, name, torch.float32, device) for name in ("top_p", "min_p"))
    filters = ((keep_top_k, top_k, top_k > 0), (keep_top_p, top_p, top_p < 1), (keep_min_p, min_p, min_p > 0))
    for keep, values, asked in filters:
        if bool(asked.any()):  # sorting is dear: only the rows that ask for it
            scaled[asked] = keep(scaled[asked], values[asked])
    positions = torch.tensor([len(one.tokens) for one in some], dtype=torch.int64, device=device)
    seeds = torch.tensor([one.seed for one in some], dtype=torch.int64, device=device)
    greedy[drawn] = (scaled + gumbel_noise(seeds, positions, logits.shape[1])).argmax(dim=-1)
    return greedy.tolist()
