"""One `show` for every noun: text, HTML, dot, JSON."""

import json
from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any

from ggraph.door import article, fit
from ggraph.errors import InputError, shown
from ggraph.explain import Explanation
from ggraph.graph import Graph
from ggraph.lazy import lazy
from ggraph.plan import (
    Certificate,
    MemoryMap,
    Placement,
    Plan,
    Schedule,
    Splits,
    VerifiedPlan,
)
from ggraph.show import graph_dot, graph_text, plan_summary, plan_text, schedule_text
from ggraph.tensor import Tensor, line
from ggraph.verify import CounterExample, examine

if TYPE_CHECKING:
    import html

    from ggraph import show_html
else:
    html, show_html = lazy("html"), lazy("ggraph.show_html")

FORMS = ("text", "html", "dot", "json")


class Page(str):
    """An HTML page of its own, which a notebook shows in a frame."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        style = "width:100%;height:640px;border:0"
        return f'<iframe style="{style}" srcdoc="{html.escape(self)}"></iframe>'


def show(noun: object, form: str = "text") -> str:
    """Any noun as text: a tensor, graph, placement, splits, schedule, memory map, plan, verified
    plan, certificate, counter-example or explanation.

    `form`: "text" for all of them; "json" for all (one object); "dot", for Graphviz, and "html", a
    page of its own, for plans; "dot" for graphs too. A plan that is not proved yet is asked for its
    verdict, and its page has the race in red. InputError for anything else.
    """
    if not isinstance(form, str) or form not in FORMS:
        raise InputError(f"form={shown(form)}: expected one of {', '.join(FORMS)}")
    for kind, forms in _SHOWN.items():
        if isinstance(noun, kind):
            if is_dataclass(noun):
                fit(noun)
            if form in forms:
                return forms[form](noun)
            raise InputError(f"{article(kind)} has no {form}; it has {', '.join(forms)}")
    known = ", ".join(k.__name__ for k in _SHOWN)
    raise InputError(f"cannot show {shown(noun)}; shown are {known}")


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, default=str)


def _graph_data(graph: Graph) -> dict[str, Any]:
    return {"graph": graph.name, "tensors": [_tensor_data(t) for t in graph]}


def _tensor_data(t: Tensor) -> dict[str, Any]:
    return {
        "name": t.name, "op": t.op, "dtype": t.dtype.name, "shape": t.shape,
        "sources": [s.name for s in t.sources], "attributes": dict(t.attrs),
        "output": t.is_output,
    }  # fmt: skip


def _html(plan: Plan, verdict: Certificate | CounterExample) -> Page:
    if isinstance(verdict, CounterExample):
        return Page(show_html.plan_html(plan, {}, verdict))
    facts = {k: x for k, x in vars(verdict).items() if k != "approximations"}
    return Page(show_html.plan_html(plan, facts))


def _fields(noun: object) -> str:
    assert is_dataclass(noun) and not isinstance(noun, type), noun
    return "\n".join(f"{name:<20} {value}" for name, value in asdict(noun).items())


def _placed(placement: Placement) -> str:
    return "\n".join(f"{n:<32} {w.device:<8} {w.cause}" for n, w in placement.of.items())


def _split(splits: Splits) -> str:
    return "\n".join(
        f"{s.index} on {s.device}: {', '.join(s.nodes) or 'nothing'}"
        + (f"; copies in {', '.join(s.copies_in)}" if s.copies_in else "")
        for s in splits.splits
    )


def _mapped(memory: MemoryMap) -> str:
    rows = [f"buffer {b.name}: {b.nbytes} bytes on {b.device}" for b in memory.buffers.values()]
    for value, r in memory.regions.items():
        cause = memory.causes.get(value, "")
        ends = ", ".join(f"[{o}, {o + r.nbytes})" for o in r.offsets)
        rows.append(f"{value:<32} {r.buffer} {ends} {cause}".rstrip())
    return "\n".join(rows)


def _memory_data(memory: MemoryMap) -> dict[str, Any]:
    return {
        "mode": memory.mode,
        "buffers": {n: asdict(b) for n, b in memory.buffers.items()},
        "regions": {n: asdict(r) for n, r in memory.regions.items()},
        "causes": dict(memory.causes),
    }


Forms = dict[str, Callable[[Any], str]]
_SHOWN: dict[type, Forms] = {
    Tensor: {"text": line, "json": lambda t: _json(_tensor_data(t))},
    Graph: {"text": graph_text, "dot": graph_dot, "json": lambda g: _json(_graph_data(g))},
    VerifiedPlan: {
        "text": plan_text,
        "html": lambda v: _html(v.plan, v.certificate),
        "dot": lambda v: graph_dot(v.plan.graph),
        "json": lambda v: _json(plan_summary(v)),
    },
    Plan: {
        "text": lambda p: schedule_text(p.schedule),
        "html": lambda p: _html(p, examine(p)),
        "dot": lambda p: graph_dot(p.graph),
        "json": lambda p: _json({"commands": list(map(str, p.schedule)), "log": list(p.log)}),
    },
    Schedule: {
        "text": schedule_text,
        "json": lambda s: _json({"commands": list(map(str, s))}),
    },
    Placement: {"text": _placed, "json": lambda p: _json({n: asdict(w) for n, w in p.of.items()})},
    Splits: {"text": _split, "json": lambda s: _json([asdict(x) for x in s.splits])},
    MemoryMap: {"text": _mapped, "json": lambda m: _json(_memory_data(m))},
    Certificate: {"text": _fields, "json": lambda c: _json(asdict(c))},
    CounterExample: {"text": str, "json": lambda c: _json(c.to_json())},
    Explanation: {"text": str, "json": lambda e: _json(asdict(e))},
}
