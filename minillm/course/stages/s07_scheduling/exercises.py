"""Exercises of stage 07."""

import functools
import itertools
import math
import random
import statistics
import time

from minillm import metrics
from minillm.blocks import KVPool
from minillm.config import EngineConfig
from minillm.course.checker import show
from minillm.course.exercise import Exercise, Mutant
from minillm.course.learn import make_llm
from minillm.course.stages.s07_scheduling.counted import mixed_jobs, run_counted
from minillm.metrics import RequestMetrics
from minillm.request import Request, SamplingParams, Status
from minillm.scheduler import Scheduler


def greedy(count):
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)


def prompt(llm, count, seed):
    """Token ids that any model has."""
    draw = random.Random(seed)
    return [draw.randrange(min(llm.num_ids, 5000)) for _ in range(count)]


class Shown(Scheduler):
    """A scheduler that shows what the exercise asks about, instead of an address."""

    def __repr__(self):
        if self.running:
            return f"<scheduler, running: {', '.join(r.id for r in self.running)}>"
        return f"<scheduler, long_prefill_token_threshold={self.config.long_prefill_token_threshold}>"


def a_scheduler(**options):
    return Shown(EngineConfig(**{"num_kv_blocks": 1, **options}), KVPool(1, 4), 4)


# ---- 07.1 share


def check_share(t, share):
    def case(need, budget, threshold, expected, note=""):
        t.case(share, a_scheduler(long_prefill_token_threshold=threshold), need, budget, expected=expected, note=note)

    case(20, 10, 0, 10, "no threshold: the budget is the limit")
    case(20, 10, 4, 4, "a threshold of 4: no more than that, although 10 are left")
    case(20, 3, 4, 3, "the budget is smaller than the threshold")
    case(2, 10, 4, 2, "it needs only 2")
    case(1, 10, 0, 1, "a decode, no threshold")
    case(1, 10, 4, 1, "a decode needs 1, whatever the threshold")
    case(20, 100, 4, 4, "a budget for all of it: the threshold still holds")
    case(7, 7, 7, 7, "all three equal")
    case(8, 7, 9, 7, "the threshold is the largest of the three")
    case(1000, 2048, 0, 1000, "0 means that there is no threshold")
    case(37, 33, 20, 20, "20 tokens, not a whole number of blocks")
    for need, budget, threshold in itertools.product((1, 6, 40), (1, 5, 64), (0, 1, 9)):
        given = 0  # the oracle: hand out tokens one by one
        while given < need and given < budget and (threshold == 0 or given < threshold):
            given += 1
        case(need, budget, threshold, given)


def threshold_ignored(self, need, budget):
    return min(need, budget)


def zero_means_none(self, need, budget):
    return min(need, budget, self.config.long_prefill_token_threshold)


def only_when_tight(self, need, budget):
    limit = self.config.long_prefill_token_threshold
    return min(need, budget) if not limit or budget >= need else min(need, budget, limit)


def need_forgotten(self, need, budget):
    limit = self.config.long_prefill_token_threshold
    return min(budget, limit) if limit else min(need, budget)


def need_never_asked(self, need, budget):
    limit = self.config.long_prefill_token_threshold
    return min(budget, limit) if limit else budget


def budget_forgotten(self, need, budget):
    limit = self.config.long_prefill_token_threshold
    return min(need, limit) if limit else need


def budget_only_without_limit(self, need, budget):
    limit = self.config.long_prefill_token_threshold
    return min(need, limit) if limit else min(need, budget)


def all_or_nothing(self, need, budget):
    limit = self.config.long_prefill_token_threshold
    want = min(need, limit) if limit else need
    return want if want <= budget else 0


def at_least_limit(self, need, budget):
    return min(need, max(budget, self.config.long_prefill_token_threshold))


def whole_blocks(self, need, budget):
    limit = self.config.long_prefill_token_threshold
    count = min(need, budget, limit) if limit else min(need, budget)
    return count if count == need or count < 16 else count // 16 * 16


def what_is_left(self, need, budget):
    limit = self.config.long_prefill_token_threshold
    return budget - (min(need, budget, limit) if limit else min(need, budget))


def share_variant(self, need, budget):
    if self.config.long_prefill_token_threshold:
        need = min(need, self.config.long_prefill_token_threshold)
    return budget if budget < need else need


def plug_share(answer, swap):
    """Two streams run, a long prompt arrives: who gets what in each step, on the real engine."""

    def play():
        llm = make_llm(num_kv_blocks=32, max_num_batched_tokens=32, long_prefill_token_threshold=20,
                       enable_prefix_caching=False)  # fmt: skip
        for i, name in enumerate(("stream A", "stream B")):
            llm.add_request(prompt(llm, 4, i), greedy(14), name)
        llm.step()
        llm.timeline = []
        llm.add_request(prompt(llm, 90, 7), greedy(4), "long")
        llm.add_request(prompt(llm, 9, 8), greedy(4), "short")
        outputs = {name: llm.requests[name][0] for name in ("stream A", "stream B", "long", "short")}
        while llm.scheduler.waiting or llm.scheduler.running:
            llm.step()
        rows = [{name: end - start for name, _, start, end in step.work} for step in llm.timeline]
        return rows, {name: request.output for name, request in outputs.items()}

    own_rows, own = play()
    with swap():
        rows, yours = play()
    print("tokens per step, with your share() (budget 32, threshold 20):")
    print("step " + "".join(f"{name:>10}" for name in own) + "     all")
    for i, row in enumerate(rows[:9]):
        print(f"{i + 1:>4} " + "".join(f"{row.get(name, '.'):>10}" for name in own) + f"{sum(row.values()):>8}")
    print(f"tokens equal: {'yes' if own == yours else 'NO'}")
    if rows != own_rows or own != yours:
        raise AssertionError("the engine's own code hands out other tokens")


# ---- 07.2 victim


def running(policy, *rows):
    """A scheduler in which these run: (name, order, priority, deadline, blocks, computed), in order of admission."""
    made = a_scheduler(scheduling_policy=policy)
    for name, order, priority, deadline, blocks, computed in rows:
        one = Request(name, list(range(computed + 1)), greedy(30), RequestMetrics(float(order)), order=order,
                      priority=priority, deadline=deadline, num_prompt=1 + order * 5 % 7, num_computed=computed,
                      block_table=list(range(blocks)), status=Status.RUNNING)  # fmt: skip
        made.running.append(one)
    made.waiting = [Request("waits", [1], greedy(3), RequestMetrics(99.0), order=99, priority=9, deadline=999.0)]
    return made


