"""Exercises of stage 05."""

import hashlib
import itertools
from array import array

from minillm import kv
from minillm.blocks import ROOT, Block, KVPool, block_digest
from minillm.course.exercise import Exercise, Mutant
from minillm.course.learn import make_llm
from minillm.course.learn import swap as swap_in
from minillm.request import SamplingParams

# ---- a pool in a certain state, and what is wrong with one


def put(pool, tokens):
    """A request with these tokens has been computed: its table, still held."""
    table = pool.allocate(kv.blocks_needed(len(tokens), pool.block_size))
    pool.publish(table, [], tokens, len(tokens))
    return table


def state(pool):
    """Everything the pool knows, to be compared later."""
    blocks = [(b.refs, b.digest, b.tokens, b.parent) for b in pool.blocks]
    return blocks, list(pool.free), dict(pool.published)


def refs(pool):
    return [block.refs for block in pool.blocks]


def problem(pool, tables):
    """What pool.check says, or None."""
    try:
        pool.check(tables)
    except AssertionError as error:
        return str(error)
    return None


def run(first, count):
    return list(range(first, first + count))


# ---- 05.1 block_digest

PARENT = bytes(range(100, 116))


def check_block_digest(t, block_digest):
    first = t.call(block_digest, b"", [5, 6, 7])
    call = 'block_digest(b"", [5, 6, 7])'
    t.true(isinstance(first, bytes), "the digest is a bytes object", call=call, got=type(first).__name__)
    t.equal(len(first), 16, f"len({call})", note="16 bytes")
    again = t.call(block_digest, b"", [5, 6, 7])
    t.true(again == first, "the same call gives the same bytes each time, or nobody finds the block again", call=call)
    again = t.call(block_digest, b"", (5, 6, 7))
    t.true(again == first, "equal tokens get equal digests, as a list and as a tuple", call=call)

    def differ(a, b, text, parents=(b"", b"")):
        names = {b"": 'b""'}
        calls = [f"block_digest({names.get(p, 'a parent')}, {x})" for p, x in zip(parents, (a, b), strict=True)]
        one, two = t.call(block_digest, parents[0], a), t.call(block_digest, parents[1], b)
        t.true(one != two, text, call=" and ".join(calls))

    differ([5, 6, 7], [5, 6, 7], "the same tokens behind another parent get another digest", (b"", PARENT))
    for place in range(3):
        other = [5, 6, 7]
        other[place] = 8
        differ([5, 6, 7], other, f"token {place} matters")
    differ([5, 6, 7], [7, 6, 5], "the order of the tokens matters")
    differ([5, 6, 7], [4, 7, 7], "it is not enough that the tokens have the same sum")
    differ([40, 50, 60], [41, 19, 60], "1 more and 31 less must not cancel out (a rolling hash with base 31)")
    differ([65, 66, 67], [321, 66, 67], "token ids go above 255")
    differ([5, 6, 7], [5 + 2**16, 6, 7], "token ids go above 65,535: Llama 3 has 128,256 tokens")
    differ([5, 6, 7], [5 + 2**32, 6, 7], "ids are taken as 64-bit integers")
    differ([1, 23], [12, 3], "1, 23 is not 12, 3: the border between two tokens matters")
    differ([0], [0, 0], "token 0 counts too")

    def chain(*blocks):
        name = b""
        for tokens in blocks:
            name = t.call(block_digest, name, tokens)
        return name

    t.true(chain([5, 6], [8, 9]) != chain([8, 9], [5, 6]), "the order of the blocks matters",
           call="the last name of the chain [5, 6] [8, 9], and of [8, 9] [5, 6]")  # fmt: skip
    t.true(chain([5, 6], [5, 6], [8, 9]) != chain([8, 9]), "two equal blocks do not cancel out",
           call="the last name of the chain [5, 6] [5, 6] [8, 9], and of [8, 9]")  # fmt: skip
    parents = [PARENT, *(PARENT[:i] + b"\0" + PARENT[i + 1 :] for i in range(16))]
    several = {t.call(block_digest, parent, [5, 6]) for parent in parents}
    t.equal(len(several), 17, "the digests of [5, 6] behind 17 parents that differ in one byte", note="all different")
    many = [t.call(block_digest, PARENT, [n, n * n, 7]) for n in range(400)]
    t.equal(len(set(many)), 400, "the number of different digests of 400 blocks")
    poorest = min(len(set(column)) for column in zip(*many, strict=False))
    t.true(poorest > 100, "over 400 blocks, each of the 16 bytes takes many values", got=f"one byte takes {poorest}")


def short(data):
    return hashlib.blake2b(data, digest_size=16).digest()


def wide(tokens):
    return array("q", tokens).tobytes()


def no_parent(parent, tokens):
    return short(wide(tokens))


def eight_bits(parent, tokens):
    return short(parent + bytes(token & 0xFF for token in tokens))


def sixteen_bits(parent, tokens):
    return short(parent + array("H", [token & 0xFFFF for token in tokens]).tobytes())


def thirty_two_bits(parent, tokens):
    return short(parent + array("I", [token & 0xFFFFFFFF for token in tokens]).tobytes())


def joined_text(parent, tokens):
    return short(parent + "".join(map(str, tokens)).encode())


def order_lost(parent, tokens):
    return short(parent + wide(sorted(tokens)))


def added_up(parent, tokens):
    return short(parent + wide([sum(tokens), len(tokens)]))


def rolling(parent, tokens):
    total = int.from_bytes(parent, "little")
    for token in tokens:
        total = (total * 31 + token + 1) % 2**127
    return short(total.to_bytes(16, "little"))


def python_hash(parent, tokens):
    return short(parent + wide(tokens))[:8] + bytes(8)  # stands for hash(), which differs from process to process


def xored(parent, tokens):
    return bytes(a ^ b for a, b in zip(short(wide(tokens)), parent or bytes(16), strict=True))


def hex_text(parent, tokens):
    return hashlib.blake2b(parent + wide(tokens), digest_size=16).hexdigest()


def full_length(parent, tokens):
    return hashlib.sha256(parent + wide(tokens)).digest()


def as_printed(parent, tokens):
    return short(parent + str(tokens).encode())


def last_token_left_out(parent, tokens):
    return short(parent + wide(tokens[:-1]))


def digest_variant(parent, tokens):
    h = hashlib.sha256()  # another hash, fed in pieces and cut to 16 bytes
    for part in (parent, *(int(token).to_bytes(8, "big") for token in tokens)):
        h.update(part)
    return h.digest()[:16]


# ---- what the plug-ins share

FEW_SHOT = {"Italy": "Rome", "Norway": "Oslo", "Greece": "Athens", "Peru": "Lima", "Cuba": "Havana", "Iraq": "Baghdad"}
EXAMPLES = "".join(f"Question: What is the capital of {a}? Answer: {b}. " for a, b in FEW_SHOT.items())


def ask(country):
    return f"{EXAMPLES}Question: What is the capital of {country}? Answer:"


def encode(llm, text):
    """Token ids; without a tokenizer (the tiny random model) one for each word."""
    return llm.tokenizer.encode(text) if llm.tokenizer else [1 + sum(word.encode()) % 95 for word in text.split()]


def greedy(count):
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)


def said(llm, output):
    return repr(output.text) if llm.tokenizer else f"token ids {output.token_ids}"


def must_be_equal(got, expected):
    print(f"tokens equal: {'yes' if got == expected else 'NO'}")
    if got != expected:
        raise AssertionError("the tokens differ from those of an engine without prefix cache")


