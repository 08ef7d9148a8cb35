"""`--profile`: time per op under the answer, beside what the machine can do."""

from typing import Any

from ggraph.backends.cpu.backend import CpuBackend
from ggraph.backends.cpu.ceilings import Ceilings
from ggraph.backends.cpu.profile import OpTime

from ..run.generation import Drafting, Generation
from ..run.load import Loaded
from .common import notes


def profiled(m: Loaded, run: Generation, drafting: Drafting | None) -> dict[str, Any]:
    """The same answer again with the clock on: rows by falling time, and the ceilings."""
    backend = m.session.backends["cpu"]  # a session always has one
    profile = backend.profile if isinstance(backend, CpuBackend) else None
    assert profile is not None, "the model was loaded without profile=True"
    with profile.timing():
        "".join(run.run(drafting))
    top = profile.ceilings()
    whole = sum(t.seconds for t in profile.times.values())
    rows = sorted(profile.times.items(), key=lambda item: -item[1].seconds)
    return {
        "seconds": whole,
        "ceilings": vars(top),
        "ops": [_row(name, n, t, whole, top) for (name, n), t in rows],
    }


def _row(name: str, rows: int, t: OpTime, whole: float, top: Ceilings) -> dict[str, Any]:
    each = max(t.seconds / len(t.times), 1e-9)
    return {
        "op": name, "rows": rows, "calls": len(t.times), "seconds": t.seconds,
        "share": t.seconds / whole if whole else 0.0,
        "bytes_per_second": t.nbytes / each, "of_read": t.nbytes / each / top.read,
        "flops_per_second": t.flops / each, "of_fma": t.flops / each / top.fma,
    }  # fmt: skip


def print_profile(facts: dict[str, Any], least: float = 0.002) -> None:
    """A table on standard error; what took less than 0.2 % is left out."""
    top = facts["ceilings"]
    lines = [
        f"\n{facts['seconds'] * 1e3:.1f} ms in ops. Ceilings of this machine with these threads: "
        f"read {top['read'] / 1e9:.1f} GB/s, copy {top['copy'] / 1e9:.1f} GB/s, "
        f"float32 multiply-adds {top['fma'] / 1e9:.0f} GFLOP/s, of 4-bit codes and bytes "
        f"{top['products'] / 1e9:.0f} GOP/s",
        f"{'op':26} {'rows':>5} {'calls':>6} {'ms':>9} {'share':>6} {'us/call':>8} "
        f"{'GB/s':>6} {'read':>5} {'GFLOP/s':>8} {'fma':>5}",
    ]
    lines += [_line(r) for r in facts["ops"] if r["share"] >= least]
    notes().print("\n".join(lines), markup=False, soft_wrap=True)


def _line(r: dict[str, Any]) -> str:
    return (
        f"{r['op']:26} {r['rows']:5} {r['calls']:6} {r['seconds'] * 1e3:9.2f} {r['share']:6.1%} "
        f"{r['seconds'] / r['calls'] * 1e6:8.1f} {r['bytes_per_second'] / 1e9:6.1f} "
        f"{r['of_read']:5.0%} {r['flops_per_second'] / 1e9:8.1f} {r['of_fma']:5.0%}"
    )
