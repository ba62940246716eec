"""Exercises of stage 06."""

import time

from minillm import metrics
from minillm.blocks import KVPool
from minillm.config import EngineConfig
from minillm.course.exercise import Exercise, Mutant
from minillm.course.learn import make_llm
from minillm.metrics import RequestMetrics, StepRecord
from minillm.request import Request, SamplingParams
from minillm.scheduler import Plan, Scheduler

# ---- what several exercises use


class Desk(Scheduler):
    """A scheduler that can say what it looks like, and that notices a loop which never ends."""

    asked = 0

    def __repr__(self):
        oldest = min((r.metrics.arrival for r in self.waiting), default=0.0)
        since = "0 s" if time.perf_counter() - oldest < 500 else "2000 s"
        waits = f"{len(self.waiting)} wait for {since}" if self.waiting else "nobody waits"
        return f"<{self.config.scheduling}: {len(self.running)} of {self.config.max_num_seqs} seats taken, {waits}>"

    def _admit(self, request, budget, plan):
        self.asked += 1
        if self.asked > 100:
            raise RuntimeError("_admit was asked 100 times in one step: this loop never ends")
        return super()._admit(request, budget, plan)


def desk(prompts=(), block_size=4, num_blocks=32, caching=False, **config):
    """A scheduler with these prompts waiting, and no model."""
    pool = KVPool(num_blocks, block_size, enable_prefix_caching=caching)
    made = Desk(EngineConfig(block_size=block_size, **config), pool, max_model_len=num_blocks * block_size)
    for tokens in prompts:
        enter(made, tokens)
    return made


def enter(made, tokens, age=0.0, name=None):
    order = made.entered = getattr(made, "entered", 0) + 1
    tokens = list(range(100 * order, 100 * order + tokens)) if isinstance(tokens, int) else list(tokens)
    arrival = time.perf_counter() - age
    request = Request(
        name or f"r{order}",
        tokens,
        SamplingParams(max_tokens=4),
        RequestMetrics(arrival),
        order,
        num_prompt=len(tokens),
    )
    made.add(request)
    return request


def draw(timeline, num_seats, rectangular):
    """The seats of a run as text: one row a seat, one character a step."""
    rows, seat_of = [[] for _ in range(num_seats)], {}
    for i, step in enumerate(timeline):
        alive = {name: end - start for name, _, start, end in step.work}
        if not rectangular:
            seat_of = {name: seat for name, seat in seat_of.items() if name in alive}
        elif not alive.keys() & seat_of.keys():
            seat_of = {}
        for name in alive:
            if name not in seat_of:
                seat_of[name] = min({*range(99)} - {*seat_of.values()})
                letter = chr(ord("A") + int(name.rpartition("-")[2]) % 26)
            else:
                letter = "="
            if seat_of[name] >= len(rows):
                rows += [[] for _ in range(seat_of[name] + 1 - len(rows))]
            rows[seat_of[name]] += [" "] * (i - len(rows[seat_of[name]])) + [letter]
        for name, seat in seat_of.items():
            if name not in alive:
                rows[seat] += [" "] * (i - len(rows[seat])) + ["."]
    return ["   " + "".join(row) for row in rows]


LENGTHS = (3, 12, 2, 4, 2, 3, 9, 2)


def serve(**options):
    """Eight requests on the course's model, 4 at a time. Returns the outputs and the timeline."""
    llm = make_llm(num_kv_blocks=64, max_num_seqs=4, enable_prefix_caching=False, **options)
    llm.timeline = []
    texts = ("Hi", "Name three birds.", "Thanks.", "What is two plus two?")
    prompts = [texts[i % 4] if llm.tokenizer else [5, 6, 7][: 1 + i % 3] for i in range(len(LENGTHS))]
    params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in LENGTHS]
    outputs = [out.outputs[0].token_ids for out in llm.generate(prompts, params, progress=False)]
    return outputs, llm.timeline


# ---- 06.1 may_admit


def check_may_admit(t, may_admit):
    def case(scheduling, running, waiting, expected, note, age=0.0):
        made = desk(num_blocks=2, scheduling=scheduling, max_num_seqs=4, batch_delay=1000.0)
        for _ in range(waiting):
            enter(made, 3, age=age)
        for _ in range(running):
            request = enter(made, 3)
            made.waiting.remove(request)
            made.running.append(request)
        t.case(may_admit, made, expected=expected, note=note)

    case("continuous", 2, 3, True, "continuous: a seat is free, nobody waits for the others to end")
    case("continuous", 0, 1, True, "continuous: an idle engine")
    case("dynamic", 0, 1, True, "dynamic: nothing runs, one request waits")
    case("dynamic", 1, 3, False, "dynamic: a batch is under way, and only one of it is left")
    case("static", 0, 4, True, "static: nothing runs and a full batch waits")
    case("static", 0, 3, False, "static: one seat would stay empty, and the first has not waited for long")
    case("static", 0, 1, True, "static: not full, but the first waits for longer than batch_delay", age=2000.0)
    case("static", 1, 4, False, "static: a full batch waits, but another one is still under way")
    case(
        "static",
        1,
        1,
        False,
        "static: the first waits for longer than batch_delay, but a batch is under way",
        age=2000.0,
    )
    case("dynamic", 3, 4, False, "dynamic: a full batch waits behind a running one")
    case("dynamic", 0, 3, True, "dynamic does not wait to be full")
    case("static", 0, 9, True, "static: more than a full batch waits")
    case("continuous", 3, 9, True, "continuous: many wait, one seat is free")


def all_wait(self):
    return not self.running


def never_waits_for_more(self):
    return self.config.scheduling == "continuous" or not self.running


def joins_midway(self):
    return self.config.scheduling != "static" or self.hold() == 0.0


def static_forgets_running(self):
    if self.config.scheduling == "dynamic":
        return not self.running
    return self.config.scheduling == "continuous" or self.hold() == 0.0


def dynamic_is_continuous(self):
    return self.config.scheduling != "static" or (not self.running and self.hold() == 0.0)


def waits_for_ever(self):
    if self.config.scheduling == "continuous":
        return True
    if self.running:
        return False
    return self.config.scheduling == "dynamic" or len(self.waiting) >= self.config.max_num_seqs


def hold_upside_down(self):
    if self.config.scheduling == "continuous":
        return True
    return not self.running and (self.config.scheduling == "dynamic" or self.hold() > 0.0)


def dynamic_waits_too(self):
    if self.config.scheduling == "continuous":
        return True
    oldest = min(r.metrics.arrival for r in self.waiting)
    full = len(self.waiting) >= self.config.max_num_seqs
    return not self.running and (full or time.perf_counter() >= oldest + self.config.batch_delay)


def always(self):
    return True


def seconds_returned(self):
    return True if self.config.scheduling == "continuous" else self.hold()


def may_admit_variant(self):
    config = self.config
    if config.scheduling == "static" and len(self.waiting) < config.max_num_seqs:
        first = min((r.metrics.arrival for r in self.waiting), default=0.0)
        if time.perf_counter() < first + config.batch_delay:
            return False
    return config.scheduling == "continuous" or len(self.running) == 0


