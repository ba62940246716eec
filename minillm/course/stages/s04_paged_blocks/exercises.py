"""Exercises of stage 04."""

import copy
import functools
import random
from collections import OrderedDict

import torch

from minillm import attention, blocks
from minillm.course.exercise import Exercise, Mutant
from minillm.course.learn import make_llm
from minillm.course.learn import swap as swap_in
from minillm.course.source import edited
from minillm.request import SamplingParams

PROMPT = "The old lighthouse keeper climbed the stairs and"


def greedy(count):
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)


def prompt_for(llm):
    return PROMPT if llm.tokenizer else [1, 2, 3, 4, 5, 6, 7]


# ---- 04.1 blocks_needed


def check_blocks_needed(t, blocks_needed):
    t.case(blocks_needed, 9, 4, expected=3, note="one token more than two full blocks")
    t.case(blocks_needed, 8, 4, expected=2, note="an exact multiple")
    t.case(blocks_needed, 7, 4, expected=2, note="one less than a multiple")
    t.case(blocks_needed, 0, 4, expected=0, note="no tokens, no blocks")
    t.case(blocks_needed, 1, 4, expected=1, note="one token")
    t.case(blocks_needed, 5, 1, expected=5, note="blocks of one token")
    t.case(blocks_needed, 3, 64, expected=1, note="a block bigger than the text")
    for tokens, size in ((16, 16), (17, 16), (31, 16), (1000, 7), (4097, 128)):
        count = 0
        while count * size < tokens:  # the oracle: put blocks down until they suffice
            count += 1
        t.case(blocks_needed, tokens, size, expected=count)


def floor(num_tokens, block_size):
    return num_tokens // block_size


def always_one_more(num_tokens, block_size):
    return num_tokens // block_size + 1


def nearest(num_tokens, block_size):
    return round(num_tokens / block_size)


def begins_now(num_tokens, block_size):
    return num_tokens // block_size + (num_tokens % block_size == 1)


