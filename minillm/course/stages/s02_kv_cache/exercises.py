"""Exercises of stage 02."""

import functools

import torch

from minillm import kv
from minillm.config import ModelConfig
from minillm.course.exercise import Exercise, Mutant
from minillm.course.learn import make_llm
from minillm.course.learn import swap as swap_in
from minillm.request import SamplingParams

WEIGHTS_7B, WEIGHTS_8B, WEIGHTS_70B = 6_738_415_616, 8_030_261_248, 70_553_706_496  # Llama-2-7B, Llama-3-8B and 70B


# ---- 02.1 kv_bytes_per_token


def check_kv_bytes(t, kv_bytes_per_token):
    t.case(kv_bytes_per_token, 2, 3, 5, 4, expected=240, note="60 numbers of 4 bytes")
    t.case(kv_bytes_per_token, 2, 3, 5, expected=120, note="dtype_bytes left out: 2 bytes a number")
    t.case(
        kv_bytes_per_token, 1, 1, 1, 1, expected=2, note="one layer, one head, one number, one byte: a key and a value"
    )
    t.case(kv_bytes_per_token, 30, 3, 64, 4, expected=46_080, note="SmolLM2-135M in float32")
    t.case(kv_bytes_per_token, 36, 8, 128, 2, expected=147_456, note="Qwen3-4B: hidden_size is 2560, head_dim is 128")
    t.case(kv_bytes_per_token, 32, 32, 128, 1, expected=262_144, note="Llama-2-7B with an int8 cache")
    for layers, heads, dim, dtype in ((7, 5, 3, torch.float64), (4, 9, 11, torch.bfloat16), (3, 2, 13, torch.int8)):
        tensors = [torch.zeros(heads, dim, dtype=dtype) for _ in range(layers) for _ in ("key", "value")]
        want = sum(len(x.numpy().tobytes()) if dtype != torch.bfloat16 else x.numel() * 2 for x in tensors)
        size = tensors[0].element_size()
        t.case(kv_bytes_per_token, layers, heads, dim, size, expected=want, note="counted in real tensors")


def keys_only(num_layers, num_kv_heads, head_dim, dtype_bytes=2):
    return num_layers * num_kv_heads * head_dim * dtype_bytes


def queries_too(num_layers, num_kv_heads, head_dim, dtype_bytes=2):
    return 3 * num_layers * num_kv_heads * head_dim * dtype_bytes


def dtype_twice(num_layers, num_kv_heads, head_dim, dtype_bytes=2):
    return 2 * num_layers * num_kv_heads * head_dim * 2 * dtype_bytes


def dtype_ignored(num_layers, num_kv_heads, head_dim, dtype_bytes=2):
    return 2 * num_layers * num_kv_heads * head_dim * 2


def in_elements(num_layers, num_kv_heads, head_dim, dtype_bytes=2):
    return 2 * num_layers * num_kv_heads * head_dim


def one_layer(num_layers, num_kv_heads, head_dim, dtype_bytes=2):
    return 2 * num_kv_heads * head_dim * dtype_bytes


def heads_twice(num_layers, num_kv_heads, head_dim, dtype_bytes=2):
    return 2 * num_layers * num_kv_heads * (num_kv_heads * head_dim) * dtype_bytes


def in_bits(num_layers, num_kv_heads, head_dim, dtype_bytes=2):
    return 2 * num_layers * num_kv_heads * head_dim * dtype_bytes // 8


def in_kib(num_layers, num_kv_heads, head_dim, dtype_bytes=2):
    return 2 * num_layers * num_kv_heads * head_dim * dtype_bytes / 1024


def as_float(num_layers, num_kv_heads, head_dim, dtype_bytes=2):
    return 2.0 * num_layers * num_kv_heads * head_dim * dtype_bytes


def no_head_dim(num_layers, num_kv_heads, head_dim, dtype_bytes=2):
    return 2 * num_layers * num_kv_heads * dtype_bytes


def bytes_variant(num_layers, num_kv_heads, head_dim, dtype_bytes=2):
    dtype = {1: torch.int8, 2: torch.float16, 4: torch.float32, 8: torch.float64}[dtype_bytes]
    one_token = torch.empty(num_layers, 2, num_kv_heads, head_dim, dtype=dtype, device="meta")  # takes no memory
    return one_token.nbytes


def plug_kv_bytes(answer, swap):
    """The engine sizes itself with the learner's function; its tensors say whether that was right."""
    with swap():
        llm = make_llm(num_kv_blocks=32)
        yours = int(llm.stats()["kv_bytes_per_token"])
    slots = llm.cache.keys[0].shape[0]
    real = llm.cache.data.nbytes // slots
    print(f"the engine, with your function, says  {yours:>7} bytes per token")
    print(f"its tensors hold                      {real:>7} bytes per slot ({llm.cache.data.nbytes} / {slots})")
    print("tokens that fit on a 24 GB card beside the fp16 weights, all users together:")
    for name, weights, shape in (("Llama-2-7B", WEIGHTS_7B, (32, 32, 128)), ("Llama-3-8B", WEIGHTS_8B, (32, 8, 128))):
        print(f"   {name:<11}{kv.max_tokens_in(24 * 10**9 - 2 * weights, answer(*shape, 2)):>7,}")
    if yours != real:
        raise AssertionError("the engine's own tensors have another size")


# ---- 02.2 write_kv


def check_write_kv(t, write_kv):
    cache, new = torch.zeros(4, 1, 2), torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]])
    want = torch.tensor([[[3.0, 4.0]], [[0.0, 0.0]], [[1.0, 2.0]], [[0.0, 0.0]]])
    call = "write_kv(zeros of shape [4, 1, 2], new, slots=[2, 0])"
    got = t.call(write_kv, cache, new, torch.tensor([2, 0]), note="two tokens")
    t.true(
        got is None or got is cache, "the result is written into cache; no other tensor is built", call=call, got=got
    )
    t.equal(cache, want, f"the cache after {call}")

    @functools.wraps(write_kv)
    def write(cache, new, slots):  # what it returns does not matter from here on
        write_kv(cache, new, slots)

    def case(cache, new, slots, note, **more):
        rows = list(cache)  # the oracle: rows in a list, one by one
        for row, slot in zip(new, slots, strict=True):
            rows[slot] = row.to(cache.dtype)
        after = torch.stack(rows)
        slots = torch.tensor(slots, dtype=torch.int64)
        t.case(write, cache, new, slots, expected=None, after={0: after}, note=note, **more)

    g = t.rng(2)
    filled, three = torch.randn(7, 2, 5, generator=g), torch.randn(3, 2, 5, generator=g)
    case(filled, three[:1], [6], "one token, the last slot")
    case(filled, three, [1, 2, 3], "neighbouring slots; all other rows keep what they held")
    case(filled, three, [5, 0, 3], "slots in any order: row t goes to slots[t]")
    case(filled, three[:0], [], "no tokens")
    case(filled.to(torch.bfloat16), three, [4, 6, 1], "a bfloat16 cache, float32 tokens")
    case(filled, three.to(torch.float16), [0, 1, 6], "a float32 cache, float16 tokens")
    case(
        filled,
        torch.randn(3, 9, 5, generator=g)[:, 4:6],
        [2, 6, 0],
        "new is a slice of a bigger tensor, as k and v are in the engine",
    )
    data = torch.randn(3, 2, 7, 2, 5, generator=g)  # layers, K or V, slots, heads, head_dim
    want = data.clone()
    want[1, 0, 6], want[1, 0, 2] = three[0], three[1]
    t.call(
        write,
        data[1, 0],
        three[:2],
        torch.tensor([6, 2]),
        note="the keys of layer 1 inside the engine's one big tensor",
    )
    t.equal(data, want, "all layers, after writing two keys of layer 1", note="only these two rows may change")
    case(torch.zeros(2048, 2, 5), three, [2000, 7, 900], "3 tokens into a cache of 2048 slots: no copy of the cache",
         max_elements=1024)  # fmt: skip