def plug_may_admit(answer, swap):
    print("A, B, C ...: a request's first step; =: one more token; .: a dead seat")
    wanted, found = {}, {}
    for mode in ("static", "continuous"):
        wanted[mode] = serve(scheduling=mode)
        with swap():
            found[mode] = serve(scheduling=mode)
        timeline = found[mode][1]
        print(f"{mode}, with your may_admit: {len(timeline)} steps, {metrics.useful_share(timeline):.0%} useful")
        print("\n".join(draw(timeline, 4, mode == "static")))
    same = all(wanted[m][0] == found[m][0] for m in wanted)
    print(f"tokens equal to those of the engine's own scheduler: {'yes' if same else 'NO'}")
    if not same or any(len(wanted[m][1]) != len(found[m][1]) for m in wanted):
        raise AssertionError("the engine's own scheduler gives another run")


# ---- 06.2 padding


def check_padding(t, padding):
    def count(chunk_lens, num_seats):
        """The oracle: draw each seat as text, P for a prompt's tokens, + for padding, x for a dead seat; count."""
        widest = max([n for n in chunk_lens if n > 1], default=1)
        rows = [("P" * n).ljust(widest, "+") if n > 1 else "P" for n in chunk_lens]
        return sum(row.count("+") + row.count("x") for row in rows + ["x"] * (num_seats - len(rows)))

    def case(chunk_lens, num_seats, expected, note):
        assert count(chunk_lens, num_seats) == expected
        t.case(padding, chunk_lens, num_seats, expected=expected, note=note)

    case([5, 2, 4], 3, 4, "three prompts, no seat is dead")
    case([1, 1], 2, 0, "two requests write, no seat is dead")
    case([1, 1], 5, 3, "two of five still write: three dead seats, one token each")
    case([6, 3], 4, 5, "two prompts and two dead seats")
    case([7], 1, 0, "a single prompt")
    case([4, 4, 4], 3, 0, "prompts of the same length")
    case([9, 1], 2, 0, "a prompt beside a request that writes: that one is not padded")
    case([1, 8, 1, 5], 6, 5, "two prompts, two that write, two dead seats")
    case([], 0, 0, "an empty step")
    case([], 2, 2, "only dead seats")
    case([2, 3, 1], 3, 1, "a prompt of two tokens is a prompt too")
    for chunk_lens, num_seats in (([11, 1, 3, 7], 9), ([1], 8), ([2, 2, 17, 1, 1], 5), ([3, 13, 5], 4)):
        t.case(padding, chunk_lens, num_seats, expected=count(chunk_lens, num_seats))


def prompts_only(chunk_lens, num_seats):
    prompts = [n for n in chunk_lens if n > 1]
    return sum(max(prompts) - n for n in prompts) if prompts else 0


def dead_seats_only(chunk_lens, num_seats):
    return num_seats - len(chunk_lens)


def full_rectangle(chunk_lens, num_seats):
    return num_seats * max(chunk_lens, default=0) - sum(chunk_lens)


def all_alive_padded(chunk_lens, num_seats):
    return sum(max(chunk_lens) - n for n in chunk_lens) + num_seats - len(chunk_lens)


def wide_dead_seats(chunk_lens, num_seats):
    longest = max(chunk_lens, default=1)
    return prompts_only(chunk_lens, num_seats) + (num_seats - len(chunk_lens)) * longest


def every_seat_dead(chunk_lens, num_seats):
    return prompts_only(chunk_lens, num_seats) + num_seats


def no_prompts_crash(chunk_lens, num_seats):
    longest = max(n for n in chunk_lens if n > 1)
    return sum(longest - n for n in chunk_lens if n > 1) + num_seats - len(chunk_lens)


def real_ones_too(chunk_lens, num_seats):
    return prompts_only(chunk_lens, num_seats) + num_seats - len(chunk_lens) + sum(chunk_lens)


def to_the_shortest(chunk_lens, num_seats):
    prompts = [n for n in chunk_lens if n > 1]
    return sum(n - min(prompts) for n in prompts) + num_seats - len(chunk_lens)


def padding_variant(chunk_lens, num_seats):
    prompts = sorted(n for n in chunk_lens if n > 1)
    area = len(prompts) * prompts[-1] if prompts else 0  # the rectangle, less what is filled
    return area - sum(prompts) + (num_seats - len(chunk_lens))


def plug_padding(answer, swap):
    own = serve(scheduling="static")
    with swap():
        outputs, timeline = serve(scheduling="static")
    print("\n".join(draw(timeline, 4, True)))
    padded = [step.padding for step in timeline]
    print(f"dead tokens in each step, by your padding: {padded}")
    real = sum(end - start for step in timeline for _, _, start, end in step.work)
    print(f"{real} real tokens, {sum(padded)} dead ones: {real / (real + sum(padded)):.0%} useful")
    same = own[0] == outputs and padded == [step.padding for step in own[1]]
    print(f"as with the engine's own: {'yes' if same else 'NO'}")
    if not same:
        raise AssertionError("the engine's own padding gives another run")


# ---- 06.3 _fill


def seen(made, plan):
    """What a step looks like afterwards: chunks as (name, first, end), who runs, who waits."""
    chunks = [(c.request.id, c.start, c.end) for c in plan.chunks]
    return {"chunks": chunks, "run": [r.id for r in made.running], "wait": [r.id for r in made.waiting]}