def check_victim(t, victim):
    @functools.wraps(victim)
    def name_of(self):
        before = [r.id for r in self.running]
        got = victim(self)
        after = [r.id for r in self.running]
        name = got.id if isinstance(got, Request) else f"{show(got)} ({type(got).__name__}), not a request"
        if after == before:
            return name
        return f"{name}; but `running` was {', '.join(before)}, and is {', '.join(after) or 'empty'} now"

    def case(policy, expected, *rows, note=""):
        # writes: `running` is compared by name_of, in fewer words
        t.case(name_of, running(policy, *rows), expected=expected, note=note, writes=(0,))

    a, b, c = ("a", 0, 0, None, 4, 13), ("b", 1, 0, None, 2, 5), ("c", 2, 0, None, 3, 9)
    case("fcfs", "c", a, b, c, note="first come, first served: the last one came last")
    case("fcfs", "a", a, note="only one runs: it preempts itself")
    case("fcfs", "c", c, a, b, note="c came last, but was admitted first; b stands at the end of `running`")
    case("fcfs", "d", a, b, ("d", 3, 0, None, 1, 2), c, note="in the middle of the list")
    x, y, z = ("x", 5, 1, None, 2, 6), ("y", 1, 2, None, 4, 15), ("z", 3, 2, None, 3, 11)
    case("priority", "z", x, y, z, note="y and z have the least important priority (2); z came later")
    case("priority", "z", z, y, x, note="the same, admitted in another order")
    case("priority", "y", x, y, note="y came first, but it is less important")
    case("fcfs", "x", x, y, z, note='the same three under "fcfs": priorities do not count')
    p, q, r = ("p", 0, 0, 70.0, 3, 10), ("q", 1, 0, 20.0, 2, 7), ("r", 2, 0, 50.0, 4, 14)
    case("deadline", "p", p, q, r, note="the deadline that is furthest away")
    case("deadline", "s", p, q, ("s", 0, 0, None, 1, 3), r, note="s has no deadline at all")
    case(lambda request: -request.order, "a", a, b, c, note="a policy of the user's own: newest first")
    draw = random.Random(7)
    for policy in ("fcfs", "priority", "deadline"):
        rows = [(f"r{i}", i, draw.randrange(3), draw.choice((None, 10.0 + i, 40.0 - i)), draw.randint(1, 9),
                 draw.randint(2, 30)) for i in range(7)]  # fmt: skip
        draw.shuffle(rows)
        last = rows[0]
        for row in rows:  # the oracle: each pair by hand
            due, last_due = (math.inf if one[3] is None else one[3] for one in (row, last))
            keys = {"fcfs": ((row[1],), (last[1],)), "priority": ((row[2], row[1]), (last[2], last[1])),
                    "deadline": ((row[2], due, row[1]), (last[2], last_due, last[1]))}[policy]  # fmt: skip
            last = row if keys[0] > keys[1] else last
        case(policy, last[0], *rows, note=f'seven requests, policy "{policy}"')


def preempt_oldest(self):
    return min(self.running, key=self.policy)


def most_blocks(self):
    return max(self.running, key=lambda request: len(request.block_table))


def least_computed(self):
    return min(self.running, key=lambda request: request.num_computed)


def last_in_list(self):
    return self.running[-1]


def newest_always(self):
    return max(self.running, key=lambda request: request.order)


def priority_only(self):
    return max(self.running, key=lambda request: request.priority)


def priority_and_arrival(self):
    return max(self.running, key=lambda request: (request.priority, request.order))


def from_the_queue(self):
    return max((*self.running, *self.waiting), key=self.policy)


def sorts_the_list(self):
    self.running.sort(key=self.policy)
    return self.running[-1]


def takes_it_out(self):
    return self.running.pop(self.running.index(max(self.running, key=self.policy)))


def longest_prompt(self):
    return max(self.running, key=lambda request: request.num_prompt)


def its_place(self):
    return max(range(len(self.running)), key=lambda i: self.policy(self.running[i]))


def the_key(self):
    return max(self.policy(request) for request in self.running)


def victim_variant(self):
    worst = self.running[0]
    for request in self.running[1:]:
        if self.policy(worst) < self.policy(request):
            worst = request
    return worst


def plug_victim(answer, swap):
    """Four requests in a pool that cannot hold them: who is thrown out, and do the tokens survive it?"""

    def play(blocks):
        llm = make_llm(num_kv_blocks=blocks, block_size=4, enable_prefix_caching=False, max_model_len=40)
        names = [llm.add_request(prompt(llm, 8, i), greedy(20), f"r{i}", priority=i % 2) for i in range(4)]
        requests = {name: llm.requests[name][0] for name in names}
        while llm.scheduler.waiting or llm.scheduler.running:
            llm.step()
            llm.scheduler.check()
        return {name: request.output for name, request in requests.items()}, llm.stats()["computed_tokens"]

    calls = []

    @functools.wraps(answer)
    def watched(self):
        calls.append(answer(self))
        return calls[-1]

    roomy, least = play(28)
    from minillm.course.learn import swap as swap_in

    with swap_in("07.2", watched):
        tight, computed = play(12)
    print("priorities: r0 0, r1 1, r2 0, r3 1 (0 is the most important)")
    print("your victims, in order:", ", ".join(request.id for request in calls))
    print(f"tokens computed: {computed:.0f}, and {least:.0f} in a pool with room for all")
    print(f"tokens equal: {'yes' if roomy == tight else 'NO'}")
    if roomy != tight:
        raise AssertionError("the tokens differ")


# ---- 07.3 by_deadline


def asks(*rows):
    """Requests from (name, priority, deadline, order, index)."""
    return [
        Request(name, [1, 2], greedy(5), RequestMetrics(float(order)), order=order, priority=priority,
                deadline=deadline, index=index)
        for name, priority, deadline, order, index in rows
    ]  # fmt: skip


def check_by_deadline(t, by_deadline):
    def order_of(*rows):
        return [request.id for request in sorted(asks(*rows), key=by_deadline)]

    def case(expected, *rows, note=""):
        for turn in (rows, rows[::-1]):  # whatever order they stand in, the queue must come out the same
            t.case(order_of, *turn, expected=list(expected), note=note)

    case(
        "ba",
        ("a", 0, 30.0, 0, 0),
        ("b", 0, 20.0, 1, 0),
        note="(name, priority, deadline, order, index): b is due first",
    )
    case("ab", ("a", 0, 20.0, 0, 0), ("b", 0, None, 1, 0), note="b has no deadline: it can wait")
    case("ba", ("a", 0, None, 0, 0), ("b", 0, 20.0, 1, 0), note="a has no deadline, though it came first")
    case("ba", ("a", 1, 20.0, 0, 0), ("b", 0, 30.0, 1, 0), note="priority 0 before 1, whatever the deadlines")
    case(
        "ba",
        ("a", 1, 20.0, 0, 0),
        ("b", 0, None, 1, 0),
        note="priority 0 without a deadline before priority 1 with one",
    )
    case("ab", ("a", 0, 20.0, 0, 0), ("b", 0, 20.0, 1, 0), note="due at the same moment: first come, first served")
    case("ab", ("a", 0, None, 3, 0), ("b", 0, None, 4, 0), note="nobody has a deadline: first come, first served")
    case("ab", ("a", 0, 9.0, 2, 0), ("b", 0, 9.0, 2, 1), note="two completions of one prompt: by index")
    case("ab", ("a", 0, 9.0, 2, 1), ("b", 0, 9.0, 3, 0), note="a came first (order 2): order counts before index")
    case("ba", ("a", 0, None, 0, 0), ("b", 0, 4e12, 1, 0), note="however far away, a deadline is a deadline")
    case("ab", ("a", 0, 0.0, 5, 0), ("b", 0, 3.0, 4, 0), note="a deadline of 0.0 is a deadline")
    one = asks(("a", 0, 50.0, 2, 0))[0]
    first = t.call(by_deadline, one)
    for _ in range(200):
        time.perf_counter()
    t.true(first == t.call(by_deadline, one), "the key of a request is the same at any moment: no clock in it")
    with t.unchanged(one, what="the request"):
        t.call(by_deadline, one)
    draw = random.Random(3)
    for size in (5, 9, 14):
        rows = [(f"r{i}", draw.randrange(3), draw.choice((None, 5.0, 8.0, 12.0)), i, 0) for i in range(size)]
        want = []  # the oracle: class by class, the dated ones first
        for priority in range(3):
            mine = [row for row in rows if row[1] == priority]
            for due in (5.0, 8.0, 12.0, None):
                want += [row[0] for row in mine if row[2] == due]
        draw.shuffle(rows)
        case(want, *rows, note=f"{size} requests, three priorities")


