"""The GPU's runner: the same tokens as the plain engine; a step in flight; padding that touches nothing.

On a machine without a GPU it runs in Triton's interpreter, where there are no graphs but the same buffers.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from helpers_models import tiny_config

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

from minillm import LLM, SamplingParams, gpu_inputs, gpu_runner  # noqa: E402
from minillm.errors import RequestError  # noqa: E402
from minillm.model import Transformer  # noqa: E402
from minillm.scheduler import Scheduler  # noqa: E402
from minillm.weights import random_state_dict  # noqa: E402

GREEDY = {"temperature": 0.0, "ignore_eos": True}
FAMILIES = [{}, {"num_heads": 3, "num_kv_heads": 1, "head_dim": 32, "qk_norm": True, "qkv_bias": True},
            {"sliding_window": 5, "tie_word_embeddings": True}]  # fmt: skip


def engines(config=None, **options):
    """The plain engine on the CPU and the one with kernels, with the same weights."""
    config = config or tiny_config(num_layers=2)
    state = random_state_dict(config, 0)
    options = {"num_kv_blocks": 60, "block_size": 4, "max_num_seqs": 4, **options}
    plain = LLM.from_parts(config, Transformer.from_state(config, state, pack=False), None, **options)
    moved = {name: tensor.to(DEVICE) for name, tensor in state.items()}
    model = Transformer.from_state(config, moved, pack=False)
    return plain, LLM.from_parts(config, model, None, attention="triton", **options)


def prompts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(101) for _ in range(draw.randint(1, longest))] for _ in range(count)]


def tokens_of(llm: LLM, texts: list[list[int]], params) -> list[list[int]]:
    return [one.outputs[0].token_ids for one in llm.generate(texts, params)]


@pytest.mark.parametrize("changes", FAMILIES)
def test_same_tokens(changes) -> None:
    plain, fast = engines(tiny_config(**changes))
    texts = prompts(6, 14)
    params = [SamplingParams(max_tokens=2 + i, temperature=(0.0, 0.9)[i % 2], top_k=(0, 7)[i // 2 % 2], seed=i,
                             ignore_eos=True) for i in range(6)]  # fmt: skip
    assert fast.runner.samples
    assert tokens_of(fast, texts, params) == tokens_of(plain, texts, params)
    fast.scheduler.check()
    assert fast._flight is None


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 5},
        {"num_kv_blocks": 9},  # preemption
        {"num_kv_blocks": 9, "preemption": "swap"},
        {"scheduling": "static", "enable_prefix_caching": False},
        {"max_num_seqs": 1},
    ],
)
def test_same_tokens_under_pressure(options) -> None:
    plain, fast = engines(**options)
    texts, params = prompts(5, 14, seed=1), SamplingParams(max_tokens=6, **GREEDY)
    assert tokens_of(fast, texts, params) == tokens_of(plain, texts, params)
    fast.scheduler.check()


def test_what_needs_logits_takes_the_other_way_and_both_mix() -> None:
    plain, fast = engines()
    texts = prompts(4, 10)
    params = [
        SamplingParams(max_tokens=5, **GREEDY),
        SamplingParams(max_tokens=5, repetition_penalty=1.3, **GREEDY),
        SamplingParams(max_tokens=5, logprobs=2, **GREEDY),
        SamplingParams(max_tokens=5, min_tokens=3, temperature=0.0, stop_token_ids=list(range(50))),
    ]
    assert tokens_of(fast, texts, params) == tokens_of(plain, texts, params)
    twice = SamplingParams(max_tokens=4, n=2, temperature=1.0, seed=3, ignore_eos=True)
    got, want = (one.generate(texts[0], twice)[0] for one in (fast, plain))
    assert [o.token_ids for o in got.outputs] == [o.token_ids for o in want.outputs]
    fast.scheduler.check()


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_every_prompt_length_is_served(length) -> None:
    """gpt-fast 69: a new prompt length after the first ones made a compiled decoder read out of bounds."""
    plain, fast = engines(tiny_config(num_layers=1))
    for llm in (plain, fast):
        llm.generate([1, 2], SamplingParams(max_tokens=2, **GREEDY))
    text, params = prompts(1, 30, seed=length)[0][:length] or [1], SamplingParams(max_tokens=3, **GREEDY)
    assert tokens_of(fast, [text], params) == tokens_of(plain, [text], params)


# ---- a step in flight


def test_the_next_step_starts_before_the_last_ones_tokens_are_read() -> None:
    _, fast = engines(tiny_config(num_layers=1))
    order = []
    start, tokens = fast.runner.start, gpu_runner.Flight.tokens

    def started(plan, after=None):
        order.append("start")
        return start(plan, after)

    fast.runner.start = started
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_runner.Flight, "tokens", lambda self: (order.append("read"), tokens(self))[1])
        fast.generate([1, 2, 3], SamplingParams(max_tokens=4, **GREEDY))
    assert order == ["start", "start", "read", "start", "read", "start", "read", "read"]


def test_nothing_starts_ahead_where_it_could_matter() -> None:
    _, fast = engines(tiny_config(num_layers=1), max_num_seqs=2)
    params = SamplingParams(max_tokens=6, **GREEDY)
    fast.add_request([1, 2, 3], params)
    fast.step()
    assert fast._flight is not None
    fast.add_request([4, 5], params)
    fast.step()  # reads what was in flight; the new one is waiting, and there is a seat for it
    assert fast._flight is None
    fast.step()
    assert len(fast.scheduler.running) == 2
    fast.add_request([6], params)
    fast.step()
    assert fast._flight is not None  # somebody waits, but there is no seat


def test_no_step_goes_beyond_max_model_len() -> None:
    """A row of the table on the device has room for max_model_len tokens; the next one is somebody else's."""
    plain, fast = engines(tiny_config(num_layers=1), max_model_len=8)
    ends, start = [], fast.runner.start

    def started(plan, after=None):
        ends.extend(chunk.end for chunk in plan.chunks)
        return start(plan, after)

    fast.runner.start = started
    texts, params = [[1, 2, 3], [4, 5]], SamplingParams(max_tokens=50, **GREEDY)
    assert tokens_of(fast, texts, params) == tokens_of(plain, texts, params)
    assert max(ends) == 7  # the last token is never computed


