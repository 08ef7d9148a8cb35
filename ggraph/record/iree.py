"""IREE's stream dialect -> a plan: what the compiler has scheduled, and where it lies.

Input is what `iree-compile --compile-to=stream
--mlir-print-ir-before=iree-stream-fuse-dispatch-bindings` prints: at that point every dispatch
still has its own byte ranges, afterwards bindings are fused into whole slabs.

The commands of one `stream.cmd.execute` run in order, those of a `concurrent` region at once;
regions that are executed are ordered by timepoints alone. Each region that runs at once with others
is a stream of the plan. Giving memory back (`dealloca`) counts as a write. Only sizes and offsets
that are constants can be judged: what is dynamic is refused, and so is control flow.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from ggraph.errors import FormatError, PlanError
from ggraph.plan import Plan
from ggraph.plan_builder import Bytes, PlanBuilder, Space

DEVICE = "iree"
CONSTANT = re.compile(r"(%\w+) = arith\.constant (\d{1,18}) : index")
RESOURCE = re.compile(r"(%\w+) as (%\w+): !stream\.resource<(\w+)>\{(%\w+)\}")
ACCESS = re.compile(r"(ro|wo|rw) (%\w+)\[(%\w+) for (%\w+)\]")
COPY = re.compile(r"stream\.cmd\.copy (%\w+)\[(%\w+)\], (%\w+)\[(%\w+)\], (%\w+) ")
FILL = re.compile(r"stream\.cmd\.fill %\w+, (%\w+)\[(%\w+) for (%\w+)\]")
JOIN = re.compile(r"(%\w+) = stream\.timepoint\.join max\(([^)]*)\)")
EXECUTE = re.compile(r"(%\w+) = stream\.cmd\.execute.*?(?:await\((%\w+)\) => )?with\((.*)\) ?\{?$")
DEALLOCA = re.compile(
    r"(%\w+) = stream\.resource\.dealloca.*?(?:await\((%\w+)\) => )?(%\w+) : "
    r"!stream\.resource<\w+>\{(%\w+)\}"
)
AWAIT = re.compile(r"((?:%\w+(?:, )?)+) = stream\.timepoint\.await (%\w+) => ((?:%\w+(?:, )?)+) :")
SUBVIEW = re.compile(r"(%\w+) = stream\.resource\.subview (%\w+)\[(%\w+)\]")
MADE = re.compile(
    r"(%\w+)(?:, %\w+)? = stream\.(resource\.alloca?|tensor\.import).*"
    r"!stream\.resource<\w+>\{(%\w+)\}"
)
FUNCTION = re.compile(r"^  (?:util|func)\.func (?:public |private )?@([\w$]+)\(.*\{$")
DISPATCH = re.compile(r"stream\.cmd\.dispatch (?:\[[^\]]*\] )?(@[\w:@$.-]+)")
HARMLESS = ("stream.cmd.flush", "stream.cmd.invalidate", "stream.cmd.discard")


def functions(text: str) -> list[str]:
    """The functions of a module that execute something, in their order."""
    return [name for name, lines in _bodies(text).items() if any(map(EXECUTE.search, lines))]


def plan_from_iree(text: str, function: str | None = None) -> Plan:
    """The plan of a function, the first that executes something unless named.

    FormatError where there is none, and where it has dynamic sizes or control flow.
    """
    bodies = _bodies(text)
    wanted = function if function is not None else next(iter(functions(text)), None)
    if wanted is None or wanted not in bodies:
        known = ", ".join(functions(text)) or "none"
        asked = f" {wanted}" if wanted else ""
        raise FormatError(f"iree: no function{asked} that executes; there are {known}")
    try:
        return _Reader(wanted, bodies[wanted]).plan()
    except PlanError as error:
        raise FormatError(f"iree: damaged: {error}") from None


def _bodies(text: str) -> dict[str, list[str]]:
    """Function -> its lines, without its frame. The last dump of a module counts."""
    found: dict[str, list[str]] = {}
    lines: list[str] | None = None
    for line in text.splitlines():
        if (m := FUNCTION.match(line)) is not None:
            lines = found[m[1]] = []
        elif line == "  }":
            lines = None
        elif lines is not None:
            lines.append(line.strip())
    return found


@dataclass
class _Place:
    """Where the reader is: an execute, and the regions around it, innermost last."""

    event: str
    base: int  # the stream on which the execute begins and ends
    names: dict[str, tuple[Space, int]]  # argument -> buffer, offset
    regions: list["_Region"] = field(default_factory=list)


@dataclass
class _Region:
    """`concurrent`: each member has a stream of its own; `serial`: all share `stream`."""

    concurrent: bool
    stream: int
    lanes: list[int] = field(default_factory=list)
    fork: str = ""


class _Reader:
    def __init__(self, name: str, lines: Sequence[str]) -> None:
        self._name, self._lines, self._at = name, lines, 0
        self._builder = PlanBuilder("iree")
        self._constants = {m[1]: int(m[2]) for line in lines if (m := CONSTANT.search(line))}
        self._sizes = {m[1]: m[3] for line in lines if (m := MADE.search(line))}
        self._fresh = {m[1] for line in lines if (m := MADE.search(line)) and "alloc" in m[2]}
        self._spaces: dict[str, Space] = {}
        self._views: dict[str, tuple[str, int]] = {}  # resource -> the whole, offset in it
        self._after: dict[str, list[str]] = {}  # timepoint -> events
        self._streams = self._events = self._count = 0
        self._place: _Place | None = None

    def plan(self) -> Plan:
        while self._at < len(self._lines):
            line = self._lines[self._at]
            self._at += 1
            if self._place is None:
                self._outside(line)
            else:
                self._inside(line, self._place)
        self._builder.host_sync()
        self._builder.device(DEVICE, streams=max(1, self._streams))
        return self._builder.plan([f"function @{self._name}, {self._count} commands"])

    def _refuse(self, why: str) -> FormatError:
        return FormatError(f"iree: @{self._name}, line {self._at}: {why}")

    def _number(self, name: str) -> int:
        if name not in self._constants:
            raise self._refuse(f"{name} is no constant: dynamic sizes cannot be judged")
        return self._constants[name]

    def _stream(self) -> int:
        self._streams += 1
        return self._streams - 1

    def _event(self, stream: int) -> str:
        """A new event, recorded at the end of a stream."""
        self._events += 1
        self._builder.record((DEVICE, stream), f"event {self._events}")
        return f"event {self._events}"

    def _wait(self, stream: int, events: Sequence[str]) -> None:
        for event in events:
            self._builder.wait((DEVICE, stream), event)

    # Between executes.

    def _outside(self, line: str) -> None:
        if line.startswith(("cf.", "scf.", "^bb")):
            raise self._refuse("control flow cannot be judged")
        if (m := EXECUTE.search(line)) is not None:
            self._begin(m[1], m[2], m[3])
        elif (m := JOIN.search(line)) is not None:
            parts = (self._after.get(t.strip(), []) for t in m[2].split(","))
            self._after[m[1]] = [event for part in parts for event in part]
        elif (m := DEALLOCA.search(line)) is not None:
            self._dealloca(*m.groups())
        elif (m := SUBVIEW.search(line)) is not None:
            self._show(m[1], m[2], self._number(m[3]))
        elif (m := AWAIT.search(line)) is not None:
            for event in self._after.get(m[2], []):
                self._builder.host_sync(event=event)
            results, awaited = m[1].split(", "), m[3].split(", ")
            if len(results) != len(awaited):
                raise self._refuse(f"{len(awaited)} resources are awaited as {len(results)}")
            for new, old in zip(results, awaited, strict=True):
                self._show(new, old, 0)
        elif "stream.cmd." in line or "stream.async." in line:
            raise self._refuse(f"unknown: {line[:80]}")

    def _show(self, new: str, old: str, offset: int) -> None:
        whole, start = self._views.get(old, (old, 0))
        self._views[new] = (whole, start + offset)

    def _begin(self, timepoint: str, after: str | None, resources: str) -> None:
        base = self._stream()
        self._wait(base, self._after.get(after or "", []))
        names = {}
        for outer, inner, kind, size in RESOURCE.findall(resources):
            names[inner] = self._space(outer, kind, self._number(size))
        if len(names) < resources.count(" as "):
            raise self._refuse("a resource without a constant size")
        self._place = _Place(timepoint, base, names, [_Region(False, base)])

    def _space(self, name: str, kind: str, nbytes: int) -> tuple[Space, int]:
        """The buffer in which a resource lies, and where."""
        name, offset = self._views.get(name, (name, 0))
        if name not in self._spaces:
            whole = self._number(self._sizes[name]) if name in self._sizes else offset + nbytes
            called, fresh = f"{kind} {name}", name in self._fresh
            self._spaces[name] = self._builder.buffer(called, DEVICE, whole, fresh=fresh)
        return self._spaces[name], offset

    def _dealloca(self, timepoint: str, after: str | None, name: str, size: str) -> None:
        stream = self._stream()
        self._wait(stream, self._after.get(after or "", []))
        space, offset = self._space(name, "transient", self._number(size))
        given = space[offset : offset + self._number(size)].called(f"{name} given back")
        self._builder.launch((DEVICE, stream), f"dealloca {name}", writes=[given])
        self._after[timepoint] = [self._event(stream)]

    # Inside an execute.

    def _inside(self, line: str, place: _Place) -> None:
        if line.startswith(("stream.cmd.concurrent {", "stream.cmd.serial {")):
            place.regions.append(self._region(place, "concurrent" in line))
        elif line.startswith("}"):
            self._end(place)
        elif line.startswith("stream.cmd.dispatch"):
            self._dispatch(line, place)
        elif (m := COPY.match(line)) is not None:
            size = self._number(m[5])
            read, write = (self._bytes(place, m[i], self._number(m[i + 1]), size) for i in (1, 3))
            self._builder.copy((DEVICE, self._member(place)), self._label("copy"), read, write)
        elif (m := FILL.match(line)) is not None:
            write = self._bytes(place, m[1], self._number(m[2]), self._number(m[3]))
            where = (DEVICE, self._member(place))
            self._builder.launch(where, self._label("fill"), writes=[write])
        elif not line.startswith(HARMLESS):
            raise self._refuse(f"unknown: {line[:80]}")

    def _label(self, what: str) -> str:
        self._count += 1
        return f"{what} {self._count}"

    def _member(self, place: _Place) -> int:
        """The stream of the next member of the innermost region."""
        region = place.regions[-1]
        if not region.concurrent:
            return region.stream
        stream = self._stream()
        self._wait(stream, [region.fork])
        region.lanes.append(stream)
        return stream

    def _region(self, place: _Place, concurrent: bool) -> _Region:
        stream = self._member(place)
        fork = self._event(stream) if concurrent else ""
        return _Region(concurrent, stream, [], fork)

    def _end(self, place: _Place) -> None:
        region = place.regions.pop()
        self._wait(region.stream, [self._event(lane) for lane in region.lanes])
        if not place.regions:
            self._after[place.event] = [self._event(place.base)]
            self._place = None

    def _dispatch(self, line: str, place: _Place) -> None:
        found = DISPATCH.search(line)
        name = found[1].rpartition("@")[2] if found is not None else "dispatch"
        touched: dict[str, list[Bytes]] = {"ro": [], "wo": [], "rw": []}
        while self._at < len(self._lines) and not self._lines[self._at].startswith("}"):
            access = self._lines[self._at]
            self._at += 1
            m = ACCESS.search(access)
            if m is None:
                raise self._refuse(f"unknown access: {access[:80]}")
            span = self._bytes(place, m[2], self._number(m[3]), self._number(m[4]))
            # A result that IREE has put into another one's memory is `rw` without being read.
            how = m[1] if m[1] != "rw" or self._builder.holds(span) else "wo"
            touched[how].append(span)
        self._at += 1
        self._builder.launch(
            (DEVICE, self._member(place)),
            self._label(name),
            reads=touched["ro"],
            writes=touched["wo"],
            updates=touched["rw"],
        )

    def _bytes(self, place: _Place, name: str, offset: int, size: int) -> Bytes:
        if name not in place.names:
            raise self._refuse(f"unknown resource {name}")
        space, base = place.names[name]
        return space[base + offset : base + offset + size]