def slots_ignored(cache, new, slots):
    cache[: len(new)] = new.to(cache.dtype)


def first_row(cache, new, slots):
    cache[slots] = new[0].to(cache.dtype) if len(new) else new


def new_by_slot(cache, new, slots):
    cache[slots] = new[slots].to(cache.dtype)


def cast_the_cache(cache, new, slots):
    cache.to(new.dtype)[slots] = new


def slots_as_start(cache, new, slots):
    if len(slots):
        cache[slots[0] : slots[0] + len(new)] = new.to(cache.dtype)


def order_ignored(cache, new, slots):
    cache[slots.sort().values] = new.to(cache.dtype)


def silent_copy(cache, new, slots):
    cache[slots].copy_(new)


def new_tensor(cache, new, slots):
    return cache.index_copy(0, slots, new.to(cache.dtype))


def concatenated(cache, new, slots):
    return torch.cat([cache, new.to(cache.dtype)])


def no_cast(cache, new, slots):
    cache[slots] = new


def wiped(cache, new, slots):
    cache.zero_()
    cache[slots] = new.to(cache.dtype)


def added(cache, new, slots):
    cache.index_add_(0, slots, new.to(cache.dtype))


def whole_copy(cache, new, slots):
    cache.copy_(cache.index_copy(0, slots, new.to(cache.dtype)))


def write_variant(cache, new, slots):
    for row, slot in zip(new, slots.tolist(), strict=True):
        cache[slot].copy_(row)  # an int gives a view (unlike a tensor of ints), and copy_ casts


def plug_write_kv(answer, swap):
    """Generate with the learner's writer, and say what it was asked to do."""
    prompt, count = "The keeper of the lighthouse", 12
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    rows = []

    def watched(cache, new, slots):
        rows.append(slots.tolist())
        answer(cache, new, slots)

    own = make_llm(num_kv_blocks=32)
    tokens = prompt if own.tokenizer else [1, 2, 3, 4, 5]
    expected = own.generate(tokens, params)[0].outputs[0]
    with swap_in("02.2", watched):
        llm = make_llm(num_kv_blocks=32)
        got = llm.generate(tokens, params)[0].outputs[0]
    per_step = 2 * llm.config.num_layers
    print(f"the engine's own:  {prompt}{expected.text}")
    print(f"with your writer:  {prompt}{got.text}")
    print(f"called {len(rows)} times: keys and values, {llm.config.num_layers} layers, {len(rows) // per_step} steps")
    print(f"slots of the first step {rows[0]}, of the next {rows[per_step]}, of the last {rows[-1]}")
    print(f"tokens equal: {'yes' if got.token_ids == expected.token_ids else 'NO'}")
    if got.token_ids != expected.token_ids:
        raise AssertionError("the tokens differ")


# ---- 02.3 causal_mask


def check_causal_mask(t, causal_mask):
    def case(num_queries, context_len, *window, note="", **more):
        width = window[0] if window and window[0] is not None else context_len
        rows = []  # the oracle: ask for every pair
        for position in range(context_len)[context_len - num_queries :]:
            rows.append([key <= position and position - key < width for key in range(context_len)])
        want = torch.tensor(rows, dtype=torch.bool).reshape(num_queries, context_len)
        t.case(causal_mask, num_queries, context_len, *window, expected=want, note=note, **more)

    case(2, 5, note="2 new tokens behind 3 cached ones")
    case(1, 4, note="one new token sees everything")
    case(4, 4, note="a whole prompt, empty cache")
    case(1, 1, note="the very first token")
    case(0, 3, note="no new tokens: a mask without rows")
    case(2, 6, 3, note="window 3: the token itself and the two before it")
    case(3, 3, 1, note="window 1: only itself")
    case(1, 10, 4, note="window 4: the token at position 9 sees 6, 7, 8 and 9")
    case(3, 5, 50, note="a window longer than the text")
    case(4, 7, None, note="window=None: no window")
    for num_queries, context_len, window in ((3, 11, 5), (6, 7, 2), (5, 13, 13)):
        case(num_queries, context_len)
        case(num_queries, context_len, window)
    case(2, 5000, note="no window, 5000 keys: all before a query are visible, and no 5000 x 5000 mask on the way",
         max_elements=4 * 2 * 5000)  # fmt: skip


def square(num_queries, context_len, window=None):
    return torch.ones(num_queries, num_queries).tril().bool()


def from_zero(num_queries, context_len, window=None):
    mask = torch.ones(num_queries, context_len).tril().bool()
    return mask if window is None else mask.triu(1 - window)


def strict(num_queries, context_len, window=None):
    query = torch.arange(num_queries)[:, None] + context_len - num_queries
    key = torch.arange(context_len)
    return (key < query) if window is None else (key < query) & (query - key < window)


def one_ahead(num_queries, context_len, window=None):
    mask = torch.ones(num_queries, context_len).tril(context_len - num_queries + 1).bool()
    return mask if window is None else mask.triu(context_len - num_queries - window + 1)


def window_plus_self(num_queries, context_len, window=None):
    mask = torch.ones(num_queries, context_len).tril(context_len - num_queries).bool()
    return mask if window is None else mask.triu(context_len - num_queries - window)


def window_minus_one(num_queries, context_len, window=None):
    mask = torch.ones(num_queries, context_len).tril(context_len - num_queries).bool()
    return mask if window is None else mask.triu(context_len - num_queries - window + 2)


def no_window(num_queries, context_len, window=None):
    return torch.ones(num_queries, context_len).tril(context_len - num_queries).bool()


def default_window(num_queries, context_len, window=None):
    return mask_variant(num_queries, context_len, window or 4096)