def check_fill(t, _fill):
    def case(made, budget, chunks, run, wait, note, last=None, plan=None):
        plan, made.asked = plan or Plan(), 0
        what = f"_fill({made!r}, plan, budget={budget})"
        t.call(_fill, made, plan, budget, note=note)
        got = seen(made, plan)
        t.equal(got, {"chunks": chunks, "run": run, "wait": wait}, f"chunks, running, waiting after {what}", note=note)
        done = {r.id: r.num_computed for r in made.running}
        t.equal(done, {name: start for name, start, _ in chunks}, f"num_computed after {what}", note=note)
        wanted = last if last is not None else {name: end for name, _, end in chunks}
        logits = {c.request.id: c.end for c in plan.chunks if c.num_logits}
        t.equal(logits, wanted, f"who gets logits after {what}", note=note)

    case(desk([3, 5]), 20, [("r1", 0, 3), ("r2", 0, 5)], ["r1", "r2"], [], "room for both prompts, 3 and 5 tokens")
    case(desk([3, 5]), 8, [("r1", 0, 3), ("r2", 0, 5)], ["r1", "r2"], [], "a budget that is just enough")
    case(desk([3, 5, 2]), 6, [("r1", 0, 3), ("r2", 0, 3)], ["r1", "r2"], ["r3"],
         "the budget ends inside the second prompt: it gets what is left, the third nothing", last={"r1": 3})  # fmt: skip
    case(desk([3]), 0, [], [], ["r1"], "no budget left")
    case(desk(), 7, [], [], [], "nobody waits")
    case(desk([2, 2, 2], max_num_seqs=2), 9, [("r1", 0, 2), ("r2", 0, 2)], ["r1", "r2"], ["r3"], "two seats")
    case(desk([9, 13, 2], num_blocks=5), 30, [("r1", 0, 9)], ["r1"], ["r2", "r3"],
         "the second needs 4 blocks, 2 are free: it holds up the third, which would fit")  # fmt: skip
    case(desk([11, 6], long_prefill_token_threshold=4), 9, [("r1", 0, 4), ("r2", 0, 4)], ["r1", "r2"], [],
         "no more than 4 tokens of one request in a step", last={})  # fmt: skip

    made = desk(caching=True)
    first = enter(made, range(500, 509), name="old")
    plan = Plan()
    Scheduler._admit(made, first, 99, plan)
    plan.chunks.append(made._chunk(first, 9))
    made.commit(plan)
    made.finish(first, "length")
    for tail in (7, 8):
        enter(made, [*range(500, 508), tail, tail, tail], name=f"hit {tail}")
    case(made, 5, [("hit 7", 8, 11), ("hit 8", 8, 10)], ["hit 7", "hit 8"], [],
         "8 of 11 tokens are in the prefix cache: only the other 3 are computed, and count", last={"hit 7": 11})  # fmt: skip

    made = desk()
    first, plan = enter(made, 9, name="old"), Plan()
    Scheduler._admit(made, first, 99, plan)
    first.num_computed = 5  # two steps ago; the other 4 tokens stand in the plan already
    plan.chunks.append(made._chunk(first, 9))
    enter(made, 6)
    case(made, 4, [("old", 5, 9), ("r2", 0, 4)], ["old", "r2"], [],
         "a request that runs has its part in the plan already: that stays", last={"old": 9}, plan=plan)  # fmt: skip

    made = desk([5, 4], enable_chunked_prefill=False, max_num_batched_tokens=8)
    case(made, 8, [("r1", 0, 5)], ["r1"], ["r2"], "no chunks: a prompt of 4 does not fit into the 3 that are left")

    draw_one = t.rng(6)
    for _ in range(6):
        sizes = [int(n) for n in (1 + 9 * torch_rand(draw_one, 7)).tolist()]
        seats, budget = int(2 + 4 * torch_rand(draw_one, 1)), int(8 + 20 * torch_rand(draw_one, 1))
        chunks, left = [], budget
        for i, n in enumerate(sizes[:seats]):  # the oracle: lay the prompts end to end, and cut at the budget
            take = min(n, left)
            if take:
                chunks.append((f"r{i + 1}", 0, take))
            left -= take
        names = [name for name, _, _ in chunks]
        last = {name: end for (name, _, end), n in zip(chunks, sizes, strict=False) if end == n}
        rest = [f"r{i + 1}" for i in range(len(sizes))][len(names) :]
        case(desk(sizes, max_num_seqs=seats), budget, chunks, names, rest, f"prompts of {sizes} tokens", last=last)


def torch_rand(generator, count):
    import torch

    return torch.rand(count, generator=generator)


def one_a_step(self, plan, budget):
    if self.waiting and budget > 0 and self._admit(request := self.waiting[0], budget, plan):
        end = request.num_computed + self.share(request.need, budget)
        plan.chunks.append(self._chunk(request, end))


def never_ends(self, plan, budget):
    while self.waiting and budget > 0:
        request = self.waiting[0]
        if self._admit(request, budget, plan):
            end = request.num_computed + self.share(request.need, budget)
            plan.chunks.append(self._chunk(request, end))
            budget -= end - request.num_computed


def overtakes(self, plan, budget):
    stuck = []
    while self.waiting and budget > 0:
        request = self.waiting[0]
        if not self._admit(request, budget, plan):
            stuck.append(self.waiting.pop(0))
            continue
        end = request.num_computed + self.share(request.need, budget)
        plan.chunks.append(self._chunk(request, end))
        budget -= end - request.num_computed
    self.waiting[:0] = stuck


def budget_stays(self, plan, budget):
    while self.waiting and budget > 0:
        request = self.waiting[0]
        if not self._admit(request, budget, plan):
            break
        plan.chunks.append(self._chunk(request, request.num_computed + self.share(request.need, budget)))


def need_off_budget(self, plan, budget):
    while self.waiting and budget > 0:
        request = self.waiting[0]
        if not self._admit(request, budget, plan):
            break
        plan.chunks.append(self._chunk(request, request.num_computed + self.share(request.need, budget)))
        budget -= request.need


def budget_of_zero(self, plan, budget):
    while self.waiting and budget >= 0:
        request = self.waiting[0]
        if not self._admit(request, budget, plan):
            break
        end = request.num_computed + self.share(request.need, budget)
        plan.chunks.append(self._chunk(request, end))
        budget -= end - request.num_computed


def plan_emptied(self, plan, budget):
    plan.chunks = []
    fill_variant(self, plan, budget)


def books_at_once(self, plan, budget):
    while self.waiting and budget > 0:
        request = self.waiting[0]
        if not self._admit(request, budget, plan):
            break
        take = self.share(request.need, budget)
        plan.chunks.append(self._chunk(request, request.num_computed + take))
        budget -= take
        request.num_computed += take


def asks_the_next(self, plan, budget):
    for request in list(self.waiting):
        if budget <= 0:
            break
        if not self._admit(request, budget, plan):
            continue
        end = request.num_computed + self.share(request.need, budget)
        plan.chunks.append(self._chunk(request, end))
        budget -= end - request.num_computed


def whole_prompts(self, plan, budget):
    while self.waiting and budget > 0:
        request = self.waiting[0]
        if not self._admit(request, budget, plan):
            break
        plan.chunks.append(self._chunk(request, len(request.tokens)))
        budget -= request.need


def only_if_it_fits(self, plan, budget):
    while self.waiting and self.waiting[0].need <= budget:
        request = self.waiting[0]
        if not self._admit(request, budget, plan):
            break
        end = request.num_computed + self.share(request.need, budget)
        plan.chunks.append(self._chunk(request, end))
        budget -= end - request.num_computed


def hit_forgotten(self, plan, budget):
    while self.waiting and budget > 0:
        request = self.waiting[0]
        if not self._admit(request, budget, plan):
            break
        end = self.share(request.need, budget)
        plan.chunks.append(self._chunk(request, end))
        budget -= end


def need_too_early(self, plan, budget):
    while self.waiting and budget > 0:
        request = self.waiting[0]
        take = self.share(request.need, budget)
        if not self._admit(request, budget, plan):
            break
        plan.chunks.append(self._chunk(request, request.num_computed + take))
        budget -= take


def pays_for_hits(self, plan, budget):
    while self.waiting and budget > 0:
        request = self.waiting[0]
        if not self._admit(request, budget, plan):
            break
        end = request.num_computed + self.share(request.need, budget)
        plan.chunks.append(self._chunk(request, end))
        budget -= end


def asks_with_all(self, plan, budget):
    whole = budget
    while self.waiting and budget > 0:
        request = self.waiting[0]
        if not self._admit(request, whole, plan):
            break
        end = request.num_computed + self.share(request.need, budget)
        plan.chunks.append(self._chunk(request, end))
        budget -= end - request.num_computed


def pops_twice(self, plan, budget):
    while self.waiting and budget > 0:
        request = self.waiting[0]
        if not self._admit(request, budget, plan):
            break
        if self.waiting:
            self.waiting.pop(0)
        end = request.num_computed + self.share(request.need, budget)
        plan.chunks.append(self._chunk(request, end))
        budget -= end - request.num_computed


