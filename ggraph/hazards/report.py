"""What `run_hazard` found, as frozen records that print and turn into JSON."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ggraph.backends.sim import Span
from ggraph.hazards.corpus import Hazard
from ggraph.plan import Certificate
from ggraph.verify import CounterExample


@dataclass(frozen=True)
class Corruption:
    """Wrong values of a bad plan: the first wrong output, and its first wrong element.

    `fault` says which read found foreign bytes. `agreement` is the share of rows that draft the
    right token, for hazards that draft.
    """

    order: str
    output: str
    run: int
    elements: int
    of: int
    at: tuple[int, ...]
    expected: float
    got: float
    fault: str
    agreement: float | None
    timeline: tuple[Span, ...]

    def __str__(self) -> str:
        where = ", ".join(map(str, self.at))
        return (
            f"{self.elements} of {self.of} elements of %{self.output} wrong in run {self.run}; "
            f"first [{where}]: expected {self.expected:.4g}, got {self.got:.4g}"
        )


@dataclass(frozen=True)
class Price:
    """Cost of one plan: arena bytes, waits per run (of streams and of the host), and virtual
    seconds for all simulated runs."""

    nbytes: int
    waits: int
    seconds: float

    def __sub__(self, other: "Price") -> "Price":
        return Price(
            self.nbytes - other.nbytes, self.waits - other.waits, self.seconds - other.seconds
        )

    def __str__(self) -> str:
        return f"{self.nbytes:+d} bytes, {self.waits:+d} waits, {self.seconds * 1e6:+.1f} us"


@dataclass(frozen=True, eq=False)
class HazardReport:
    """One hazard, run. It is `ok` when nothing failed; `failures` say what did."""

    hazard: Hazard
    seed: int
    orders: int
    counter_example: CounterExample | None
    corruption: Corruption | None
    certificate: Certificate | None
    prices: Mapping[str, Price]
    failures: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether everything that the corpus claims was seen."""
        return not self.failures

    @property
    def fix_price(self) -> Price | None:
        """What the repair costs against the bad plan."""
        bad = self.prices.get("bad")
        return None if bad is None else self.prices["fixed"] - bad

    def to_json(self) -> dict[str, Any]:
        """One row; numbers that JSON lacks (NaN) as text."""
        c, e = self.corruption, self.counter_example
        return {
            "id": self.hazard.id,
            "row": self.hazard.row,
            "title": self.hazard.title,
            "upstream": list(self.hazard.upstream),
            "ok": self.ok,
            "failures": list(self.failures),
            "seed": self.seed,
            "counter_example": None if e is None else e.to_json(),
            "corruption": None if c is None else _corruption(c),
            "fixed": None if self.certificate is None else vars(self.certificate),
            "orders_bit_equal": self.orders if self.ok else 0,
            "prices": {k: vars(p) for k, p in self.prices.items()},
        }


def _corruption(c: Corruption) -> dict[str, Any]:
    return {
        "order": c.order,
        "output": c.output,
        "run": c.run,
        "elements": c.elements,
        "of": c.of,
        "at": list(c.at),
        "expected": f"{c.expected:.9g}",
        "got": f"{c.got:.9g}",
        "fault": c.fault,
        "agreement": c.agreement,
    }