def deadline_first(request):
    deadline = math.inf if request.deadline is None else request.deadline
    return (deadline, request.priority, request.order, request.index)


def none_first(request):
    return (request.priority, -math.inf if request.deadline is None else request.deadline, request.order, request.index)


def none_as_it_is(request):
    return (request.priority, request.deadline, request.order, request.index)


def falsy(request):
    return (request.priority, request.deadline if request.deadline else math.inf, request.order, request.index)


def a_large_number(request):
    deadline = 10**9 if request.deadline is None else request.deadline
    return (request.priority, deadline, request.order, request.index)


def dated_first(request):
    return (request.deadline is None, request.priority, request.deadline or 0.0, request.order, request.index)


def no_index(request):
    return (request.priority, math.inf if request.deadline is None else request.deadline, request.order)


def index_before_order(request):
    deadline = math.inf if request.deadline is None else request.deadline
    return (request.priority, deadline, request.index, request.order)


def latest_first(request):
    deadline = math.inf if request.deadline is None else -request.deadline
    return (request.priority, deadline, request.order, request.index)


def no_deadlines(request):
    return (request.priority, request.order, request.index)


def higher_number_first(request):
    deadline = math.inf if request.deadline is None else request.deadline
    return (-request.priority, deadline, request.order, request.index)


def no_priorities(request):
    deadline = math.inf if request.deadline is None else request.deadline
    return (deadline, request.order, request.index)


def no_tie_break(request):
    return (request.priority, math.inf if request.deadline is None else request.deadline)


def time_that_is_left(request):
    left = math.inf if request.deadline is None else request.deadline - time.perf_counter()
    return (request.priority, left, request.order, request.index)


def deadline_variant(request):
    return (request.priority, request.deadline is None, request.deadline or 0.0, request.order, request.index)


def plug_by_deadline(answer, swap):
    """One seat, six requests that are all there at once: in which order do they get it?"""
    asked = {"r0": (0, None), "r1": (0, 900.0), "r2": (1, 300.0), "r3": (0, 600.0), "r4": (1, None), "r5": (0, 300.0)}

    def play(policy):
        llm = make_llm(num_kv_blocks=16, max_num_seqs=1, scheduling_policy=policy)
        for i, (name, (priority, timeout)) in enumerate(asked.items()):
            llm.add_request(prompt(llm, 4, i), greedy(2), name, priority=priority, timeout=timeout)
        requests = {name: llm.requests[name][0] for name in asked}
        while llm.scheduler.waiting or llm.scheduler.running:
            llm.step()
        return sorted(asked, key=lambda name: requests[name].metrics.token_times[0])

    own = play("deadline")
    with swap():
        yours = play("deadline")
    print("sent as (priority, seconds until the deadline):")
    print("   " + ", ".join(f"{name} {ask}" for name, ask in asked.items()))
    print("first come, first served:    ", " ".join(play("fcfs")))
    print('"deadline", with your key:   ', " ".join(yours))
    if yours != own or play(answer) != own:
        raise AssertionError("the engine's own policy serves them in another order")


# ---- 07.4 goodput


def served(arrival, first, gap, count, finished=True):
    """A request whose first token came `first` seconds after its arrival, and `count` - 1 more, `gap` seconds apart."""
    times = [arrival + first + i * gap for i in range(count)]
    return RequestMetrics(arrival, times, (times[-1] if times else arrival + first) if finished else None)


def check_goodput(t, goodput):
    a, b = served(10.0, 0.5, 0.25, 5), served(11.0, 2.0, 0.25, 5)  # TTFT 0.5 and 2.0, TPOT 0.25 both
    slow = served(12.0, 0.5, 0.75, 3)
    t.case(goodput, [a, b], 4.0, 1.0, 0.5, expected=0.25, note="one of two came soon enough: 1 request in 4 s")
    t.case(goodput, [a], 4.0, 1.0, 0.5, expected=0.25, note="one request, and it is good")
    t.case(goodput, [a, slow], 4.0, 1.0, 0.5, expected=0.25, note="the second begins soon, but then it is slow")
    t.case(goodput, [b, slow], 4.0, 1.0, 0.5, expected=0.0, note="one breaks the TTFT limit, the other the TPOT limit")
    t.case(goodput, [a], 4.0, 0.5, 0.25, expected=0.25, note="both limits are just reached: kept")
    t.case(goodput, [served(3.0, 0.5, 0.25, 5, finished=False), a], 4.0, 1.0, 0.5, expected=0.25,
           note="the first is still running: it kept nothing yet")  # fmt: skip
    t.case(goodput, [served(3.0, 0.5, 0.0, 0), a], 4.0, 1.0, 0.5, expected=0.25, note="the first ended without a token")
    t.case(goodput, [served(3.0, 0.5, 0.0, 1)], 4.0, 1.0, 0.5, expected=0.25, note="one single token: no gaps, TPOT 0")
    t.case(goodput, [], 5.0, 1.0, 0.5, expected=0.0, note="no requests")
    t.case(goodput, [a, a, a], 0.5, 1.0, 0.5, expected=6.0, note="3 requests in half a second")
    t.case(goodput, [a, b], 4.0, 3.0, 0.5, 1.75, expected=0.25, note="max_e2e 1.75 s: a takes 1.5 s, b takes 3 s")
    t.case(goodput, [a, b], 4.0, 3.0, 0.5, expected=0.5, note="without max_e2e both are good")
    t.case(goodput, [a], 4.0, 3.0, 0.5, 1.5, expected=0.25, note="max_e2e is just reached")
    t.case(goodput, [a], 4.0, 3.0, 0.5, 0.0, expected=0.0, note="max_e2e 0.0 is a limit, and nobody keeps it")
    fast, late = served(0.0, 0.25, 0.125, 9), served(0.0, 4.0, 0.125, 9)
    t.case(goodput, [fast] * 9 + [late], 10.0, 1.0, 0.5, expected=0.9, note="nine of ten are good: these nine count")
    t.case(goodput, [fast] + [late] * 9, 10.0, 1.0, 0.5, expected=0.1, note="one of ten is good: that one counts")
    draw = random.Random(4)
    for _ in range(4):
        rows = [(draw.randrange(1, 40) / 8, draw.randrange(1, 16) / 16, draw.randrange(0, 7), draw.random() < 0.8)
                for _ in range(13)]  # fmt: skip
        group = [served(float(i), first, gap, count, done) for i, (first, gap, count, done) in enumerate(rows)]
        good = 0  # the oracle: from the numbers that the requests were made of
        for first, gap, count, done in rows:
            gap = gap if count > 1 else 0.0
            good += done and count > 0 and first <= 3.0 and gap <= 0.5 and first + (count - 1) * gap <= 4.5
        t.case(goodput, group, 7.0, 3.0, 0.5, 4.5, expected=good / 7.0, note="13 requests of all sorts")


def _good(request, max_ttft, max_tpot, max_e2e):
    if request.ttft is None or request.e2e is None:
        return False
    return request.ttft <= max_ttft and request.tpot <= max_tpot and (max_e2e is None or request.e2e <= max_e2e)


def unfinished_too(requests, seconds, max_ttft, max_tpot, max_e2e=None):
    def good(r):
        return r.ttft <= max_ttft and r.tpot <= max_tpot and (max_e2e is None or r.e2e is None or r.e2e <= max_e2e)

    return sum(good(r) for r in requests if r.ttft is not None) / seconds