def pops_first(self, plan, budget):
    while self.waiting and budget > 0:
        request = self.waiting.pop(0)
        if not self._admit(request, budget, plan):
            break
        end = request.num_computed + self.share(request.need, budget)
        plan.chunks.append(self._chunk(request, end))
        budget -= end - request.num_computed


def live_list(self, plan, budget):
    for request in self.waiting:
        if budget <= 0 or not self._admit(request, budget, plan):
            break
        end = request.num_computed + self.share(request.need, budget)
        plan.chunks.append(self._chunk(request, end))
        budget -= end - request.num_computed


def no_chunk(self, plan, budget):
    while self.waiting and budget > 0 and self._admit(request := self.waiting[0], budget, plan):
        budget -= self.share(request.need, budget)


def threshold_ignored(self, plan, budget):
    while self.waiting and budget > 0:
        request = self.waiting[0]
        if not self._admit(request, budget, plan):
            break
        end = request.num_computed + min(request.need, budget)
        plan.chunks.append(self._chunk(request, end))
        budget -= end - request.num_computed


def seats_only(self, plan, budget):
    for request in list(self.waiting[: self.config.max_num_seqs - len(self.running)]):
        if budget > 0:
            self._admit(request, budget, plan)
            end = request.num_computed + self.share(request.need, budget)
            plan.chunks.append(self._chunk(request, end))
            budget -= end - request.num_computed


def fill_variant(self, plan, budget):
    before = len(plan.chunks)
    for request in list(self.waiting):
        left = budget - sum(c.end - c.start for c in plan.chunks[before:])
        if left <= 0 or not self._admit(request, left, plan):
            return
        plan.chunks.append(self._chunk(request, request.num_computed + self.share(request.need, left)))


def plug_fill(answer, swap):
    own = serve(max_num_batched_tokens=8)
    with swap():
        outputs, timeline = serve(max_num_batched_tokens=8)
    print("continuous batching with your loop. A, B, C ...: a request's first step; =: more of it")
    print("\n".join(draw(timeline, 4, False)))
    most = max(sum(end - start for _, _, start, end in step.work) for step in timeline)
    print(f"{len(timeline)} steps for {sum(LENGTHS)} tokens; the fullest step computed {most} of 8 allowed")
    same = own[0] == outputs and len(own[1]) == len(timeline)
    print(f"tokens and steps equal to those of the engine's own loop: {'yes' if same else 'NO'}")
    if not same:
        raise AssertionError("the engine's own loop gives another run")


# ---- 06.4 useful_share


class Step(StepRecord):
    """A step that prints in short."""

    def __repr__(self):
        work = ", ".join(f"{name} {start} to {end}" for name, _, start, end in self.work)
        return f"<step: work {work or 'none'}; padding {self.padding}>"


def record(work, padding, start=0.0, end=1.0):
    """One step: `work` holds (first position, end position) of each request."""
    return Step(start, end, [(f"r{i}", 0, a, b) for i, (a, b) in enumerate(work)], padding, 1, 0)


def check_useful_share(t, useful_share):
    def case(steps, expected, note):
        marks = [m for work, pad, *_ in steps for m in [*(1 for a, b in work for _ in range(a, b)), *[0] * pad]]
        assert abs((sum(marks) / len(marks) if marks else 1.0) - expected) < 1e-12  # the oracle: one mark a token
        t.case(useful_share, [record(*step) for step in steps], expected=expected, note=note)

    case([([(4, 5), (7, 8)], 2)], 0.5, "one step: two tokens, two dead ones")
    case([([(0, 6)], 0)], 1.0, "one prompt, no padding")
    case([], 1.0, "nothing was computed: nothing was wasted")
    case([([(0, 5), (0, 2)], 3), ([(5, 6), (2, 3)], 0)], 0.75, "a prompt step and a decode step")
    case([([(0, 19)], 0), ([(19, 20)], 3)], 20 / 23, "steps of different size: tokens count, not steps")
    case([([(40, 48), (9, 10)], 1)], 0.9, "a later chunk of a prompt: 8 tokens, at positions 40 to 47")
    case([([], 4)], 0.0, "only dead tokens")
    case(
        [([(0, 3), (0, 1), (8, 9)], 2, 0.0, 5.0), ([(3, 4)], 2, 5.0, 6.0)],
        0.6,
        "steps of different duration: time does not count",
    )
    case([([(7, 8)], 7)] * 9 + [([(0, 8), (0, 9)], 1)], 26 / 90, "ten steps")


def mean_of_steps(timeline):
    shares = [metrics.useful_share([step]) for step in timeline]
    return sum(shares) / len(shares) if shares else 1.0


def seats_counted(timeline):
    real = sum(len(step.work) for step in timeline)
    padded = sum(step.padding for step in timeline)
    return real / (real + padded) if real + padded else 1.0


def wasted(timeline):
    return 1.0 - metrics.useful_share(timeline) if timeline else 1.0


def over_padding(timeline):
    real = sum(end - start for step in timeline for *_, start, end in step.work)
    return real / (sum(step.padding for step in timeline) or 1)


def empty_is_zero(timeline):
    return metrics.useful_share(timeline) if timeline else 0.0


def empty_crashes(timeline):
    real = sum(end - start for step in timeline for *_, start, end in step.work)
    return real / (real + sum(step.padding for step in timeline))


def ends_counted(timeline):
    real = sum(end for step in timeline for *_, end in step.work)
    return real / (real + sum(step.padding for step in timeline)) if timeline else 1.0


def end_included(timeline):
    real = sum(end - start + 1 for step in timeline for *_, start, end in step.work)
    padded = sum(step.padding for step in timeline)
    return real / (real + padded) if real + padded else 1.0


def by_time(timeline):
    total = sum(step.end - step.start for step in timeline)
    return sum((s.end - s.start) * metrics.useful_share([s]) for s in timeline) / total if timeline else 1.0


def percent(timeline):
    return 100 * metrics.useful_share(timeline)


def clean_steps(timeline):
    return sum(not step.padding for step in timeline) / len(timeline) if timeline else 1.0


def useful_variant(timeline):
    real = dead = 0
    for step in timeline:
        dead += step.padding
        for *_, start, end in step.work:
            real += len(range(start, end))
    return 1.0 - dead / max(real + dead, 1)


def plug_useful_share(answer, swap):
    print("your useful_share on three runs of the same eight requests, 4 seats:")
    for mode in ("static", "dynamic", "continuous"):
        _, timeline = serve(scheduling=mode)
        share = answer(timeline)
        print(
            f"   {mode:<11}{len(timeline):>3} steps {share:>5.0%}  {'#' * round(40 * share)}{'.' * (40 - round(40 * share))}"
        )
        if abs(share - metrics.useful_share(timeline)) > 1e-9:
            raise AssertionError("the engine's own says something else")
    print("(all eight wait from the start, so static and dynamic form the same batches)")


# ---- 06.5 check the claim

VERDICTS = {
    "A": "wrong",
    "B": "right",
    "C": "wrong",
    "D": "right",
    "E": "depends",
    "F": "right",
    "G": "wrong",
    "H": "wrong",
    "I": "wrong",
}