@pytest.mark.parametrize("how", ["abort", "timeout"])
def test_a_request_that_ends_in_flight_frees_its_blocks_once(how) -> None:
    """mini-sglang 111, sglang 18803 (double free), 28374 (its unfinished blocks in the prefix cache)."""
    plain, fast = engines(tiny_config(num_layers=1))
    params = SamplingParams(max_tokens=12, **GREEDY)
    doomed = fast.add_request([1, 2, 3, 4, 5], params, timeout=1000.0 if how == "timeout" else None)
    other = fast.add_request([9, 8, 7], params)
    for _ in range(4):
        fast.step()
    assert fast._flight is not None
    request = fast.requests[doomed][0]
    computed = list(request.tokens)
    if how == "abort":
        fast.abort(doomed)
    else:
        request.deadline = 0.0
    while not fast.is_done(other):
        fast.step()
        fast.scheduler.check()
    assert fast.pool.num_free == len(fast.pool.blocks)
    kept = fast.requests[other][0].output
    assert kept == tokens_of(plain, [[9, 8, 7]], params)[0]
    # only blocks whose tokens were all known and computed are found again
    assert len(fast.pool.match(computed + [0] * 8)) <= len(computed) // 4
    again = tokens_of(fast, [computed], SamplingParams(max_tokens=4, **GREEDY))
    assert again == tokens_of(plain, [computed], SamplingParams(max_tokens=4, **GREEDY))


def test_an_ended_requests_last_row_is_thrown_away() -> None:
    """A stop token is seen one step late; no token is added after it, and no block stays taken (tt-xla 5830)."""
    plain, fast = engines(tiny_config(num_layers=1))
    text = [5, 6, 7]
    free = tokens_of(plain, [text], SamplingParams(max_tokens=8, **GREEDY))[0]
    stop = SamplingParams(max_tokens=8, temperature=0.0, stop_token_ids=[free[3]])
    want = free[: free.index(free[3]) + 1]
    assert tokens_of(fast, [text], stop)[0] == want
    assert fast._flight is None or fast.step() == []
    assert fast.pool.num_free == len(fast.pool.blocks)


def test_an_error_in_flight_leaves_the_engine_usable() -> None:
    plain, fast = engines(tiny_config(num_layers=1))
    params = SamplingParams(max_tokens=6, **GREEDY)
    name = fast.add_request([1, 2, 3], params)
    fast.step()
    fast.step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_runner.Flight, "tokens", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fast.step()
    assert fast._flight is None
    while not fast.is_done(name):
        fast.step()
        fast.scheduler.check()
    assert fast.requests[name][0].output == tokens_of(plain, [[1, 2, 3]], params)[0]


