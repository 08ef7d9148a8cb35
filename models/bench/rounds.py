"""Rounds in which engines take turns, and the row of a table that they make."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

OURS = "ggraph"
STEADY = 0.85  # of the most that memory gave in a round, from which on its sides compare


@dataclass(frozen=True)
class Round:
    """A turn of each side, by name: rows or tokens a second, and the part of its cores it got.
    `gave`: what the threads could do a second of what bounds the case: bytes read, before each turn
    and behind the last, or products, once; `others`: cores that other programs used."""

    rates: dict[str, float]
    shares: dict[str, float]
    others: float | None = None
    gave: tuple[float, ...] = ()

    @property
    def steady(self) -> float:
        """The least of what memory gave, by the most of it."""
        return min(self.gave) / max(self.gave) if self.gave else 1.0

    def busy(self, name: str) -> float:
        """A side's rate by processor time."""
        return self.rates[name] / self.shares[name]


def changed(rounds: Sequence[Round], wanted: int) -> bool:
    """Whether memory was steady in fewer rounds than wanted."""
    return sum(r.steady >= STEADY for r in rounds) < wanted


def steadiest(rounds: Sequence[Round], count: int) -> list[Round]:
    """So many of the rounds, in their order."""
    kept = sorted(rounds, key=lambda r: r.steady, reverse=True)[:count]
    return [r for r in rounds if r in kept][:count]


@dataclass(frozen=True)
class Measured:
    """The rounds of a case that count, how many were left out, and how many of `gave` one token of
    ours needs, where that is known."""

    rounds: Sequence[Round]
    left_out: int = 0
    needs: float | None = None


def row(case: str, unit: str, m: Measured) -> dict[str, Any]:
    """One row of the table: medians, their spread, and the ratio over the fastest peer.

    `busy_ratio`: by processor time in place of time, the least over the peers. On one thread it
    holds while others take the cores; threads that wait for one another by spinning spoil it.
    """
    middle, rounds, needs = statistics.median, m.rounds, m.needs
    ours, busy = middle(r.rates[OURS] for r in rounds), middle(r.busy(OURS) for r in rounds)
    peers = {
        name: {"rate": (rate := middle(r.rates[name] for r in rounds)), "ratio": ours / rate,
               "share": min(r.shares[name] for r in rounds),
               "busy_ratio": busy / middle(r.busy(name) for r in rounds)}
        for name in rounds[0].rates if name != OURS
    }  # fmt: skip
    fastest = max(peers, key=lambda name: peers[name]["rate"], default=None)
    given = [(middle(r.gave), r.rates[OURS]) for r in rounds if r.gave]
    others = [r.others for r in rounds if r.others is not None]
    return {
        "case": case, "unit": unit, "ours": ours, "peers": peers, "fastest": fastest,
        "ratio": None if fastest is None else peers[fastest]["ratio"],
        "busy_ratio": min((p["busy_ratio"] for p in peers.values()), default=None),
        "of_ceiling": middle(needs * rate / g for g, rate in given) if needs and given else None,
        "ceiling": middle(g for g, _ in given) if given else None,
        "steady": min(r.steady for r in rounds), "left_out": m.left_out,
        "our_share": min(r.shares[OURS] for r in rounds),
        "their_share": min((p["share"] for p in peers.values()), default=None),
        "others": middle(others) if others else None,
        "samples": {"ours" if n == OURS else n: [r.rates[n] for r in rounds]
                    for n in rounds[0].rates},
    }  # fmt: skip


__all__ = ["OURS", "Measured", "Round", "changed", "row", "steadiest"]