CLAIM_NOTES = {
    "A": "Utilisation up 23-fold, from 30 %?",
    "B": "81 to about 1,900 tokens/s: about 23 times?",
    "C": "The 23x are continuous batching alone?",
    "D": "Orca: 36.9 times FasterTransformer's throughput?",
    "E": "Continuous batching brings several times the throughput?",
    "F": "One of 100 tokens, seven of 10: 79 % dead?",
    "G": "A bigger static batch wastes no more?",
    "H": "New requests wait for the current batch?",
    "I": "Padding and masks in vLLM?",
}


def check_verdicts(t, verdicts):
    t.true(isinstance(verdicts, dict), "verdicts is a dict, with the keys A to I as they stood", got=type(verdicts))
    missing = sorted(VERDICTS.keys() - verdicts.keys())
    t.true(not missing, "verdicts has the keys A to I", got=f"{', '.join(missing)} missing" if missing else None)
    given = {key: str(verdicts.get(key, "")).strip().lower() for key in VERDICTS}
    odd = sorted(key for key, word in given.items() if word not in ("right", "wrong", "depends"))
    t.true(not odd, 'each verdict is "right", "wrong" or "depends"', got={key: given[key] for key in odd} or None)
    for key, want in VERDICTS.items():
        t.equal(given[key], want, f"verdict on claim {key}", note=CLAIM_NOTES[key], hide=True)
        if t.failure:
            return  # the claims are independent: what is wrong further down says nothing about this one


def believed(**changes):
    return {**VERDICTS, **changes}