def at_least_one(num_tokens, block_size):
    return max(1, -(-num_tokens // block_size))


def a_float(num_tokens, block_size):
    return float(-(-num_tokens // block_size))


def in_slots(num_tokens, block_size):
    return -(-num_tokens // block_size) * block_size


def blocks_variant(num_tokens, block_size):
    return len(range(0, num_tokens, block_size))  # the first positions of the blocks


def plug_blocks_needed(answer, swap):
    """Generate with three block sizes, sized by the learner's function; say what is empty at the end."""
    options = {
        "num_kv_blocks": 64,
        "enable_prefix_caching": False,
        "attention": "sdpa",
    }  # numba would compile three times
    own = make_llm(**options)
    want = own.generate(prompt_for(own), greedy(12))[0].outputs[0].token_ids
    for size in (1, 7, 16):
        with swap():
            llm = make_llm(block_size=size, **options)
            request_id = llm.add_request(prompt_for(llm), greedy(12))
            request, blocks_held, tokens = llm.requests[request_id][0], 0, 0
            while not request.finish_reason:
                blocks_held, tokens = len(request.block_table), request.num_computed
                llm.step()
        same = request.output == want
        print(
            f"block size {size:>2}: {tokens} tokens in {blocks_held} blocks, {blocks_held * size - tokens} slots empty, ",
            end="",
        )
        print(f"tokens equal: {'yes' if same else 'NO'}")
        if not same:
            raise AssertionError("the tokens differ")


# ---- 04.2 slots_for


def check_slots_for(t, slots_for):
    t.case(slots_for, [5, 2], 0, 6, 4, expected=[20, 21, 22, 23, 8, 9], note="two blocks, the second partly used")
    t.case(slots_for, [5, 2], 6, 7, 4, expected=[10], note="one new token in the second block")
    t.case(slots_for, [5, 2, 0], 3, 9, 4, expected=[23, 8, 9, 10, 11, 0], note="a chunk that crosses two borders")
    t.case(slots_for, [5, 2], 4, 8, 4, expected=[8, 9, 10, 11], note="exactly one block")
    t.case(slots_for, [5, 2], 7, 7, 4, expected=[], note="no tokens")
    t.case(slots_for, [3, 1, 4], 0, 3, 1, expected=[3, 1, 4], note="blocks of one token: the table itself")
    t.case(slots_for, (6, 0), 1, 4, 3, expected=[19, 20, 0], note="a table may be a tuple")
    rng = random.Random(4)
    for size, count, start, end in ((5, 4, 3, 18), (16, 3, 15, 33), (7, 6, 20, 42)):
        table = rng.sample(range(50), count)
        memory = [slot for block in table for slot in range(block * size, block * size + size)]  # all slots, in order
        t.case(slots_for, table, start, end, size, expected=memory[start:end], note="a scrambled table")


def slots_logical(table, start, end, block_size):
    return list(range(start, end))


def slots_block_plus_position(table, start, end, block_size):
    return [table[p // block_size] * block_size + p for p in range(start, end)]


def slots_start_ignored(table, start, end, block_size):
    return [table[p // block_size] * block_size + p % block_size for p in range(end - start)]


def slots_end_included(table, start, end, block_size):
    return [
        table[p // block_size] * block_size + p % block_size
        for p in range(start, min(end + 1, len(table) * block_size))
    ]


def slots_contiguous(table, start, end, block_size):
    first = table[start // block_size] * block_size + start % block_size if start < end else 0
    return list(range(first, first + end - start))


def slots_blocks_only(table, start, end, block_size):
    return [table[p // block_size] for p in range(start, end)]


def slots_offset_restarts(table, start, end, block_size):
    return [table[p // block_size] * block_size + i % block_size for i, p in enumerate(range(start, end))]


def slots_block_not_scaled(table, start, end, block_size):
    return [table[p // block_size] + p % block_size for p in range(start, end)]


def slots_swapped(table, start, end, block_size):
    return [table[p // block_size] + (p % block_size) * block_size for p in range(start, end)]


def slots_entry_by_rest(table, start, end, block_size):
    return [table[p % block_size] * block_size + p // block_size for p in range(start, end)]


def slots_whole_blocks(table, start, end, block_size):
    used = table[start // block_size : -(-end // block_size)] if start < end else ()
    return [block * block_size + i for block in used for i in range(block_size)]


def slots_sorted(table, start, end, block_size):
    return sorted(table[p // block_size] * block_size + p % block_size for p in range(start, end))


def slots_tensor(table, start, end, block_size):
    return torch.tensor([table[p // block_size] * block_size + p % block_size for p in range(start, end)])


def slots_variant(table, start, end, block_size):
    slots, p = [], start
    while p < end:  # a run of neighbours for each block
        stop = min(end, p - p % block_size + block_size)
        first = table[p // block_size] * block_size + p % block_size
        slots += range(first, first + stop - p)
        p = stop
    return slots


def plug_slots_for(answer, swap):
    """Shuffle the free list, so that the request's blocks lie anywhere, and generate on the learner's slots."""
    seen = []

    def watched(table, start, end, block_size):
        slots = answer(table, start, end, block_size)
        seen.append((list(table), slots))
        return slots

    own = make_llm(block_size=4, num_kv_blocks=32, enable_prefix_caching=False, attention="sdpa")
    want = own.generate(prompt_for(own), greedy(12))[0].outputs[0]
    with swap_in("04.2", watched):
        llm = make_llm(block_size=4, num_kv_blocks=32, enable_prefix_caching=False, attention="sdpa")
        order = list(llm.pool.free)
        random.Random(4).shuffle(order)
        llm.pool.free = OrderedDict.fromkeys(order)
        got = llm.generate(prompt_for(llm), greedy(12))[0].outputs[0]
    print(f"blocks in order:  {want.text or want.token_ids}")
    print(f"blocks scrambled: {got.text or got.token_ids}")
    print(f"its table at the end: {seen[-1][0]}")
    print(f"slots of the prompt: {seen[0][1]}, of the last token: {seen[-1][1]}")
    print(f"tokens equal: {'yes' if got.token_ids == want.token_ids else 'NO'}")
    if got.token_ids != want.token_ids:
        raise AssertionError("the tokens differ")


# ---- 04.3 KVPool.extend


def trouble(pool, tables):
    """What KVPool.check() has to complain about; None if nothing."""
    try:
        pool.check(tables)
    except AssertionError as error:
        return str(error)
    return None


def check_extend(t, extend):
    def step(pool, table, start, end, others=(), note=""):
        """Call extend, then look at everything that must hold. The numbers of new blocks are not prescribed."""
        size, before, old = pool.block_size, list(table), [copy.copy(block.refs) for block in pool.blocks]
        free, kept = pool.num_free, [list(other) for other in others]
        last = -(-end // size)
        shared = [before[i] for i in range(len(before)) if start // size <= i < last and old[before[i]] > 1]
        call = f"extend(pool, {before}, {start}, {end}) in blocks of {size}"
        copies = t.call(extend, pool, table, start, end, note=note)
        t.true(isinstance(copies, list), "a list comes back: of (source, target), or empty", call=call, got=copies)
        told = [tuple(pair) for pair in copies or []]
        t.equal(sorted(source for source, _ in told), sorted(shared), f"the sources in {call}", note=note)
        t.equal(len(table), max(len(before), last), f"the number of blocks in the table after {call}", note=note)
        moved = [(a, b) for a, b in zip(before, table, strict=False) if a != b]
        t.equal(sorted(told), sorted(moved), f"what {call} returns, against what changed in the table", note=note)
        refs = [pool.blocks[number].refs for number in table[start // size : last]]
        t.equal(refs, [1] * len(refs), f"references of the blocks to be written after {call}", note=note)
        t.equal([list(other) for other in others], kept, f"the other tables after {call}", note=note)
        t.equal(free - pool.num_free, len(shared) + max(0, last - len(before)), f"blocks taken by {call}", note=note)
        t.equal(trouble(pool, [table, *others]), None, f"what KVPool.check() says after {call}", note=note)

    # growing, one sequence alone
    pool = blocks.KVPool(5, 4)
    table = pool.allocate(1)
    step(pool, table, 3, 4, note="the last slot of a block: nothing to take yet")
    step(pool, table, 4, 5, note="the block is full: the next token needs a new one")
    step(pool, table, 5, 6, note="room is left")
    step(pool, table, 6, 14, note="8 tokens at once, over two borders")
    pool = blocks.KVPool(6, 1)
    table = []
    step(pool, table, 0, 2, note="blocks of one token, an empty table")
    step(pool, table, 2, 3, note="blocks of one token")

    # a fork: two sequences, one prompt of 6 tokens
    pool = blocks.KVPool(6, 4)
    a = pool.allocate(2)
    pool.share(a)
    b = list(a)
    step(pool, a, 6, 7, [b], note="the first writer gets a copy of the half-full block; the full one stays shared")
    step(pool, b, 6, 7, [a], note="the second is alone on the old block now: no copy")
    step(pool, a, 7, 9, [b], note="one slot left, then a new block")

    # which blocks are looked at
    pool = blocks.KVPool(9, 4)
    a = pool.allocate(2)
    pool.share(a)
    step(pool, a, 8, 9, [list(a)], note="shared, but full: it is only read, so it stays shared")
    pool = blocks.KVPool(9, 4)
    a = pool.allocate(4)
    pool.share(a)
    step(pool, a, 5, 11, [list(a)], note="a chunk over two shared blocks; the first and the last are not touched")
    pool = blocks.KVPool(9, 4)
    a = pool.allocate(3)
    pool.share(a)
    step(pool, a, 6, 8, [list(a)], note="writing ends where block 1 ends: block 2 is shared too, but not touched")
    pool = blocks.KVPool(9, 4)
    a = pool.allocate(3)
    step(pool, a, 2, 5, note="the table is longer than needed: blocks were taken for the whole prompt before")
    pool = blocks.KVPool(9, 3)
    a = pool.allocate(2)
    pool.share(a)
    pool.share(a)
    step(pool, a, 4, 10, [list(a), list(a)], note="three sequences share; a copy and two new blocks")

    # too few blocks
    pool = blocks.KVPool(5, 4)
    a = pool.allocate(2)
    pool.share(a)
    b, cached = list(a), pool.allocate(1)
    pool.publish(cached, [], [1, 2, 3, 4], 4)
    pool.release(cached)
    rest = pool.allocate(2)  # free is only the block that is still findable
    refs = [block.refs for block in pool.blocks]
    for table, start, end in ((a, 6, 9), (rest, 0, 24)):
        before = list(table)
        call = f"extend(pool, {before}, {start}, {end}) with one block free"
        copies = t.call(extend, pool, table, start, end, note="more blocks are needed than are free")
        t.equal(copies, None, call, note="too few blocks: return None")
        t.equal(table, before, f"the table after {call}", note="too few blocks: nothing changes")
        t.equal([block.refs for block in pool.blocks], refs, f"all references after {call}")
        t.equal(pool.match([1, 2, 3, 4, 5]), cached, f"blocks found for a cached prompt after {call}")
    step(pool, a, 6, 7, [b, rest], note="exactly as many free as needed")

    # a long random story, with the contents of every slot
    rng, pool = random.Random(4), blocks.KVPool(40, 3)
    memory, live = {}, [([], [])]  # (table, the labels it must read)
    for turn in range(60):
        table, text = live[rng.randrange(len(live))]
        if len(live) < 4 and text and rng.random() < 0.2:
            pool.share(table)
            live.append((list(table), list(text)))
            continue
        if len(text) > 20 and len(live) > 1:
            pool.release(table)
            live = [pair for pair in live if pair[0] is not table]
            continue
        start, end = len(text), len(text) + rng.choice((1, 1, 1, 2, 5))
        call = f"extend(pool, {table}, {start}, {end}) in blocks of 3"
        copies = t.call(extend, pool, table, start, end, note="many sequences fork, write and leave")
        for source, target in copies or []:
            memory.update({(target, i): memory.get((source, i)) for i in range(3)})
        for p in range(start, end):
            text.append((turn, p))
            memory[table[p // 3], p % 3] = (turn, p)
        wrong = sum([memory.get((tb[p // 3], p % 3)) for p in range(len(tx))] != tx for tb, tx in live)
        t.equal(wrong, 0, f"sequences that read somebody else's tokens after {call}")
        t.equal(trouble(pool, [tb for tb, _ in live]), None, f"what KVPool.check() says after {call}")


EXTEND = "minillm.blocks:KVPool.extend"
GUARD = "    if new is None:\n        return None\n"


def extend_variant(self, table, start, end):
    size = self.block_size
    plan = []  # (place in the table, the shared block there or None), in the order of the positions
    for i in range(start // size, (end + size - 1) // size):
        if i >= len(table):
            plan.append((i, None))
        elif self.blocks[table[i]].refs > 1:
            plan.append((i, table[i]))
    if len(plan) > self.num_free:
        return None
    copies = []
    for i, old in plan:
        (fresh,) = self.allocate(1)
        if old is None:
            table.append(fresh)
        else:
            copies.append((old, fresh))
            table[i] = fresh
            self.release([old])
    return copies


def extend_no_copies(self, table, start, end):
    new = self.allocate(max(0, -(-end // self.block_size) - len(table)))
    if new is None:
        return None
    table.extend(new)
    return []


def extend_begins_now(self, table, start, end):
    size = self.block_size
    shared = [i for i in range(start // size, min(len(table), -(-end // size))) if self.blocks[table[i]].refs > 1]
    new = self.allocate(len(shared) + (end % size == 1))
    if new is None:
        return None
    copies = []
    for i in shared:
        copies.append((table[i], new[0]))
        self.release([table[i]])
        table[i] = new.pop(0)
    table.extend(new)
    return copies


def extend_piecemeal(self, table, start, end):
    """Takes block after block and stops where none is left; what it took stays taken."""
    size, copies = self.block_size, []
    for i in range(start // size, -(-end // size)):
        if i < len(table) and self.blocks[table[i]].refs == 1:
            continue
        new = self.allocate(1)
        if new is None:
            return None
        if i < len(table):
            copies.append((table[i], new[0]))
            self.release([table[i]])
            table[i] = new[0]
        else:
            table.extend(new)
    return copies


def extend_rolled_back(self, table, start, end):
    """Takes block after block and gives them back when one is missing. But taking a block makes the pool forget it."""
    size = self.block_size
    shared = [i for i in range(start // size, min(len(table), -(-end // size))) if self.blocks[table[i]].refs > 1]
    new = []
    for _ in range(len(shared) + max(0, -(-end // size) - len(table))):
        one = self.allocate(1)
        if one is None:
            self.release(new)
            return None
        new += one
    copies = []
    for i in shared:
        copies.append((table[i], new[0]))
        self.release([table[i]])
        table[i] = new.pop(0)
    table.extend(new)
    return copies


def plug_extend(answer, swap):
    """Three samples of one prompt on the learner's copy-on-write; every step is proven by the engine's own check."""
    params = SamplingParams(n=3, max_tokens=14, temperature=0.9, seed=11, ignore_eos=True)
    copies = []

    @functools.wraps(answer)
    def watched(self, table, start, end):
        told = answer(self, table, start, end)
        copies.extend(told or [])
        return told

    def run():
        llm = make_llm(block_size=6, num_kv_blocks=64, enable_prefix_caching=False, attention="sdpa")
        request_id = llm.add_request(prompt_for(llm), params)
        most = apart = 0
        while not llm.is_done(request_id):
            llm.step()
            llm.scheduler.check()
            most = max(most, int(llm.stats()["blocks_used"]))
            apart = max(apart, sum(len(r.block_table) for r in llm.scheduler.running))
        return [r.text or str(r.output) for r in llm.requests[request_id]], most, apart

    want, _, _ = run()
    with swap_in("04.3", watched):
        got, most, apart = run()
    for index, text in enumerate(got):
        print(f"sample {index}: ...{text!r}")
    print(f"copies (source, target): {copies}: all but the last writer of the half-full block got one")
    print(f"blocks used at most: {most}; three separate caches would hold {apart}")
    print(f"texts equal to the engine's own: {'yes' if got == want else 'NO'}")
    if got != want:
        raise AssertionError("the texts differ")


# ---- 04.4 paged_query


def check_paged_query(t, paged_query):
    def case(
        context_len, size, heads=6, kv_heads=2, dim=5, window=None, spare=0, loud=1.0, unused=None, note="", **more
    ):
        g, rng = t.rng(100 * context_len + size), random.Random(10 * context_len + size)
        count = -(-context_len // size)
        table = rng.sample(range(count + spare + 3), count + spare)
        slots = [table[p // size] * size + p % size for p in range(context_len)]
        visible = slots if window is None else slots[-window:]
        num_slots = (count + spare + 3) * size
        keys, values = (torch.randn(num_slots, kv_heads, dim, generator=g) for _ in range(2))  # others' tokens
        if unused is not None:
            keys.fill_(unused), values.fill_(unused)
        k, v = (torch.randn(len(visible), kv_heads, dim, generator=g) for _ in range(2))
        q = torch.randn(heads, dim, generator=g) * loud
        keys[visible], values[visible] = k, v
        scale, share = 0.3, heads // kv_heads
        want = torch.empty(heads, dim)
        for head in range(heads):  # the oracle: one head after another, in float64, on the tokens in order
            mine, theirs = k[:, head // share].double(), v[:, head // share].double()
            scores = mine @ q[head].double() * scale
            weights = (scores - scores.max()).exp()
            want[head] = (weights / weights.sum() @ theirs).float()
        note = note or f"{context_len} tokens in blocks of {size}"
        window = () if window is None else (window,)
        t.case(paged_query, q, keys, values, table, context_len, size, scale, *window, expected=want, tol=2e-5,
               note=note, **more)  # fmt: skip

    nan = float("nan")
    case(3, 4, note="less than a block: the rest of the block is not yours")
    case(4, 4, note="exactly one block")
    case(8, 4, note="exactly two blocks, not neighbours")
    case(9, 4, note="one token in the third block")
    case(1, 4, note="a single token")
    case(5, 1, note="blocks of one token")
    case(10, 3, spare=2, note="the table is longer than the context: the spare blocks are not written yet")
    case(13, 4, heads=4, kv_heads=4, dim=3, note="as many KV heads as query heads")
    case(11, 4, heads=5, kv_heads=1, dim=7, note="one KV head for all")
    case(23, 5, loud=60.0, note="large scores: exp() of them is more than a float can hold")
    case(6, 4, unused=nan, note="all slots that are not yours hold NaN: they may not even be read")
    case(14, 4, window=7, note="a window of 7 that begins in the middle of a block")
    case(16, 4, window=8, note="a window of exactly two blocks")
    case(7, 4, window=50, note="a window longer than the text")
    case(11, 4, window=1, note="window 1: only itself")
    case(18, 4, window=5, unused=nan, note="what lies before the window holds NaN: its blocks may be gone")
    case(37, 8)
    case(125, 8, heads=4, kv_heads=2, dim=3, max_elements=200,
         note="125 tokens in blocks of 8: block by block, so never a tensor with all of them")  # fmt: skip


PAGED = "minillm.attention:paged_query"


def paged_two_passes(q, keys, values, table, context_len, block_size, scale, window=None):
    """First the largest score, then the sums: the cache's keys are read twice, but nothing is corrected later."""
    share = q.shape[0] // keys.shape[1]
    first = 0 if window is None else max(0, context_len - window)

    def scores():
        for i, block in enumerate(table):
            low, high = max(first - i * block_size, 0), min(context_len - i * block_size, block_size)
            if low < high:
                part = slice(block * block_size + low, block * block_size + high)
                yield part, torch.einsum("hd,shd->hs", q, keys[part].repeat_interleave(share, dim=1)) * scale

    top = torch.stack([s.amax(dim=1) for _, s in scores()]).amax(dim=0)[:, None]
    total, mixed = torch.zeros(len(q), 1), torch.zeros_like(q)
    for part, s in scores():
        weights = (s - top).exp()
        total += weights.sum(dim=1, keepdim=True)
        mixed += torch.einsum("hs,shd->hd", weights, values[part].repeat_interleave(share, dim=1))
    return mixed / total


def paged_gathered(q, keys, values, table, context_len, block_size, scale, window=None):
    first = 0 if window is None else max(0, context_len - window)
    slots = [table[p // block_size] * block_size + p % block_size for p in range(first, context_len)]
    mask = torch.ones(1, len(slots), dtype=torch.bool)
    return attention.naive(q[None], keys[slots], values[slots], mask, scale)[0]


def paged_mean_of_blocks(q, keys, values, table, context_len, block_size, scale, window=None):
    first = 0 if window is None else max(0, context_len - window)
    outs = []
    for i in range(first // block_size, -(-context_len // block_size)):
        low, high = max(first, i * block_size), min(context_len, (i + 1) * block_size)
        part = slice(table[i] * block_size + low % block_size, table[i] * block_size + low % block_size + high - low)
        mask = torch.ones(1, high - low, dtype=torch.bool)
        outs.append(attention.naive(q[None], keys[part], values[part], mask, scale)[0])
    return torch.stack(outs).mean(dim=0)


def paged_masked(q, keys, values, table, context_len, block_size, scale, window=None):
    """Reads whole blocks and masks the scores: a weight of 0 times NaN is NaN."""
    share = q.shape[0] // keys.shape[1]
    first = 0 if window is None else max(0, context_len - window)
    total, mixed, top = torch.zeros(len(q), 1), torch.zeros_like(q), torch.full((len(q), 1), float("-inf"))
    for i in range(first // block_size, -(-context_len // block_size)):
        part = slice(table[i] * block_size, (table[i] + 1) * block_size)
        k, v = keys[part].repeat_interleave(share, dim=1), values[part].repeat_interleave(share, dim=1)
        place = torch.arange(i * block_size, (i + 1) * block_size)
        s = torch.einsum("hd,shd->hs", q, k) * scale
        s = s.masked_fill((place < first) | (place >= context_len), float("-inf"))
        new = torch.maximum(top, s.amax(dim=1, keepdim=True))
        weights, shrink = (s - new).exp(), (top - new).exp()
        total, mixed, top = total * shrink + weights.sum(1, keepdim=True), mixed * shrink, new
        mixed = mixed + torch.einsum("hs,shd->hd", weights, v)
    return mixed / total


def plug_paged_query(answer, swap):
    """The engine's `paged` backend walks through the learner's function, for every token and layer."""
    calls = []

    @functools.wraps(answer)
    def watched(q, keys, values, table, context_len, block_size, scale, window=None):
        calls.append((list(table), context_len))
        return answer(q, keys, values, table, context_len, block_size, scale, window)

    own = make_llm(num_kv_blocks=32, block_size=8, enable_prefix_caching=False, attention="sdpa")
    want = own.generate(prompt_for(own), greedy(10))[0].outputs[0]
    with swap_in("04.4", watched):
        llm = make_llm(num_kv_blocks=32, block_size=8, enable_prefix_caching=False, attention="paged")
        got = llm.generate(prompt_for(llm), greedy(10))[0].outputs[0]
    print(f"gathered copy (sdpa):    {want.text or want.token_ids}")
    print(f"your walk by the table:  {got.text or got.token_ids}")
    gathered = sum(length for _, length in calls) * own.cache.bytes_per_token // own.config.num_layers
    table, length = calls[-1]
    print(f"{len(calls)} calls: every query of the prompt and every new token, in {llm.config.num_layers} layers")
    print(f"the last one walked through {table}, {length} tokens; ", end="")
    print(f"gathering before each call would have copied {gathered / 1e6:.1f} MB in all")
    print(f"tokens equal: {'yes' if got.token_ids == want.token_ids else 'NO'}")
    if got.token_ids != want.token_ids:
        raise AssertionError("the tokens differ")


EXERCISES = [
    Exercise(
        id="04.1",
        symbol="minillm.kv:blocks_needed",
        title="How many blocks?",
        minutes=5,
        difficulty=1,
        statement="""
            The cache is handed out in blocks of `block_size` tokens. How many blocks do `num_tokens` tokens need? All
            three are ints.

            Worked example: 9 tokens in blocks of 4 need **3** blocks (4 + 4 + 1). 8 tokens need 2, and no tokens
            need 0.
        """,
        hints=(
            "Draw 9 tokens in boxes of 4. What about the last box? And for 8 tokens?",
            "Divide and round *up*. Python's `//` rounds down. Test your idea with 8 and 9, and with boxes of 1.",
            "Rounding down a negative number moves away from zero. So turn the sign, use `//`, and turn it back. Or add "
            "`block_size - 1` before you divide.",
        ),
        explanation="""
            The last block may be partly empty, so we round up. Negating twice does it in integers. Also right:
            `(a + b - 1) // b`, `divmod`, or `math.ceil(a / b)` for numbers of this size (it goes through a float,
            which is exact up to 2**53 only).

            Two wrong ideas look right in most tests. `a // b + 1` fails only for exact multiples. `a % b == 1` asks
            "does a new block *begin* with this token?", which is another question, and for blocks of one token it is
            never true.

            vLLM calls this `cdiv(num_tokens, block_size)`. SGLang, with `page_size` above 1, aligns lengths to whole
            pages. llama.cpp has no blocks: it gives out single cells.
        """,
        check=check_blocks_needed,
        mutants=(
            Mutant(
                "floor",
                floor,
                "You round down: the last, partly filled block is missing. Try 9 tokens in blocks of 4.",
                "a common slip",
            ),
            Mutant(
                "always_one_more",
                always_one_more,
                "One block too many when the tokens fill their blocks exactly. Try 8 in blocks of 4.",
                "a common slip",
            ),
            Mutant(
                "nearest",
                nearest,
                "A block with a single token in it is a block too. (round() goes to the nearest number, and loses it.)",
                "a common slip",
            ),
            Mutant(
                "begins_now",
                begins_now,
                "`% block_size == 1` asks whether a new block *begins* with this token. Try 7 tokens in blocks of 4.",
                "llm-algo-leetcode, notebook 22; nano-vllm's block manager",
            ),
            Mutant("at_least_one", at_least_one, "No tokens need no block.", "max(1, ...) as a guard"),
            Mutant("a_float", a_float, "A count of blocks is an int. Yours is a float.", "math.floor or numpy.ceil"),
            Mutant(
                "in_slots",
                in_slots,
                "That is the number of *slots* in those blocks. Blocks are asked for.",
                "aligned lengths",
            ),
        ),
        variant=blocks_variant,
        scratch="""
            for tokens in (7, 8, 9):
                print(tokens, blocks_needed(tokens, 4))
        """,
        plug_in=plug_blocks_needed,
    ),
    Exercise(
        id="04.2",
        symbol="minillm.kv:slots_for",
        title="From positions to slots",
        minutes=10,
        difficulty=1,
        statement="""
            Block *b* owns the slots `b * block_size` up to `(b + 1) * block_size - 1` of the cache. `table` lists the
            blocks of one sequence in order. Give the slots of its tokens at positions `start` to `end - 1`: a list of
            ints, in the order of the positions. The table always reaches far enough.

            Worked example, blocks of 4, `table = [5, 2]`: the first four tokens live in block 5, slots 20 to 23. The
            next live in block 2, from slot 8. So `slots_for([5, 2], 0, 6, 4)` is **[20, 21, 22, 23, 8, 9]**, and
            `slots_for([5, 2], 6, 7, 4)` is **[10]**.
        """,
        hints=(
            "Take position 6, blocks of 4, table [5, 2]. In which entry of the table is it? Which slot of that block?",
            "A position says two things: which entry of the table (divide), and how far into that block (the rest).",
            "For each position p from start to end - 1: look the block up in the table at p // block_size, multiply its "
            "number by block_size to get its first slot, and add the rest of the division.",
        ),
        explanation="""
            This is the address translation of an operating system: page number and offset, one look into the page
            table. The engine calls it once per step for each request, and `write_kv` of stage 02 writes to the slots
            that it names. Nothing else in the model knows where tokens lie.

            Also right: whole runs per block (a `range` for each), or tensors: `table[p // size] * size + p % size` with
            `p = torch.arange(start, end)`, as `attention.Layout` does for reading.

            vLLM: `slot_mapping`, computed from `block_table`. SGLang: `req_to_token` maps each position to a slot, one
            entry per *token*, and `out_cache_loc` is this list. llama.cpp: a cell index for each token.
        """,
        check=check_slots_for,
        mutants=(
            Mutant(
                "logical",
                slots_logical,
                "You return positions. Where a token lies is decided by the table.",
                "single-request caches",
            ),
            Mutant(
                "block_plus_position",
                slots_block_plus_position,
                "You add the whole position to the block's first slot. Add only its place *within* the block: p % block_size.",
                "reference/courses.md 6.6: slot = block * B + pos",
            ),
            Mutant(
                "start_ignored",
                slots_start_ignored,
                "You always begin at position 0. The chunk begins at `start`.",
                "a second chunk written over the first",
            ),
            Mutant("end_included", slots_end_included, "One slot too many: `end` is not included.", "a common slip"),
            Mutant(
                "contiguous",
                slots_contiguous,
                "You count on from the first slot. When the block ends, the next token goes to the table's next block, wherever that is.",
                "code that was right before paging",
            ),
            Mutant(
                "blocks_only",
                slots_blocks_only,
                "These are block numbers. A block has block_size slots: multiply, then add the place within it.",
                "a common slip",
            ),
            Mutant(
                "offset_restarts",
                slots_offset_restarts,
                "You count the place within the block from `start`. It depends on the absolute position: p % block_size.",
                "chunked prefill",
            ),
            Mutant(
                "not_scaled",
                slots_block_not_scaled,
                "You add to the block's *number*. Its first slot is block * block_size.",
                "a common slip",
            ),
            Mutant(
                "swapped",
                slots_swapped,
                "You multiply the offset by block_size. It is the block's number that counts block_size slots each.",
                "a common slip",
            ),
            Mutant(
                "entry_by_rest",
                slots_entry_by_rest,
                "You look up the wrong entry of the table. It is p // block_size; the rest is the place within the block.",
                "division and rest exchanged; table[p]",
            ),
            Mutant(
                "whole_blocks",
                slots_whole_blocks,
                "You return whole blocks. Only the tokens from start to end - 1 are asked for.",
                "the last block not truncated: test names in skyzh/tiny-llm",
            ),
            Mutant(
                "sorted",
                slots_sorted,
                "The slots come in the order of the *positions*. Yours are sorted, so tokens change places.",
                "sorting indices for speed",
            ),
            Mutant(
                "tensor",
                slots_tensor,
                "The right numbers, but a list of ints is asked for, not a tensor.",
                "a common slip",
            ),
        ),
        variant=slots_variant,
        scratch="""
            print(slots_for([5, 2], 0, 6, 4))
            print(slots_for([5, 2], 6, 7, 4))
        """,
        plug_in=plug_slots_for,
    ),
    Exercise(
        id="04.3",
        symbol=EXTEND,
        title="Copy on write",
        minutes=25,
        difficulty=3,
        statement="""
            A method of `KVPool` (you write a function; its first parameter is `self`, the pool). A sequence wants to
            write its tokens at positions `start` to `end - 1`. Two things can be in the way: its `table` is too short,
            and a block that it will write to is shared (`self.blocks[number].refs > 1`). Change `table` in place so that
            it may write, and return the list of copies that the runner has to make first, as `(source, target)`. The
            list may be empty. If the pool has too few free blocks, return `None` and change nothing at all.

            You may use: `self.block_size`, `self.blocks[number].refs`, `self.num_free`, `self.allocate(count)` (a list of
            new blocks with one reference each, or `None` and nothing changed), `self.release(list_of_blocks)` (one
            reference less for each).

            Worked example, blocks of 4. Sequences A and B both hold `[0, 1]`: 6 tokens, so block 1 is half full. Both
            blocks have 2 references; block 2 is the next free one.

                extend(pool, A, 6, 7)  ->  [(1, 2)]    A is [0, 2], B is [0, 1]. References: block 0: 2, 1: 1, 2: 1
                extend(pool, B, 6, 7)  ->  []          B is alone on block 1 now
                extend(pool, A, 7, 9)  ->  []          A is [0, 2, 3]: position 8 needs a new block

            Block 0 stays shared: it is full, so it is only read. A table may also be longer than `end` needs.
        """,
        hints=(
            "Which entries of the table does writing at positions 6 to 10 touch, with blocks of 4? Only those matter. Full "
            "blocks before them are read, never written.",
            "First count, then act. How many entries in the range are shared? How many entries are missing at the end? Ask "
            "for all these blocks in *one* call. If the answer is None, nothing has been changed yet.",
            "The entries are those from start // block_size up to (not including) the number of blocks that `end` tokens "
            "need, as far as the table goes. For each shared one: note (old, new), give one reference of the old block "
            "back, put the new number into the table. What is left of the new blocks goes to the table's end.",
        ),
        explanation="""
            *Copy on write* is what `fork()` does in Unix: share everything, copy a page only when somebody writes to it.
            Here only the half-full last block is ever copied in practice, so a fork costs at most one block per sequence,
            however long the prompt. The last writer needs no copy: the others have left the block.

            Counting first makes it all or nothing. A version that takes blocks one by one has to give them back when one
            is missing, and even that is not "nothing changed": handing out a free block makes the pool forget what it
            had cached there (stage 05).

            Also right: one block at a time after comparing the count with `num_free`; the new blocks in any order.

            vLLM's first engine had this as `append_slot` of its block manager, which returned source and destination of
            the copy. Its V1 engine does not fork tables: the samples of a prompt find its *full* blocks in the prefix
            cache and compute the rest again. In llama.cpp a cell carries a set of sequence ids (`llama_memory_seq_cp`), so
            sharing is by token, and within one stream nothing is copied. SGLang's radix tree shares whole pages, with `page_size` 1 by
            default also single tokens.
        """,
        check=check_extend,
        mutants=(
            Mutant(
                "no_copies",
                extend_no_copies,
                "A shared block is written without a copy: the other sequence's tokens are overwritten.",
                "Avarok-Cybersecurity/atlas#1193",
            ),
            Mutant(
                "all_shared",
                edited(EXTEND, "range(start // size, min(len(table), -(-end // size)))", "range(len(table))"),
                "You copy every shared block. A block that is only read can stay shared: look at positions start to end - 1 only.",
                "copying the whole prompt on a fork",
            ),
            Mutant(
                "only_tail",
                edited(
                    EXTEND,
                    "range(start // size, min(len(table), -(-end // size)))",
                    "range(max(0, len(table) - 1), len(table))",
                ),
                "You look at the table's last block only. A chunk may write to several blocks, and the last one may lie behind it.",
                "append_slot for one token",
            ),
            Mutant(
                "first_only",
                edited(
                    EXTEND,
                    "range(start // size, min(len(table), -(-end // size)))",
                    "range(start // size, min(len(table), start // size + 1))",
                ),
                "You make only the first block writable. A chunk may write to several.",
                "append_slot for one token",
            ),
            Mutant(
                "one_too_far",
                edited(EXTEND, "min(len(table), -(-end // size))", "min(len(table), end // size + 1)"),
                "You look one block too far when `end` is a multiple of the block size: position `end` is not written.",
                "an off-by-one that only shows at multiples",
            ),
            Mutant(
                "to_the_end",
                edited(
                    EXTEND, "range(start // size, min(len(table), -(-end // size)))", "range(start // size, len(table))"
                ),
                "You look from `start` to the table's end. Blocks behind position end - 1 are not written now and stay shared.",
                "a common slip",
            ),
            Mutant(
                "always_copied",
                edited(EXTEND, ".refs > 1", ".refs >= 1"),
                "You copy a block that nobody else uses. One reference is this sequence's own; shared means more than one.",
                "a common slip",
            ),
            Mutant(
                "rebound",
                edited(EXTEND, "table.extend(new)", "table = table + new"),
                "`table = table + ...` makes a new list, and the caller still holds the old one. Change the list itself: extend, append or +=.",
                "names and objects in Python",
            ),
            Mutant(
                "unclamped",
                edited(
                    EXTEND,
                    "max(0, kv.blocks_needed(end, size) - len(table))",
                    "kv.blocks_needed(end, size) - len(table)",
                ),
                "When the table is longer than needed, your count of missing blocks is negative, and you take too few for the copies.",
                "a common slip",
            ),
            Mutant(
                "none_unchecked",
                edited(EXTEND, GUARD, ""),
                "allocate() returns None when the blocks do not suffice. Look at its result before you use it.",
                "a common slip",
            ),
            Mutant(
                "never_released",
                edited(EXTEND, "        self.release([table[i]])\n", ""),
                "The old block keeps this sequence's reference, so it is never free again: a leak. Give it back.",
                "vLLM's copy-on-write decrements the count of the source",
            ),
            Mutant(
                "released_new",
                edited(
                    EXTEND,
                    "self.release([table[i]])\n        table[i] = new.pop(0)",
                    "table[i] = new.pop(0)\n        self.release([table[i]])",
                ),
                "You release the block that is in the table *now*, the new one. The reference to give back is that of the old one.",
                "order of two lines",
            ),
            Mutant(
                "target_first",
                edited(EXTEND, "copies.append((table[i], new[0]))", "copies.append((new[0], table[i]))"),
                "The pairs are the wrong way round: (source, target). The runner would copy garbage over the prompt.",
                "a common slip",
            ),
            Mutant(
                "table_kept",
                edited(EXTEND, "table[i] = new.pop(0)", "new.pop(0)"),
                "The copy is made, but the table still names the old block: the sequence goes on writing there.",
                "a common slip",
            ),
            Mutant(
                "one_early",
                edited(EXTEND, "kv.blocks_needed(end, size) - len(table)", "end // size + 1 - len(table)"),
                "You take a block as soon as the last one is *full*. Take it when a token needs it.",
                "reference/courses.md 6.6: allocate at n % B == 0",
            ),
            Mutant(
                "begins_now",
                extend_begins_now,
                "`end % block_size == 1` fails for chunks of several tokens, and for blocks of one token. Compare the blocks needed with the length of the table.",
                "llm-algo-leetcode, notebook 22; nano-vllm's may_append",
            ),
            Mutant(
                "from_start",
                edited(EXTEND, "kv.blocks_needed(end, size) - len(table)", "kv.blocks_needed(end - start, size)"),
                "You take blocks for the new tokens alone. Some may fit into what the table has already.",
                "a common slip",
            ),
            Mutant(
                "truncated",
                edited(EXTEND, "table.extend(new)", "table.extend(new)\n    del table[kv.blocks_needed(end, size) :]"),
                "You cut the table. Blocks beyond `end` were taken for the rest of the prompt.",
                "chunked prefill",
            ),
            Mutant(
                "piecemeal",
                extend_piecemeal,
                "When the blocks do not suffice, some are taken already: table and pool are left half changed.",
                "reference/courses.md 6.6: partial allocation not rolled back",
            ),
            Mutant(
                "rolled_back",
                extend_rolled_back,
                "Giving blocks back is not enough: allocate() made the pool forget what they had cached. Count first, take once.",
                "partial allocation rolled back",
            ),
            Mutant(
                "empty_for_none",
                edited(EXTEND, GUARD, "    if new is None:\n        return []\n"),
                "An empty list says: go ahead and write. When blocks are missing, return None.",
                "GeeeekExplorer/nano-vllm#274",
            ),
            Mutant(
                "none_for_empty",
                edited(EXTEND, "return copies", "return copies or None"),
                "Without copies, return an empty list. None says that the blocks do not suffice, so somebody would be preempted.",
                "a common slip",
            ),
        ),
        variant=extend_variant,
        scratch="""
            from minillm.blocks import KVPool

            pool = KVPool(6, block_size=4)
            A = pool.allocate(2)
            pool.share(A)
            B = list(A)
            print(extend(pool, A, 6, 7), A, B, [block.refs for block in pool.blocks])
        """,
        plug_in=plug_extend,
    ),
    Exercise(
        id="04.4",
        symbol=PAGED,
        title="Attention through the table",
        minutes=20,
        difficulty=3,
        statement="""
            One query of one sequence looks at all its tokens, where they lie. `keys` and `values` are the whole cache
            of a layer, `[num_slots, num_kv_heads, D]`; `table` lists the sequence's blocks; `q` is `[num_heads, D]`.

            The beginning and the end are there. `rows` `[num_kv_heads, share, D]` are the scaled queries, stacked for
            each KV head; `m`, `l`, `acc` are the state of the online softmax of stage 03 (largest score, sum, weighted
            sum of values); the visible positions go from `first` to `end - 1` (`first` is above 0 only with a window).
            **Write the loop:** take the visible positions block by block, slice their keys and values out of the cache,
            and feed `online_update(m, l, acc, scores, v)`, which returns the new three. It wants scores
            `[num_kv_heads, share, C]` and values `[num_kv_heads, C, D]`; a slice of the cache is `[C, num_kv_heads, D]`.

            Worked example: blocks of 4, `table = [5, 2, 7]`, 9 tokens, no window. Three rounds read the slots 20 to 23,
            8 to 11, and **28 alone**: what lies in slots 29 to 31 is not yours, and may be NaN. Gather nothing: no tensor
            may hold the whole context.
        """,
        hints=(
            "Write down by hand which slots to read for table [5, 2, 7], blocks of 4 and 9 tokens. Then with a window of 3 "
            "(first = 6): blocks are only partly visible at both ends.",
            "Loop over the *numbers* of the blocks in the sequence: from the one that holds `first` to the last one that is "
            "needed. The visible part of block i is where [i * size, (i + 1) * size) and [first, end) overlap.",
            "With low and high as the ends of that overlap: the first slot is the block's first slot plus low % block_size, and "
            "high - low neighbours follow. Scores: `rows @` the keys permuted to [num_kv_heads, D, C]. Values: the slice with "
            "its first two dimensions swapped.",
        ),
        explanation="""
            A slice of the cache is a *view*: nothing is copied. Each key and value is read once, and what is carried from
            block to block is tiny: a number, a number, and a vector per head. That is PagedAttention (Kwon et al. 2023,
            arXiv:2309.06180, section 4.1) together with the online softmax of stage 03.

            Cut, do not mask: a masked score has the weight 0, but 0 times NaN is NaN, and unused slots may hold anything.

            Also right: two passes (first the largest score, then the sums), which reads the keys twice; or a softmax per
            block whose results are merged with their log-sum-exp, which lets many workers share a long context. GPU
            kernels do that for decoding ("split KV", FlashDecoding).

            In the engine: `attention="paged"` runs your function. `attention="numba"` is the same loop, compiled. vLLM's
            original kernel is `paged_attention_v1` and `_v2` (split); FlashInfer's `BatchDecodeWithPagedKVCacheWrapper`
            serves SGLang; both follow the table inside the kernel.
        """,
        check=check_paged_query,
        mutants=(
            Mutant(
                "logical",
                edited(PAGED, "table[i] * block_size", "i * block_size"),
                "You read block i of the *cache*. The sequence's block i is table[i].",
                "single-request caches",
            ),
            Mutant(
                "last_block_whole",
                edited(PAGED, "min(end, (i + 1) * block_size)", "(i + 1) * block_size"),
                "You read the last block to its end. The slots after the last token are not yours; they may hold NaN.",
                "the last block not truncated: test names in skyzh/tiny-llm",
            ),
            Mutant(
                "last_block_lost",
                edited(PAGED, "kv.blocks_needed(end, block_size)", "end // block_size"),
                "The last, partly filled block is missing: round the number of blocks up.",
                "a common slip",
            ),
            Mutant(
                "masked",
                paged_masked,
                "You read whole blocks and mask the scores. The weight is 0, but 0 times NaN is NaN: slice, so that unused slots are not read.",
                "flashinfer-ai/flashinfer#2883 (NaN in padding)",
            ),
            Mutant(
                "window_ignored",
                edited(
                    PAGED,
                    "for i in range(first // block_size, kv.blocks_needed(end, block_size)):\n        low, high = max(first, i * block_size)",
                    "for i in range(kv.blocks_needed(end, block_size)):\n        low, high = i * block_size",
                ),
                "With a window you still read everything: begin at `first`.",
                "a common slip",
            ),
            Mutant(
                "window_by_block",
                edited(PAGED, "max(first, i * block_size)", "i * block_size"),
                "With a window you read its first block from the beginning. `first` may lie inside a block.",
                "windows rounded to blocks",
            ),
            Mutant(
                "offset_lost",
                edited(PAGED, "+ low % block_size", ""),
                "You read the right number of slots from the block's beginning. With a window they begin at low % block_size.",
                "a common slip",
            ),
            Mutant(
                "table_from_window",
                edited(PAGED, "table[i] * block_size", "table[i - first // block_size] * block_size"),
                "With a window you begin at table[0]. The table counts from the sequence's start.",
                "a common slip",
            ),
            Mutant(
                "forgetful",
                edited(
                    PAGED,
                    "online_update(m, l, acc, rows",
                    "online_update(torch.full_like(m, NEVER), l * 0, acc * 0, rows",
                ),
                "Only the last block counts: hand the old m, l and acc to online_update.",
                "a state that is reset in the loop",
            ),
            Mutant(
                "state_dropped",
                edited(PAGED, "m, l, acc = online_update(", "online_update("),
                "online_update changes nothing itself: it returns the new m, l and acc. Keep them, or 0 / 0 is left: NaN.",
                "a common slip",
            ),
            Mutant(
                "reshaped",
                edited(PAGED, "k.permute(1, 2, 0)", "k.reshape(k.shape[1], k.shape[2], -1)"),
                "The shape fits, but reshape and view mix up the numbers of different tokens. Use permute or transpose.",
                "a common slip",
            ),
            Mutant(
                "mean_of_blocks",
                paged_mean_of_blocks,
                "Each block has its own softmax, and you average them. A block with large scores must weigh more: carry m and l along.",
                "TorchCode, flash attention without rescaling",
            ),
            Mutant(
                "scaled_twice",
                edited(PAGED, "rows @ k.permute(1, 2, 0)", "scale * rows @ k.permute(1, 2, 0)"),
                "The scale is in `rows` already: you apply it twice.",
                "a common slip",
            ),
            Mutant(
                "neighbours",
                edited(PAGED, "table[i] * block_size", "(table[0] + i) * block_size"),
                "You take the first block's neighbours. Each block is wherever the table says.",
                "code that was right before paging",
            ),
            Mutant(
                "gathered",
                paged_gathered,
                "The result is right, but you first copy all keys and values together. Read them block by block, as slices.",
                "what the engine's sdpa backend does",
            ),
        ),
        variant=paged_two_passes,
        scratch="""
            keys, values = torch.randn(32, 2, 3), torch.randn(32, 2, 3)  # 8 blocks of 4, 2 KV heads, D = 3
            keys[29:], values[29:] = float("nan"), float("nan")  # not yours: if they are read, you see it
            print(paged_query(torch.randn(4, 3), keys, values, [5, 2, 7], 9, 4, 0.5))
        """,
        plug_in=plug_paged_query,
    ),
]
