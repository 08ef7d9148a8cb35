"""Measures decoding, verification and prompts on the CPU, alternating with other engines.

All engines read the same GGUF file with the same number of threads and the same token ids, and
take turns, so that a machine that slows down slows both. Our figures are a user's: graph replay,
feeds, masks and the choice of a token are in them. Medians of the rounds.

Memory that neighbours on the host share may give half of what it gave a second ago. What threads
can read is measured between any two turns of decoding, and a round in which it changes is done
again.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ggraph import InputError, cache_dir, kept
from ggraph.backends.cpu.backend import CpuBackend
from ggraph.backends.cpu.ceilings import products_ceiling, read_ceiling
from ggraph.backends.cpu.profile import Profile
from ggraph.decode.acceptance import only
from ggraph.decode.rows import Rows

from ..registry import open_model
from ..run.convert import model_to_gguf
from ..run.load import Loaded, load
from .machine import Others
from .peer import Peer, Reply
from .rounds import OURS, Measured, Round, changed, steadiest

SAID = (
    "The quick survey of the coast began at dawn, when the tide was low and the light was clear. "
    "Three people walked north with a map, a rope and a notebook; two of them counted birds. "
    "By noon they had listed 14 species, argued about one of them, and lost the rope to the sea. "
)
FILLED = 1000  # tokens from which on the room for them is about full
PATIENCE = 5  # rounds for one that is wanted


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

    def ceiling(self, case: Case) -> float:
        """What the threads can do a second of what bounds a case, measured now: products of a
        prompt, bytes read of a decoded token."""
        measured = products_ceiling if case.kind == "prompt" else read_ceiling
        return measured(self._profile().pool)

    def needs(self, case: Case) -> float:
        """How much of that a token takes."""
        return self._products(case) if case.kind == "prompt" else self._reads(case)

    def _profile(self) -> Profile:
        backend = self.m.session.backends["cpu"]
        assert isinstance(backend, CpuBackend) and backend.profile is not None
        return backend.profile

    def _products(self, case: Case) -> float:
        """Multiply-adds of matrices; attention is not counted."""
        profile = self._profile()
        with profile.timing():
            self._prompt(case)
        products = (t for (name, _), t in profile.times.items() if name.startswith("mul_mat"))
        return sum(t.flops / 2 * len(t.times) for t in products) / case.rows

    def _reads(self, case: Case) -> float:
        """Bytes that a decoded token reads, weights and cache. A short text's cache is not counted,
        since an op says how much there is room for."""
        profile = self._profile()
        self._read(case.context - 1)  # a recurrent model cannot go back
        with profile.timing():
            self.m.runner.text(self.ids[case.context - 1 : case.context])
        counted = ("mul_mat", "flash_attn") if case.context >= FILLED else ("mul_mat",)
        times = profile.times.items()
        return sum(t.nbytes * len(t.times) for (n, _), t in times if n.startswith(counted))

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
        prompt = self.ids[: case.rows]
        runner.prepare(prompt)
        clock = Clock(self.threads)
        runner.text(prompt)
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
) -> Iterator[tuple[Case, Measured, dict[str, str]]]:
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
            found = list[Round]()
            while changed(found, rounds) and len(found) < PATIENCE * rounds:
                found.append(_round(case, ours, opened, len(found)))
            needs = None if case.kind == "verify" else ours.needs(case)
            measured = Measured(steadiest(found, rounds), len(found) - rounds, needs)
            yield case, measured, {p.name: p.version for p in opened}


def _round(case: Case, ours: Ours, peers: Sequence[Peer], first: int) -> Round:
    others, cpu, their_cpu = Others(), time.process_time(), 0.0
    rates, shares, gave = dict[str, float](), dict[str, float](), list[float]()

    def look() -> None:
        if case.kind == "decode" or (case.kind == "prompt" and not gave):
            gave.append(ours.ceiling(case))  # memory is shared with others, so again and again

    def we() -> None:
        rates[OURS], shares[OURS] = ours.rate(case)

    def they(peer: Peer) -> None:
        nonlocal their_cpu
        rates[peer.name], reply = their_rate(peer, case, ours.ids, ours.tokens)
        shares[peer.name] = reply.share
        their_cpu += reply.raw["cpu"]

    turns: list[Callable[[], None]] = [we, *(partial(they, p) for p in peers)]
    for i in range(len(turns)):
        look()
        turns[(first + i) % len(turns)]()
    look()
    busy = others.cores(time.process_time() - cpu + their_cpu)
    return Round(rates, shares, busy, tuple(gave))


def prompt_ids(m: Loaded, count: int) -> list[int]:
    """Token ids of plain English, that many. InputError for an odd tokenizer."""
    ids = m.tokenizer.encode(SAID, bos=None)
    if not ids:
        raise InputError(f"{m.model.name}: no tokens for plain English")
    return (ids * -(-count // len(ids)))[:count]


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
