"""Measures decoding, verification and prompts on the CPU, alternating with other engines.

All engines read the same GGUF file with the same number of threads and the same token ids, and
take turns, so that a machine that slows down slows both. Our figures are a user's: graph replay,
feeds, masks and the choice of a token are in them. Medians of the rounds.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ggraph import InputError, cache_dir, kept
from ggraph.backends.cpu.backend import CpuBackend
from ggraph.decode.acceptance import only
from ggraph.decode.rows import Rows

from ..registry import open_model
from ..run.convert import model_to_gguf
from ..run.load import Loaded, load
from .machine import Others
from .peer import Peer, Reply

SAID = (
    "The quick survey of the coast began at dawn, when the tide was low and the light was clear. "
    "Three people walked north with a map, a rope and a notebook; two of them counted birds. "
    "By noon they had listed 14 species, argued about one of them, and lost the rope to the sea. "
)
FILLED = 1000  # tokens from which on the room for them is about full


@dataclass(frozen=True)
class Case:
    """One row of the table: `rows` token rows at `context` tokens in the cache."""

    name: str
    kind: str  # "decode", "verify" or "prompt"
    rows: int
    context: int

    @property
    def unit(self) -> str:
        """What our rate counts."""
        return "rows/s" if self.kind == "verify" else "tokens/s"

    def cache(self, tokens: int) -> int:
        """Rows of the cache that the sides need, with `tokens` decoded a round."""
        return self.rows if self.kind == "prompt" else self.context + max(self.rows, tokens + 1)


CASES = (  # a text that one leaves behind is the next one's, as far as it goes
    Case("decode at 64", "decode", 1, 64),
    Case("5 rows at 64", "verify", 5, 64),
    Case("prompt of 128", "prompt", 128, 0),
    Case("prompt of 512", "prompt", 512, 0),
    Case("decode at 1024", "decode", 1, 1024),
    Case("5 rows at 1024", "verify", 5, 1024),
    Case("prompt of 2048", "prompt", 2048, 0),
    Case("decode at 4096", "decode", 1, 4096),
)


@dataclass
class Samples:
    """Rates of one case, one per round; `share` is the part of its cores that a side got."""

    ours: list[float] = field(default_factory=list)
    theirs: dict[str, list[float]] = field(default_factory=dict)
    our_share: list[float] = field(default_factory=list)
    their_share: dict[str, list[float]] = field(default_factory=dict)
    others: list[float] = field(default_factory=list)
    read_share: list[float] = field(default_factory=list)  # of decoding
    ceiling: list[float] = field(default_factory=list)  # what that is a share of, bytes a second


class Ours:
    """ggraph on one file: `rate` measures a case, after a warm-up of its plans."""

    def __init__(self, path: Path, threads: int, tokens: int, context: int) -> None:
        self.m: Loaded = load(path, threads=threads, ctx_size=context, profile=True)
        self.m.runner.picks = 1  # the best token, as greedy text has it
        self.threads, self.tokens = threads, tokens
        self.ids = prompt_ids(self.m, context)
        self._warm: set[Case] = set()
        self._held = 0  # how many of `ids` stand in the cache

    def rate(self, case: Case) -> tuple[float, float]:
        """(rows or tokens per second, share of the cores)."""
        action = {"decode": self._decode, "verify": self._verify, "prompt": self._prompt}[case.kind]
        if case not in self._warm:
            action(case)
            self._warm.add(case)
        return action(case)

    def reads(self, case: Case) -> tuple[float, float]:
        """Bytes that a decoded token reads, weights and cache, and what the threads can read a
        second, measured now. A short text's cache is not counted, since an op says how much there
        is room for."""
        backend = self.m.session.backends["cpu"]
        assert isinstance(backend, CpuBackend) and backend.profile is not None
        self._read(case.context - 1)  # a recurrent model cannot go back
        profile = backend.profile
        with profile.timing():
            self.m.runner.text(self.ids[case.context - 1 : case.context])
        counted = ("mul_mat", "flash_attn") if case.context >= FILLED else ("mul_mat",)
        times = profile.times.items()
        read = sum(t.nbytes * len(t.times) for (n, _), t in times if n.startswith(counted))
        return read, profile.ceilings().read

    def _read(self, count: int) -> None:
        """The first tokens of the text in the cache, what stands there already as it is."""
        runner = self.m.runner
        runner.past = 0 if runner.recurrent else min(self._held, count)
        if runner.past < count:
            runner.text(self.ids[runner.past : count])
        self._held = count

    def _decode(self, case: Case) -> tuple[float, float]:
        engine = self.m.engine
        self._read(case.context - 1)
        engine.ends = frozenset()  # as the peers are told to
        last = self.ids[case.context - 1 : case.context]
        text = engine.generate(last, only, lambda token: None, limit=self.tokens + 1)
        next(text)
        clock = Clock(self.threads)
        for _ in text:
            pass
        return clock.rate(self.tokens)

    def _verify(self, case: Case) -> tuple[float, float]:
        """Rows as speculation checks them: written behind the text, forgotten again."""
        runner, at = self.m.runner, case.context
        self._read(at)
        runner.ready(case.rows, at + case.rows)
        slots = range(at, at + case.rows)
        rows = Rows(list(self.ids[at : at + case.rows]), slots, slots, at)
        times = []
        clock = Clock(self.threads)
        for _ in range(self.tokens):
            begun = time.perf_counter()
            runner.step(rows, range(case.rows))
            times.append(time.perf_counter() - begun)
        _, share = clock.rate(1)
        return case.rows / statistics.median(times), share

    def _prompt(self, case: Case) -> tuple[float, float]:
        runner = self.m.runner
        runner.past = 0
        runner.prepare(case.rows)
        clock = Clock(self.threads)
        runner.text(self.ids[: case.rows])
        self._held = case.rows
        return clock.rate(case.rows)


class Clock:
    """Wall time since it was made, and how much of its cores this process used."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def rate(self, count: int) -> tuple[float, float]:
        """(count per second, share of the cores)."""
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        return count / wall, cpu / (wall * self.threads)


