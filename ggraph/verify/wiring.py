"""Do the declarations compute the graph? Knows tensors, nothing of order.

Accesses must cover what each tensor's op reads and writes; through copies, staging buffers
included, each tensor must get the very bytes of the tensor that the graph names; and every output
must reach the host whole. A plan without a graph (another runtime's) has its declarations alone.

Legend: a piece is (value, start, stop), bytes of a value; t, s tensors; a, r, w accesses.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

from ggraph.plan import Access, Command, Do, Plan
from ggraph.tensor import Kind, Tensor
from ggraph.verify.report import CounterExample, at_command

Piece = tuple[str, int, int]
Move = tuple[int, int, str, int]  # a value's bytes [start, stop), where the first of them was
Moves = Mapping[str, Sequence[Move]]  # by value, in order


def wiring_faults(plan: Plan) -> Iterator[CounterExample]:
    """Every command and tensor that does not do what the graph says.

    Relies on what `step_faults` has seen.
    """
    tensors = {t.name: t for t in plan.graph}
    if not tensors:
        return
    moves = _moves(plan)
    for i, c in enumerate(plan.schedule):
        t = tensors.get(c.node or "")
        for message in _misses(c, t, moves) if t is not None else ():
            yield at_command(plan, i, "declaration", message)
    nodes = {do: {c.node for c in plan.schedule if c.do is do} for do in Do}
    fed = {(c.node, a.value) for c in plan.schedule if c.do is Do.HOST_WRITE for a in c.writes}
    for t in plan.graph:
        for message in (*_absent(t, nodes, moves), *_unfed(t, fed, moves)):
            yield CounterExample("declaration", message, values=(t.name,))


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
    for s in t.sources:
        for start, stop in s.byte_ranges():
            if not _covers(c.reads, s.root.name, start, stop):
                yield f"reads bytes [{start}, {stop}) of {s.root.name!r} without declaring it"
    if not _covers(c.writes, t.name, 0, t.nbytes):
        yield f"writes {t.nbytes} bytes of {t.name!r} without declaring it"


def _missing_slices(t: Tensor) -> Iterator[str]:
    """Of a partial copy `t` may read only the slices that were copied: its own indices are those
    that chose the copy."""
    for i, s in enumerate(t.sources):
        if s.root.op == "copy" and len(s.root.sources) > 1:
            picks = t.spec.picks if t.spec is not None else None
            same = picks is not None and picks[0] == i and s is s.root
            if not (same and picks and original(t.sources[picks[1]]) is s.root.sources[1]):
                yield f"reads slices of {s.root.name!r} that its partial copy need not bring"


def original(t: Tensor) -> Tensor:
    """What `t` is a whole copy of; `t` itself where it is none."""
    while t.op == "copy" and len(t.sources) == 1:
        t = t.sources[0]
    return t


def _absent(t: Tensor, nodes: Mapping[Do, set[str | None]], moves: Moves) -> Iterator[str]:
    """What should have been done for `t` by some command, and has not been."""
    is_moved = t.op == "copy" and t.name in nodes[Do.COPY]
    if not (t.is_leaf or t.is_view or is_moved or t.name in nodes[Do.LAUNCH]) and t.nbytes:
        yield f"no command computes {t.name!r}"
    if is_moved and not _is(_span(t), t.sources[0], moves):
        yield f"{t.name!r} does not get the bytes of {t.sources[0].name!r}"
    if t.is_output and t.name not in nodes[Do.HOST_READ]:
        yield f"the host never reads output {t.name!r}"


def _unfed(t: Tensor, fed: AbstractSet[tuple[str | None, str]], moves: Moves) -> Iterator[str]:
    """An input's bytes must come from where the host writes that very input."""
    if t.is_leaf and t.kind is Kind.INPUT and t.nbytes:
        first, *others = _merged(_origins(_span(t), moves))
        if others or (t.name, first[0]) not in fed or first[1:] != (0, t.nbytes):
            yield f"the host never writes input {t.name!r}"


def _covers(accesses: Iterable[Access], value: str, start: int, stop: int) -> bool:
    reached = start
    for a in sorted((a for a in accesses if a.value == value), key=lambda a: a.start):
        if a.start <= reached:
            reached = max(reached, a.stop)
    return reached >= stop


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