def tokenless_too(requests, seconds, max_ttft, max_tpot, max_e2e=None):
    def good(r):
        return (r.ttft or 0) <= max_ttft and (r.tpot or 0) <= max_tpot and (max_e2e is None or r.e2e <= max_e2e)

    return sum(good(r) for r in requests if r.e2e is not None) / seconds


def none_compared(requests, seconds, max_ttft, max_tpot, max_e2e=None):
    def good(r):
        return r.ttft <= max_ttft and r.tpot <= max_tpot and (max_e2e is None or r.e2e <= max_e2e)

    return sum(good(r) for r in requests if r.finished is not None) / seconds


def none_never_asked(requests, seconds, max_ttft, max_tpot, max_e2e=None):
    def good(r):
        return r.ttft <= max_ttft and r.tpot <= max_tpot and (max_e2e is None or r.e2e <= max_e2e)

    return sum(map(good, requests)) / seconds


def zero_gap_is_none(requests, seconds, max_ttft, max_tpot, max_e2e=None):
    return sum(bool(r.tpot) and _good(r, max_ttft, max_tpot, max_e2e) for r in requests) / seconds


def zero_limit_is_none(requests, seconds, max_ttft, max_tpot, max_e2e=None):
    return sum(_good(r, max_ttft, max_tpot, max_e2e or None) for r in requests) / seconds


def whole_numbers(requests, seconds, max_ttft, max_tpot, max_e2e=None):
    return sum(_good(r, max_ttft, max_tpot, max_e2e) for r in requests) // seconds


def strictly_below(requests, seconds, max_ttft, max_tpot, max_e2e=None):
    def good(r):
        return _good(r, math.inf, math.inf, None) and (
            r.ttft < max_ttft and r.tpot < max_tpot and (max_e2e is None or r.e2e < max_e2e)
        )

    return sum(map(good, requests)) / seconds


def as_a_share(requests, seconds, max_ttft, max_tpot, max_e2e=None):
    return sum(_good(r, max_ttft, max_tpot, max_e2e) for r in requests) / len(requests) if requests else 0.0


def just_the_count(requests, seconds, max_ttft, max_tpot, max_e2e=None):
    return float(sum(_good(r, max_ttft, max_tpot, max_e2e) for r in requests))


def in_tokens(requests, seconds, max_ttft, max_tpot, max_e2e=None):
    return sum(len(r.token_times) for r in requests if _good(r, max_ttft, max_tpot, max_e2e)) / seconds


def one_limit_is_enough(requests, seconds, max_ttft, max_tpot, max_e2e=None):
    def good(r):
        return _good(r, math.inf, math.inf, max_e2e) and (r.ttft <= max_ttft or r.tpot <= max_tpot)

    return sum(map(good, requests)) / seconds


def first_token_only(requests, seconds, max_ttft, max_tpot, max_e2e=None):
    return sum(_good(r, max_ttft, math.inf, max_e2e) for r in requests) / seconds


def e2e_forgotten(requests, seconds, max_ttft, max_tpot, max_e2e=None):
    return sum(_good(r, max_ttft, max_tpot, None) for r in requests) / seconds


def by_percentile(requests, seconds, max_ttft, max_tpot, max_e2e=None):
    done = [r for r in requests if r.ttft is not None and r.e2e is not None]
    limits = {"ttft": max_ttft, "tpot": max_tpot, "e2e": math.inf if max_e2e is None else max_e2e}
    kept = all(metrics.percentile([getattr(r, n) for r in done], 90) <= limit for n, limit in limits.items())
    return len(done) / seconds if kept else 0.0


def by_mean(requests, seconds, max_ttft, max_tpot, max_e2e=None):
    done = [r for r in requests if r.ttft is not None and r.e2e is not None]
    if not done:
        return 0.0
    limits = {"ttft": max_ttft, "tpot": max_tpot, "e2e": math.inf if max_e2e is None else max_e2e}
    kept = all(statistics.mean(getattr(r, n) for r in done) <= limit for n, limit in limits.items())
    return len(done) / seconds if kept else 0.0


def each_limit_apart(requests, seconds, max_ttft, max_tpot, max_e2e=None):
    limits = (max_ttft, math.inf, None), (math.inf, max_tpot, None), (math.inf, math.inf, max_e2e)
    return min(sum(_good(r, *limit) for r in requests) for limit in limits) / seconds


def goodput_variant(requests, seconds, max_ttft, max_tpot, max_e2e=None):
    bad = 0
    limits = (("ttft", max_ttft), ("tpot", max_tpot), ("e2e", math.inf if max_e2e is None else max_e2e))
    for request in requests:
        values = [(getattr(request, name), limit) for name, limit in limits]
        bad += any(value is None or value > limit for value, limit in values)
    return (len(requests) - bad) / seconds


def plug_goodput(answer, swap):
    """Eight requests at once on two seats: throughput is fine, but who was served as promised?"""

    def play(count, seats):
        llm = make_llm(num_kv_blocks=64, max_num_seqs=seats, enable_prefix_caching=False)
        start = time.perf_counter()
        names = [llm.add_request(prompt(llm, 12, i), greedy(10)) for i in range(count)]
        all_ = [llm.requests[name][0].metrics for name in names]
        while llm.scheduler.waiting or llm.scheduler.running:
            llm.step()
        return all_, time.perf_counter() - start

    play(1, 1)  # warm up
    alone = [play(1, 1)[0][0] for _ in range(3)]
    limits = 4 * max(one.ttft for one in alone), 3 * max(one.tpot for one in alone)
    print(
        f"the promise (SLO): first token in {limits[0] * 1e3:.0f} ms, then one in {limits[1] * 1e3:.0f} ms, on the mean"
    )
    for count in (2, 8):
        all_, seconds = play(count, 2)
        yours, own = answer(all_, seconds, *limits), metrics.goodput(all_, seconds, *limits)
        print(f"{count} requests at once: {count / seconds:5.2f} requests/s, goodput {yours:5.2f} requests/s")
        if not math.isclose(yours, own):
            raise AssertionError(f"the engine's own goodput is {own}")


# ---- 07.5 a policy of one's own

SEEDS, LIMIT, MARGIN = (1, 2, 3), 300, 30
SYSTEM = {"max_num_seqs": 4, "max_num_batched_tokens": 48, "num_kv_blocks": 64}


def play(seed, policy):
    """In time, and the longest that a request without a deadline took, on trace `seed`."""
    run = run_counted(mixed_jobs(seed, gap=2.8), scheduling_policy=policy, **SYSTEM)
    undated = [r.metrics.e2e or run.ticks - r.metrics.arrival for r in run.requests.values() if r.deadline is None]
    dated = sum(run.requests[name].deadline is not None for name in run.in_time)
    return dated, round(max(undated))


@functools.cache
def first_come(seed):
    return play(seed, "fcfs")[0]