def their_rate(peer: Peer, case: Case, ids: Sequence[int], tokens: int) -> tuple[float, Reply]:
    """A peer's rate for a case; verification is compared with its decoding."""
    if case.kind == "prompt":
        reply = peer.ask(ids[: case.rows], 1)
        return reply.prompt_per_second, reply
    reply = peer.ask(ids[: case.context], tokens + 1, keep=True)
    return reply.decode_per_second, reply


def fitting(path: Path, cases: Sequence[Case], tokens: int) -> list[Case]:
    """The cases whose cache the model's context holds."""
    context = open_model(path).context_length
    return [c for c in cases if c.cache(tokens) <= context]


def measure(
    path: Path,
    threads: int,
    rounds: int,
    tokens: int,
    peers: Sequence[str],
    cases: Sequence[Case],
    *,
    report: Callable[[str], None] = print,
) -> Iterator[tuple[Case, Samples, dict[str, str]]]:
    """Case by case what alternating rounds gave, and the peers' versions; the side that begins
    changes from round to round. A peer that refuses the file is reported and left out."""
    context = max(c.cache(tokens) for c in cases)
    with ExitStack() as open_sides:
        opened: list[Peer] = []
        for name in peers:
            try:
                peer = Peer(path, threads, context, name=name)
            except InputError as refused:
                report(str(refused))
                continue
            opened.append(open_sides.enter_context(closing(peer)))
        ours = Ours(path, threads, tokens, context)
        open_sides.enter_context(closing(ours.m))
        for peer in opened:
            peer.ask(ours.ids[:32], 2)  # its pages
        for case in cases:
            for peer in opened:
                if case.kind != "prompt":  # its text in the cache
                    their_rate(peer, case, ours.ids, 1)
            samples = Samples()
            for i in range(rounds):
                _round(samples, case, ours, opened, i)
            yield case, samples, {p.name: p.version for p in opened}


