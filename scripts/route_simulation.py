"""Rules of routing against one another: replicas and requests in virtual time.

    python scripts/route_simulation.py --replicas 64 --requests 100000

Requests come as they do where chats and agents are served: applications of very different
popularity, each with a system prompt of its own; conversations of several turns that repeat all
that was said; pauses between turns; some lone requests. Lengths are lognormal, arrivals Poisson. No
trace is replayed: the numbers at the head of the file are the shape, and can be changed.

A replica keeps the blocks that it used lately. A request's work is the part of its prompt that is
not there, then its answer; replicas share their speed among all that they have to do. The rules:
random; round robin; the better of two; the rule of Ray Serve's prefix router, as its documents give
it (the longest match where it is a tenth of the prompt, else the replica that was sent fewest
letters; never a look at load, as by default, or the better of two where queues differ by more than
16); and ours, by the class that the server uses. Times are of this machine model, not of a GPU.
"""

import argparse
import heapq
import json
import random
import resource
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from models.serve.routing import Routes, Wish

BLOCK = 32  # tokens
APPLICATIONS, ZIPF = 400, 1.0  # popularity of the i-th: 1 / i ** ZIPF
SYSTEM = (1200, 0.8)  # tokens of a system prompt: median, sigma of its logarithm
USER, ANSWER = (90, 1.0), (220, 0.7)
TURNS, PAUSE = 4.0, 20.0  # mean turns of a conversation; mean seconds between them
CACHE = 60_000  # tokens of a replica
PREFILL, DECODE = 8000.0, 60.0  # tokens per second of one text alone
SHARE = 0.02  # how much slower all get by one text more
LOAD = 0.7  # of what replicas could do without any cache hit


@dataclass(frozen=True)
class Ask:
    """One request: when it comes, its prompt's blocks, the tokens of its answer, its session."""

    at: float
    blocks: tuple[int, ...]
    answer: int
    session: str


def trace(count: int, rate: float, seed: int) -> list[Ask]:
    """Requests in order of time, `rate` of them a second."""
    r = np.random.default_rng(seed)
    popular = 1.0 / np.arange(1, APPLICATIONS + 1) ** ZIPF
    popular /= popular.sum()
    systems = [_blocks(r, i << 40, _tokens(r, SYSTEM)) for i in range(1, APPLICATIONS + 1)]
    found, begun, number = list[Ask](), 0.0, APPLICATIONS + 1
    while len(found) < count * 1.05:
        begun += r.exponential(TURNS / rate)
        at, said = begun, systems[int(r.choice(APPLICATIONS, p=popular))]
        for _ in range(int(r.geometric(1 / TURNS))):
            number += 1
            said = said + _blocks(r, number << 40, _tokens(r, USER))
            answer = _tokens(r, ANSWER)
            found.append(Ask(at, said, answer, f"s{begun}"))
            number += 1
            said = said + _blocks(r, number << 40, answer)
            at += answer / DECODE + r.exponential(PAUSE)
    return sorted(found, key=lambda a: a.at)[:count]


def _tokens(r: np.random.Generator, shape: tuple[float, float]) -> int:
    return max(1, min(8000, int(r.lognormal(np.log(shape[0]), shape[1]))))


