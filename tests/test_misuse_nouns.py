"""Plans with odd members: every function that takes one answers, or raises one error of ours.

Plans are frozen records that anybody may take apart and put together again (docs/races.md does). So
each field of each record in a plan is replaced by what does not belong there, or by another value
of its own type, and each function that takes a plan is called with the result.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_type_hints

import numpy as np
import pytest

from ggraph import (
    DeviceSpec,
    GgraphError,
    Graph,
    InputError,
    Options,
    explain,
    input,
    make_plan,
    ops,
    show,
    state,
    verify,
)
from ggraph.backends.sim import Simulator
from ggraph.plan_json import plan_to_json
from ggraph.verify import CounterExample, approximations, examine, races

X = input("x", (2, 3))
KEPT = ops.set_rows(state("held", (4, 3)), X + 1, input("i", (2,), "i32"))
GRAPH = Graph.of({"y": ops.exp(X) * 2, "z": ops.cont(KEPT)})
FEEDS = {"x": np.zeros((2, 3), np.float32), "i": np.array([0, 1], np.int32)}
GPU = DeviceSpec("d", "sim", memory_bytes=1 << 20, streams=2)
PLAN = make_plan(GRAPH, [GPU], Options(streams=2)).plan

ODD: dict[str, Any] = {
    "None": None, "string": "x", "int": 3, "negative": -1, "float": 0.5, "NaN": float("nan"),
    "list": [1], "tuple": (), "dict": {}, "dict of None": {"x": None}, "array": np.zeros((2, 3)),
    "objects": np.array([None, "x"], object), "tensor": X, "graph": GRAPH, "class": int,
    "set": {1}, "list of None": [None], "True": True, "huge": 1 << 70,
}  # fmt: skip
USES: Mapping[str, Callable[[Any], object]] = {
    "verify": verify,
    "examine": examine,
    "races": races,
    "approximations": approximations,
    "explain": lambda p: explain(p, "y"),
    **{form: lambda p, form=form: show(p, form) for form in ("text", "json", "html", "dot")},
    "plan_to_json": plan_to_json,
    "simulate": lambda p: Simulator(p, {}).run([FEEDS]),
}  # fmt: skip

Put = Callable[[Any], Any]


def records(value: Any, path: str, put: Put, seen: set[type]) -> Iterator[tuple[str, Any, Put]]:
    """One record of each class in `value`: the way to it, and how to put another in its place."""
    if is_dataclass(value) and type(value) not in seen:
        seen.add(type(value))
        yield path, value, put
        for f in fields(value):
            inner = getattr(value, f.name)
            around: Put = lambda new, name=f.name: put(replace(value, **{name: new}))  # noqa: E731
            yield from records(inner, f"{path}.{f.name}", around, seen)
    elif isinstance(value, tuple):
        for i, inner in enumerate(value):
            among: Put = lambda new, i=i: put((*value[:i], new, *value[i + 1 :]))  # noqa: E731
            yield from records(inner, f"{path}[{i}]", among, seen)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            beside: Put = lambda new, key=key: put({**value, key: new})  # noqa: E731
            yield from records(inner, f"{path}[{key}]", beside, seen)


RECORDS = {path: (r, put) for path, r, put in records(PLAN, "plan", lambda new: new, set())}


def test_a_plan_has_records_of_many_classes() -> None:
    kinds = {type(r).__name__ for r, _ in RECORDS.values()}
    assert len(kinds) >= 17
    assert {"Plan", "Schedule", "Graph", "Tensor", "Command", "Access", "Region"} <= kinds


@pytest.mark.parametrize("path", RECORDS)
def test_odd_members_of_plans_are_one_clear_error(path: str) -> None:
    record, put = RECORDS[path]
    functions = {n for n, a in get_type_hints(type(record)).items() if "Callable" in str(a)}
    tried = refused = 0
    for f in fields(record):
        for what, value in ODD.items():
            if what == "class" and f.name in functions:
                continue  # what a caller's own function raises is the caller's
            for use, function in USES.items():
                tried += 1
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    try:
                        function(put(replace(record, **{f.name: value})))
                    except GgraphError as error:
                        assert str(error)
                        refused += 1
                    except Exception as error:
                        where = f"{use}: {path}.{f.name}={what}: {error!r}"
                        raise AssertionError(where) from error
    assert tried > 100
    assert refused > tried // 4


def test_errors_name_the_way_to_the_member() -> None:
    commands = PLAN.schedule.commands
    odd = (replace(commands[0], reads=((1, 2),)), *commands[1:])  # type: ignore[arg-type]
    broken = replace(PLAN, schedule=replace(PLAN.schedule, commands=odd))
    said = r"plan\.schedule\.commands\[0\]\.reads\[0\]=.*: expected an Access"
    with pytest.raises(InputError, match=f"verify: {said}"):
        verify(broken)
    with pytest.raises(InputError, match=f"races: {said}"):
        races(broken)


def test_numbers_that_are_none_prove_nothing() -> None:
    """NaN is less than nothing and more than nothing: each bound of a proof would hold for it."""
    region = replace(PLAN.memory.regions["y"], offsets=(float("nan"),))  # type: ignore[arg-type]
    memory = replace(PLAN.memory, regions={**PLAN.memory.regions, "y": region})
    with pytest.raises(InputError, match=r"offsets\[0\]=nan: expected a whole number"):
        verify(replace(PLAN, memory=memory))


def test_what_is_typed_well_and_wrong_is_still_refused() -> None:
    region = replace(PLAN.memory.regions["y"], offsets=(1 << 40,))
    memory = replace(PLAN.memory, regions={**PLAN.memory.regions, "y": region})
    assert isinstance(examine(replace(PLAN, memory=memory)), CounterExample)