def check_my_policy(t, my_policy):
    def key_of(name, priority, deadline, order):
        return t.call(my_policy, asks((name, priority, deadline, order, 0))[0], note="one request")

    def is_less(key, other_key):
        return key < other_key

    one = asks(("a", 0, 50.0, 2, 0))[0]
    with t.unchanged(one, what="the request"):
        first = t.call(my_policy, one, note="one request")
    for _ in range(200):
        time.perf_counter()
    t.true(first == t.call(my_policy, one), "the key of a request is the same at any moment: no clock, no random")
    for kind in ((1, 90.0), (2, None)):
        other = key_of("b", *kind, 3)
        t.call(is_less, first, other, note="keys of requests with and without a deadline must be comparable")
    for seed in SEEDS:

        def trace(number):
            return play(number, my_policy)

        got = t.call(trace, seed, note=f"the busy hour, seed {seed}")
        if got is None:
            continue
        goal = first_come(seed) + MARGIN
        call, text = f"the busy hour, seed {seed}", f"{got[0]} in time, slowest background job {got[1]} ticks"
        t.true(got[0] >= goal, f"at least {goal} in time (first come, first served has {goal - MARGIN})",
               call=call, got=text)  # fmt: skip
        t.true(got[1] <= LIMIT, f"no background job takes more than {LIMIT} ticks", call=call, got=text)


def policy_fcfs(request):
    return request.order


def policy_priority(request):
    return (request.priority, request.order)


def policy_edf(request):
    return (math.inf if request.deadline is None else request.deadline, request.order)


def policy_none(request):
    return (request.deadline, request.order)


def policy_shortest(request):
    return (request.num_prompt + request.params.max_tokens, request.order)


def policy_short_prompt(request):
    return (request.num_prompt, request.order)


def policy_short_output(request):
    return (request.params.max_tokens, request.order)


def policy_lifo(request):
    return -request.order


def policy_jobs_first(request):
    return (-request.priority, request.order)


def policy_none_first(request):
    return (request.deadline or 0.0, request.order)


def policy_clock(request):
    return ((request.deadline or math.inf) - time.perf_counter(), request.order)


def policy_weak_aging(request):
    return request.metrics.arrival + 10 * request.priority


def policy_strong_aging(request):
    return request.metrics.arrival + 300 * request.priority


def policy_far_deadline(request):
    return (request.metrics.arrival + 400 if request.deadline is None else request.deadline, request.order)


def policy_minus(request):
    return 100 * request.priority - request.metrics.arrival


def policy_order_aging(request):
    return request.order + request.priority


def policy_variant(request):
    """Aging by size: each token asked for is worth two ticks of waiting."""
    return request.metrics.arrival + 2 * (request.num_prompt + request.params.max_tokens)


def plug_my_policy(answer, swap):
    """A small rush hour on the real engine: arrivals by step, deadlines in seconds, goodput by the clock."""
    draw = random.Random(5)
    jobs = []
    for i in range(26):
        kind = draw.choices((0, 1, 2), (6, 3, 1))[0]
        sizes = ((4, 10), (4, 7), 30), ((16, 30), (9, 13), 75), ((20, 40), (12, 16), None)
        (low, high), output, due = sizes[kind]
        jobs.append((i, draw.randint(low, high), draw.randint(*output), kind, due))

    def rush(policy, tick):
        llm = make_llm(num_kv_blocks=64, max_num_seqs=2, max_num_batched_tokens=64, enable_prefix_caching=False,
                       scheduling_policy=policy)  # fmt: skip
        coming, sent, steps, start = list(jobs), [], 0, time.perf_counter()
        while coming or llm.scheduler.waiting or llm.scheduler.running:
            while coming and coming[0][0] <= steps:
                _, length, count, kind, due = coming.pop(0)
                name = llm.add_request(prompt(llm, length, len(sent)), greedy(count), priority=kind,
                                       timeout=due and due * tick)  # fmt: skip
                sent.append(llm.requests[name][0])
            llm.step()
            steps += 1
        seconds = time.perf_counter() - start
        kept = [r.metrics for r in sent if r.finish_reason == "length" and r.deadline is not None]
        slowest = max(r.metrics.e2e for r in sent if r.deadline is None)
        return len(kept), metrics.goodput(kept, seconds, math.inf, math.inf), slowest / tick

    llm = make_llm(num_kv_blocks=64, enable_prefix_caching=False)
    for i in range(3):
        llm.add_request(prompt(llm, 8, i), greedy(12))
    stamps = []
    while llm.scheduler.waiting or llm.scheduler.running:
        llm.step()
        stamps.append(time.perf_counter())
    tick = 1.2 * statistics.median(b - a for a, b in itertools.pairwise(stamps))  # prompts make steps longer
    dated = sum(due is not None for *_, due in jobs)
    print(f"a tick is {tick * 1e3:.0f} ms here; {dated} of {len(jobs)} requests have a deadline")
    for label, policy in (("fcfs", "fcfs"), ("priority", "priority"), ("yours", answer)):
        count, rate, slowest = rush(policy, tick)
        print(
            f"{label:<10}{count:>3} in time, goodput {rate:5.2f} requests/s, slowest background job {slowest:4.0f} ticks"
        )
    print("(by the clock, so the numbers move a little from run to run)")