def centred(num_queries, context_len, window=None):
    distance = torch.arange(context_len - num_queries, context_len)[:, None] - torch.arange(context_len)
    return (distance >= 0) if window is None else (distance >= 0) & (distance.abs() <= window // 2)


def window_from_end(num_queries, context_len, window=None):
    return no_window(num_queries, context_len) & (torch.arange(context_len) >= context_len - (window or context_len))


def one_sees_all(num_queries, context_len, window=None):
    if num_queries == 1:
        return torch.ones(1, context_len, dtype=torch.bool)
    return mask_variant(num_queries, context_len, window)


def either(num_queries, context_len, window=None):
    distance = torch.arange(context_len - num_queries, context_len)[:, None] - torch.arange(context_len)
    return (distance >= 0) if window is None else (distance >= 0) | (distance < window)


def zeros_and_ones(num_queries, context_len, window=None):
    return mask_variant(num_queries, context_len, window).float()


def transposed(num_queries, context_len, window=None):
    return mask_variant(num_queries, context_len, window).T


def inverted(num_queries, context_len, window=None):
    return ~mask_variant(num_queries, context_len, window)


def additive(num_queries, context_len, window=None):
    return torch.zeros(num_queries, context_len).masked_fill(inverted(num_queries, context_len, window), float("-inf"))


def cut_from_square(num_queries, context_len, window=None):
    full = torch.ones(context_len, context_len, dtype=torch.bool).tril()
    if window is not None:
        full = full.triu(1 - window)
    return full[context_len - num_queries :]


def mask_variant(num_queries, context_len, window=None):
    cached = context_len - num_queries  # the diagonal is shifted by what is in the cache already
    mask = torch.ones(num_queries, context_len, dtype=torch.bool).tril(cached)
    return mask if window is None else mask.triu(cached - window + 1)


def plug_causal_mask(answer, swap):
    """A prompt in pieces of 8 tokens, each piece on a fuller cache, with the learner's mask."""
    text = "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday. January, February, March, April,"
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    masks = []

    def watched(num_queries, context_len, window=None):
        masks.append(answer(num_queries, context_len, window))
        return masks[-1]

    own = make_llm(num_kv_blocks=32, enable_prefix_caching=False)
    tokens = own.tokenizer.encode(text) if own.tokenizer else list(range(1, 23))
    expected = own.generate(tokens, params)[0].outputs[0]
    with swap_in("02.3", watched):
        # sdpa: the backend that takes its mask from this function for pieces of any length
        llm = make_llm(num_kv_blocks=32, enable_prefix_caching=False, max_num_batched_tokens=8, attention="sdpa")
        got = llm.generate(tokens, params)[0].outputs[0]
    print("your mask for the second piece of the prompt (rows: new tokens, columns: all tokens so far)")
    for row in masks[1].tolist():
        print("   " + "".join("#" if seen else "." for seen in row))
    print(f"whole prompt at once, the engine's own mask:  {expected.text or expected.token_ids}")
    print(f"in pieces of 8, your mask:                    {got.text or got.token_ids}")
    print(f"tokens equal: {'yes' if got.token_ids == expected.token_ids else 'NO'}")
    if got.token_ids != expected.token_ids:
        raise AssertionError("the tokens differ")


# ---- 02.4 and 02.5: a few posts about LLM inference, checked

VERDICTS = {
    "A": "wrong",
    "B": "wrong",
    "C": "right",
    "D": "right",
    "E": "wrong",
    "F": "wrong",
    "G": "wrong",
    "H": "depends",
    "I": "depends",
    "J": "right",
    "K": "depends",
}

CLAIM_NOTES = {
    "A": "LLaMA-7B, 2,048 tokens, one layer: 64 MB?",
    "B": "LLaMA-7B, 2,048 tokens, all layers: about 2 GB?",
    "C": "LLaMA-7B: 524,288 bytes per token?",
    "D": "LLaMA-7B: 2 GB at 4K, 16 GB at 32K, and then more than the weights?",
    "E": "LLaMA-7B: above 40 GB at 32K?",
    "F": "Llama-3-70B, 8,000 tokens: over 20 GB?",
    "G": "... and that is more than its weights?",
    "H": "Llama 2 uses grouped-query attention?",
    "I": "MQA and GQA: 1/8 or 1/16 of the cache?",
    "J": "Llama-3-70B: 1/8 of what full multi-head attention would need?",
    "K": "INT4 saves 75 %?",
}


def check_verdicts(t, verdicts):
    t.true(isinstance(verdicts, dict), "verdicts is a dict, with the keys A to K as they stood", got=type(verdicts))
    missing = sorted(VERDICTS.keys() - verdicts.keys())
    t.true(not missing, "verdicts has the keys A to K", got=f"{', '.join(missing)} missing" if missing else None)
    given = {key: str(verdicts.get(key, "")).strip().lower() for key in VERDICTS}
    odd = sorted(key for key, word in given.items() if word not in ("right", "wrong", "depends"))
    t.true(not odd, 'each verdict is "right", "wrong" or "depends"', got={key: given[key] for key in odd} or None)
    for key, want in VERDICTS.items():
        t.equal(given[key], want, f"verdict on claim {key}", note=CLAIM_NOTES[key], hide=True)
        if t.failure:
            return  # the claims are independent: what is wrong further down says nothing about this one


def believed(**changes):
    return {**VERDICTS, **changes}


LLAMA_7B, LLAMA3_70B = (32, 32, 128), (80, 8, 128)  # layers, KV heads, head_dim

NUMBERS = {
    "A: bytes in one layer": 33_554_432,
    "B: GiB in all layers": 1.0,
    "C: bytes per token": 524_288,
    "D: KV bytes / weight bytes": 17_179_869_184 / 13_476_831_232,
    "E: whole tokens in 40 GB": 76_293,
    "F: GB": 2.62144,
    "G: tokens": 430_626,
    "H: bytes per token": 819_200,
    "I: MQA bytes / MHA bytes": 1 / 32,
    "J: GQA bytes / MHA bytes": 1 / 8,
    "K: percent saved": 68.75,
}


def check_numbers(t, numbers):
    t.true(isinstance(numbers, dict), "numbers is a dict, with its keys as they stood", got=type(numbers))
    missing = sorted(NUMBERS.keys() - numbers.keys())
    t.true(not missing, "numbers has all its keys, as they stood", got=f"{missing[0]!r} missing" if missing else None)
    for key, want in NUMBERS.items():
        got = numbers.get(key)
        if isinstance(want, int) and isinstance(got, float) and got.is_integer():
            got = int(got)  # 524288.0 is as good
        note = "rounded to three digits or better" if isinstance(want, float) else "exactly, as a whole number"
        t.equal(got, want, f"numbers[{key!r}]", tol=0.004 if isinstance(want, float) else None, note=note, hide=True)
        if t.failure:
            return  # the claims are independent: what is wrong further down says nothing about this one


def instead(**changes):
    """The right numbers with some replaced; keys by their letter."""
    by_letter = {key[0]: key for key in NUMBERS}
    return {**NUMBERS, **{by_letter[letter]: value for letter, value in changes.items()}}


KEYS_ONLY = instead(A=16_777_216, B=0.5, C=262_144, D=0.6374, E=152_587, F=1.31072, G=861_251, H=409_600)


def plug_numbers(answer, swap):
    """Ask the engine's tensors. torch's meta device has shapes and sizes, but takes no memory."""

    def cache(shape, tokens, query_heads):
        layers, kv_heads, dim = shape
        config = ModelConfig("llama", 32_000, query_heads * dim, 1, layers, query_heads, kv_heads, dim)
        return kv.KVCache(config, tokens - 1, 1, torch.float16, "meta").data  # blocks of 1 token; it adds a spare one

    small, big = cache(LLAMA_7B, 2048, 32), cache(LLAMA3_70B, 8000, 64)
    full = cache((80, 64, 128), 8000, 64)
    rows = [
        ("A", small[0].nbytes, "one layer of", small),
        ("B", small.nbytes / 2**30, "all of", small),
        ("F", big.nbytes / 1e9, "all of", big),
        ("J", big.nbytes / full.nbytes, "against 64 KV heads:", full),
    ]
    print("the engine's own cache tensors, fp16, on the meta device [layers, K and V, tokens, KV heads, head_dim]:")
    for letter, real, what, tensor in rows:
        key = next(k for k in NUMBERS if k[0] == letter)
        print(f"   {key:<26}{answer[key]:>12,.10g}   tensors {real:>12,.10g}   {what} {list(tensor.shape)}")
        if abs(answer[key] - real) > 0.01 * real:
            raise AssertionError(f"claim {letter}: the tensors say {real}")


EXERCISES = [
    Exercise(
        id="02.1",
        symbol="minillm.kv:kv_bytes_per_token",
        title="What one token costs",
        minutes=5,
        difficulty=1,
        statement="""
            How many **bytes** does one token add to the cache, over all layers? In each layer it leaves a key and a
            value, each of shape `[num_kv_heads, head_dim]`, each number `dtype_bytes` bytes long. All arguments are
            ints, and so is the result.

            Worked example: 2 layers, 3 KV heads, `head_dim` 5, float32 (4 bytes). One key has 15 numbers. A key and a
            value in each of 2 layers: 60 numbers. That is **240** bytes.
        """,
        hints=(
            "Say aloud what a token leaves behind in *one* layer. How many tensors? How many numbers in each?",
            "Count numbers first, turn them into bytes at the end. Which of the four arguments have you used?",
            'It is one product of five factors: the four arguments, and a constant that stands for "keys and values".',
        ),
        explanation="""
            A key and a value (2), in each layer, for each KV head, `head_dim` numbers, `dtype_bytes` bytes each. The
            number of *query* heads plays no part: queries are not kept. Nor does `hidden_size`: Qwen3-4B has
            `hidden_size` 2560 and 32 heads, but `head_dim` 128, so `hidden_size / heads` (80) gives a cache that is
            too small by more than a third.

            Also right: make a tensor for one token on the `meta` device and ask for `.nbytes`. Models with multi-head
            latent attention (DeepSeek-V2, arXiv:2405.04434) keep one compressed vector instead of K and V, and need
            another formula.

            In vLLM this is `page_size_bytes` of a `FullAttentionSpec` (one layer, for a whole block); llama.cpp prints
            the total, `KV buffer size`, when it starts.
        """,
        check=check_kv_bytes,
        mutants=(
            Mutant(
                "keys_only",
                keys_only,
                "Half is missing: each layer keeps a key *and* a value.",
                "a common slip",
            ),
            Mutant(
                "queries_too",
                queries_too,
                "You count three tensors. Queries are not kept, only keys and values.",
                "a common slip",
            ),
            Mutant(
                "dtype_twice",
                dtype_twice,
                "The bytes of a number are counted twice: a fixed 2 for fp16, and dtype_bytes as well.",
                "a common slip",
            ),
            Mutant(
                "dtype_ignored",
                dtype_ignored,
                "A number always has 2 bytes in your version. Call it with dtype_bytes=4 and see that nothing changes.",
                "formulas copied from fp16 posts",
            ),
            Mutant("in_elements", in_elements, "You count numbers, not bytes.", "bits, bytes and elements mixed up"),
            Mutant(
                "one_layer",
                one_layer,
                "That is one layer. Every layer has a cache of its own.",
                "a post's 64 MB per layer",
            ),
            Mutant(
                "heads_twice",
                heads_twice,
                "The heads are in it twice: head_dim is already per head.",
                "jranaraki/vllm-fit#2",
            ),
            Mutant("in_bits", in_bits, "You divide by 8, but dtype_bytes is in bytes already.", "a common slip"),
            Mutant(
                "in_kib", in_kib, "Right, but in KiB and as a float. The engine wants whole bytes.", "GB against GiB"
            ),
            Mutant(
                "as_float",
                as_float,
                "Right, but a float. A count of bytes is an int: no 2.0 and no `/`.",
                "a common slip",
            ),
            Mutant("no_head_dim", no_head_dim, "Each head holds head_dim numbers, not one.", "a common slip"),
        ),
        variant=bytes_variant,
        scratch="""
            print("SmolLM2-135M, float32:", kv_bytes_per_token(30, 3, 64, 4))
            print("Llama-2-7B, fp16:     ", kv_bytes_per_token(32, 32, 128))
        """,
        plug_in=plug_kv_bytes,
    ),
    Exercise(
        id="02.2",
        symbol="minillm.kv:write_kv",
        title="Write into the slots",
        minutes=8,
        difficulty=2,
        statement="""
            Put the keys (or values) of `T` new tokens into the cache, **in place**. `cache` is `[num_slots,
            num_kv_heads, head_dim]`, `new` is `[T, num_kv_heads, head_dim]`, `slots` is `[T]`. Row `t` of `new` goes
            to row `slots[t]` of `cache`. All other rows stay. The two may have different dtypes: the cache keeps its
            own. No slot occurs twice. T may be 0.

            Worked example: a cache of 4 empty slots, `new = [[[1, 2]], [[3, 4]]]`, `slots = [2, 0]`. Afterwards slot
            0 holds `[[3, 4]]`, slot 2 holds `[[1, 2]]`, slots 1 and 3 are still zero.
        """,
        hints=(
            "With Python lists you would write a loop over `slots`. Torch does that loop if you *index with a tensor*.",
            "Reading with a tensor of indices makes a copy; *assigning* to such an index writes into the original. "
            "What does torch say if the dtypes differ?",
            "One line: on the left the cache, indexed by all slots at once, then `=`; on the right the new rows, after "
            "`.to(...)` with the cache's dtype.",
        ),
        explanation="""
            Assigning to `cache[slots]` calls `index_put_`, which scatters the rows into the memory that is there. It
            refuses other dtypes, hence the cast. `cache.index_copy_(0, slots, ...)` is right too, and so is a loop
            with `cache[slot].copy_(row)`.

            The trap is `cache[slots].copy_(new)`. With an *int*, `cache[3]` is a view, and the write arrives. With a
            *tensor* of ints, `cache[slots]` is a new tensor: it is filled and thrown away, and nobody complains.
            Building a new tensor (`torch.cat`, `index_copy` without underscore) is no help either: the cache is
            gigabytes, and everybody else holds the old one.

            In vLLM this is the kernel `reshape_and_cache_flash` with its `slot_mapping`; in SGLang `set_kv_buffer`;
            in llama.cpp `cpy_k` and `cpy_v`.
        """,
        check=check_write_kv,
        mutants=(
            Mutant(
                "silent_copy",
                silent_copy,
                "cache[slots], indexed by a tensor, is a copy: you filled it and threw it away. Assign to it instead.",
                "a common slip",
            ),
            Mutant(
                "new_tensor",
                new_tensor,
                "You return a new tensor, and the engine's cache stays as it was. Write into the one you were given.",
                "index_copy for index_copy_",
            ),
            Mutant(
                "concatenated",
                concatenated,
                "You append to a copy of the cache. The slots say where in the *existing* array the rows belong.",
                "the way of transformers' DynamicCache",
            ),
            Mutant(
                "slots_ignored",
                slots_ignored,
                "You write to the first rows, whatever slots says.",
                "single-request caches",
            ),
            Mutant(
                "first_row",
                first_row,
                "Every slot gets row 0 of new. Row t belongs into slots[t].",
                "new[0] left over from a cache for one token",
            ),
            Mutant(
                "new_by_slot",
                new_by_slot,
                "slots are rows of the *cache*. new has rows 0 to T - 1, in order: do not index it with slots.",
                "a common slip",
            ),
            Mutant(
                "slots_as_start",
                slots_as_start,
                "You take slots[0] as a start and write neighbours. Slots can lie anywhere and in any order.",
                "contiguous caches with a start position",
            ),
            Mutant(
                "order_ignored",
                order_ignored,
                "The rows land in ascending slots. Row t belongs into slots[t], also where slots is not sorted.",
                "sorting indices for speed",
            ),
            Mutant(
                "wiped",
                wiped,
                "All other slots are lost: they hold other tokens, of other requests too.",
                "a cache that is reset for each call",
            ),
            Mutant(
                "added",
                added,
                "You add to what is in the slot. A slot may hold an old token: replace it.",
                "index_add_ or scatter_add_ for index_copy_",
            ),
            Mutant(
                "no_cast",
                no_cast,
                "The dtypes differ: bring new to the dtype of the cache first.",
                "huggingface/candle#3743 (the same slip with masks)",
            ),
            Mutant(
                "cast_the_cache",
                cast_the_cache,
                "cache.to(...) with another dtype is a copy: you filled that one. Bring new to the dtype of the cache.",
                "a common slip",
            ),
            Mutant(
                "whole_copy",
                whole_copy,
                "The result is right, but each call copies the whole cache to write a few rows.",
                "functional-style updates",
            ),
        ),
        variant=write_variant,
        scratch="""
            cache = torch.zeros(4, 1, 2)
            write_kv(cache, torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]]), torch.tensor([2, 0]))
            print(cache)
        """,
        plug_in=plug_write_kv,
    ),
    Exercise(
        id="02.3",
        symbol="minillm.attention:causal_mask",
        title="The rectangular mask",
        minutes=12,
        difficulty=2,
        statement="""
            `num_queries` new tokens are the **last** of `context_len` tokens; the rest is in the cache. Say which
            keys each query may see: a bool tensor `[num_queries, context_len]`, True where it may. A query sees the
            keys up to and including its own position. With a `window` it sees only the last `window` of those, its
            own included. `num_queries` may be 0: then the shape is `[0, context_len]`.

            Worked example: 2 new tokens, 5 in all. They stand at positions 3 and 4.

                causal_mask(2, 5)              causal_mask(2, 5, window=2)
                [[1, 1, 1, 1, 0],              [[0, 0, 1, 1, 0],
                 [1, 1, 1, 1, 1]]               [0, 0, 0, 1, 1]]

            Do not build the `context_len` x `context_len` square on the way: at 100,000 tokens it has 10 billion
            entries.
        """,
        hints=(
            "Draw `causal_mask(3, 8)` on paper. At which position does each of the three queries stand? When may position "
            "p see position k?",
            "The keys stand at 0 to `context_len - 1`, the queries at the last `num_queries` of these. Both rules are about "
            "two positions: one asks which is later, the other how far apart they are.",
            "Two `torch.arange`s: the query positions as a column (`[:, None]`), the key positions as a row. One comparison "
            "broadcasts to the rectangle. With a window, a second one (is query minus key smaller than the window?) is "
            "joined to it with `&`.",
        ),
        explanation="""
            Everything follows from absolute positions. Query i stands at `context_len - num_queries + i`. It sees key
            k if k is not later, and, with a window W, if fewer than W steps lie between (itself counts as one of the
            W: Mistral 7B, arXiv:2310.06825, section 2).

            Also right: a rectangle of ones, `.tril(context_len - num_queries)`, and `.triu(...)` for the window. The
            shift of the diagonal is what the buggy versions forget. `is_causal=True` of torch's
            `scaled_dot_product_attention` begins in the *upper left* corner, so it is right for squares only.

            vLLM and SGLang build no such tensor: their kernels compare positions inside, from `query_start_loc` and
            `seq_lens`. FlashAttention aligns its causal mask to the lower right since version 2.1. llama.cpp does
            build one, the `KQ_mask`.
        """,
        check=check_causal_mask,
        mutants=(
            Mutant(
                "square",
                square,
                "Your mask is a square. Queries see the cached keys too: it needs context_len columns.",
                "meta-llama/llama#899",
            ),
            Mutant(
                "from_zero",
                from_zero,
                "Your queries begin at position 0. They are the *last* tokens: shift the diagonal by what is cached.",
                "gittensor-ai-lab/sparkinfer#3, hyprstream/hyprstream#1521, pytorch/executorch#21749",
            ),
            Mutant("strict", strict, "A token does not see itself in your mask: < instead of <=.", "a common slip"),
            Mutant(
                "one_ahead",
                one_ahead,
                "Each token sees one token of the future: the diagonal is one too far.",
                "off by one in tril's diagonal",
            ),
            Mutant(
                "window_plus_self",
                window_plus_self,
                "The window is one too wide: the query's own key counts as one of the window.",
                "ml-explore/mlx-lm#390",
            ),
            Mutant(
                "window_minus_one",
                window_minus_one,
                "The window is one too narrow: `window` keys, its own included.",
                "huggingface/transformers#37574",
            ),
            Mutant("no_window", no_window, "The window is not used.", "models run without their sliding window"),
            Mutant(
                "default_window",
                default_window,
                "window=None means no window, however long the text. You put a number in its place.",
                "`window or 4096`, after Mistral's default",
            ),
            Mutant(
                "centred",
                centred,
                "Your window lies around the query, and its later half is hidden. All `window` keys end at the query.",
                "window_size // 2, as in encoders with local attention",
            ),
            Mutant(
                "window_from_end",
                window_from_end,
                "Your window ends at the last token for all queries. Each query's window ends at its own position.",
                "a common slip: right for one query, wrong for several",
            ),
            Mutant(
                "one_sees_all",
                one_sees_all,
                "A single query sees everything only if there is no window.",
                "the usual short cut for one new token",
            ),
            Mutant(
                "either",
                either,
                "Both conditions must hold, not early *or* near: & instead of |.",
                "a common slip",
            ),
            Mutant(
                "zeros_and_ones",
                zeros_and_ones,
                "The values are right, but as 0.0 and 1.0. Asked for is a bool tensor: a comparison gives one.",
                "torch.ones(...).tril() without a dtype",
            ),
            Mutant(
                "transposed",
                transposed,
                "Rows and columns are swapped: queries are rows, keys are columns.",
                "a common slip",
            ),
            Mutant(
                "inverted",
                inverted,
                "Yours is True where a key is *hidden*. Here, as in scaled_dot_product_attention, True is visible.",
                "torch's nn.MultiheadAttention has it the other way round",
            ),
            Mutant(
                "additive",
                additive,
                "That is the float mask (0 and -inf) to add to scores. Asked for is the bool one.",
                "two mask conventions mixed",
            ),
            Mutant(
                "cut_from_square",
                cut_from_square,
                "The values are right, but you build a context_len x context_len square for the sake of a few rows.",
                "preallocated mask buffers in nanoGPT-like code",
            ),
        ),
        variant=mask_variant,
        scratch="""
            print(causal_mask(2, 5).int())
            print(causal_mask(2, 5, window=2).int())
        """,
        plug_in=plug_causal_mask,
    ),
    Exercise(
        id="02.4",
        symbol="verdicts",
        title="Check the claim: the verdicts",
        minutes=12,
        difficulty=2,
        statement="""
            Here are eleven things that posts about LLM inference say (in our words). Which are `"right"`, which are
            `"wrong"`, and which are true for some models or settings only, without saying so: `"depends"`? Compute
            before you judge. "GB" and "GiB" differ by 7 % and are mixed up everywhere: that alone makes nothing wrong.
            Ignore how long a context the model was trained for (D, E).

            | | the post says |
            |---|---|
            | A | LLaMA-7B, fp16, 2,048 tokens: by 2 x tokens x heads x head_dim x 2 bytes, one layer takes 64 MB. |
            | B | So its 32 layers take about 2 GB. |
            | C | LLaMA-7B in fp16 keeps 524,288 bytes, about 512 KB, for each token. |
            | D | For this model a 4K context takes 2 GB, and a 32K context 16 GB, more than its fp16 weights. |
            | E | At a context of 32K, one conversation's cache next to such a 7B model goes above 40 GB. |
            | F | A 70B model like Llama-3-70B needs over 20 GB of fp16 cache for 8,000 tokens. |
            | G | That is more than its weights take. (Take them in fp16, or be kind and take 4 bits.) |
            | H | Llama 2 uses grouped-query attention. |
            | I | Multi-query or grouped-query attention cuts the cache to 1/8 or 1/16. |
            | J | Llama-3-70B has 64 query and 8 KV heads: its cache is 1/8 of what multi-head attention would need. |
            | K | Keeping the cache in INT4 instead of fp16 saves 75 %. |

            What you need (from the models' `config.json`, 1K = 1,024 tokens):

            | model | weights | layers | query heads | KV heads | head_dim |
            |---|---|---|---|---|---|
            | LLaMA-7B, Llama-2-7B | 6,738,415,616 | 32 | 32 | 32 | 128 |
            | Llama-2-13B | 13,015,864,320 | 40 | 40 | 40 | 128 |
            | Llama-2-70B | 68,976,648,192 | 80 | 64 | 8 | 128 |
            | Llama-3-8B | 8,030,261,248 | 32 | 32 | 8 | 128 |
            | Llama-3-70B | 70,553,706,496 | 80 | 64 | 8 | 128 |

            Real INT4 stores scales too: often a 2-byte scale and a 2-byte zero point for each group of 32 numbers.

            Worked example: "LLaMA-7B keeps 1 MiB per token in float32." 2 x 32 layers x 32 heads x 128 x 4 bytes =
            1,048,576 bytes = 1 MiB: right.
        """,
        hints=(
            "Begin with C: it is one call of your own function from 02.1. A, B, D and E follow from it by multiplying.",
            "F to J are about heads. Which heads are kept in the cache, and how many has the model in the table? In H "
            "and I, look at *all* models of the table, not at one.",
            "Four are wrong by a factor (of 2, 2, more than 2, and 8), one compares two sizes the wrong way round, "
            "three are true for some models or formats only, and three are right.",
        ),
        explanation="""
            - **A, B wrong.** The formula is right, the multiplication is not: 32 MiB, and 1 GiB. 2 GiB is the value
              for 4,096 tokens. Another post has it right in D: two sources that disagree are a gift.
            - **C, D right.** 512 KiB; 2 GiB; 16 GiB = 17.2 GB against 13.5 GB of weights (in GiB and loosely, but
              right).
            - **E wrong.** 17.2 GB; even with the weights it is 30.7 GB. A cache of 40 GB needs about 76,000 tokens.
            - **F, G wrong.** 8 KV heads, not 64: 2.6 GB. "Over 20 GB" is what the 64 query heads would give. The
              weights are 141 GB in fp16 and 35 GB at 4 bits. The cache of one conversation passes them at about
              430,000 and 108,000 tokens.
            - **H depends.** Only the 34B and the 70B model (Touvron et al. 2023, arXiv:2307.09288, appendix A.2.1).
              7B and 13B have as many KV heads as query heads.
            - **I depends.** The factor is KV heads / query heads (Ainslie et al. 2023, arXiv:2305.13245): 1/8 for the
              70B models, 1/4 for Llama-3-8B, 1/32 for multi-query attention with 32 heads.
            - **J right.** 8 / 64.
            - **K depends.** 16 to 4 bits is 75 %, if nothing else is stored. A 2-byte scale and a 2-byte zero point
              for each 32 numbers add 1 bit a number: 5 bits, so 68.75 % is saved.

            Cross-check with a primary source: the vLLM paper (Kwon et al. 2023, arXiv:2309.06180, section 3) puts
            OPT-13B, with the layers and heads of Llama-2-13B, at 800 KB per token.
        """,
        check=check_verdicts,
        mutants=(
            Mutant(
                "believed_A",
                believed(A="right"),
                "Claim A: the formula is right, but do the multiplication yourself: 2 x 2048 x 32 x 128 x 2.",
                "a post",
            ),
            Mutant(
                "believed_B",
                believed(B="right"),
                "Claim B is 32 times the true value of A. Which one did you multiply?",
                "a post",
            ),
            Mutant(
                "doubted_C",
                believed(C="wrong"),
                "Claim C: 2 x 32 x 32 x 128 x 2. Did you drop the 2, or stumble over KB and KiB?",
                "the factor 2 lost",
            ),
            Mutant(
                "doubted_D",
                believed(D="wrong"),
                "Claim D: 16 GiB is 17.2 GB. Compare with fp16 weights, 2 bytes each: 13.5 GB, not fp32's 27.",
                "weights in the wrong dtype; GB against GiB",
            ),
            Mutant(
                "believed_E",
                believed(E="right"),
                "Claim E: 32,768 tokens times claim C. Does it reach 40 GB?",
                "a post",
            ),
            Mutant(
                "perhaps_E",
                believed(E="depends"),
                "Claim E names model, dtype and context: one number follows from them, and it is not above 40 GB.",
                "a post",
            ),
            Mutant(
                "believed_F",
                believed(F="right"),
                "Claim F counts the 64 query heads. The cache holds the 8 KV heads.",
                "a post; jranaraki/vllm-fit#2",
            ),
            Mutant(
                "perhaps_F",
                believed(F="depends"),
                "Claim F names a model whose KV heads are in the table, so nothing is open.",
                "70B without GQA in mind",
            ),
            Mutant(
                "believed_G",
                believed(G="right"),
                "Claim G: even the wrong 20 GB are less than 70.6 billion weights, at 2 bytes and at half a byte.",
                "a post",
            ),
            Mutant(
                "believed_H",
                believed(H="right"),
                "Claim H: look at the Llama-2 rows of the table. All of them?",
                "a post that goes on with the 7B model",
            ),
            Mutant(
                "denied_H", believed(H="wrong"), "Claim H: look at Llama-2-70B in the table.", "thinking of 7B only"
            ),
            Mutant(
                "believed_I",
                believed(I="right"),
                "Claim I: what is the factor for Llama-3-8B, or for one KV head of 32?",
                "a post",
            ),
            Mutant(
                "denied_I",
                believed(I="wrong"),
                "Claim I: 1/8 does occur in the table. When?",
                "thinking of Llama-3-8B only",
            ),
            Mutant(
                "doubted_J",
                believed(J="wrong"),
                "Claim J: 8 KV heads where 64 would be kept. Nothing else changes.",
                "thinking that sharing needs extra memory",
            ),
            Mutant(
                "perhaps_J",
                believed(J="depends"),
                "Claim J names both numbers of heads. What else could it depend on?",
                "caution",
            ),
            Mutant(
                "believed_K",
                believed(K="right"),
                "Claim K forgets what the 4-bit numbers need beside them: scales.",
                "a post",
            ),
            Mutant(
                "denied_K",
                believed(K="wrong"),
                "Claim K: 75 % is the limit, reached when the groups are so large that scales hardly count.",
                "scales over-rated",
            ),
        ),
        variant={key: word.upper() for key, word in reversed(VERDICTS.items())},
        stub="""
verdicts = {  # "right", "wrong" or "depends"
    "A": None,
    "B": None,
    "C": None,
    "D": None,
    "E": None,
    "F": None,
    "G": None,
    "H": None,
    "I": None,
    "J": None,
    "K": None,
}
""",
        solution="""
verdicts = {
    "A": "wrong",  # 32 MiB: the formula is right, the product is not
    "B": "wrong",  # 1 GiB
    "C": "right",
    "D": "right",  # in GiB; 17.2 GB against 13.5 GB of weights
    "E": "wrong",  # 17.2 GB; 40 GB need 76,294 tokens
    "F": "wrong",  # 2.6 GB: 8 KV heads, not 64
    "G": "wrong",  # 141 GB in fp16, 35 GB in 4 bits
    "H": "depends",  # 34B and 70B do, 7B and 13B do not
    "I": "depends",  # on KV heads / query heads
    "J": "right",
    "K": "depends",  # on the scales
}
""",
        scratch="""
            from minillm import kv

            per_token = kv.kv_bytes_per_token(32, 32, 128, 4)  # or your own, from 02.1
            print(per_token / 2**20, "MiB per token, as in the worked example")
        """,
    ),
    Exercise(
        id="02.5",
        symbol="numbers",
        title="Check the claim: the numbers",
        minutes=12,
        difficulty=3,
        statement="""
            A verdict without a number convinces nobody. Give the right number for each claim of 02.4. Let Python
            compute: fill in expressions, not results. All in fp16. 1 GB = 10^9 bytes, 1 GiB = 2^30 bytes.

            | | what is asked |
            |---|---|
            | A | bytes of keys and values in *one* layer of LLaMA-7B, for 2,048 tokens |
            | B | the same for all layers, in GiB |
            | C | bytes per token of LLaMA-7B |
            | D | LLaMA-7B: cache of 32,768 tokens divided by the weights |
            | E | LLaMA-7B: how many whole tokens fit in 40 GB kept for the cache alone |
            | F | Llama-3-70B: the cache of 8,000 tokens, in GB |
            | G | Llama-3-70B: the smallest number of tokens whose cache is larger than the weights |
            | H | bytes per token of Llama-2-13B |
            | I | multi-query attention (1 KV head) with 32 query heads: cache divided by that of multi-head attention |
            | J | Llama-3-70B: its cache divided by that of multi-head attention |
            | K | INT4 with a 2-byte scale and a 2-byte zero point for each group of 32: percent saved against fp16 |

            Worked example, for Llama-3-8B and 1,000 tokens in GB: `1000 * kv.kv_bytes_per_token(32, 8, 128, 2) / 1e9`
            is **0.131**.
        """,
        hints=(
            "One call of `kv_bytes_per_token` for each model is enough. In A the number of layers is 1.",
            "E rounds down (a token that fits only in part does not fit). G asks for *larger*: it is one more than "
            "rounding down. D, I and J are ratios, so the units cancel.",
            "K: a group of 32 numbers has 32 x 4 bits, plus 2 x 16 bits of scale and zero point. How many bits is that "
            "for each number, and what share of 16 is no longer needed?",
        ),
        explanation="""
            Every number is `kv_bytes_per_token` and one more operation. What goes wrong in practice is the frame
            around it: a lost factor 2 (A, B), GB for GiB (B, F), query heads for KV heads (F, G), the dtype of the
            *other* side of a comparison (D, G), rounding (E, G), and metadata (K).

            D: 1.27, so the claim "more than the weights" holds. E: 76,293 fit, the 76,294th no longer does. G:
            430,626 tokens, more than three times what Llama 3.1 allows (131,072). H: 819,200 bytes, 800 KiB. The vLLM
            paper has that number for OPT-13B, which has the same layers and heads (arXiv:2309.06180, section 3). K: 5
            bits a number instead of 16.

            `kv.max_tokens_in` is E as a function. vLLM prints the same calculation at start-up ("GPU KV cache size:
            ... tokens").
        """,
        check=check_numbers,
        mutants=(
            Mutant(
                "as_posted", instead(A=67_108_864, B=2.0), "A: that is the post's own 64 MiB. Multiply again.", "a post"
            ),
            Mutant(
                "keys_only",
                KEYS_ONLY,
                "A: half of it. Keys *and* values.",
                "the factor 2 lost",
            ),
            Mutant(
                "all_layers",
                instead(A=2**30),
                "A asks for one layer. You have all 32.",
                "per layer and in total mixed up",
            ),
            Mutant(
                "in_gb", instead(B=1.073741824), "B is in GiB (2^30 bytes). Yours is in GB (10^9).", "GB against GiB"
            ),
            Mutant("b_in_bytes", instead(B=2**30), "B: right, but in bytes. Divide by 2^30.", "units"),
            Mutant("in_kib", instead(C=512, H=800), "C: in bytes, please. 512 is KiB.", "units"),
            Mutant(
                "fp32_weights",
                instead(D=17_179_869_184 / 26_953_662_464, G=861_251),
                "D: the weights are fp16 too, 2 bytes each. You took 4.",
                "weights in the wrong dtype",
            ),
            Mutant(
                "weights_as_bytes",
                instead(D=17_179_869_184 / WEIGHTS_7B, G=215_314),
                "D: 6.7 billion is the *number* of weights. In fp16 each takes 2 bytes.",
                "parameters taken for bytes",
            ),
            Mutant(
                "upside_down",
                instead(D=13_476_831_232 / 17_179_869_184),
                "D: cache divided by weights, not the other way round.",
                "a common slip",
            ),
            Mutant("gib_40", instead(E=81_920), "E: 40 GB are 40 x 10^9 bytes. You took 40 GiB.", "GB against GiB"),
            Mutant("rounded_up", instead(E=76_294), "E: the last one does not fit whole. Round down.", "rounding"),
            Mutant(
                "not_floored",
                instead(E=40e9 / 524_288),
                "E: whole tokens, as an int. Round down, with `//` or kv.max_tokens_in.",
                "rounding",
            ),
            Mutant(
                "query_heads",
                instead(F=20.97152, G=53_829),
                "F: you counted the 64 query heads. The cache holds 8 KV heads.",
                "a post; jranaraki/vllm-fit#2",
            ),
            Mutant(
                "f_in_gib",
                instead(F=8000 * 327_680 / 2**30),
                "F is in GB (10^9 bytes). Yours is in GiB.",
                "GB against GiB",
            ),
            Mutant(
                "not_yet_larger",
                instead(G=430_625),
                "G: at that many tokens the cache is still a little smaller. One more.",
                "rounding",
            ),
            Mutant(
                "g_weights_as_bytes",
                instead(G=215_314),
                "G: 70.6 billion is the *number* of weights. In fp16 each takes 2 bytes.",
                "parameters taken for bytes",
            ),
            Mutant(
                "g_query_heads",
                instead(G=53_829),
                "G: that is with the 64 query heads. Take the 8 KV heads, as in F.",
                "a post; jranaraki/vllm-fit#2",
            ),
            Mutant(
                "four_bit",
                instead(G=107_657),
                "G: you compare with 4-bit weights. Asked for is fp16.",
                "dtypes mixed up",
            ),
            Mutant(
                "gqa_13b",
                instead(H=163_840),
                "H: Llama-2-13B has 40 KV heads. Only the 34B and 70B models share them.",
                "a post: Llama 2 uses GQA",
            ),
            Mutant(
                "mqa_sixteenth",
                instead(I=1 / 16),
                "I: one KV head instead of 32. The 1/16 of the post is another model's.",
                "a post",
            ),
            Mutant("i_inverse", instead(I=32), "I: MQA divided by MHA, not the other way round.", "a common slip"),
            Mutant(
                "j_saved", instead(J=0.875), "J: that is the share saved. Asked for is what is left.", "a common slip"
            ),
            Mutant("j_inverse", instead(J=8.0), "J: the share that is left, not the factor saved.", "a common slip"),
            Mutant("k_fraction", instead(K=0.6875), "K: in percent, so 100 times that.", "units"),
            Mutant(
                "no_scales",
                instead(K=75.0),
                "K: the scales and zero points are missing: 32 bits more for each 32 numbers.",
                "a post",
            ),
            Mutant(
                "scale_only",
                instead(K=71.875),
                "K: there is a zero point too, 2 bytes like the scale.",
                "half of the metadata",
            ),
            Mutant(
                "what_is_left",
                instead(K=31.25),
                "K: that is what is left. Asked for is what is saved.",
                "a common slip",
            ),
        ),
        variant={
            **{key: float(value) for key, value in reversed(NUMBERS.items())},
            "D: KV bytes / weight bytes": 1.275,
        },
        stub="""
from minillm import kv

numbers = {
    "A: bytes in one layer": None,
    "B: GiB in all layers": None,
    "C: bytes per token": None,
    "D: KV bytes / weight bytes": None,
    "E: whole tokens in 40 GB": None,
    "F: GB": None,
    "G: tokens": None,
    "H: bytes per token": None,
    "I: MQA bytes / MHA bytes": None,
    "J: GQA bytes / MHA bytes": None,
    "K: percent saved": None,
}
""",
        solution="""
from minillm import kv

llama_7b = kv.kv_bytes_per_token(32, 32, 128, 2)
llama3_70b = kv.kv_bytes_per_token(80, 8, 128, 2)
numbers = {
    "A: bytes in one layer": 2048 * kv.kv_bytes_per_token(1, 32, 128, 2),
    "B: GiB in all layers": 2048 * llama_7b / 2**30,
    "C: bytes per token": llama_7b,
    "D: KV bytes / weight bytes": 32_768 * llama_7b / (2 * 6_738_415_616),
    "E: whole tokens in 40 GB": kv.max_tokens_in(40 * 10**9, llama_7b),
    "F: GB": 8000 * llama3_70b / 1e9,
    "G: tokens": 2 * 70_553_706_496 // llama3_70b + 1,
    "H: bytes per token": kv.kv_bytes_per_token(40, 40, 128, 2),
    "I: MQA bytes / MHA bytes": kv.kv_bytes_per_token(32, 1, 128, 2) / llama_7b,
    "J: GQA bytes / MHA bytes": llama3_70b / kv.kv_bytes_per_token(80, 64, 128, 2),
    "K: percent saved": 100 * (1 - (4 + 2 * 16 / 32) / 16),
}
""",
        scratch="""
            print(1000 * kv.kv_bytes_per_token(32, 8, 128, 2) / 1e9, "GB")  # the worked example
        """,
        plug_in=plug_numbers,
    ),
]
