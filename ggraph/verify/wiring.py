"""Do the declarations compute the graph? Knows tensors, nothing of order.

Accesses must cover what each tensor's op reads and writes; through copies, staging buffers
included, each tensor must get the very bytes of the tensor that the graph names; and every output
must reach the host whole. A plan without a graph (another runtime's) has its declarations alone.

Legend: a piece is (value, start, stop), bytes of a value; t, s tensors; a, r, w accesses.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from math import inf

from ggraph.plan import Access, Command, Do, Plan
from ggraph.tensor import Kind, Tensor
from ggraph.verify.report import CounterExample, at_command
from ggraph.verify.spans import merged

Piece = tuple[str, int, int]
Move = tuple[int, int, str, int]  # a value's bytes [start, stop), where the first of them was
Moves = Mapping[str, Sequence[Move]]  # by value, in order


def wiring_faults(plan: Plan) -> Iterator[CounterExample]:
    """Every command and tensor that does not do what the graph says.

    Relies on what `step_faults` has seen.
    """
    tensors = plan.graph.named
    if not tensors:
        return
    moves = _moves(plan)
    for i, c in enumerate(plan.schedule):
        t = tensors.get(c.node or "")
        for message in _misses(c, t, moves) if t is not None else ():
            yield at_command(plan, i, "declaration", message)
    launched, moved, read = (
        {c.node for c in plan.schedule if c.do is do} for do in (Do.LAUNCH, Do.COPY, Do.HOST_READ)
    )
    fed = {(c.node, a.value) for c in plan.schedule if c.do is Do.HOST_WRITE for a in c.writes}
    for t in plan.graph:
        is_moved = t.name in moved and t.op == "copy"
        idle = t.spec is None or t.view_src is not None or is_moved
        if not (idle or t.name in launched) and t.nbytes:
            yield _fault(t, f"no command computes {t.name!r}")
        if is_moved and not _is(_span(t), t.sources[0], moves):
            yield _fault(t, f"{t.name!r} does not get the bytes of {t.sources[0].name!r}")
        if t.is_output and t.name not in read:
            yield _fault(t, f"the host never reads output {t.name!r}")
        if t.kind is Kind.INPUT and t.is_leaf and t.nbytes and not _is_fed(t, fed, moves):
            yield _fault(t, f"the host never writes input {t.name!r}")


def _fault(t: Tensor, message: str) -> CounterExample:
    return CounterExample("declaration", message, values=(t.name,))


def _misses(c: Command, t: Tensor, moves: Moves) -> Iterator[str]:
    if c.do is Do.LAUNCH:
        yield from _launch(c, t)
    elif c.do is Do.HOST_READ:
        if not _is(c.reads, t, moves):
            yield f"does not read the {t.nbytes} bytes of output {t.name!r}"
    else:
        # A copy node means its source's bytes, every other tensor its own, whatever way they take.
        yield from _part(c, t)
        meant = _merged(_origins(_span(_copied(c, t)), moves))
        for value, start, stop in _merged(_origins(c.writes, moves)):
            if not any(v == value and a <= start and stop <= b for v, a, b in meant):
                yield f"{c.do.value} for {t.name!r} moves {value}[{start}:{stop}], bytes of another"


def _copied(c: Command, t: Tensor) -> Tensor:
    return t.sources[0] if c.do is Do.COPY and t.op == "copy" else t


def _part(c: Command, t: Tensor) -> Iterator[str]:
    """A copy moves a part exactly where the graph says so, chosen by the same indices."""
    wanted = t.sources[1].name if t.op == "copy" and len(t.sources) > 1 else None
    if c.do is Do.COPY and c.node == t.name and c.chosen_by != wanted:
        yield f"a copy chosen by {c.chosen_by!r} for {t.name!r}, which {wanted!r} chooses"


def _launch(c: Command, t: Tensor) -> Iterator[str]:
    yield from _missing_slices(t)
    read, written = _touched(c.reads), _touched(c.writes)
    for s, root in zip(t.sources, t.roots, strict=True):
        declared = read.get(root.name, ())
        for start, stop in s.byte_ranges():
            if not _covers(declared, start, stop):
                yield f"reads bytes [{start}, {stop}) of {root.name!r} without declaring it"
    if not _covers(written.get(t.name, ()), 0, t.nbytes):
        yield f"writes {t.nbytes} bytes of {t.name!r} without declaring it"


def _missing_slices(t: Tensor) -> Iterator[str]:
    """Of a partial copy `t` may read only the slices that were copied: its own indices are those
    that chose the copy."""
    for i, root in enumerate(t.roots):
        if len(root.sources) > 1 and root.op == "copy":
            picks = t.spec.picks if t.spec is not None else None
            same = picks is not None and picks[0] == i and t.sources[i] is root
            if not (same and picks and original(t.sources[picks[1]]) is root.sources[1]):
                yield f"reads slices of {root.name!r} that its partial copy need not bring"


def original(t: Tensor) -> Tensor:
    """What `t` is a whole copy of; `t` itself where it is none."""
    while t.op == "copy" and len(t.sources) == 1:
        t = t.sources[0]
    return t


def _is_fed(t: Tensor, fed: AbstractSet[tuple[str | None, str]], moves: Moves) -> bool:
    """Whether an input's bytes come from where the host writes that very input."""
    first, *others = _merged(_origins(_span(t), moves))
    return not others and (t.name, first[0]) in fed and first[1:] == (0, t.nbytes)