def _blocks(r: np.random.Generator, first: int, tokens: int) -> tuple[int, ...]:
    return tuple(range(first, first + max(1, tokens // BLOCK)))


@dataclass(eq=False)
class Replica:
    """Shares its speed among what it has to do; `clock` is work done for each of its texts."""

    clock: float = 0.0
    since: float = 0.0
    open: int = 0
    ends: list[tuple[float, int, int]] = field(default_factory=list)  # work, number, kind
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def speed(self) -> float:
        """Seconds of work for each text in a second."""
        return 1.0 / (1.0 + SHARE * max(0, self.open - 1))

    def advance(self, now: float) -> None:
        """Up to now."""
        self.clock += (now - self.since) * self.speed()
        self.since = now

    def missing(self, blocks: Sequence[int]) -> int:
        """Blocks of a prompt that are to be read; all of them are there afterwards."""
        hit = next((i for i, b in enumerate(blocks) if b not in self.cache), len(blocks))
        for b in reversed(blocks):
            self.cache[b] = None
            self.cache.move_to_end(b)
        while len(self.cache) > CACHE // BLOCK:
            self.cache.popitem(last=False)
        return len(blocks) - hit


Rule = Callable[[Ask, Mapping[str, int]], str]


def run(asked: Sequence[Ask], count: int, rule: Rule) -> dict[str, float]:
    """One rule: the share of prompts that was in a cache, times in seconds."""
    replicas = {str(i): Replica() for i in range(count)}
    loads = dict.fromkeys(replicas, 0)
    first, whole = np.zeros(len(asked)), np.zeros(len(asked))
    due: list[tuple[float, str, int]] = []  # when a replica's next end is, and its version
    versions = dict.fromkeys(replicas, 0)
    blocks = missed = worst = 0

    def plan(name: str, now: float) -> None:
        r = replicas[name]
        versions[name] += 1
        if r.ends:
            heapq.heappush(due, (now + (r.ends[0][0] - r.clock) / r.speed(), name, versions[name]))

    def until(now: float) -> None:
        while due and due[0][0] <= now:
            at, name, version = heapq.heappop(due)
            if version != versions[name]:
                continue
            r = replicas[name]
            r.advance(at)
            _, number, kind = heapq.heappop(r.ends)
            if kind == 0:
                first[number] = at - asked[number].at
            else:
                whole[number] = at - asked[number].at
                r.open -= 1
                loads[name] -= 1
            plan(name, at)

    for number, a in enumerate(asked):
        until(a.at)
        name = rule(a, loads)
        r = replicas[name]
        r.advance(a.at)
        new = r.missing(a.blocks)
        blocks, missed = blocks + len(a.blocks), missed + new
        read = r.clock + new * BLOCK / PREFILL
        heapq.heappush(r.ends, (read, number, 0))
        heapq.heappush(r.ends, (read + a.answer / DECODE, number, 1))
        r.open += 1
        loads[name] += 1
        worst = max(worst, loads[name])
        plan(name, a.at)
    until(float("inf"))
    return {
        "hit rate": 1 - missed / blocks,
        "first token, p50": float(np.quantile(first, 0.5)),
        "first token, p95": float(np.quantile(first, 0.95)),
        "whole, p95": float(np.quantile(whole, 0.95)),
        "most at once": worst,
    }


def rules(count: int, seed: int, slack: int) -> dict[str, Rule]:
    """The rules by name."""
    r, names = random.Random(seed), [str(i) for i in range(count)]
    turn = iter(range(1 << 60))

    def two(loads: Mapping[str, int]) -> str:
        return min(r.sample(names, 2), key=lambda n: loads[n])

    return {
        "random": lambda a, loads: r.choice(names),
        "round robin": lambda a, loads: names[next(turn) % count],
        "better of two": lambda a, loads: two(loads),
        "Serve's prefix router": _serve(names, two, float("inf")),
        "the same, bound 16": _serve(names, two, 16),
        f"ours, slack {slack}": _ours(slack, seed),
    }


def _ours(slack: int, seed: int) -> Rule:
    routes = Routes(CACHE // BLOCK, slack, random.Random(seed))

    def choose(a: Ask, loads: Mapping[str, int]) -> str:
        wish = Wish(a.blocks, belongs=(a.session,))
        name = routes.choose(wish, loads)[0]
        routes.went(wish, name)
        return name

    return choose


def _serve(names: list[str], two: Callable[[Mapping[str, int]], str], bound: float) -> Rule:
    """As documented: a tree of all that was ever sent, without forgetting."""
    holders: dict[int, set[str]] = {}
    sent = dict.fromkeys(names, 0)

    def choose(a: Ask, loads: Mapping[str, int]) -> str:
        name = two(loads)
        if max(loads.values()) - min(loads.values()) <= bound:
            depth, last = 0, set[str]()
            for block in a.blocks:
                if not holders.get(block):
                    break
                depth, last = depth + 1, holders[block]
            if depth / len(a.blocks) < 0.1 or not last:
                fewest = min(sent.values())
                last = {n for n in names if sent[n] == fewest}
            name = min(sorted(last), key=lambda n: loads[n])
        for block in a.blocks:
            there = holders.setdefault(block, set())
            sent[name] += name not in there
            there.add(name)
        return name

    return choose


def main() -> None:
    """Print a line for each rule."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--slack", type=int, nargs="*", default=[8])
    parser.add_argument("--load", type=float, default=LOAD)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="rules whose names hold this")
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    sample = trace(4000, 1.0, a.seed + 1)
    work = np.mean([len(x.blocks) * BLOCK / PREFILL + x.answer / DECODE for x in sample])
    most = 1.0 / SHARE  # texts' worth of work that a replica does in a second, at best
    rate = a.load * a.replicas * most / float(work)
    asked = trace(a.requests, rate, a.seed)
    print(f"{len(asked)} requests, {rate:.0f} a second, {asked[-1].at:.0f} s of virtual time")
    chosen: dict[str, Rule] = {}
    for slack in a.slack:
        chosen |= rules(a.replicas, a.seed, slack)
    for name, rule in chosen.items():
        if a.only in name:
            begun = time.perf_counter()
            found = run(asked, a.replicas, rule)
            took = time.perf_counter() - begun
            if a.json:
                print(json.dumps({"rule": name, **found, "seconds": took}), flush=True)
            else:
                told = ", ".join(f"{k} {v:.3g}" for k, v in found.items())
                print(f"{name:24} {told} ({took:.0f} s)", flush=True)
    print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB at most")


if __name__ == "__main__":
    main()