EXERCISES = [
    Exercise(
        id="06.1",
        symbol="minillm.scheduler:Scheduler.may_admit",
        title="The if that decides",
        minutes=8,
        difficulty=1,
        statement="""
            May waiting requests join now? Write the method that tells the three ways of batching apart. Whether there
            is a seat and memory for one of them is asked elsewhere, after you said yes.

            | `self.config.scheduling` | they may join |
            |---|---|
            | `"continuous"` | always |
            | `"dynamic"` | when nothing runs |
            | `"static"` | when nothing runs, and `self.hold()` is 0.0 |

            `self.running` and `self.waiting` are lists of requests. `self.hold()` is how many seconds a static batch still
            waits for more: 0.0 if it is full, or if its first request has waited for `batch_delay`.
            Return a bool.

            Worked example: a static engine with 4 seats. Nothing runs, 3 wait, the first for a second, and
            `batch_delay` is 60: `hold()` is 59.0, so the answer is **False**. With a fourth waiting it is **True**. With one
            request still running, it is **False** however many wait.
        """,
        hints=(
            "Begin with the mode that needs no thinking. Then there are two left, and one question is the same for both.",
            "If something runs, static and dynamic say no. If nothing runs, dynamic says yes, and static asks `hold`.",
            'Three steps: True for "continuous"; False while the list of running requests is not empty; at last, True for '
            '"dynamic", and for "static" whether no seconds are left to hold.',
        ),
        explanation="""
            One `if` is the whole difference, because the rest of the step has no phases: whoever runs gets its tokens, and
            a newcomer is just a request with more of them to compute.

            `hold()` gives 0.0 in the other two modes, so `continuous or (not running and hold() == 0.0)` is right too. So is
            asking for a free seat here; `_admit` would only ask again.

            Orca calls the continuous way *iteration-level scheduling* (Yu et al., OSDI 2022). vLLM and SGLang have
            no switch for it: they always do it. `"dynamic"` is Triton's `dynamic_batching { }` as it stands. With a
            `max_queue_delay_microseconds` it waits for company, like our static batch with a `batch_delay`; Triton calls that
            dynamic too. A batch that a client sends as one list is static.
        """,
        check=check_may_admit,
        mutants=(
            Mutant(
                "all_wait",
                all_wait,
                "Everybody waits until the engine is empty. In continuous batching nobody has to: a free seat is filled at once.",
                "candle-vllm issue 156: a scheduler that let nobody in while others ran",
            ),
            Mutant(
                "never_waits_for_more",
                never_waits_for_more,
                "A static batch begins half full: `hold()` says that it should still wait for more.",
                "static taken for dynamic",
            ),
            Mutant(
                "joins_midway",
                joins_midway,
                "Static and dynamic batches are closed once they run. Do you ask whether something runs?",
                "forgetting that a padded batch cannot grow",
            ),
            Mutant(
                "static_forgets_running",
                static_forgets_running,
                "Static asks two things: does nothing run, *and* is `hold()` 0.0? A full batch that waits does not join a running one.",
                "half of the table's line read",
            ),
            Mutant(
                "dynamic_is_continuous",
                dynamic_is_continuous,
                "You let requests join a dynamic batch that is under way. Here that is what continuous means.",
                "the names: Anyscale's post says dynamic for continuous",
            ),
            Mutant(
                "waits_for_ever",
                waits_for_ever,
                "A static batch that never gets full would wait for ever. Its first request has waited for `batch_delay`: `hold()` is 0.0.",
                "a fixed batch size without a timeout",
            ),
            Mutant(
                "hold_upside_down",
                hold_upside_down,
                "`hold()` is how long to go on waiting. The batch may start when that is 0.0.",
                "a common slip",
            ),
            Mutant(
                "dynamic_waits_too",
                dynamic_waits_too,
                "A dynamic batch takes what is there. Only a static one waits for more.",
                "Triton's delay taken for the default",
            ),
            Mutant(
                "always",
                always,
                "That is continuous batching, whatever the engine was asked for.",
                "the mode never read",
            ),
            Mutant(
                "seconds_returned",
                seconds_returned,
                "`hold()` is a number of seconds. Asked is a bool: may they join?",
                "seconds taken for a yes or no",
            ),
        ),
        variant=may_admit_variant,
        scratch="""
            from types import SimpleNamespace

            for mode in ("static", "dynamic", "continuous"):
                engine = SimpleNamespace(
                    config=SimpleNamespace(scheduling=mode), running=[], waiting=["A", "B", "C"], hold=lambda: 59.0
                )
                print(mode, may_admit(engine))
        """,
        plug_in=plug_may_admit,
    ),
    Exercise(
        id="06.2",
        symbol="minillm.scheduler:padding",
        title="Dead tokens",
        minutes=8,
        difficulty=1,
        statement="""
            A padded batch computes more than it needs. Count the dead tokens of one step.

            `chunk_lens[i]` is how many tokens the i-th *living* request computes in this step: more than 1 is a prompt,
            1 is one more token of an answer. `num_seats` is how many requests the batch began with. The finished ones
            are no longer in `chunk_lens`.

            Two things are dead:
            - each prompt is filled up to the longest prompt of the step (requests with 1 token are left as they are);
            - the seat of each finished request costs one token.

            Worked example: `padding([6, 3], 4)`. The second prompt gets 3 dead tokens, and the two dead seats one each:
            **5**. And `padding([1, 1], 5)` is **3**.
        """,
        hints=(
            "Two separate counts, added. Do the dead seats first: how many of the seats are not in the list?",
            "For the prompts, pick out the lengths above 1. Each is filled up to the largest of them.",
            "There may be no prompt at all in a step. Then there is no largest one either, and `max` of nothing is an error.",
        ),
        explanation="""
            Filling up to the longest is the price of a rectangular tensor `[batch, length]`; a dead seat is the price of
            not changing the batch until it is done. `count * longest - sum` over the prompts is right too.

            Real servers with padding are worse than this: many pad to a fixed length, or keep the finished
            row as wide as the others. transformers' `generate` on a list pads prompts to the longest and finished rows
            with `pad_token_id`. vLLM, SGLang and TGI's newer models have no padding: all tokens of a step lie in one flat
            row. (GPU engines do pad the number of *rows* a little, to reuse a recorded CUDA graph: stage 14.)
        """,
        check=check_padding,
        mutants=(
            Mutant(
                "prompts_only",
                prompts_only,
                "The seats of finished requests are missing: one dead token for each.",
                "padding thought of as a matter of prompts",
            ),
            Mutant(
                "dead_seats_only",
                dead_seats_only,
                "Short prompts are filled up to the longest one. That is missing.",
                "padding thought of as a matter of finished rows",
            ),
            Mutant(
                "full_rectangle",
                full_rectangle,
                "That is the whole rectangle, seats times the longest. Here a dead seat costs one token, and one that writes costs none.",
                "batch * max_len - sum, as in training",
            ),
            Mutant(
                "all_alive_padded",
                all_alive_padded,
                "Requests that compute 1 token are not filled up to the prompts' length.",
                "the lengths above 1 not picked out",
            ),
            Mutant(
                "wide_dead_seats",
                wide_dead_seats,
                "A dead seat costs one token, also in a step with long prompts.",
                "dead seats as wide as the prompts",
            ),
            Mutant(
                "every_seat_dead",
                every_seat_dead,
                "You count every seat as dead. Take away those who still live.",
                "a common slip",
            ),
            Mutant(
                "no_prompts_crash",
                no_prompts_crash,
                "Most steps have no prompt at all. `max` of nothing raises an error.",
                "the decode step forgotten",
            ),
            Mutant(
                "real_ones_too",
                real_ones_too,
                "Real tokens are not dead. You count all that the step computes.",
                "computed taken for wasted",
            ),
            Mutant(
                "to_the_shortest",
                to_the_shortest,
                "Padding fills up to the longest. You measure against the shortest.",
                "min for max",
            ),
        ),
        variant=padding_variant,
        scratch="""
            print(padding([6, 3], 4), "dead tokens, as in the worked example")
            print(padding([1, 1], 5))
        """,
        plug_in=plug_padding,
    ),
    Exercise(
        id="06.3",
        symbol="minillm.scheduler:Scheduler._fill",
        title="The admission loop",
        minutes=15,
        difficulty=3,
        statement="""
            The heart of continuous batching: after the running requests got their tokens, `budget` tokens of the step are
            left. Let waiting requests in, first one first, as long as there is budget. Return nothing; append to `plan.chunks`,
            where the running requests' parts stand already. `num_computed` moves on later, when the step has been computed.

            What you have:
            - `self.waiting`: the queue. Its first element is next.
            - `self._admit(request, budget, plan)`: tries to let in *the first waiting request*. True: it now runs, is out
              of the queue, and `request.num_computed` is what the prefix cache gave it. False: no seat, no memory, or (without
              chunks) not enough budget; nothing has changed. If the first does not fit, nobody behind it gets in.
            - `self.share(need, budget)`: how many of `need` tokens the request gets in this step.
            - `request.need`: tokens that are not computed yet.
            - `self._chunk(request, end)`: the request's part of the step, from `num_computed` to `end` (not included). It
              goes into `plan.chunks`. What it computes comes off the budget.

            Worked example: prompts of 3, 5 and 2 tokens wait, and `budget` is 6. The first gets positions 0 to 3, the
            second 0 to 3 (the rest of its prompt comes in the next step), the third waits: **(0, 3), (0, 3)**.
        """,
        hints=(
            "A loop with two conditions: somebody waits, and budget is left. Inside it: ask, and leave the loop on False.",
            "Admitting may change `num_computed`, so look at `need` only afterwards. The chunk begins at `num_computed`, so "
            "where does it end?",
            "After a yes: the end is what was computed already plus this request's share of what it needs; append the chunk for that "
            "end; take off the budget what lies between the two. `_admit` has removed the request from the queue: "
            "do not remove it again.",
        ),
        explanation="""
            The order of two lines matters: `need` before `_admit` does not know yet what the prefix cache saves. And
            the *break*: it keeps first come, first served, so that a long prompt is not overtaken for ever by short ones. It has
            a price, head-of-line blocking: memory may lie idle while the first waits for more. vLLM's loop breaks as well;
            issue 31731 asks it to skip, and a measurement in pull request 33499 shows both sides: those behind get in far sooner, the
            blocked one even later.

            A `for` over a copy of the queue, with `return` at the first no, is right too. In vLLM this is the loop over
            `waiting` in `Scheduler.schedule`, in SGLang `get_new_batch_prefill` with its `PrefillAdder`, in TGI the
            router's `batching_task`.
        """,
        check=check_fill,
        mutants=(
            Mutant(
                "one_a_step",
                one_a_step,
                "Only one request gets in. Go on while somebody waits and budget is left.",
                "`if` for `while`",
            ),
            Mutant(
                "never_ends",
                never_ends,
                "When `_admit` says no, nothing changes: the same request is asked again and again. Leave the loop.",
                "the break forgotten",
            ),
            Mutant(
                "overtakes",
                overtakes,
                "Somebody overtook the first in the queue. Short requests could do that for ever: stop at the first no.",
                "vLLM issue 31731 asks for it; pull request 33499 measures what it costs the first one",
            ),
            Mutant(
                "budget_stays",
                budget_stays,
                "The budget never shrinks, so the step gets more tokens than it may have.",
                "the last line forgotten",
            ),
            Mutant(
                "need_off_budget",
                need_off_budget,
                "Take off what this step computes, the share. The rest of `need` is not computed now.",
                "the two words of `share(need, budget)` mixed up",
            ),
            Mutant(
                "budget_of_zero",
                budget_of_zero,
                "With 0 tokens left you let one more in: it gets a chunk of no tokens. Stop when the budget is 0.",
                ">= for >",
            ),
            Mutant(
                "plan_emptied",
                plan_emptied,
                "`plan.chunks` holds the running requests' parts already. You threw them away: append to it.",
                "a new list for an old one",
            ),
            Mutant(
                "books_at_once",
                books_at_once,
                "You move `num_computed` on. A plan computes nothing yet: `commit` moves it on after the step.",
                "planned taken for done",
            ),
            Mutant(
                "asks_the_next",
                asks_the_next,
                "After a no you ask about the next one, but `_admit` always takes the first of the queue. Stop at the first no.",
                "continue for break",
            ),
            Mutant(
                "whole_prompts",
                whole_prompts,
                "Each gets its whole prompt, also where the budget ends. `share` says how much it may have.",
                "nano-vllm before chunked prefill: whole prompts only",
            ),
            Mutant(
                "only_if_it_fits",
                only_if_it_fits,
                "A prompt longer than what is left gets a part of it now and the rest in the next step. You leave it outside.",
                "chunking forgotten; with prompts above the budget it waits for ever (vllm-metal pull request 200)",
            ),
            Mutant(
                "hit_forgotten",
                hit_forgotten,
                "The chunk ends at `num_computed` plus its share. With a prefix hit it does not begin at 0.",
                "a share taken for a position",
            ),
            Mutant(
                "need_too_early",
                need_too_early,
                "You looked at `need` before `_admit`. Only afterwards is known what the prefix cache saves.",
                "the order of two lines",
            ),
            Mutant(
                "pays_for_hits",
                pays_for_hits,
                "Tokens from the prefix cache are not computed, so they cost no budget.",
                "the end taken for a length",
            ),
            Mutant(
                "asks_with_all",
                asks_with_all,
                "`_admit` must hear what is left *now*. Without chunks it would let in a prompt that no longer fits.",
                "a copy of the budget",
            ),
            Mutant(
                "pops_twice",
                pops_twice,
                "`_admit` takes the request out of the queue. You take out the next one too, and it is lost.",
                "a request that vanished",
            ),
            Mutant(
                "pops_first",
                pops_first,
                "You take the request out before you ask, and `_admit` then takes out the next one. Only look: `self.waiting[0]`.",
                "pop(0) as the usual way to read a queue",
            ),
            Mutant(
                "live_list",
                live_list,
                "You loop over the queue itself, while `_admit` takes elements out of it: every other request is skipped.",
                "changing a list while looping over it",
            ),
            Mutant(
                "no_chunk",
                no_chunk,
                "They run, but the plan does not know: nothing of them would be computed.",
                "the append forgotten",
            ),
            Mutant(
                "threshold_ignored",
                threshold_ignored,
                "`self.share` also keeps to the limit for one request (long_prefill_token_threshold). min(need, budget) does not.",
                "share written anew",
            ),
            Mutant(
                "seats_only",
                seats_only,
                "Seats are not all: memory may be missing too. When `_admit` says False, the request must not get a chunk.",
                "admitting by batch size, blocks ignored (nano-vllm, vLLM pull request 4162)",
            ),
        ),
        variant=fill_variant,
        scratch="""
            from types import SimpleNamespace

            class Toy:
                \"\"\"Seats and memory without end: everybody is let in.\"\"\"

                def __init__(self, *lengths):
                    self.waiting = [SimpleNamespace(need=n, num_computed=0) for n in lengths]

                def _admit(self, request, budget, plan):
                    self.waiting.pop(0)
                    return True

                def share(self, need, budget):
                    return min(need, budget)

                def _chunk(self, request, end):
                    return (request.num_computed, end)

            plan = SimpleNamespace(chunks=[])
            _fill(Toy(3, 5, 2), plan, 6)
            print(plan.chunks)  # the worked example
        """,
        plug_in=plug_fill,
    ),
    Exercise(
        id="06.4",
        symbol="minillm.metrics:useful_share",
        title="What was it good for?",
        minutes=8,
        difficulty=2,
        statement="""
            `timeline` is a list of `StepRecord`s, one for each step. `step.work` holds a tuple `(request id, index, start, end)` for
            each living request: it computed the positions from `start` to `end` (not included). `step.padding` counts
            the dead tokens of the step.

            Return the share of all computed tokens, padding included, that belonged to a living request: a float from 0.0 to 1.0.
            If nothing was computed, 1.0.

            Worked example: step 1 computes positions (0, 5) and (0, 2) with 3 dead tokens, step 2 computes (5, 6) and
            (2, 3) with none. Useful are 5 + 2 + 1 + 1 = 9 of 12: **0.75**.
        """,
        hints=(
            "Two sums over the whole run, then one division at the end. How many tokens does one entry of `work` stand for?",
            "An entry stands for `end - start` tokens: 1 in a decode step, many for a prompt. Dead tokens are given.",
            "Divide the real ones by real and dead together. Before dividing, ask whether there was anything at all.",
        ),
        explanation="""
            It is a ratio of sums, not a mean of ratios: a step with 19 tokens must count for more than one with 4. The mean over steps
            answers another question ("how full was a step?").

            A useful share of 100 % does not mean a busy machine. Continuous batching has no dead tokens even with a
            single request running, and the machine then does little for each byte it reads. And `nvidia-smi`'s "GPU utilisation"
            is a third thing: the share of *time* in which any kernel ran at all. It can be 100 % while the arithmetic units
            idle. When somebody says utilisation, ask which.

            vLLM logs running and waiting requests, and the share of KV cache in use; SGLang logs `#running-req`, `#token` and `token usage`.
        """,
        check=check_useful_share,
        mutants=(
            Mutant(
                "mean_of_steps",
                mean_of_steps,
                "You average the shares of the steps. A big step must count for more: sum first, then divide.",
                "a mean of ratios for a ratio of sums",
            ),
            Mutant(
                "seats_counted",
                seats_counted,
                "You count requests. A prompt's entry stands for end - start tokens.",
                "decode steps in mind only",
            ),
            Mutant("wasted", wasted, "That is the wasted share. Asked is the useful one.", "a common slip"),
            Mutant(
                "over_padding",
                over_padding,
                "Divide by all computed tokens, real and dead together, not by the dead ones.",
                "a ratio taken for a share",
            ),
            Mutant("empty_is_zero", empty_is_zero, "Nothing computed, nothing wasted: 1.0.", "the empty run"),
            Mutant(
                "empty_crashes",
                empty_crashes,
                "An empty timeline divides by zero. Nothing was wasted then: 1.0.",
                "the empty run",
            ),
            Mutant(
                "ends_counted",
                ends_counted,
                "`end` is a position, not a number of tokens. Only end - start were computed in this step.",
                "positions taken for lengths",
            ),
            Mutant(
                "end_included",
                end_included,
                "`end` is not included: positions 4 to 5 are one token, end - start.",
                "one too many",
            ),
            Mutant(
                "by_time",
                by_time,
                "You weigh the steps by their time. Asked is a share of tokens.",
                "utilisation as a share of time",
            ),
            Mutant("percent", percent, "A share from 0.0 to 1.0, not percent.", "units"),
            Mutant(
                "clean_steps",
                clean_steps,
                "You count steps without padding. Asked is a share of tokens.",
                "all or nothing",
            ),
        ),
        variant=useful_variant,
        scratch="""
            from minillm.metrics import StepRecord

            one = StepRecord(0.0, 1.0, [("A", 0, 0, 5), ("B", 0, 0, 2)], padding=3, blocks_used=2, num_waiting=0)
            two = StepRecord(1.0, 2.0, [("A", 0, 5, 6), ("B", 0, 2, 3)], padding=0, blocks_used=2, num_waiting=0)
            print(useful_share([one, two]))
        """,
        plug_in=plug_useful_share,
    ),
    Exercise(
        id="06.5",
        symbol="verdicts",
        title="Check the claim",
        minutes=12,
        difficulty=2,
        statement="""
            Nine things that are said about batching (in our words). Which are `"right"`, which are `"wrong"`, and which are true in
            some settings only, without saying so: `"depends"`? Compute before you judge: the data stand in the cell.

            | | the claim |
            |---|---|
            | A | Continuous batching raised the GPU utilisation of a server from 30 % to 23 times as much. |
            | B | In Anyscale's test, throughput grew about 23-fold from the slowest static run to vLLM at its limit. |
            | C | In that post, the whole factor of 23 is due to continuous batching. |
            | D | Orca reached 36.9 times the throughput of FasterTransformer on GPT-3 175B, at the same latency. |
            | E | Continuous batching brings several times the throughput of static batching. |
            | F | A static batch of 8 answers, one of 100 tokens and seven of 10: 79 % of what its seats compute is dead. |
            | G | With random lengths, a static batch of 32 wastes no larger share than one of 8, as the mean length is the same. |
            | H | With continuous batching, a new request waits until the running batch is finished. |
            | I | vLLM batches requests of different length by padding them and masking the padding. |

            Worked example: "A static batch of 2 answers, of 10 and 30 tokens, is two thirds useful." It computes
            2 x 30 = 60, and 40 are useful: right.
        """,
        hints=(
            "A is one multiplication, B and F one division. For G, the lesson's table of longest / mean has both numbers.",
            "For C look at what the post credits to continuous batching alone. For E think of the two ends of the lesson's plot: "
            "equal lengths, and a heavy tail.",
            "H and I are said of continuous engines but describe rectangular batches. Three claims are right, and only one depends.",
        ),
        explanation="""
            - **A wrong.** 30 % x 23 = 690 %. A share that grows 23-fold must begin below 100 / 23 = 4.35 %. The sentence it comes from
              mistook throughput for utilisation.
            - **B right.** 1,900 / 81 = 23.5. (The post's text: static falls to 81 tokens/s at the widest spread of lengths; vLLM
              saturates near 1,900. Daniel et al. 2023, Anyscale.)
            - **C wrong.** 8x for continuous batching, 23x together with vLLM's memory management. 23 / 8 = 2.9 is the memory's
              part.
            - **D right.** It is the abstract's own sentence (Yu et al., OSDI 2022). The same latency is part of it: at a latency that
              FasterTransformer can hold only at a small load.
            - **E depends.** On lengths, seats and load. With equal lengths all at once there is no gain; Anyscale found none at the
              lowest spread either.
            - **F right.** 8 x 100 = 800 computed, 170 useful, 630 / 800 = 79 % dead.
            - **G wrong.** The mean stays, the *longest* grows: 4.06 times the mean for 32 exponential lengths, 2.72 for 8. So 75 % is
              dead instead of 63 %.
            - **H wrong.** It waits for one step, if a seat and memory are free.
            - **I wrong.** That is what rectangular batches need. Orca batches only the operations that do not care whose token it is, and runs
              attention for each request (*selective batching*); vLLM lays the tokens in one flat row.
        """,
        check=check_verdicts,
        mutants=(
            Mutant(
                "believed_A",
                believed(A="right"),
                "Claim A: 23 times 30 % is how many percent?",
                "a post on LLM inference",
            ),
            Mutant(
                "perhaps_A",
                believed(A="depends"),
                "Claim A names its start, 30 %. Nothing is open: multiply.",
                "caution",
            ),
            Mutant(
                "doubted_B",
                believed(B="wrong"),
                "Claim B is about throughput, which has no upper limit of 100 %. Divide the two rates.",
                "every 23x taken for the wrong one",
            ),
            Mutant(
                "perhaps_B", believed(B="depends"), "Claim B names the test and its two ends. Divide them.", "caution"
            ),
            Mutant(
                "believed_C",
                believed(C="right"),
                "Claim C: the post has a factor for continuous batching without vLLM's memory management. Is it 23?",
                "the post's own title",
            ),
            Mutant(
                "perhaps_C",
                believed(C="depends"),
                "Claim C is about one post, and the post says both factors.",
                "caution",
            ),
            Mutant(
                "doubted_D",
                believed(D="wrong"),
                "Claim D says model, baseline and condition, as the paper's abstract does. See the data.",
                "big factors taken for hype",
            ),
            Mutant(
                "perhaps_D",
                believed(D="depends"),
                "Claim D reports one measurement, with its setting. It does not say that you would get the same.",
                "a report taken for a promise",
            ),
            Mutant(
                "believed_E",
                believed(E="right"),
                "Claim E: what was the gain with equal lengths?",
                "most posts on batching",
            ),
            Mutant(
                "denied_E",
                believed(E="wrong"),
                "Claim E: look at the other end of the plot, many seats and a heavy tail.",
                "the plot's left end only",
            ),
            Mutant(
                "doubted_F",
                believed(F="wrong"),
                "Claim F: 8 seats x 100 steps are computed. How many of them hold one of the 170 tokens?",
                "the short ones' own steps counted only",
            ),
            Mutant("perhaps_F", believed(F="depends"), "Claim F gives every length. Count.", "caution"),
            Mutant(
                "believed_G",
                believed(G="right"),
                "Claim G: the mean stays, but what sets the pace is the longest.",
                "the mean taken for the maximum",
            ),
            Mutant(
                "perhaps_G",
                believed(G="depends"),
                "Claim G says random lengths. More draws never make the expected longest smaller, and here it grows.",
                "equal lengths in mind",
            ),
            Mutant(
                "believed_H",
                believed(H="right"),
                "Claim H describes static and dynamic batching. What does `may_admit` say in continuous mode?",
                "a post that has it right elsewhere",
            ),
            Mutant(
                "perhaps_H",
                believed(H="depends"),
                "Claim H: without a free seat it does wait, but for one request to end, not for the batch.",
                "a full engine in mind",
            ),
            Mutant(
                "believed_I",
                believed(I="right"),
                "Claim I describes rectangular batches. How many padding tokens had the continuous run?",
                "a post on LLM inference",
            ),
            Mutant(
                "perhaps_I",
                believed(I="depends"),
                "Claim I: vLLM has no padded mode for requests of different length.",
                "transformers' generate in mind",
            ),
        ),
        variant={key: word.upper() for key, word in reversed(VERDICTS.items())},
        stub="""
# Anyscale 2023 (OPT-13B, one A100-40GB, exponential lengths), all against naive static batching
tokens_per_second = {"static, widest spread of lengths": 81, "vLLM, at its limit": 1900}
factors = {"continuous batching": 8, "continuous batching and vLLM's memory management": 23}
# Orca, OSDI 2022, abstract: "36.9x throughput improvement at the same level of latency"
# expected longest / mean for exponential lengths
longest_over_mean = {8: 2.72, 32: 4.06}

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
}
""",
        solution="""
verdicts = {
    "A": "wrong",  # 690 %
    "B": "right",  # 1900 / 81 = 23.5
    "C": "wrong",  # 8 of it; the memory management brings the other 2.9
    "D": "right",
    "E": "depends",  # on lengths, seats, load
    "F": "right",  # 630 of 800
    "G": "wrong",  # 1 - 1 / 4.06 = 75 %, against 1 - 1 / 2.72 = 63 %
    "H": "wrong",  # for one step
    "I": "wrong",  # a flat row, no padding
}
""",
        scratch="""
            print(40 / (2 * 30))  # the worked example
            print(tokens_per_second["vLLM, at its limit"] / tokens_per_second["static, widest spread of lengths"])
        """,
    ),
]