def _touched(accesses: Iterable[Access]) -> dict[str, list[tuple[int, int]]]:
    """The bytes of each value, as ranges that do not touch, in order."""
    found: dict[str, list[tuple[int, int]]] = {}
    for a in accesses:
        found.setdefault(a.value, []).append((a.start, a.stop))
    return {name: spans if len(spans) == 1 else merged(spans) for name, spans in found.items()}


def _covers(spans: Sequence[tuple[int, int]], start: int, stop: int) -> bool:
    """Whether one of these ranges, which do not touch, has all bytes of [start, stop)."""
    i = bisect_right(spans, (start, inf)) - 1
    return start >= stop or (i >= 0 and stop <= spans[i][1])


# Where bytes come from.


def _span(t: Tensor) -> tuple[Access, ...]:
    """The bytes of `t` in its root from first to last, gaps of a view included."""
    return (Access(t.root.name, t.offset, t.offset + t.nbytes),) if t.nbytes else ()


def _is(accesses: Iterable[Access], t: Tensor, moves: Moves) -> bool:
    """Whether these bytes, in this order, are those of `t`: with or without a view's gaps."""
    got = _merged(_origins(accesses, moves))
    exact = tuple(Access(t.root.name, start, stop) for start, stop in t.byte_ranges())
    return any(got == _merged(_origins(want, moves)) for want in (_span(t), exact))


def _moves(plan: Plan) -> Moves:
    """What copies put where: each moves one range to one."""
    found: dict[str, list[Move]] = {}
    for c in plan.schedule:
        if c.do is Do.COPY:
            (r,), (w,) = c.reads, c.writes
            found.setdefault(w.value, []).append((w.start, w.stop, r.value, r.start))
    return {value: sorted(moved) for value, moved in found.items()}


def _origins(
    accesses: Iterable[Access], moves: Moves, passed: frozenset[str] = frozenset()
) -> Iterator[Piece]:
    """The same bytes where they first were, before any copy; `passed` stops at circles."""
    for a in accesses:
        at = a.start
        for start, stop, source, begin in moves.get(a.value, ()):
            first, last = max(start, at), min(stop, a.stop)
            if first < last and a.value not in passed:
                if at < first:
                    yield a.value, at, first
                shift = begin - start
                deeper = (Access(source, first + shift, last + shift),)
                yield from _origins(deeper, moves, passed | {a.value})
                at = last
        if at < a.stop:
            yield a.value, at, a.stop


def _merged(pieces: Iterable[Piece]) -> list[Piece]:
    """Neighbours joined, so that equal bytes have equal lists."""
    found: list[Piece] = []
    for value, start, stop in pieces:
        if found and found[-1][0] == value and found[-1][2] == start:
            found[-1] = (value, found[-1][1], stop)
        else:
            found.append((value, start, stop))
    return found