def _round(s: Samples, case: Case, ours: Ours, peers: Sequence[Peer], first: int) -> None:
    others, cpu = Others(), time.process_time()
    their_cpu = 0.0

    def we() -> None:
        rate, share = ours.rate(case)
        s.ours.append(rate)
        s.our_share.append(share)
        if case.kind == "decode":
            read, ceiling = ours.reads(case)
            s.read_share.append(read * rate / ceiling)
            s.ceiling.append(ceiling)

    def they(peer: Peer) -> None:
        nonlocal their_cpu
        rate, reply = their_rate(peer, case, ours.ids, ours.tokens)
        s.theirs.setdefault(peer.name, []).append(rate)
        s.their_share.setdefault(peer.name, []).append(reply.share)
        their_cpu += reply.raw["cpu"]

    turns: list[Callable[[], None]] = [we, *(partial(they, p) for p in peers)]
    for i in range(len(turns)):
        turns[(first + i) % len(turns)]()
    busy = others.cores(time.process_time() - cpu + their_cpu)
    if busy is not None:
        s.others.append(busy)


def prompt_ids(m: Loaded, count: int) -> list[int]:
    """Token ids of plain English, that many. InputError for an odd tokenizer."""
    ids = m.tokenizer.encode(SAID, bos=None)
    if not ids:
        raise InputError(f"{m.model.name}: no tokens for plain English")
    return (ids * -(-count // len(ids)))[:count]


def row(case: Case, s: Samples) -> dict[str, Any]:
    """One row of the table: medians, their spread, and the ratio over the fastest peer.

    `busy_ratio`: by processor time in place of time, the least over the peers. On one thread it
    holds while others take the cores; threads that wait for one another by spinning spoil it.
    """
    ours = statistics.median(s.ours)
    busy = statistics.median(r / c for r, c in zip(s.ours, s.our_share, strict=True))
    peers = {
        name: {"rate": (rate := statistics.median(rates)), "ratio": ours / rate,
               "share": min(s.their_share[name]),
               "busy_ratio": busy / statistics.median(
                   r / c for r, c in zip(rates, s.their_share[name], strict=True))}
        for name, rates in s.theirs.items()
    }  # fmt: skip
    fastest = max(peers, key=lambda name: peers[name]["rate"], default=None)
    return {
        "case": case.name, "unit": case.unit, "ours": ours, "peers": peers, "fastest": fastest,
        "ratio": None if fastest is None else peers[fastest]["ratio"],
        "busy_ratio": min((p["busy_ratio"] for p in peers.values()), default=None),
        "read_share": statistics.median(s.read_share) if s.read_share else None,
        "ceiling": statistics.median(s.ceiling) if s.ceiling else None,
        "our_share": min(s.our_share),
        "their_share": min((p["share"] for p in peers.values()), default=None),
        "others": statistics.median(s.others) if s.others else None,
        "samples": {"ours": s.ours, **s.theirs},
    }  # fmt: skip


def file_of(type_name: str, source: Path, report: Callable[[str], None]) -> Path:
    """`source` in another type, quantised once and kept in the cache."""
    if source.stem.lower().endswith("." + type_name):
        return source
    base = source.stem.rsplit(".", 1)[0]
    out = cache_dir() / "bench" / f"{base}.{type_name.upper()}.gguf"
    made_from = f"{source.resolve()}|{kept.state(source)}|{type_name}"
    if not kept.holds(out, made_from):
        kept.make_folder(out.parent)
        report(f"quantising {source.name} to {type_name}")
        model_to_gguf(open_model(source), out, type_name)
        kept.stamp(out, made_from)
    return out