def test_an_error_while_a_table_is_sent_leaves_no_old_table(monkeypatch) -> None:
    """The request comes back to the same seat with the same table, which the device has not got yet."""
    plain, fast = engines(tiny_config(num_layers=1))
    text, params = list(range(1, 12)), SamplingParams(max_tokens=6, **GREEDY)
    name = fast.add_request(text, params)
    with monkeypatch.context() as patch:
        patch.setattr(gpu_inputs, "upload", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fast.step()
    while not fast.is_done(name):
        fast.step()
        fast.scheduler.check()
    assert fast.requests[name][0].output == tokens_of(plain, [text], params)[0]


def test_not_finite_logits_end_one_request() -> None:
    config = tiny_config(num_layers=1)
    _, fast = engines(config)
    with torch.no_grad():
        fast.model.embed.weight.data[50] = float("nan")
    outputs = fast.generate([[1, 2, 50], [3, 4]], SamplingParams(max_tokens=4, **GREEDY))
    assert "not finite" in outputs[0].error and outputs[1].error is None and len(outputs[1].outputs[0].token_ids) == 4
    fast.scheduler.check()


# ---- graphs: padding and persistent buffers


def with_graphs(llm: LLM, sizes: tuple[int, ...] = ()) -> list[gpu_inputs.Shape]:
    """Without a GPU: the shapes that get a graph there (those of `sizes` tokens) are computed in full, from the same
    buffers. Returns a list of what was replayed."""
    runner, replayed = llm.runner, []
    shapes = gpu_runner.graph_shapes(runner.most, llm.engine_config.max_num_batched_tokens, runner.per_tile)

    class Replay:
        def __init__(self, shape):
            self.shape = shape

        def replay(self):
            replayed.append(self.shape)
            return runner._compute(self.shape, runner.inputs[self.shape.decode])

    if DEVICE == "cpu":
        picked = [shape for shape in shapes if not sizes or shape.tokens in sizes]
        runner.graphs = {shape: Replay(shape) for shape in sorted(picked, key=lambda shape: shape.tokens)}
    return replayed


def test_pad_rows() -> None:
    """vLLM 43869 (slot -1 is the last slot), rvllm 32 (live slot 0): padding takes the spare block, reads nothing."""
    for group in gpu_inputs.GROUPS:
        fields = {name: np.full(6, 77, dtype=kind) for name, kind, _ in group}
        gpu_inputs.pad_rows(fields, 2, 5, spare_slot=40)
        for name, kind, empty in group:
            want = 40 if name == "slots" else empty
            assert fields[name].dtype == kind
            assert fields[name].tolist() == [77, 77, want, want, want, 77]
    empty = gpu_inputs.HARMLESS
    assert empty["counts"] == 0 and empty["lengths"] == 0 and empty["sources"] == -1 and empty["temperatures"] == 0.0


def test_padding_neither_reads_nor_writes_what_is_live() -> None:
    """Padded steps, of prompts and of decodes, on a cache that is NaN wherever no live token is."""
    plain, fast = engines(tiny_config(num_layers=2), enable_prefix_caching=False)
    replayed = with_graphs(fast, (4, 16))
    params, texts = SamplingParams(max_tokens=6, **GREEDY), [[1, 2, 3, 4, 5], [6, 7]]
    want = tokens_of(plain, texts, params)
    names = [fast.add_request(text, params) for text in texts]
    fast.cache.data.fill_(float("nan"))
    for _ in range(2):
        fast.step()
    live = [fast.requests[name][0] for name in names]
    used = {b * 4 + i for r in live for b in r.block_table for i in range(4)}
    outside = [slot for slot in range(fast.cache.num_blocks * 4) if slot not in used]
    while not all(fast.is_done(name) for name in names):
        fast.step()
        for request in live:
            used |= {b * 4 + i for b in request.block_table for i in range(4)}
    assert [request.output for request in live] == want
    outside = [slot for slot in outside if slot not in used]
    assert fast.cache.data[:, :, outside].isnan().all()
    if DEVICE == "cpu":
        assert {shape.tokens for shape in replayed} == {4, 16}


def test_a_decode_step_follows_its_buffers() -> None:
    """imp 986, aprender 2030: a graph that was captured with one length on the host replayed it for every other."""
    plain, fast = engines(tiny_config(num_layers=1), max_num_seqs=2)
    params = SamplingParams(max_tokens=3, **GREEDY)
    for text in ([1] * 3, [2] * 17, [3] * 2, [4] * 30):  # longer, shorter, longer: the same buffers
        assert tokens_of(fast, [text], params) == tokens_of(plain, [text], params)


def test_stale_columns_of_a_larger_table_are_not_read() -> None:
    """nano-vllm-v1 3: columns that a larger table left behind."""
    plain, fast = engines(tiny_config(num_layers=1), max_num_seqs=1, enable_prefix_caching=False)
    params = SamplingParams(max_tokens=3, **GREEDY)
    fast.generate([7] * 40, params)
    assert int((fast.runner.tables.data != 0).sum()) > 5
    fast.cache.data.fill_(float("nan"))
    assert tokens_of(fast, [[8, 9]], params) == tokens_of(plain, [[8, 9]], params)


def test_a_mixed_step_never_takes_the_decode_graph() -> None:
    """torchtitan 3685, nano-vllm-v1 3: a step with a chunk of a prompt in a graph that is for single tokens."""
    _, fast = engines(tiny_config(num_layers=1), max_num_batched_tokens=6)
    taken, replayed, start = [], with_graphs(fast), fast.runner.start

    def started(plan, after=None):
        before = len(replayed)
        flight = start(plan, after)
        taken.append((replayed[before:], [chunk.end - chunk.start for chunk in plan.chunks]))
        return flight

    fast.runner.start = started
    fast.add_request([1, 2], SamplingParams(max_tokens=9, **GREEDY))
    fast.step()
    fast.step()
    name = fast.add_request(list(range(20)), SamplingParams(max_tokens=2, **GREEDY))
    while not fast.is_done(name):
        fast.step()
    assert any(len(counts) > 1 and 1 in counts and max(counts) > 1 for _, counts in taken)
    if DEVICE == "cpu":  # on a GPU, `graphs` holds what cannot be watched; the choice is the same
        for shapes, counts in taken:
            assert all(shape.decode == (set(counts) == {1}) and shape.tokens >= sum(counts) for shape in shapes)


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 18}, {"scheduling": "static", "max_num_seqs": 3}])
def test_steps_of_every_kind_are_the_same_in_a_graph(options) -> None:
    """Prompts, chunks of them beside decodes, short ones among long ones, padded batches: the same tokens."""
    plain, fast = engines(tiny_config(num_layers=1, sliding_window=11), num_kv_blocks=100, **options)
    fast.runner.processors = 40  # so that contexts are read in parts
    replayed, draw = with_graphs(fast), random.Random(3)
    texts = [[draw.randrange(101) for _ in range(n)] for n in (13, 3, 9, 6, 1, 12)]
    params = [SamplingParams(max_tokens=2 + i % 3, temperature=i % 2, top_k=5, seed=i, ignore_eos=True)
              for i in range(6)]  # fmt: skip
    assert tokens_of(fast, texts, params) == tokens_of(plain, texts, params)
    if DEVICE == "cpu":
        assert {shape.decode for shape in replayed} == ({True, False} if "scheduling" not in options else {False, True})