EXERCISES = [
    Exercise(
        id="07.1",
        symbol="minillm.scheduler:Scheduler.share",
        title="A share of the step",
        minutes=5,
        difficulty=1,
        statement="""
            A step has `budget` tokens left. One request still has `need` tokens to compute (1 for a running stream,
            hundreds for a long prompt). How many does it get in this step? All are ints, and so is the result; `need`
            and `budget` are at least 1.

            Three limits: what it needs, what is left, and `self.config.long_prefill_token_threshold`, the most that
            any request may take in one step. A threshold of **0** means: there is no such limit. You write a function
            whose first parameter is `self`, the scheduler.

            Worked example: `need` 20, `budget` 10. With threshold 4 it gets **4**. With threshold 0 it gets **10**.
        """,
        hints=(
            "Which is the smallest of the three limits? Try it with numbers: need 20, budget 10, threshold 4.",
            "The smallest of three numbers does it, except for one value of the threshold. Which one, and what would "
            "that smallest number be then?",
            "Two cases. With a threshold, take the minimum of all three. Without one (it is 0, so `if limit` is false), "
            "take the minimum of the other two.",
        ),
        explanation="""
            The smallest of three limits, where 0 stands for "no limit". (`float("inf")` for "none" would make the result
            a float in some languages' `min`, and a config file cannot hold it; engines use 0 or -1.) Also right: shrink
            `need` to the threshold first, then take the smaller of `need` and `budget`.

            Budget and threshold do different things. The budget bounds the *step*, so it bounds the time between two
            tokens of every stream. The threshold bounds one *request*, so that in the same step there is room for
            another newcomer beside a long prompt.

            In vLLM: `max_num_batched_tokens` and `long_prefill_token_threshold` (0 by default), in the same words. In
            SGLang the chunk is `--chunked-prefill-size`; in llama.cpp's server a step holds `--batch-size` tokens.
        """,
        check=check_share,
        mutants=(
            Mutant(
                "threshold_ignored",
                threshold_ignored,
                "The threshold plays no part: need 20, budget 10, threshold 4 must give 4.",
                "a common slip",
            ),
            Mutant(
                "zero_means_none",
                zero_means_none,
                "With threshold 0 nobody ever gets a token: the engine would stand still. 0 means no limit.",
                "a common slip",
            ),
            Mutant(
                "only_when_tight",
                only_when_tight,
                "You drop the threshold when the budget is large enough for everything. It holds then too.",
                "taking the threshold for a rule against overflow",
            ),
            Mutant(
                "need_forgotten",
                need_forgotten,
                "With a threshold you forget `need`: a request that needs 2 tokens cannot be given 4.",
                "two cases written apart",
            ),
            Mutant(
                "need_never_asked",
                need_never_asked,
                "`need` plays no part: a request that needs 2 tokens cannot be given 4.",
                "a common slip",
            ),
            Mutant(
                "budget_forgotten",
                budget_forgotten,
                "More than the budget is handed out. Other requests' tokens are counted in it too.",
                "a common slip",
            ),
            Mutant(
                "budget_only_without_limit",
                budget_only_without_limit,
                "With a threshold you forget the budget: need 20, budget 3, threshold 4 must give 3.",
                "two cases written apart",
            ),
            Mutant(
                "all_or_nothing",
                all_or_nothing,
                "A request that does not fit gets nothing. A part is fine: that is what chunking means.",
                "engines without chunked prefill; nano-vllm#73",
            ),
            Mutant(
                "at_least_limit",
                at_least_limit,
                "You use the threshold as the least that is given. It is the most.",
                "max for min",
            ),
            Mutant(
                "whole_blocks",
                whole_blocks,
                "You round down to whole blocks of 16. Chunks may end anywhere (rounding hangs where the chunk is "
                "smaller than a block).",
                "sgl-project/sglang#36344",
            ),
            Mutant(
                "what_is_left",
                what_is_left,
                "That is the budget that remains afterwards, not the share.",
                "a common slip",
            ),
        ),
        variant=share_variant,
        scratch="""
            from types import SimpleNamespace

            for threshold in (0, 4):
                some_self = SimpleNamespace(config=SimpleNamespace(long_prefill_token_threshold=threshold))
                print("threshold", threshold, "->", share(some_self, 20, 10))
        """,
        plug_in=plug_share,
    ),
    Exercise(
        id="07.2",
        symbol="minillm.scheduler:Scheduler.victim",
        title="Who is thrown out?",
        minutes=6,
        difficulty=1,
        statement="""
            The pool is full, and a running request needs one more block. Somebody must give up all of its blocks. Return
            that request: of those in `self.running`, the one that the policy puts last.

            `self.running` is a list of `Request`, in the order in which they got their seats. `self.policy` is a function
            from a request to a sort key: the *smallest* key is served first. Do not change the list. There is always at
            least one, and it may be the one that asked.

            Worked example: under first come, first served, requests with `order` 4, 9 and 7 run. The victim is the one
            with `order` **9**, wherever it stands in the list.
        """,
        hints=(
            "The queue is sorted by `self.policy`. Who would stand at its very end?",
            "You need the request itself, not its key. Which built-in gives the element whose key is the largest?",
            "`max` takes `key=`, as `sorted` does. The function is there already, under a name in `self`.",
        ),
        explanation="""
            One rule for both ends: who is served first is preempted last. That keeps two promises. Whoever is at the head
            of the policy never loses its blocks, so it finishes; then the next one is at the head. So everybody finishes,
            however small the pool is. And a request of high priority is never thrown out for one of low priority.

            Preempt the *first* instead, and the one that was nearly done starts again, while newcomers overtake it: nobody
            is sure to finish any more. "Frees the most blocks" often hits the same one: the longest has run longest.

            Also right: `sorted(...)[-1]`, or a loop. Sorting the list in place is not: its order is the order of the seats.

            In vLLM (V1) it is the last of `self.running` under "fcfs", and the largest `(priority, arrival_time)` under
            "priority". SGLang calls it retraction. The vLLM paper: the latest arrivals are preempted first, and all
            blocks of a sequence or none (arXiv:2309.06180, section 4.5).
        """,
        check=check_victim,
        mutants=(
            Mutant(
                "oldest",
                preempt_oldest,
                "You throw out the one that the policy wants to serve *first*. It is nearly done, and starts again.",
                "min for max",
            ),
            Mutant(
                "most_blocks",
                most_blocks,
                "Most blocks: that is the longest request, often the oldest and nearly done. Ask the policy.",
                "a heuristic that sounds good",
            ),
            Mutant(
                "least_computed",
                least_computed,
                "The least computed: little is lost, but an important newcomer would always be the victim. Ask the "
                "policy.",
                "a heuristic that sounds good",
            ),
            Mutant(
                "last_in_list",
                last_in_list,
                "The last in `running` got its seat last. That is not the one whom the policy puts last.",
                "vLLM's fcfs does this; nano-vllm too",
            ),
            Mutant(
                "newest_always",
                newest_always,
                "You always take the newest. Under priorities or deadlines that may be the most important one.",
                "policy ignored; vLLM before priority scheduling",
            ),
            Mutant(
                "priority_only",
                priority_only,
                "Among equal priorities you take the first in the list. The policy says which: the whole key counts.",
                "a common slip",
            ),
            Mutant(
                "priority_and_arrival",
                priority_and_arrival,
                "You built in one policy. `self.policy` may be any: first come, deadlines, the user's own.",
                "vLLM's key (priority, arrival), written by hand",
            ),
            Mutant(
                "from_the_queue",
                from_the_queue,
                "A request that waits holds no blocks: throwing it out frees nothing.",
                "a common slip",
            ),
            Mutant(
                "sorts_the_list",
                sorts_the_list,
                "The right one, but you sorted `running` in place. Others walk through that list at this moment.",
                "list.sort for sorted",
            ),
            Mutant(
                "takes_it_out",
                takes_it_out,
                "The right one, but you took it out of `running`. Only say who: the engine does the rest.",
                "pop for max",
            ),
            Mutant(
                "longest_prompt",
                longest_prompt,
                "The longest prompt frees much, but it may be the most important one, and costs most to compute "
                "again. Ask the policy.",
                "a heuristic that sounds good",
            ),
            Mutant(
                "its_place",
                its_place,
                "You return its place in the list. Wanted is the request that stands there.",
                "max over indices",
            ),
            Mutant(
                "the_key",
                the_key,
                "You return the largest key. Wanted is the request that it belongs to.",
                "max over keys",
            ),
        ),
        variant=victim_variant,
        scratch="""
            from types import SimpleNamespace

            rows = [SimpleNamespace(name=f"order {n}", order=n) for n in (4, 9, 7)]
            print(victim(SimpleNamespace(running=rows, policy=lambda request: request.order)))
        """,
        plug_in=plug_victim,
    ),
    Exercise(
        id="07.3",
        symbol="minillm.scheduler:by_deadline",
        title="Earliest deadline first",
        minutes=7,
        difficulty=2,
        statement="""
            A policy is a sort key. Write the key for deadlines: the smallest key is served first.

            1. A lower `request.priority` (int) comes before a higher one, whatever the deadlines.
            2. Within a priority: the earlier `request.deadline` first. It is a time in seconds (float), or `None` for
               "no deadline"; those come after all that have one.
            3. Still equal: first come, first served: `request.order` (int), and then `request.index` (int) for the
               completions of one prompt.

            The key must not depend on the time at which it is asked for: the queue is kept sorted by it.

            Worked example, all of one priority: deadlines 30, `None`, 20 are served as **20, 30, None**.
        """,
        hints=(
            "Python compares tuples from left to right: the first elements that differ decide.",
            "Comparing `None` with a number raises TypeError. Which number is later than every deadline?",
            "A tuple of four: priority, the deadline or infinity, order, index. Ask `is None`, for 0.0 is a deadline too.",
        ),
        explanation="""
            Tuples compare from left to right, so the rules stand in the tuple as they stand in the text. Infinity is the
            natural "never". Also right: `(priority, deadline is None, deadline or 0.0, order, index)`: False sorts before
            True.

            Earliest deadline first is the best there is on one machine while all deadlines *can* be met (Liu and Layland
            1973, Journal of the ACM 20). Under overload it is not: it helps whoever is nearest to being late, and many
            miss by a little. The engine ends a request when its deadline passes, so no more work goes into it.

            Why no clock? The time that is left shrinks for all alike, so it changes no order. But keys taken at
            different moments cannot be compared, and a list sorted by them is not sorted.

            vLLM has "fcfs" and "priority" (a lower value goes first). SGLang has `--enable-priority-scheduling`; there a
            higher value goes first, unless `--schedule-low-priority-values-first`. Neither has deadlines.
        """,
        check=check_by_deadline,
        mutants=(
            Mutant(
                "deadline_first",
                deadline_first,
                "You compare deadlines before priorities: an unimportant request that is due soon goes first.",
                "order of the tuple",
            ),
            Mutant(
                "none_first",
                none_first,
                "No deadline sorts first in your key. Those can wait: they come last.",
                "None as 0 or -infinity",
            ),
            Mutant(
                "none_as_it_is",
                none_as_it_is,
                "None and a number cannot be compared. Put a number in place of None.",
                "a common slip",
            ),
            Mutant("falsy", falsy, "`if request.deadline` is false for 0.0 too. Ask `is None`.", "truth of numbers"),
            Mutant(
                "a_large_number",
                a_large_number,
                "Your stand-in for None is a large number, and a deadline may be larger still. Infinity is not.",
                "9999999 for never",
            ),
            Mutant(
                "dated_first",
                dated_first,
                "Whoever has a deadline goes first in your key, of any priority. Rule 1 comes before rule 2.",
                "order of the tuple",
            ),
            Mutant(
                "no_index",
                no_index,
                "The completions of one prompt share their `order`. Only `index` tells them apart.",
                "rule 3 read half",
            ),
            Mutant(
                "index_before_order",
                index_before_order,
                "`index` before `order`: the second completion of an old prompt waits for all newer prompts.",
                "order of the tuple",
            ),
            Mutant(
                "latest_first",
                latest_first,
                "The latest deadline goes first in your key. Is there a minus?",
                "a heap of negated keys",
            ),
            Mutant(
                "no_deadlines",
                no_deadlines,
                "Your key does not look at the deadline, or only behind `order`, which is never equal.",
                "by_priority copied; order of the tuple",
            ),
            Mutant(
                "higher_number_first",
                higher_number_first,
                "A higher number goes first in your key. Here, as in vLLM, the lower number is more important.",
                "SGLang's default direction",
            ),
            Mutant("no_priorities", no_priorities, "Your key does not look at the priority.", "rule 1 forgotten"),
            Mutant(
                "no_tie_break",
                no_tie_break,
                "Equal keys: then it depends on chance who stands first. Add order and index.",
                "a common slip",
            ),
            Mutant(
                "time_that_is_left",
                time_that_is_left,
                "Your key holds the clock, so it changes while the request waits. The deadline itself does not.",
                "least slack first, by the wall clock",
            ),
        ),
        variant=deadline_variant,
        scratch="""
            from types import SimpleNamespace

            rows = [SimpleNamespace(priority=0, deadline=due, order=i, index=0) for i, due in enumerate((30, None, 20))]
            print([row.deadline for row in sorted(rows, key=by_deadline)])
        """,
        plug_in=plug_by_deadline,
    ),
    Exercise(
        id="07.4",
        symbol="minillm.metrics:goodput",
        title="Goodput",
        minutes=9,
        difficulty=2,
        statement="""
            Requests per second that were served *as promised*. `requests` is a list of `RequestMetrics`; the run took
            `seconds`. The promise (SLO): `request.ttft <= max_ttft` **and** `request.tpot <= max_tpot` **and**, unless
            `max_e2e` is None, `request.e2e <= max_e2e`. All in seconds. Just reached is kept. The result is a float, in
            requests per second.

            `ttft` and `tpot` are `None` if there was no token, `e2e` is `None` if the request did not finish. Such a
            request kept no promise, and it is no error either.

            Worked example: three requests finish in a run of 4 s. Their (ttft, tpot) are (0.5, 0.25), (2.0, 0.25) and
            (0.5, 0.75). With limits 1.0 and 0.5 only the first one kept both: goodput is 1 / 4 = **0.25**.
        """,
        hints=(
            "Write a function `good(request)` that says yes or no for *one* request. What is left then?",
            "Deal with None first. Then all limits must hold for the same request, joined by `and`.",
            "Count the good ones and divide by the seconds of the run, not by the number of requests.",
        ),
        explanation="""
            The limits hold for each request *together*. If half of them break the TTFT limit and the other half the TPOT
            limit, each limit alone is kept by half, and goodput is zero. A percentile of TTFT beside a percentile of TPOT
            cannot see that. And it is a rate: 90 % of ten requests an hour is not much.

            DistServe (Zhong et al. 2024, arXiv:2401.09670, section 1) defines goodput as the *highest request rate* at
            which a goal such as "90 % keep the SLO" is met, per GPU. What you wrote is measured at one rate; sweep the
            rate to get theirs. A known weakness: dropping a request that is late already costs nothing here (Wang et al.
            2024, arXiv:2410.14257).

            A request that its deadline ended has an `e2e` too. So `minillm bench` hands `goodput` only those that came to
            their own end.

            In vLLM: `vllm bench serve --goodput ttft:500 tpot:50` (milliseconds, and `e2el`), with the same "and".
        """,
        check=check_goodput,
        mutants=(
            Mutant(
                "unfinished_too",
                unfinished_too,
                "A request that is still running is counted. It has not kept its promise yet: e2e is None.",
                "in-flight requests at the end of a benchmark",
            ),
            Mutant(
                "tokenless_too",
                tokenless_too,
                "A request that ended without any token is counted as perfect: None became 0.",
                "`or 0` for None",
            ),
            Mutant(
                "none_compared",
                none_compared,
                "ttft and tpot are None where no token came. Ask for that before you compare.",
                "a common slip",
            ),
            Mutant(
                "none_never_asked",
                none_never_asked,
                "You never ask for None: a request that still runs is counted, and one without a token would raise an "
                "error.",
                "the limits only",
            ),
            Mutant(
                "zero_gap_is_none",
                zero_gap_is_none,
                "`if request.tpot` is false for 0.0 too, the TPOT of one single token. Ask `is None`.",
                "truth of numbers",
            ),
            Mutant(
                "zero_limit_is_none",
                zero_limit_is_none,
                "`if max_e2e` takes a limit of 0.0 for no limit. Ask `is None`.",
                "truth of numbers",
            ),
            Mutant(
                "whole_numbers",
                whole_numbers,
                "`//` throws the fraction away. One request in 4 s is 0.25 per second, not 0.",
                "// for /",
            ),
            Mutant("strictly_below", strictly_below, "Just reached is kept: `<=`, not `<`.", "a common slip"),
            Mutant(
                "as_a_share",
                as_a_share,
                "That is the share of good requests (SLO attainment). Goodput is a rate: divide by the seconds.",
                "attainment taken for goodput",
            ),
            Mutant(
                "just_the_count", just_the_count, "That is how many were good. Per second, please.", "a common slip"
            ),
            Mutant("in_tokens", in_tokens, "You count tokens. Goodput counts requests.", "throughput in tokens"),
            Mutant(
                "one_limit_is_enough",
                one_limit_is_enough,
                "You accept a request that keeps one limit of the two. It must keep all.",
                "or for and",
            ),
            Mutant(
                "first_token_only", first_token_only, "The TPOT limit plays no part in your version.", "a common slip"
            ),
            Mutant("e2e_forgotten", e2e_forgotten, "max_e2e plays no part in your version.", "a common slip"),
            Mutant(
                "by_percentile",
                by_percentile,
                "You ask whether the 90th percentile keeps the limits, and count all or nothing. Count the requests "
                "that do.",
                "percentiles per metric",
            ),
            Mutant(
                "by_mean",
                by_mean,
                "You compare the means with the limits. One fast request cannot make up for a slow one.",
                "averages",
            ),
            Mutant(
                "each_limit_apart",
                each_limit_apart,
                "You count the keepers of each limit apart and take the smaller number. It must be the same request "
                "that keeps both.",
                "percentiles per metric",
            ),
        ),
        variant=goodput_variant,
        scratch="""
            def served(first, gap, count=3):
                times = [first + i * gap for i in range(count)]
                return RequestMetrics(0.0, times, times[-1])

            from minillm.metrics import RequestMetrics

            three = [served(0.5, 0.25), served(2.0, 0.25), served(0.5, 0.75)]
            print([(r.ttft, r.tpot) for r in three], goodput(three, 4.0, 1.0, 0.5))
        """,
        plug_in=plug_goodput,
    ),
    Exercise(
        id="07.5",
        symbol="my_policy",
        title="A policy of your own",
        minutes=20,
        difficulty=3,
        statement=f"""
            An open one: there are many good answers. A busy hour, more work than four seats can do in time: **chats**
            (priority 0, due 30 ticks after they arrive), **reports** (priority 1, due after 90) and **background jobs**
            (priority 2, never due). A request that is not done at its deadline is ended. One step takes one tick, and the
            scheduler is the engine's own.

            Write `my_policy(request)`: a sort key, the smallest is served first. You may use `request.priority`,
            `.deadline` (in ticks, or None), `.order`, `.metrics.arrival` (in ticks), `.num_prompt` and
            `.params.max_tokens`. The key of a request must not change while it waits.

            On each of {len(SEEDS)} such hours you must have

            - at least **{MARGIN} more** requests in time than first come, first served has, and
            - **nobody starved**: no background job takes more than **{LIMIT} ticks** from arrival to its last token.

            Worked example: `by_priority` passes the first and fails the second, as the cell below shows. First come,
            first served is the other way round.
        """,
        hints=(
            "Why does a background job starve under `by_priority`? Because no time that it has waited makes up for its "
            "priority. What if waiting were worth something?",
            "Aging: a request should gain on the others while it waits. All gain at the same speed, so you need no clock: "
            "its *arrival* says it all. Who arrived long enough ago goes before someone more important.",
            "Add up, instead of comparing one after the other: the time of arrival, plus a handicap. The handicap grows "
            "with the priority number (or with the size). Try handicaps from 10 to 200 ticks and print both numbers.",
        ),
        explanation="""
            A lexicographic key (priority, then arrival) lets nothing make up for a worse priority, so under overload the
            last class starves. A *sum* does: `arrival + 100 * priority` says that one class is worth 100 ticks of waiting.
            After 200 ticks a background job goes before every new chat. That is aging, and as all keys age alike it needs no
            clock. The handicap is a knob between the two extremes: 0 is first come, first served; infinity is strict
            priority.

            Other answers that pass: a handicap by size (`arrival + 2 * (num_prompt + max_tokens)`), which is shortest job
            first with aging; or a made-up deadline for those that have none, if it is far enough away.

            Size-based rules need to know the output length. Here `max_tokens` gives it away; real requests often stop
            long before.

            vLLM's "priority" compares (priority, arrival time) one after the other, so it can starve the last class. Many
            operating systems age; SGLang's default order is "fcfs".
        """,
        check=check_my_policy,
        mutants=(
            Mutant(
                "fcfs",
                policy_fcfs,
                "That is first come, first served itself. It starves nobody, and is late.",
                "the default of vLLM and SGLang",
            ),
            Mutant(
                "priority",
                policy_priority,
                "Strict priority: in time, but the background jobs wait until the hour is over.",
                "vLLM's priority policy",
            ),
            Mutant(
                "edf",
                policy_edf,
                "Earliest deadline, None last: as long as dated requests come, nobody else is served.",
                "earliest deadline first",
            ),
            Mutant(
                "none",
                policy_none,
                "deadline is None for background jobs, and None cannot be compared.",
                "a common slip",
            ),
            Mutant(
                "shortest",
                policy_shortest,
                "Shortest first: the big ones starve. Let waiting count for something.",
                "shortest job first",
            ),
            Mutant(
                "short_prompt",
                policy_short_prompt,
                "Shortest prompt first: the long ones starve. Let waiting count for something.",
                "shortest job first",
            ),
            Mutant(
                "short_output",
                policy_short_output,
                "Shortest output first: the long ones starve. Let waiting count for something too.",
                "shortest job first",
            ),
            Mutant(
                "lifo",
                policy_lifo,
                "Newest first: who has once waited a while waits for ever.",
                "dropping from the front under overload",
            ),
            Mutant(
                "jobs_first",
                policy_jobs_first,
                "A higher priority number goes first in your key: the background jobs before the chats.",
                "SGLang's default direction",
            ),
            Mutant(
                "none_first",
                policy_none_first,
                "None became 0, so background jobs go before everything that is due.",
                "`or 0` for None",
            ),
            Mutant(
                "clock",
                policy_clock,
                "Your key holds the clock, so it changes while a request waits. Use the arrival or the deadline.",
                "least slack first, by the wall clock",
            ),
            Mutant(
                "weak_aging",
                policy_weak_aging,
                "The right idea, but the handicap is so small that this is nearly first come, first served. Larger.",
                "aging with a weight that is too small",
            ),
            Mutant(
                "strong_aging",
                policy_strong_aging,
                "The right idea, but the handicap is so large that a background job outlives your patience. Smaller.",
                "aging with a weight that is too large",
            ),
            Mutant(
                "far_deadline",
                policy_far_deadline,
                "A made-up deadline is a good idea. Yours is so far away that nearly everybody overtakes it. Nearer.",
                "a default timeout that is too long",
            ),
            Mutant(
                "minus",
                policy_minus,
                "Minus the arrival: who came later has the smaller key. The early ones should gain, so add it.",
                "a sign the wrong way round",
            ),
            Mutant(
                "order_aging",
                policy_order_aging,
                "The right idea, but `order` counts requests, and one class is worth one request. Larger.",
                "aging with a weight that is too small",
            ),
        ),
        variant=policy_variant,
        stub='def my_policy(request):\n    """A sort key: the smallest is served first."""\n    raise NotImplementedError("exercise 07.5")',
        solution=(
            'def my_policy(request):\n    """Aging: being one class lower is worth 100 ticks of waiting, and no more."""\n'
            "    return (request.metrics.arrival + 100 * request.priority, request.order)"
        ),
        scratch="""
            from minillm.course.stages.s07_scheduling.counted import mixed_jobs, run_counted

            def busy_hour(policy):
                run = run_counted(mixed_jobs(1, gap=2.8), scheduling_policy=policy, max_num_seqs=4,
                                  max_num_batched_tokens=48, num_kv_blocks=64)
                slowest = max(r.metrics.e2e for r in run.requests.values() if r.deadline is None)
                dated = [name for name in run.in_time if run.requests[name].deadline is not None]
                return f"{len(dated)} in time, slowest background job {slowest:.0f} ticks"

            print("fcfs:     ", busy_hour("fcfs"))
            print("priority: ", busy_hour("priority"))
            print("my_policy:", busy_hour(my_policy))
        """,
        plug_in=plug_my_policy,
    ),
]