def plug_digest(answer, swap):
    """Name the blocks of two prompts with the learner's function, then let the engine find them by it."""
    plain, llm = make_llm(num_kv_blocks=64, enable_prefix_caching=False), make_llm(num_kv_blocks=64)
    llm.pool.hash_fn = answer
    upside_down = "".join(f"Question: What is the capital of {a}? Answer: {FEW_SHOT[a]}. " for a in reversed(FEW_SHOT))
    texts = {
        "Spain": ask("Spain"),
        "Sweden": ask("Sweden"),
        "turned round": ask("Spain").replace(EXAMPLES, upside_down),
    }
    prompts, size = {label: encode(llm, text) for label, text in texts.items()}, llm.pool.block_size
    print("the full blocks' names (first three bytes), by your function; the third has its examples in another order")
    for label, tokens in prompts.items():
        names, parent = [], b""
        for start in range(0, len(tokens) // size * size, size):
            parent = answer(parent, tuple(tokens[start : start + size]))
            names.append(parent[:3].hex())
        print(f"   {label:<13}{' '.join(names)}")
    outs = {label: llm.generate(tokens, greedy(3))[0] for label, tokens in prompts.items()}
    for label, out in outs.items():
        found = f"{out.num_cached_tokens:>3} of {len(out.prompt_token_ids)} tokens from the cache"
        print(f"   {label:<13}{found}; it says {said(llm, out.outputs[0])}")
    llm.scheduler.check()
    must_be_equal(
        [out.outputs[0].token_ids for out in outs.values()],
        [plain.generate(tokens, greedy(3))[0].outputs[0].token_ids for tokens in prompts.values()],
    )


# ---- 05.2 KVPool.match


def check_match(t, match):
    def ask(pool, tokens, want, note=""):
        before = state(pool)
        got = t.call(match, pool, list(tokens), note=note)
        call = f"match(pool, {list(tokens)})"
        t.equal(got, want, call, note=note)
        t.true(
            state(pool) == before, "match only looks: references, free list and digests stay as they were", call=call
        )

    x = run(11, 9)  # two full blocks of 4, and one token
    pool = KVPool(8, 4)
    ask(pool, x, [], "an empty pool")
    table = put(pool, x)
    ask(pool, [*x, 50, 51], table[:2], "a running request has these blocks; the third is not full")
    pool.release(table)
    ask(pool, [*x, 50, 51], table[:2], "that request has ended: its blocks are free, but still hold their content")
    ask(pool, [*x[:4], 50, 51, 52, 53, 54], table[:1], "only the first block is the same")
    ask(pool, [*x[:6], 50, 51, 52, 53], table[:1], "the second block differs in its middle")
    ask(pool, [50, *x], [], "one token more at the front: nothing stands where it stood")
    ask(pool, [*x[4:8], 50], [], "the second block's tokens, but at the front")
    ask(pool, x, table[:2], "9 tokens: two blocks are found, one token is left to compute")
    ask(pool, x[:8], table[:1], "exactly the 8 cached tokens: the last token must still be computed")
    ask(pool, x[:5], table[:1], "5 tokens")
    ask(pool, x[:4], [], "exactly one cached block")
    ask(pool, x[:1], [], "one token")
    same = put(pool, [3, 3, 3, 3, 3, 3, 3, 3, 3])
    ask(pool, [3] * 12, same[:2], "two blocks with equal tokens")
    pool._forget(table[0])
    ask(pool, x, [], "the first block was evicted: what comes behind it is of no use")

    pool = KVPool(5, 1)
    table = put(pool, [7, 8, 9])
    ask(pool, [7, 8, 9], table[:2], "blocks of one token")
    pool = KVPool(6, 3)
    table = put(pool, run(1, 7))
    pool.enable_prefix_caching = False
    ask(pool, run(1, 7), [], "the cache is switched off")

    pool = KVPool(6, 4, hash_fn=lambda parent, tokens: b"own" + block_digest(parent, tokens))
    table = put(pool, x)
    ask(pool, x, table[:2], "a pool with a hash function of its own: self.hash_fn")
    pool = KVPool(6, 4, hash_fn=lambda parent, tokens: b"always the same")
    table = put(pool, run(1, 4))
    ask(pool, run(31, 5), [], "a collision: another block with the same digest")
    ask(pool, run(1, 5), table, "... and the right one")
    ask(pool, run(31, 4) + run(1, 5), [], "a collision, and the second block would fit, at the front: a hole ends it")
    pool = KVPool(8, 4, hash_fn=lambda parent, tokens: block_digest(b"", tokens))
    a, b, c, d = run(1, 4), run(11, 4), run(21, 4), run(41, 4)
    first = put(pool, a + b)
    other = put(pool, c + d)
    ask(pool, c + b + [0], other[:1], "a collision: this block is cached, but behind another parent")
    ask(pool, a + d + [0], first[:1], "the same, behind block 0")
    ask(pool, [*b, 0], [], "the same: cached behind another block, but here it comes first")

    for size, seed in ((2, 5), (3, 6)):
        g = t.rng(seed)

        def draw(low, high, *shape, g=g):
            import torch

            return torch.randint(low, high, shape, generator=g).tolist()

        pool, known = KVPool(60, size), {}  # the oracle: every cached prefix, in full
        for _ in range(8):
            tokens = draw(0, 2, draw(1, 12, 1)[0])
            for i, number in enumerate(put(pool, tokens)[: len(tokens) // size]):
                known[tuple(tokens[: (i + 1) * size])] = number
        for _ in range(12):
            tokens = draw(0, 2, draw(1, 14, 1)[0])
            ends = itertools.takewhile(lambda end: tuple(tokens[:end]) in known, range(size, len(tokens), size))  # noqa: B023
            ask(pool, tokens, [known[tuple(tokens[:end])] for end in ends], "any prompts, compared token by token")


def matching(
    keep=1, spare=0, chain=True, tokens_too=True, parent_too=True, goes_on=False, obeys=True, as_list=False,
    used_only=False, takes=False, own_hash=True, falsy=False, front_too=True,
):  # fmt: skip
    """`match` with one thing or another done wrong."""

    def match(self, tokens):
        hits, digest, parent, size = [], b"", ROOT, self.block_size
        if obeys and not self.enable_prefix_caching:
            return hits
        for i in range((len(tokens) - keep) // size - spare):
            content = tokens[i * size : (i + 1) * size]
            content = content if as_list else tuple(content)
            name = self.hash_fn if own_hash else block_digest
            digest = name(digest if chain else b"", content)
            number = self.published.get(digest)
            block = self.blocks[number] if (number if falsy else number is not None) else None
            if (
                block is None
                or (tokens_too and block.tokens != content)
                or (parent_too and (front_too or hits) and block.parent != parent)
                or (used_only and block.refs == 0)
            ):
                if goes_on:
                    continue
                break
            hits.append(number)
            parent = number
        if takes:
            self.share(hits)
        return hits

    return match


def match_variant(self, tokens):
    if not self.enable_prefix_caching:
        return []
    size = self.block_size
    parts = [tuple(tokens[i : i + size]) for i in range(0, len(tokens) - size, size)]  # all names first, as vLLM does
    names = list(itertools.accumulate(parts, self.hash_fn, initial=b""))[1:]
    found = [self.published.get(name) for name in names]
    before = [ROOT, *found]

    def good(i):
        block = self.blocks[found[i]] if found[i] is not None else None
        return block is not None and (block.tokens, block.parent) == (parts[i], before[i])

    return found[: next((i for i in range(len(parts)) if not good(i)), len(parts))]


def plug_match(answer, swap):
    """A conversation, turn by turn, with the learner's `match`."""
    plain, llm = make_llm(num_kv_blocks=64, enable_prefix_caching=False), make_llm(num_kv_blocks=64)
    turns = ("Hello! Who are you?", "What is a prefix?", "Give me one example of it, please.", "Thanks. Goodbye!")
    answers = ("I am a friendly guide.", "A prefix is what comes first.", "The prefix of sunflower is sun.")
    messages = [{"role": "system", "content": "You are a friendly guide who answers in one short sentence."}]
    print("turn   prompt   found by your match   left to compute")
    got, expected = [], []
    for i, question in enumerate(turns):
        messages.append({"role": "user", "content": question})
        text = " ".join(message["content"] for message in messages)
        tokens = llm.tokenizer.encode_chat(messages) if llm.tokenizer else encode(llm, text)
        with swap():
            out = llm.generate(tokens, greedy(2))[0]
        llm.scheduler.check()
        print(f"{i + 1:>4}{len(tokens):>9}{out.num_cached_tokens:>22}{len(tokens) - out.num_cached_tokens:>18}")
        got.append(out.outputs[0].token_ids)
        expected.append(plain.generate(tokens, greedy(2))[0].outputs[0].token_ids)
        messages += [{"role": "assistant", "content": answers[i]}] if i < len(answers) else []
    must_be_equal(got, expected)


# ---- 05.3 KVPool.release


def check_release(t, release):
    def cached_order(pool):
        return [number for number in pool.free if pool.blocks[number].digest is not None]

    def empty_first(pool):
        has = [pool.blocks[number].digest is not None for number in pool.free]
        return has == sorted(has)

    pool = KVPool(6, 4)
    x = run(11, 9)
    table = put(pool, x)  # blocks 0, 1 (full) and 2 (one token)
    names = dict(pool.published)
    call, given = "release(pool, [0, 1, 2])", list(table)
    t.call(release, pool, given, note="one request, two full blocks and one that is not full")
    t.true(given == table, "the table itself stays as it is: it belongs to the caller", call=call, got=given)
    t.equal(refs(pool), [0] * 6, f"the references after {call}")
    t.equal(sorted(pool.free), run(0, 6), f"the free blocks after {call}, sorted", note="each is there once")
    t.equal(cached_order(pool), [1, 0], f"the cached blocks in the free list, front first, after {call}",
            note="what is further back in the prompt is handed out sooner")  # fmt: skip
    t.true(empty_first(pool), "blocks without content are handed out before blocks with content", call=call,
           got=f"free list {list(pool.free)}; cached are {sorted(cached_order(pool))}")  # fmt: skip
    t.equal(dict(pool.published), names, f"pool.published after {call}", note="free blocks can still be matched")
    t.equal(pool.match(x), [0, 1], f"pool.match of the same prompt after {call}")
    second = put(pool, run(31, 9))
    pair = list(second)
    t.call(release, pool, second, note="a second request ends later")
    t.equal(cached_order(pool), [1, 0, pair[1], pair[0]], "the cached blocks in the free list after the second request",
            note="least recently used first")  # fmt: skip
    t.true(empty_first(pool), "blocks without content come first", got=f"free list {list(pool.free)}")

    pool = KVPool(7, 4)
    one, two = put(pool, x), put(pool, [*x[:4], *run(50, 5)])  # they share block 0
    t.call(release, pool, one, note="two requests share their first block; one of them ends")
    t.equal(refs(pool)[0], 1, "the references of the shared block")
    t.true(0 not in pool.free, "a block that somebody uses is not in the free list", got=f"free list {list(pool.free)}")
    text = problem(pool, [two])
    t.true(text is None, "pool.check finds nothing wrong", got=text)
    t.call(release, pool, two, note="... and the other ends")
    t.equal(sorted(pool.free), run(0, 7), "the free blocks, sorted")
    before = state(pool)
    t.call(release, pool, [], note="an empty table")
    t.true(state(pool) == before, "an empty table changes nothing", call="release(pool, [])")
    t.raises(RuntimeError, release, pool, [1], note="nobody uses block 1: freed twice")
    pool = KVPool(3, 2)
    table = put(pool, [1, 2])
    t.raises(RuntimeError, release, pool, [*table, *table], note="the same block twice, with one reference")

    g, pool, tables = t.rng(3), KVPool(24, 2), []
    import torch

    for step in range(40):
        pick = int(torch.randint(0, 1000, (), generator=g))
        if tables and (pick % 2 or pool.num_free < 4):
            t.call(release, pool, tables.pop(pick % len(tables)), note="requests come and go")
        else:
            tokens = torch.randint(0, 2, (1 + pick % 7,), generator=g).tolist()
            table = pool.admit(pool.match(tokens), len(tokens))
            pool.publish(table, [pool.blocks[n].digest for n in table if pool.blocks[n].digest], tokens, len(tokens))
            tables.append(table)
        text = problem(pool, tables)
        t.true(text is None, "pool.check finds nothing wrong", got=text, note=f"requests come and go, step {step + 1}")


def releasing(
    backwards=True, empty_to_front=True, all_to_front=False, guard=True, forget=False, always=False, never=False,
    zero=False, skip=False, keep_shared=False, early=False, in_place=False,
):  # fmt: skip
    """`release` with one thing or another done wrong."""

    def release(self, table):
        if in_place:
            table.reverse()
            table = table[::-1]
        if early and any(self.blocks[number].refs < 1 for number in table):
            raise RuntimeError("a block is freed twice")
        for number in reversed(table) if backwards else table:
            block = self.blocks[number]
            if (skip and block.refs < 1) or (keep_shared and block.refs > 1):
                continue
            if guard and not early and block.refs < 1:
                raise RuntimeError(f"block {number} is freed twice")
            block.refs = 0 if zero else block.refs - 1
            if forget:
                self._forget(number)
            if (block.refs == 0 or always) and not never:
                self.free[number] = None
                if all_to_front or (empty_to_front and block.digest is None):
                    self.free.move_to_end(number, last=False)

    return release


def release_variant(self, table):
    left = {number: self.blocks[number].refs - table.count(number) for number in table}
    if min(left.values(), default=0) < 0:
        raise RuntimeError("a block is freed twice")
    for number, count in left.items():
        self.blocks[number].refs = count
    done = [number for number, count in left.items() if count == 0]
    empty = [number for number in done if self.blocks[number].digest is None]
    full = [number for number in done if self.blocks[number].digest is not None]
    order = [*empty, *self.free, *full[::-1]]  # the list is built anew
    self.free.clear()
    self.free.update(dict.fromkeys(order))


def plug_release(answer, swap):
    """Visitors with one system prompt, other people in between, a small pool. What is left of it each time?"""
    system = "You are the guide of a small museum. Be friendly, be brief, and never talk about politics. "
    questions = [
        "Where are the dinosaurs, and may I touch them with my hands?",
        "How much is a ticket for two adults and three children today?",
        "Is there a place where we can eat our own sandwiches?",
        "Which painting do you like best, and why do you like it?",
    ]
    plain = make_llm(num_kv_blocks=64, block_size=4, enable_prefix_caching=False)
    prompts = [encode(plain, system + question) for question in questions]
    blocks = max(map(len, prompts)) // 4 + 5
    print(f"{len(prompts)} prompts that begin alike, each of about {len(prompts[0])} tokens; {blocks} blocks of 4;")
    print("after each of them, somebody else comes with 32 tokens of his own")
    outs = {}
    for label, function in (
        ("start goes first, to compare", releasing(backwards=False)),
        ("with your release", answer),
    ):
        llm = make_llm(num_kv_blocks=blocks, block_size=4)
        outs[label] = []
        for i, tokens in enumerate(prompts):
            with swap_in("05.3", function):
                outs[label].append(llm.generate(tokens, greedy(3))[0])
                llm.generate([1 + (7 * i + n * n) % 90 for n in range(32)], greedy(1))
        print(f"   {label:<30}tokens from the cache: {[out.num_cached_tokens for out in outs[label]]}")
    llm.scheduler.check()
    expected = [plain.generate(tokens, greedy(3))[0].outputs[0].token_ids for tokens in prompts]
    must_be_equal([out.outputs[0].token_ids for out in outs["with your release"]], expected)


# ---- 05.4 KVPool.allocate


def check_allocate(t, allocate):
    pool = KVPool(5, 4)
    got = t.call(allocate, pool, 2)
    t.equal(got, [0, 1], "allocate(pool, 2), of blocks 0 to 4", note="the two at the front of the free list")
    t.equal(refs(pool), [1, 1, 0, 0, 0], "the references after allocate(pool, 2)")
    t.equal(list(pool.free), [2, 3, 4], "the free list after allocate(pool, 2)")
    t.equal(t.call(allocate, pool, 0), [], "allocate(pool, 0)", note="no blocks wanted")
    before = state(pool)
    t.equal(t.call(allocate, pool, 4), None, "allocate(pool, 4), with 3 free", note="too many")
    t.true(state(pool) == before, "a refused request changes nothing", call="allocate(pool, 4), with 3 free",
           got=f"free list {list(pool.free)}, references {refs(pool)}")  # fmt: skip
    t.equal(t.call(allocate, pool, 3), [2, 3, 4], "allocate(pool, 3), with 3 free", note="the very last ones")

    pool, x = KVPool(4, 4), run(11, 9)
    pool.release(put(pool, x))  # free list: 2, 3 (no content), then 1, 0 (cached)
    before = state(pool)
    t.equal(t.call(allocate, pool, 5), None, "allocate(pool, 5), with 4 free", note="too many, and some are cached")
    t.true(state(pool) == before, "a refused request changes nothing: what is cached stays cached",
           call="allocate(pool, 5), with 4 free")  # fmt: skip
    order = list(pool.free)
    got = t.call(allocate, pool, 3)
    t.equal(got, order[:3], f"allocate(pool, 3), with the free list {order}", note="a cached block is free too")
    text = "block 1, which held tokens of an old prompt, is handed out"
    t.equal(len(pool.published), 1, "the number of blocks that can still be matched", note=text)
    t.equal(pool.match(x), [0], "pool.match of the old prompt", note="block 0 is still there, block 1 is not")
    block = pool.blocks[1]
    t.equal(
        (block.digest, block.tokens, block.parent), (None, (), ROOT), "digest, tokens and parent of block 1", note=text
    )
    wrong = problem(pool, [got or []])
    t.true(wrong is None, "pool.check finds nothing wrong", got=wrong, note=text)

    pool = KVPool(2, 4)  # two blocks, two requests, one after the other
    x, y = [1, 2, 3, 4, 5], [9, 9, 9, 9, 8]
    pool.release(put(pool, x))
    table = t.call(allocate, pool, 2)
    t.equal(
        pool.match(x), [], "pool.match of the old prompt while the new one runs", note="all its blocks were given away"
    )
    t.equal(len(pool.published), 0, "the number of blocks that can be matched then")
    if isinstance(table, list) and len(table) == 2:
        pool.publish(table, [], y, 5)
        pool.release(table)
    t.equal(len(pool.match(y)), 1, "the number of blocks that pool.match finds for the new prompt, after it ended")
    t.equal(pool.match(x), [], "pool.match of the old prompt, after that")

    pool = KVPool(9, 2)
    for first in (10, 20, 30):
        pool.release(put(pool, run(first, 6)))
    order = list(pool.free)
    got = t.call(allocate, pool, 4)
    t.equal(got, order[:4], f"allocate(pool, 4), with the free list {order}", note="least recently used first")
    left = [len(pool.match([*run(first, 6), 0])) for first in (10, 20, 30)]
    t.equal(left, [0, 2, 3], "blocks left of the oldest, the middle and the newest prompt",
            note="the oldest is gone, the middle one lost its end")  # fmt: skip


def allocating(forget="both", short="none", back=False, count_refs=True, only_empty=False, strict=False, stays=False,
               zero=()):  # fmt: skip
    """`allocate` with one thing or another done wrong."""

    def allocate(self, count):
        room = sum(self.blocks[n].digest is None for n in self.free) if only_empty else len(self.free)
        if count > room - strict and short != "fewer" and count:
            if short == "partial":
                while self.free:
                    self.blocks[self.free.popitem(last=False)[0]].refs = 1
            return [] if short == "empty" else None
        if not count:
            return list(zero) if zero is not None else None
        taken = [self.free.popitem(last=back)[0] for _ in range(min(count, room))]
        if stays:
            self.free = type(self.free).fromkeys([*taken, *self.free])
        if forget == "everything" and taken:
            for number in list(self.published.values()):
                self._forget(number)
        for number in taken:
            block = self.blocks[number]
            if forget == "both":
                self._forget(number)
            elif forget == "index":
                self.published.pop(block.digest, None)
            elif forget == "block":
                block.digest, block.tokens, block.parent = None, (), ROOT
            if count_refs:
                block.refs = 1
        return taken

    return allocate


def allocate_variant(self, count):
    taken = list(itertools.islice(self.free, count))
    if len(taken) < count:
        return None
    for number in taken:
        del self.free[number]
        self.published.pop(self.blocks[number].digest, None)
        self.blocks[number] = Block(refs=1)  # a new record instead of a cleaned one
    return taken


PASSWORD = "My name is {}. The password of my safe is {}, and it is a good one."


def plug_allocate(answer, swap):
    """Anna and Carl tell their passwords. A block of Anna's is reused for Carl's. What does Anna get?"""
    llm = make_llm(num_kv_blocks=8)
    size = llm.pool.block_size
    block = {
        name: (encode(llm, PASSWORD.format(name, word)) * size)[:size]
        for name, word in (("Anna", "tiger"), ("Carl", "piano"))
    }
    question = encode(llm, " I repeat: the password of my safe is")
    other = [1 + n % 90 for n in range(7 * size)]
    with swap():
        first = llm.generate(block["Anna"] + question, greedy(2))[0]
        llm.generate(other, greedy(1))  # takes every other block, so that Anna's is the next to go
        carl, anna = llm.generate([block["Carl"] + question, block["Anna"] + question], greedy(2), progress=False)
        llm.scheduler.check()
    print(f"Anna, alone:                     {said(llm, first.outputs[0])}")
    print(f"Carl, who gets Anna's old block: {said(llm, carl.outputs[0])}")
    print(f"Anna again, in the same step:    {said(llm, anna.outputs[0])}")
    must_be_equal(anna.outputs[0].token_ids, first.outputs[0].token_ids)


# ---- 05.5 KVPool.publish_block


def check_publish_block(t, publish_block):
    a, b, c = tuple(run(1, 4)), tuple(run(11, 4)), tuple(run(21, 4))
    name_a = block_digest(b"", a)
    name_b = block_digest(name_a, b)

    def known(pool, number):
        block = pool.blocks[number]
        return (block.digest, block.tokens, block.parent)

    pool = KVPool(8, 4)
    table = pool.allocate(2)
    call = "publish_block(pool, [0, 1], 0, digest of A, A)"
    t.equal(t.call(publish_block, pool, table, 0, name_a, a), True, call, note="a first block")
    t.equal(pool.published, {name_a: 0}, f"pool.published after {call}")
    t.equal(known(pool, 0), (name_a, a, ROOT), "digest, tokens and parent of block 0", note="it has no parent: ROOT")
    call = "publish_block(pool, [0, 1], 1, digest of A B, B)"
    t.equal(t.call(publish_block, pool, table, 1, name_b, b), True, call, note="a second block")
    t.equal(known(pool, 1), (name_b, b, 0), "digest, tokens and parent of block 1", note="its parent is block 0")
    t.equal((table, refs(pool)), ([0, 1], [1, 1] + [0] * 6), "the table and the references after that")
    before = state(pool)
    t.equal(t.call(publish_block, pool, table, 0, name_a, a), True, "publish_block of block 0 once more",
            note="a fork that shares the block publishes it too")  # fmt: skip
    t.true(state(pool) == before, "publishing a block again changes nothing", call="publish_block of block 0 once more")

    twin = pool.allocate(2)  # blocks 2 and 3: another request computed the same in the same step
    call = "publish_block(pool, [2, 3], 0, digest of A, A)"
    t.equal(t.call(publish_block, pool, twin, 0, name_a, a), True, call, note="an equal block is published already")
    t.equal(twin, [0, 3], f"the table after {call}", note="block 0 is used instead of block 2")
    t.equal(refs(pool)[0], 2, "the references of block 0", note="two requests use it now")
    t.equal(refs(pool)[2], 0, "the references of block 2", note="nobody needs the second copy")
    t.equal(known(pool, 2), (None, (), ROOT), "digest, tokens and parent of block 2", note="it was never published")
    t.equal(pool.published, {name_a: 0, name_b: 1}, "pool.published after that")
    wrong = problem(pool, [table, twin])
    t.true(wrong is None, "pool.check finds nothing wrong", got=wrong, note="after the second copy was dropped")
    t.equal(t.call(publish_block, pool, twin, 1, name_b, b), True, "publish_block(pool, [0, 3], 1, digest of A B, B)")
    t.equal((twin, refs(pool)), ([0, 1], [2, 2] + [0] * 6), "the table and the references after that")
    before = state(pool)
    lone = pool.allocate(2)
    before = state(pool)
    t.equal(t.call(publish_block, pool, lone, 1, block_digest(b"?", c), c), False, "publish_block for a block whose parent has no digest",
            note="nobody could ever reach it, so it stays private")  # fmt: skip
    t.true(state(pool) == before, "a block that stays private changes nothing", call="... whose parent has no digest")

    pool = KVPool(4, 4)
    one, two = pool.allocate(1), pool.allocate(2)
    t.call(publish_block, pool, one, 0, name_a, a)
    pool.release(one)  # the first request has ended meanwhile: block 0 is cached, and free
    call = "publish_block(pool, [1, 2], 0, digest of A, A), with block 0 cached but free"
    t.equal(t.call(publish_block, pool, two, 0, name_a, a), True, call, note="the equal block belongs to nobody now")
    t.equal((two, refs(pool)), ([0, 2], [1, 0, 1, 0]), "the table and the references after that")
    t.equal(list(pool.free), [1, 3], "the free list after that", note="block 0 is in use again; block 1 is empty")
    pool = KVPool(5, 4)
    one, two = pool.allocate(1), pool.allocate(2)
    t.call(publish_block, pool, one, 0, name_a, a)
    pool.share(two)  # a fork has the same table
    call = "publish_block(pool, [1, 2], 0, digest of A, A), with two users of block 1"
    t.equal(t.call(publish_block, pool, two, 0, name_a, a), True, call, note="a fork still uses the second copy")
    t.equal(refs(pool), [2, 1, 2, 0, 0], "the references after that", note="only your own reference is given back")
    t.equal(list(pool.free), [3, 4], "the free list after that", note="block 1 is in use")

    pool = KVPool(6, 4)
    one, two = pool.allocate(1), pool.allocate(1)
    t.call(publish_block, pool, one, 0, b"same name", a)
    before = state(pool)
    got = t.call(publish_block, pool, two, 0, b"same name", c)
    call = "publish_block(pool, [1], 0, a digest that another block has, C)"
    t.equal(got, False, call, note="a collision: the digest is the same, the tokens are not")
    t.true(state(pool) == before and two == [1], "the other block keeps its name, and this one stays private", call=call,
           got=f"table {two}, published {pool.published}")  # fmt: skip
    pool = KVPool(6, 4)
    one, two = pool.allocate(2), pool.allocate(2)
    for table, content in ((one, a), (two, c)):
        t.call(publish_block, pool, table, 0, block_digest(b"", content), content)
    t.call(publish_block, pool, one, 1, b"B, wherever", b)
    before = state(pool)
    got = t.call(publish_block, pool, two, 1, b"B, wherever", b)
    call = "publish_block(pool, [2, 3], 1, a digest that A B has, B), behind C"
    t.equal(got, False, call, note="same digest and tokens, but another parent")
    t.true(state(pool) == before and two == [2, 3], "B behind C is not B behind A", call=call, got=f"table {two}")


def publishing(
    merge=True, overwrite=False, share=True, release=True, tokens_too=True, parent_too=True, orphans=False,
    root=False, own_tokens=True, result=True, last=False, no_root=False, refuse=False, by_hand="", switch=True,
):  # fmt: skip
    """`publish_block` with one thing or another done wrong."""

    def publish_block(self, table, i, digest, content):
        parent = table[i - 1] if i or last else ROOT
        if (i or no_root) and not orphans and self.blocks[parent].digest is None:
            return False
        number = self.published.get(digest, table[i])
        if number == table[i] or overwrite:
            self.published[digest] = table[i]
            block = self.blocks[table[i]]
            block.digest, block.parent = digest, ROOT if root else parent
            block.tokens = content if own_tokens else ()
            return result
        block = self.blocks[number]
        if (tokens_too and block.tokens != content) or (parent_too and block.parent != parent):
            return False
        if refuse:
            return False
        if merge:
            if by_hand == "share":
                block.refs += 1
            elif share:
                self.share([number])
            if by_hand == "release":
                self.blocks[table[i]].refs = 0
                self.free[table[i]] = None
                self.free.move_to_end(table[i], last=False)
            elif release:
                self.release([table[i]])
            if switch:
                table[i] = number
        return result

    return publish_block


def publish_variant(self, table, i, digest, content):
    parent = ROOT if i == 0 else table[i - 1]
    if parent != ROOT and self.blocks[parent].digest is None:
        return False
    mine, there = self.blocks[table[i]], self.published.get(digest)
    if there is None:  # a new name
        self.published[digest] = table[i]
        mine.digest, mine.tokens, mine.parent = digest, content, parent
        return True
    if (self.blocks[there].tokens, self.blocks[there].parent) != (content, parent):
        return False
    own, table[i] = table[i], there
    if own != there:
        self.release([own])
        self.share([there])
    return True


def keep_twins(self, table, i, digest, content):
    """For comparison: as vLLM does, equal blocks of one step stay as they are; only the first has the name."""
    if self.published.get(digest, table[i]) != table[i]:
        return False
    return OWN_PUBLISH_BLOCK(self, table, i, digest, content)


OWN_PUBLISH_BLOCK = KVPool.publish_block


def plug_publish_block(answer, swap):
    """Four prompts with the same examples, all in the same step."""
    countries = ("Spain", "Sweden", "Japan", "Egypt")
    plain = make_llm(num_kv_blocks=96, enable_prefix_caching=False)
    prompts = [encode(plain, ask(country)) for country in countries]
    got = {}
    for label, function in (("copies kept", keep_twins), ("with your publish_block", answer)):
        llm = make_llm(num_kv_blocks=96)
        with swap_in("05.5", function):
            ids = [llm.add_request(tokens, greedy(3)) for tokens in prompts]
            llm.step()
            used, tables = llm.stats()["blocks_used"], [llm.requests[i][0].block_table for i in ids]
            while not all(llm.is_done(i) for i in ids):
                llm.step()
            got[label] = [llm.requests[i][0].output for i in ids]
        print(f"{label}: {used:.0f} blocks in use after the first step")
        for country, table in zip(countries, tables, strict=True):
            print(f"   {country:<8}{table}")
    expected = [plain.generate(tokens, greedy(3))[0].outputs[0].token_ids for tokens in prompts]
    must_be_equal(got["with your publish_block"], expected)


EXERCISES = [
    Exercise(
        id="05.1",
        symbol="minillm.blocks:block_digest",
        title="A name for a block",
        minutes=7,
        difficulty=1,
        statement="""
            Give a full block a name: **16 bytes** that depend on its tokens *and on everything before them*. What is
            before is in `parent`, the 16-byte name of the block before it (`b""` for the first block). `tokens` is a
            list or a tuple of ints. Ids can be large: take each as a 64-bit integer.

            Use a real hash function. The setup cell has imported `hashlib` and `array`.

            Worked example: `block_digest(b"", [5, 6, 7])` is 16 bytes, the same ones each time. With `[5, 6, 8]`, or
            `[7, 6, 5]`, or another parent, they are different. Which bytes exactly is up to you.
        """,
        hints=(
            "A hash function takes one string of bytes. What two things must be in that string?",
            'How do ints become bytes without losing anything? `array("q", numbers)` holds 64-bit integers, and arrays '
            "have a method that gives their bytes.",
            "Put the parent's bytes in front of the tokens' bytes and give both to `hashlib.blake2b`. It takes an "
            "argument `digest_size`, and its result has a method `digest()`.",
        ),
        explanation="""
            The chain is in the argument `parent`: it stands for the whole prefix, so one fixed-size name is enough
            however long the prompt is. And each token goes in at full width: cut to 8 bits, 65 and 321 are the same.

            Any cryptographic hash is right: SHA-256 cut to 16 bytes, BLAKE2, BLAKE3. Python's `hash()` is not meant
            for this: it has 64 bits, two inputs with equal values are easy to make, and `hash(None)` is a constant
            since Python 3.12 (vLLM pull request 12621).

            In vLLM this is `hash_block_tokens`, with SHA-256 by default since 0.10.2 (pull request 29261); what else
            changes keys and values (an image, a LoRA adapter, a tenant's salt) goes in too. SGLang compares the
            tokens themselves in its tree.
        """,
        check=check_block_digest,
        mutants=(
            Mutant(
                "no_parent",
                no_parent,
                "The parent is not in it: the same tokens get the same name wherever they stand. Their keys differ.",
                "a frequent shortcut; the chain is the first idea of vLLM's design (issue 2614)",
            ),
            Mutant(
                "eight_bits",
                eight_bits,
                "Each id is cut to 8 bits, so 65 and 321 are the same token to you. Most ids are above 255.",
                "waybarrios/vllm-mlx#444",
            ),
            Mutant(
                "sixteen_bits",
                sixteen_bits,
                "Each id is cut to 16 bits. SmolLM2's ids fit, Llama 3's do not.",
                "ids in a uint16 array",
            ),
            Mutant("thirty_two_bits", thirty_two_bits, "Each id is cut to 32 bits. Asked for is 64.", "a common slip"),
            Mutant(
                "joined_text",
                joined_text,
                "The numbers are glued together without a border: 1, 23 and 12, 3 both give '123'.",
                "a common slip",
            ),
            Mutant(
                "order_lost",
                order_lost,
                'The order of the tokens is lost: "dog bites man" is "man bites dog".',
                "sets and sorted keys",
            ),
            Mutant("added_up", added_up, "Different tokens with the same sum get the same name.", "checksums"),
            Mutant(
                "rolling",
                rolling,
                "A rolling hash with base 31: add 1 to a token, take 31 from the next, and the name is the same.",
                "NVIDIA/Megatron-LM#4158",
            ),
            Mutant(
                "python_hash",
                python_hash,
                "Only 8 of your 16 bytes say anything. That is Python's hash() in a longer coat: collisions can be made.",
                "vllm-project/vllm#12621, #15297",
            ),
            Mutant(
                "xored",
                xored,
                "Parent and hash are mixed with XOR: A B gets the name of B A, and A A cancels out. Hash both together.",
                "combining hashes with ^",
            ),
            Mutant(
                "hex_text",
                hex_text,
                "That is hexadecimal text. `.digest()` gives bytes, `.hexdigest()` a string.",
                "a common slip",
            ),
            Mutant(
                "full_length",
                full_length,
                "Right idea, but 16 bytes are asked for. Yours has 32.",
                "sha256 as it comes",
            ),
            Mutant(
                "as_printed",
                as_printed,
                "You hash what `str(tokens)` prints: [5, 6] and (5, 6) are the same tokens, but other text.",
                "repr as a cheap serialisation",
            ),
            Mutant("last_token_left_out", last_token_left_out, "The block's last token is not in it.", "off by one"),
        ),
        variant=digest_variant,
        scratch="""
            a = block_digest(b"", [5, 6, 7])
            print(len(a), a.hex())
            print(block_digest(a, [5, 6, 7]).hex(), "the same tokens, one block further")
        """,
        plug_in=plug_digest,
    ),
    Exercise(
        id="05.2",
        symbol="minillm.blocks:KVPool.match",
        title="The longest cached prefix",
        minutes=12,
        difficulty=2,
        statement="""
            A prompt arrives. Which of its blocks are cached? Return their numbers, in order: a list, empty if there
            are none. `self` is the pool.

            - `self.hash_fn(parent_digest, tokens_of_the_block)` names a block (`b""` is the first one's parent digest).
              `self.published` is a dict from names to block numbers. `self.block_size` is the size.
            - Names can collide. So compare what `self.blocks[number]` says: `.tokens` is a **tuple** of the block's
              tokens, `.parent` is the *number* of the block before it (`ROOT` for the first).
            - Stop at the first block that is not there: a hole ends the prefix.
            - At least one token must be left to compute, else there are no logits to choose the next token from.
            - `self.enable_prefix_caching` may be False. And only look: change nothing.

            Worked example: block size 4, and 11, 12, ..., 19 (9 tokens) is cached in blocks 0, 1 and, half empty, 2.
            For a prompt of these 9 tokens: **[0, 1]**. For the first 8: **[0]**, as the eighth must be computed.
        """,
        hints=(
            "Walk through the prompt block by block. What must you carry from one block to the next?",
            "You carry two things: the digest of the last block, and its number. How many whole blocks fit in a prompt "
            "of n tokens if the last token may not be part of them? Try n = 8 and n = 9 with blocks of 4.",
            "Whole blocks in `len(tokens) - 1` tokens. For each: slice, make it a tuple, name it with the last digest, "
            "`.get` the number. If there is none, or its tokens or its parent are not these, break; else append, and it is the parent now.",
        ),
        explanation="""
            The walk mirrors how names were made: each digest is made from the one before. At the first miss it ends,
            as whatever follows was computed behind other tokens. `(len(tokens) - 1) // size` blocks may hit: a prompt
            that is cached whole would leave nothing to run through the model.

            vLLM caps the hit at `num_tokens - 1` too, in `get_computed_blocks`, and then computes a whole block again,
            as we do. nano-vllm crashed there (issue 144); the fix proposed in its pull request 199 computes only the
            last token, and writes it into a block that others may be reading.

            Also right: name all blocks first, then look them up. vLLM does so, and keeps the names with the request.
            SGLang's `match_prefix` walks down a tree that holds the tokens, so there is no name and no collision.
        """,
        check=check_match,
        mutants=(
            Mutant(
                "full_hit",
                matching(keep=0),
                "A prompt that is cached whole leaves no token to compute, so there are no logits. Try 8 tokens, blocks of 4.",
                "GeeeekExplorer/nano-vllm#144, #199",
            ),
            Mutant(
                "one_block_short",
                matching(keep=0, spare=1),
                "The last full block is always left out. It must be only if the prompt ends with it: try 9 tokens.",
                "nano-vllm#144: the first workaround",
            ),
            Mutant(
                "no_chain",
                matching(chain=False),
                "Only the first block is ever found. Do you hand both on to the next one: the digest, and the number?",
                "a common slip",
            ),
            Mutant(
                "trusting",
                matching(chain=False, tokens_too=False, parent_too=False),
                "Each block is named alone, and the name is trusted: that is the lesson's broken engine.",
                "the lesson's `trusting`",
            ),
            Mutant(
                "trusts_the_digest",
                matching(tokens_too=False, parent_too=False),
                "A digest that is found is taken for a hit. Let two blocks have one name and you serve foreign keys.",
                "vllm-project/vllm#12621; openvino.genai#3722",
            ),
            Mutant(
                "no_parent_check",
                matching(parent_too=False),
                "The tokens are compared, but not what stands before them: B behind A is not B behind C.",
                "engines that compare the tokens of one block",
            ),
            Mutant(
                "no_token_check",
                matching(tokens_too=False),
                "The parent is compared, but not the block's own tokens.",
                "half of the comparison",
            ),
            Mutant(
                "goes_on",
                matching(goes_on=True, parent_too=False),
                "After a miss you go on. Later blocks of this prompt are of no use: there is a hole before them.",
                "`continue` for `break`",
            ),
            Mutant(
                "goes_on_with_proof",
                matching(goes_on=True),
                "After a miss you go on. If names collide, a later block of this prompt may look like its first.",
                "`continue` for `break`, with both comparisons",
            ),
            Mutant(
                "goes_on_strictly",
                matching(goes_on=True, parent_too=False, tokens_too=False),
                "You go on after a miss, and trust every digest that you find.",
                "a common slip",
            ),
            Mutant(
                "ignores_the_switch",
                matching(obeys=False),
                "`enable_prefix_caching=False` is not respected.",
                "a common slip",
            ),
            Mutant(
                "list_and_tuple",
                matching(as_list=True),
                "Nothing is ever found: some comparison is never true. `[1, 2] == (1, 2)` is False; and `.parent` is a "
                "block number, never a digest.",
                "a common slip",
            ),
            Mutant(
                "zero_is_false",
                matching(falsy=True),
                "Block 0 is a block too, but `if not number` is true for it. Compare with None.",
                "truth of 0",
            ),
            Mutant(
                "first_parent_unchecked",
                matching(front_too=False),
                "The first block's parent is not compared. It must be ROOT: the block may be cached behind another one.",
                "`if hits and ...`",
            ),
            Mutant(
                "only_blocks_in_use",
                matching(used_only=True),
                "You only find blocks that somebody uses. Free blocks keep their content until they are handed out.",
                "free taken for empty",
            ),
            Mutant(
                "takes_references",
                matching(takes=True),
                "`match` only looks. The references are taken later, by `admit`, if the request gets all it needs.",
                "references leaked by requests that wait",
            ),
            Mutant(
                "hash_fn_ignored",
                matching(own_hash=False),
                "You call block_digest. The pool may have another function: self.hash_fn.",
                "a common slip",
            ),
        ),
        variant=match_variant,
        scratch="""
            from minillm import blocks

            pool = blocks.KVPool(num_blocks=8, block_size=4)
            tokens = list(range(11, 20))  # 9 tokens
            table = pool.allocate(3)
            pool.publish(table, [], tokens, num_computed=9)
            print(match(pool, tokens), match(pool, tokens[:8]), match(pool, [1, 2, 3, 4, 5]))
        """,
        plug_in=plug_match,
    ),
    Exercise(
        id="05.3",
        symbol="minillm.blocks:KVPool.release",
        title="Give back, in the right order",
        minutes=10,
        difficulty=2,
        statement="""
            A request has ended. Take one reference from each block of its `table`. A block whose references reach 0 goes
            to the free list `self.free`, but **keeps its digest**: it can still be matched. (`self.free` is an
            `OrderedDict` with block numbers as keys and None as values. The front is handed out first.)

            - Blocks go in from the last of the table to the first: of one prompt, the end is evicted before the start.
            - A cached block goes to the end of the free list. One whose `digest` is None goes to the front: nothing
              is lost when it is reused.
            - A block that others still use is not free.
            - A block that nobody uses must not be freed: raise a `RuntimeError`. And leave the list `table` as it is.

            Worked example: 6 blocks; a prompt has blocks 0 and 1, which are cached, and 2, which is not full. The free
            list is 3, 4, 5. After `release(pool, [0, 1, 2])` it is **2, 3, 4, 5, 1, 0**.
        """,
        hints=(
            "Which end of a long prompt is more likely to be asked for again: the system prompt, or the last sentence?",
            "`reversed(table)` walks from the end. `OrderedDict` has a method that moves a key to the front or the end.",
            "For each block from the last to the first: if `refs` is below 1, raise; take one away; if that leaves 0, put "
            "the number into `self.free` with None, and if it has no digest, `move_to_end` it with `last=False`.",
        ),
        explanation="""
            References say whether a block *may* be reused, the order of the free list says *when*. Last block first,
            because a prefix without its beginning is worthless: evict block 0 and all others of that prompt can never
            be matched again, though they still take memory. What has no content is reused before anything is lost.

            The check for a double free costs one comparison. Without it the same number stands in the list once but
            is handed out while somebody uses it (vLLM issues 1556 and 42571 had tables that list a block twice).

            In vLLM this is `BlockPool.free_blocks`, and the caller hands it the blocks in reverse; its
            `FreeKVCacheBlockQueue` is a linked list, as a block that is hit must leave from the middle. SGLang counts
            references per tree node (`dec_lock_ref`) and evicts leaves, so the end goes first by construction.
        """,
        check=check_release,
        mutants=(
            Mutant(
                "head_first",
                releasing(backwards=False),
                "The start of the prompt is evicted before its end. Without its start, the rest can never be matched.",
                "llm-d-inference-sim#704, Megatron-LM#5822",
            ),
            Mutant(
                "empty_last",
                releasing(empty_to_front=False),
                "Blocks without content go to the end: cached ones are thrown away while empty ones wait.",
                "a common slip",
            ),
            Mutant(
                "newest_first",
                releasing(all_to_front=True),
                "You put everything at the front: what was used last is evicted first. That is a stack, not LRU.",
                "free lists built as stacks",
            ),
            Mutant(
                "no_guard",
                releasing(guard=False),
                "A block without references can be freed again. Its count is below zero then, and nobody notices.",
                "vllm-project/vllm#1556, #42571",
            ),
            Mutant(
                "looks_away",
                releasing(skip=True),
                "A block that nobody uses is passed over in silence. Then nobody learns of the bug: raise a RuntimeError.",
                "defensive code that hides the mistake",
            ),
            Mutant(
                "checked_too_early",
                releasing(early=True),
                "All blocks are checked before any is released: a block that stands there twice passes twice.",
                "check and act apart",
            ),
            Mutant(
                "shared_keeps_its_count",
                releasing(keep_shared=True),
                "A block that others use is passed over, so this request's reference stays for ever. Take it away.",
                "a leak",
            ),
            Mutant(
                "turned_round",
                releasing(in_place=True),
                "`table.reverse()` turns the caller's own list round. `reversed(table)` only walks the other way.",
                "in place for a copy",
            ),
            Mutant(
                "forgets",
                releasing(forget=True),
                "The digest is dropped when the block becomes free. Then a cached prefix dies with its last user.",
                "GeeeekExplorer/nano-vllm#153, a proposed fix",
            ),
            Mutant(
                "always_free",
                releasing(always=True),
                "A block goes to the free list though others still use it. It would be overwritten under them.",
                "reference counts ignored",
            ),
            Mutant(
                "never_free",
                releasing(never=True),
                "Blocks never come back to the free list. Do you ask whether `refs` is 0 before you take one away?",
                "a leak; off by one",
            ),
            Mutant(
                "all_references",
                releasing(zero=True),
                "You set the count to 0. This request held one reference, not all of them.",
                "a common slip",
            ),
        ),
        variant=release_variant,
        scratch="""
            from minillm import blocks

            pool = blocks.KVPool(num_blocks=6, block_size=4)
            table = pool.allocate(3)
            pool.publish(table, [], list(range(11, 20)), num_computed=9)
            release(pool, table)
            print("free list:", list(pool.free), "  can be matched:", list(pool.published.values()))
        """,
        plug_in=plug_release,
    ),
    Exercise(
        id="05.4",
        symbol="minillm.blocks:KVPool.allocate",
        title="Hand out, and forget",
        minutes=8,
        difficulty=2,
        statement="""
            Hand out `count` blocks: take them from the **front** of the free list `self.free` (an `OrderedDict`), give
            each one reference, and return their numbers in that order. If there are fewer than `count`, return None and
            change nothing.

            A block from the free list may still hold an old prompt. Its content is about to be overwritten, so nobody
            may find it any more. `self._forget(number)` takes a block out of `self.published` and clears its
            digest, tokens and parent.

            Worked example: the free list is 2, 3, 1, 0, and 1 and 0 are cached. `allocate(pool, 3)` gives
            **[2, 3, 1]**. Block 1 can no longer be matched, block 0 can. `allocate(pool, 5)` gives **None**.
        """,
        hints=(
            "Two questions for each block that you take: who knows it by its old name? And who uses it now?",
            "Compare `count` with the length of the free list first, before you touch anything. `popitem` takes a key out "
            "of an `OrderedDict`; look up its argument `last`.",
            "None if the list is too short. Else `popitem` from the front, `count` times, and collect the keys (it gives "
            "pairs). For each number call `_forget` and set the block's `refs` to 1.",
        ),
        explanation="""
            This is the only place where something is evicted. Evicting late, at the last possible moment, is what
            makes the cache free of charge: memory that nobody needs right now holds old prompts.

            Leave out the forgetting, and the old name leads to a block with somebody else's content (nano-vllm issue
            163). Comparing `tokens` does not save you: the record still holds the *old* tokens until the new
            content is published. Then Anna's name finds Carl's password.

            Also right: make a fresh record for each block. In vLLM this is `get_new_blocks`, which calls
            `_maybe_evict_cached_block` for each; in SGLang `evict` removes leaves from the tree *before* the
            allocator hands out their slots.
        """,
        check=check_allocate,
        mutants=(
            Mutant(
                "stale",
                allocating(forget="none"),
                "The old name still leads to the block, though it will hold other content. Call _forget for each.",
                "GeeeekExplorer/nano-vllm#163",
            ),
            Mutant(
                "index_only",
                allocating(forget="index"),
                "`published` is right, but the block itself keeps its digest. Later it is taken for a cached one.",
                "ovg-project/kvcached#362",
            ),
            Mutant(
                "block_only",
                allocating(forget="block"),
                "The block is clean, but `published` still leads to it.",
                "half of _forget",
            ),
            Mutant(
                "forgets_everything",
                allocating(forget="everything"),
                "You empty the whole cache. Only the blocks that are handed out are lost.",
                "a cache flushed when full",
            ),
            Mutant(
                "still_free",
                allocating(stays=True),
                "The blocks have an owner now, but they are still in the free list: the next one gets them too.",
                "list(self.free)[:count]",
            ),
            Mutant(
                "half_taken",
                allocating(short="partial"),
                "You take what there is and then give up: those blocks are lost. Compare first, take afterwards.",
                "partial allocation that is not rolled back",
            ),
            Mutant(
                "fewer",
                allocating(short="fewer"),
                "With too few free blocks you return fewer. The caller needs all or None.",
                "a common slip",
            ),
            Mutant(
                "empty_for_none",
                allocating(short="empty"),
                "Too few blocks: None, not an empty list. An empty list is what 0 blocks look like.",
                "`or []`",
            ),
            Mutant(
                "none_for_zero",
                allocating(zero=None),
                "0 blocks can always be handed out: an empty list. None says that there is no room.",
                "truth of an empty list",
            ),
            Mutant(
                "from_the_back",
                allocating(back=True),
                "You take from the back: what was used last is evicted first. `popitem()` does that by default.",
                "the default of OrderedDict.popitem",
            ),
            Mutant(
                "no_references",
                allocating(count_refs=False),
                "The blocks have an owner now, but their count is still 0.",
                "a common slip",
            ),
            Mutant(
                "cached_is_taken",
                allocating(only_empty=True),
                "You count only blocks without content. Cached blocks that nobody uses are free as well.",
                "free and cached mixed up: a pool that fills up and never empties",
            ),
            Mutant(
                "never_the_last",
                allocating(strict=True),
                "The last free block is never handed out: with 3 free, 3 can be taken.",
                "`>=` for `>`",
            ),
        ),
        variant=allocate_variant,
        scratch="""
            from minillm import blocks

            pool = blocks.KVPool(num_blocks=4, block_size=4)
            table = pool.allocate(3)
            pool.publish(table, [], list(range(11, 20)), num_computed=9)
            pool.release(table)
            print("free list before:", list(pool.free))
            print("handed out:", allocate(pool, 3))
            print("can still be matched:", list(pool.published.values()))
        """,
        plug_in=plug_allocate,
    ),
    Exercise(
        id="05.5",
        symbol="minillm.blocks:KVPool.publish_block",
        title="Twins",
        minutes=15,
        difficulty=3,
        statement="""
            Block `table[i]` is full and computed. Make it findable: enter it in `self.published` under `digest`, and
            write `digest`, `tokens` (that is `content`, a tuple) and `parent` into its record `self.blocks[...]`. The
            parent is the number `table[i - 1]`, or `ROOT` if i is 0. Return True. But:

            - **A twin.** An equal block (same content, same parent) has that name already: another request computed it
              in the same step. Then use that one: `table[i]` becomes its number, it gets one reference more
              (`self.share([number])`), and your own copy is given back (`self.release([number])`). Return True.
            - **A collision.** The name belongs to a block with other content, or another parent. Then nothing changes;
              this block stays private. Return False.
            - **An orphan.** The parent has no digest itself (it collided, say, and stayed private). Nobody could reach
              this block. Nothing changes; return False.
            - The name belongs to `table[i]` itself already: nothing changes; return True.

            Worked example: block 0 is published with content A. A second request has `table = [2, 3]`, and its block
            2 holds A too. `publish_block(pool, table, 0, name_of_A, A)` gives True; `table` is now **[0, 3]**,
            block 0 has 2 references, and block 2 is free.
        """,
        hints=(
            'There are four possible answers to "who has this name?": nobody, this very block, an equal one, a different one.',
            "Deal with the orphan first. Then ask `self.published` for the owner of the name. Compare the owner's tokens and "
            "parent with yours before you trust it.",
            "`dict.setdefault(digest, number)` enters the number if the name is new, and gives the owner in either case. Is "
            "the owner your own block? Write the record. Is its content or parent different? False. Otherwise: share "
            "the owner, release yours, and put the owner's number into the table.",
        ),
        explanation="""
            Two requests that start in the same step cannot find each other's blocks: nothing is published yet. So both
            compute the prefix (that time is lost), and here the second copy is dropped (that memory is not).

            Merging also keeps the tree whole. If a child could hang on one copy while the name leads to the other,
            eviction could take a parent before its child. Now each content exists once, and whoever uses a block also
            uses its parent.

            vLLM keeps both copies, on purpose: its block tables only ever grow, which is easier for everything that
            has copied them. nano-vllm let the later copy take over the name (issue 219), so the
            earlier one could no longer be found.
            SGLang's `cache_unfinished_req` inserts into the tree, frees the duplicate slots and continues with the
            tree's own, as we do.
        """,
        check=check_publish_block,
        mutants=(
            Mutant(
                "twins_kept",
                publishing(merge=False),
                "Both copies stay. That works, but wastes memory; here the table must switch to the published one.",
                "vLLM keeps them; GeeeekExplorer/nano-vllm#219",
            ),
            Mutant(
                "twins_refused",
                publishing(refuse=True),
                "The copy stays private, as in vLLM. That works, but wastes memory; here the table must switch to the "
                "published block, and the answer is True.",
                "vLLM; the lesson's `keep_twins`",
            ),
            Mutant(
                "table_not_switched",
                publishing(switch=False),
                "The counts are right, but table[i] still names your own copy, which you have given back.",
                "a forgotten line",
            ),
            Mutant(
                "counted_by_hand",
                publishing(by_hand="share"),
                "You raise the count by hand. If nobody used that block, it also stands in the free list, and goes to "
                "the next who asks: `self.share` takes it out.",
                "half of `share`",
            ),
            Mutant(
                "freed_by_hand",
                publishing(by_hand="release"),
                "You free your copy by hand. A fork may use it too: `self.release` takes away one reference, not all.",
                "half of `release`",
            ),
            Mutant(
                "name_overwritten",
                publishing(overwrite=True),
                "The name now leads to the newer block, and the older one still believes that it has it.",
                "GeeeekExplorer/nano-vllm#219",
            ),
            Mutant(
                "not_shared",
                publishing(share=False),
                "The table uses the other block, but its count does not say so. It would be freed under this request.",
                "reference not raised on a hit",
            ),
            Mutant(
                "not_released",
                publishing(release=False),
                "Your own copy is in no table any more, but keeps its reference: it is lost for ever.",
                "a leak",
            ),
            Mutant(
                "trusts_the_digest",
                publishing(tokens_too=False, parent_too=False),
                "An equal name is taken for equal content. Compare tokens and parent: names can collide.",
                "vllm-project/vllm#12621, #54727",
            ),
            Mutant(
                "no_parent_check",
                publishing(parent_too=False),
                "The tokens are compared, the parents are not.",
                "half of the comparison",
            ),
            Mutant(
                "no_token_check",
                publishing(tokens_too=False),
                "The parents are compared, the tokens are not.",
                "half of the comparison",
            ),
            Mutant(
                "orphans",
                publishing(orphans=True),
                "A block whose parent cannot be found is published all the same. Nobody can reach it.",
                "blocks stranded behind an evicted parent",
            ),
            Mutant(
                "root_is_last",
                publishing(last=True),
                "For i = 0, `table[i - 1]` is `table[-1]`: the table's last block. The first block's parent is ROOT.",
                "an index of -1",
            ),
            Mutant(
                "root_has_no_record",
                publishing(no_root=True),
                "The first block is taken for an orphan. ROOT is -1, and `self.blocks[-1]` is the pool's last block: ask "
                "for the parent's digest only if i > 0.",
                "an index of -1",
            ),
            Mutant(
                "parent_lost",
                publishing(root=True),
                "The parent is ROOT for every block. It is table[i - 1], unless i is 0.",
                "a common slip",
            ),
            Mutant(
                "tokens_lost",
                publishing(own_tokens=False),
                "The block's tokens are not written down, so no hit can be proved.",
                "a common slip",
            ),
            Mutant(
                "says_nothing",
                publishing(result=None),
                "It does the work but returns nothing. The caller goes on only after True.",
                "a missing return",
            ),
        ),
        variant=publish_variant,
        scratch="""
            from minillm import blocks

            pool, content = blocks.KVPool(num_blocks=6, block_size=4), (11, 12, 13, 14)
            name = blocks.block_digest(b"", content)
            first, second = pool.allocate(2), pool.allocate(2)
            print(publish_block(pool, first, 0, name, content), first)
            print(publish_block(pool, second, 0, name, content), second, "free:", list(pool.free))
        """,
        plug_in=plug_publish_block,
    ),
]