def test_graph_shapes() -> None:
    shape = gpu_inputs.Shape
    assert shape(4, 4, 0, 4).decode and not shape(4, 4, 1, 4).decode and not shape(5, 4, 0, 4).decode
    assert shape(8, 8, 0, 8).holds(shape(3, 3, 0, 3)) and not shape(2, 2, 0, 2).holds(shape(3, 3, 0, 3))
    assert shape(64, 8, 4, 8).holds(shape(30, 2, 3, 1)) and not shape(64, 8, 4, 8).holds(shape(30, 2, 5, 1))
    assert not shape(64, 64, 9, 64).holds(shape(3, 3, 0, 3))  # a decode step has graphs of its own
    assert not shape(64, 64, 0, 64).holds(shape(30, 2, 0, 1))
    shapes = gpu_runner.graph_shapes(8, 100, 64)
    assert [one.tokens for one in shapes if not one.decode] == [16, 32, 64]
    assert [one.tokens for one in shapes if one.decode] == [1, 2, 4, 8]


def test_the_step_that_is_measured_for_its_memory_runs(monkeypatch) -> None:
    """The largest step, on a cache of its own. Without a GPU the counters are faked; the step itself is computed."""
    _, fast = engines(tiny_config(num_layers=1), max_num_batched_tokens=30)
    if DEVICE == "cpu":
        for name, value in (("reset_peak_memory_stats", None), ("memory_allocated", 5), ("max_memory_allocated", 12)):
            monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    for longest in (1, 7, 64):
        found = gpu_runner.activation_bytes(fast.model, fast.engine_config, longest)
        assert found == 7 if DEVICE == "cpu" else found > 0


def test_buckets_and_splits() -> None:
    assert gpu_runner.buckets(1) == [1]
    assert gpu_runner.buckets(7) == [1, 2, 4, 7]
    for most in (3, 8, 65, 256, 511):  # every batch has a graph (nano-vllm: StopIteration above the largest)
        assert gpu_runner.buckets(most)[-1] == most and gpu_runner.buckets(most) == sorted(
            set(gpu_runner.buckets(most))
        )
    assert gpu_runner.split_count(8, 132) == 16 and gpu_runner.split_count(132, 132) == 1


# ---- eight-bit cache


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_eight_bit_cache_is_close_and_survives_copies(kind) -> None:
    """Swapping and copy-on-write move the scales too: the same tokens with a small pool as with a large one."""
    config = tiny_config(num_layers=2)
    texts, params = prompts(3, 14, seed=2), SamplingParams(max_tokens=7, **GREEDY)
    roomy = only_fast(config, kv_cache_dtype=kind)
    tight = only_fast(config, kv_cache_dtype=kind, num_kv_blocks=9, preemption="swap")
    want = tokens_of(roomy, texts, params)
    assert tokens_of(tight, texts, params) == want
    assert tight.scheduler.num_swaps > 0
    assert roomy.cache.bytes_per_token < 0.5 * 4 * 2 * 2 * 2 * 16  # float32 takes four times the bytes, less scales


@pytest.mark.parametrize("kind", ["auto", "int8", "fp8"])
def test_a_nan_anywhere_in_a_prompt_is_noticed(kind) -> None:
    """Also where the cache has no number for NaN: then its scale is NaN."""
    fast = only_fast(tiny_config(num_layers=1), kv_cache_dtype=kind)
    with torch.no_grad():
        fast.model.embed.weight.data[50] = float("nan")
    with pytest.raises(RequestError, match="not finite"):
        fast.generate([50, 1, 2], SamplingParams(max_tokens=4, **GREEDY))
    assert len(fast.generate([3, 1, 2], SamplingParams(max_tokens=4, **GREEDY))[0].outputs[0].token_ids) == 4


def only_fast(config, **options) -> LLM:
    state = {name: tensor.to(DEVICE) for name, tensor in random_state_dict(config, 0).items()}
    options = {"num_kv_blocks": 60, "block_size": 4, "max_num_seqs": 4, **options}
    return LLM.from_parts(
        config, Transformer.from_state(config, state, pack=False), None, attention="triton", **options
    )


def test_options_that_need_the_kernels_say_so(monkeypatch) -> None:
    config = tiny_config()
    model = Transformer.from_state(config, random_state_dict(config, 0))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    if DEVICE == "cpu":
        with pytest.raises(RequestError, match="needs a CUDA device"):
            LLM.from_parts(config, model, None, attention="triton", num_kv_blocks=4)
        with pytest.raises(RequestError, match="kv_cache_dtype 'int8' needs attention 'triton'"):
            LLM.from_parts(config, model, None, kv_cache_dtype="int8", num_kv_blocks=4)
    with pytest.raises(RequestError, match="kv_cache_dtype must be one of"):
        LLM.from_parts(config, model, None, kv_cache_dtype="int3", num_kv_blocks=4)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_graphs_and_eager_agree() -> None:
    config = tiny_config()
    state = {name: tensor.cuda() for name, tensor in random_state_dict(config, 0).items()}
    model = Transformer.from_state(config, state)
    texts, params = prompts(9, 30), SamplingParams(max_tokens=12, **GREEDY)
    found = []
    for eager in (False, True):
        llm = LLM.from_parts(config, model, None, num_kv_blocks=200, max_num_seqs=16, enforce_eager=eager)
        assert bool(llm.runner.graphs) != eager
        found.append(tokens_of(llm, texts, params))
    assert found[0] == found[1]


def test_ahead_is_the_schedulers_choice() -> None:
    """Scheduler.ahead gives nothing for a static batch, a prompt under way, or a pool without room for everyone."""
    _, fast = engines(tiny_config(num_layers=1), num_kv_blocks=2, max_num_seqs=2)
    fast.add_request([1, 2, 3], SamplingParams(max_tokens=5, **GREEDY))
    plan = fast.scheduler.plan()
    assert Scheduler.ahead(fast.scheduler, plan) is not None
    fast.pool.allocate(fast.pool.num_free)
    assert Scheduler.ahead(fast.scheduler, plan) is None


@pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU machine a model on the CPU is refused anyway")
def test_packed_weights_are_refused_in_a_sentence() -> None:
    model = Transformer.from_state(tiny_config(), random_state_dict(tiny_config(), 0))
    if model.head.weight is None:  # they were packed: float32 on a CPU with oneDNN
        with pytest.raises(RequestError, match="pack=False"):
            LLM.from_parts(tiny_config(), model, None, attention="triton", num_kv_blocks=4)
