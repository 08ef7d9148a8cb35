"""The public face with each argument of the wrong kind: it works, or raises one error of ours.

`CALLS` holds every function of docs/library.md with arguments that work; the page's own maker says
which functions those are. What a caller's own function raises is the caller's, so the class `int`
is not tried where a function is wanted.
"""

import ctypes
import importlib
import inspect
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ggraph_models.door import open_arch_file, register_architecture
from ggraph_models.families.llama import LLAMA

from ggraph import (
    DeviceSpec,
    GgraphError,
    Graph,
    InputError,
    Options,
    Session,
    cache_dir,
    dtypes,
    explain,
    input,
    make_plan,
    open_backend,
    ops,
    register_op,
    scope,
    show,
    state,
    verify,
    weight,
)
from ggraph.backends import sim
from ggraph.decode.draft.eagle import TreeShape
from ggraph.decode.draft.lookup import PromptLookup
from ggraph.decode.draft.tree import Draft
from ggraph.decode.engine import Engine
from ggraph.decode.model import StepShape
from ggraph.decode.runner import Runner, drawing, move_graph, picking, spreading
from ggraph.decode.sampler import Sampler, SamplerConfig
from ggraph.extend import address_of
from ggraph.formats import dequantize, open_checkpoint, quantize
from ggraph.formats.checkpoint import RawTensor
from ggraph.ops.evaluate import evaluate
from ggraph.plan_json import plan_from_json, plan_to_json
from ggraph.tensor import Arg, Example, Kind, Meta, Tensor
from ggraph.testing import check_op, check_plan
from ggraph.verify import approximations, examine, races
from models.registry import open_model

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
library: Any = importlib.import_module("make_library_docs")
shown: Any = importlib.import_module("ggraph.show")

X = input("x", (2, 3))
GRAPH = Graph.of({"y": X + 1})
ZEROS = {"x": np.zeros((2, 3), np.float32)}
ODD: dict[str, Any] = {
    "None": None, "string": "x", "int": 3, "negative": -1, "float": 0.5, "NaN": float("nan"),
    "zero": 0, "huge": 1 << 70, "infinite": float("inf"), "half a character": "\ud800",
    "list": [1], "tuple": (), "dict": {}, "dict of None": {"x": None}, "array": np.zeros((2, 3)),
    "objects": np.array([None, "x"], object), "complex": np.zeros((2, 3), np.complex64),
    "strings": np.array(["a"]), "tensor": X, "graph": GRAPH, "class": int, "bytes": b"x",
    "set": {1}, "path": Path("nowhere"), "list of None": [None], "jagged": [[1], [1, 2]],
}  # fmt: skip

HOW_OFTEN = {"orders", "runs"}  # a huge number of these only takes long

Calls = dict[str, tuple[Callable[..., Any], dict[str, Any]]]
SPEC = DeviceSpec("d", "sim", memory_bytes=1 << 20)
HELD = Graph.of({"z": ops.cont(ops.cpy(input("r", (2, 3)), state("held", (2, 3))))})
PLAN = make_plan(GRAPH, [SPEC])
SESSION = Session({"cpu": open_backend("cpu", threads=1, profile=True)})
SESSION.prepare("k", GRAPH)
SESSION.prepare("s", HELD)
numbers = iter(range(1 << 30))


def fields_of(record: Any) -> dict[str, Any]:
    return {f.name: getattr(record, f.name) for f in fields(record)}


def new_op(**change: Any) -> object:
    """An op of a new name, and what it builds."""
    given = {"meaning": lambda x, **_: np.abs(x), "examples": [Example((Arg((2, 2)),))], **change}
    return register_op(f"odd{next(numbers)}", **given)(input("q", (2, 2)))


STORED = RawTensor("w", dtypes.F32, (2, 2), np.zeros((2, 2), np.float32))


def making() -> Calls:
    """What makes graphs, ops and records; a record is used where it belongs."""
    leaf = {"name": "q", "shape": (2,), "dtype": "f32"}
    odd = {
        "name": "odd",
        "meaning": abs,
        "examples": [Example((Arg((2, 2)),))],
        "shape": None,
        "doc": "",
        "elementwise": False,
        "inplace": (),
        "overwrites": None,
        "kernel": None,
        "cuda": "",
    }
    binary = (
        "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ "
        "__rpow__ __gt__ __lt__ __ge__ __le__ __matmul__ __rmatmul__ __getitem__"
    )
    return {
        "input": (input, leaf),
        "weight": (weight, leaf),
        "state": (state, leaf),
        "scope": (lambda name: scope(name).__enter__(), {"name": "s"}),
        "Tensor": (
            lambda **k: Graph.of({"y": ops.exp(Tensor(**k))}), fields_of(ops.reshape(X, 6))
        ),
        "Tensor.named": (X.named, {"name": "q"}),
        "Tensor.byte_ranges": (X.byte_ranges, {"limit": 3}),
        **{
            f"Face.{m}": (getattr(X, m), {"axis": 0, "keepdims": True})
            for m in ("sum", "mean", "max", "min")
        },
        "Face.cumsum": (X.cumsum, {"axis": 0}),
        "Face.reshape": (lambda shape: X.reshape(shape), {"shape": (3, 2)}),
        "Face.permute": (lambda axes: X.permute(axes), {"axes": (1, 0)}),
        **{m: (lambda other, m=m: getattr(X, m)(other), {"other": 2.0}) for m in binary.split()},
        "Graph": (lambda **k: make_plan(Graph(**k), [SPEC]), fields_of(GRAPH)),
        "Graph.of": (Graph.of, {"outputs": {"y": X + 1}, "also": (), "name": "g"}),
        "Graph.leaves": (GRAPH.leaves, {"kind": Kind.INPUT}),
        "Graph.replace": (GRAPH.replace, {"heirs": {"y": X * 2}}),
        "Graph.users": (GRAPH.users, {}),
        "Graph.to_networkx": (GRAPH.to_networkx, {}),
        "Graph.__getitem__": (GRAPH.__getitem__, {"name": "y"}),
        "Graph.get": (GRAPH.get, {"name": "y"}),
        "register_op": (register_op, odd),
        "address_of": (address_of, {"kernel": ctypes.CDLL(None).labs}),
        "Arg": (lambda **k: new_op(examples=[Example((Arg(**k),))]), fields_of(Arg((2, 2)))),
        "Example": (
            lambda **k: new_op(examples=[Example(**k)]), fields_of(Example((Arg((2, 2)),)))
        ),
        "Meta": (lambda **k: new_op(shape=lambda s, a: Meta(**k)), fields_of(Meta((2, 2)))),
        "dtypes.dtype": (dtypes.dtype, {"name": "f32"}),
        "dtypes.as_dtype": (dtypes.as_dtype, {"given": "f32"}),
    }  # fmt: skip


def planning() -> Calls:
    """What plans, proves, tells and checks."""
    plan, text = PLAN.plan, json.dumps(plan_to_json(PLAN.plan))
    return {
        "DeviceSpec": (lambda **k: make_plan(GRAPH, [DeviceSpec(**k)]), fields_of(SPEC)),
        "DeviceSpec.supports": (SPEC.supports, {"t": X}),
        "Options": (lambda **k: make_plan(GRAPH, [SPEC], Options(**k)), fields_of(Options())),
        "make_plan": (make_plan, {"graph": GRAPH, "devices": [SPEC], "options": Options()}),
        "verify": (verify, {"plan": plan, "iterations": 0}),
        "examine": (examine, {"plan": plan, "iterations": 0}),
        "races": (races, {"plan": plan}),
        "approximations": (approximations, {"plan": plan}),
        "explain": (explain, {"plan": PLAN, "tensor": "y", "given": GRAPH}),
        "Plan.tensor": (plan.tensor, {"name": "y"}),
        "show": (show, {"noun": GRAPH, "form": "json"}),
        "graph_text": (shown.graph_text, {"graph": GRAPH}),
        "graph_dot": (shown.graph_dot, {"graph": GRAPH}),
        "schedule_text": (shown.schedule_text, {"schedule": plan.schedule}),
        "plan_brief": (shown.plan_brief, {"verified": PLAN}),
        "plan_text": (shown.plan_text, {"verified": PLAN}),
        "plan_summary": (shown.plan_summary, {"verified": PLAN}),
        "plan_to_json": (plan_to_json, {"plan": plan}),
        "plan_from_json": (plan_from_json, {"text": text}),
        "evaluate": (evaluate, {"graph": GRAPH, "feeds": ZEROS, "every": False}),
        "check_op": (check_op, {"name": "relu", "devices": ("cpu",)}),
        "check_plan": (check_plan, {"graph": GRAPH, "feeds": ZEROS, "orders": 1}),
        "quantize": (
            quantize,
            {"values": np.zeros((2, 32)), "dtype": dtypes.Q8_0, "importance": np.ones(32)},
        ),
        "dequantize": (dequantize, {"raw": np.zeros((2, 34), np.uint8), "dtype": dtypes.Q8_0}),
        "register_architecture": (register_architecture, {"a": LLAMA}),
        "open_arch_file": (open_arch_file, {"path": "nowhere"}),
        "open_checkpoint": (open_checkpoint, {"path": "nowhere"}),
    }


def running() -> Calls:
    """Sessions and the simulated accelerator."""
    one = np.zeros((1, 12), np.uint8)
    simulated, held = sim.Simulator(PLAN.plan, {}), make_plan(HELD, [SPEC]).plan

    def runs(order: sim.Order) -> sim.Simulated:
        return simulated.run([ZEROS], order)

    return {
        "open_backend": (open_backend, {"name": "cpu"}),
        "Session": (Session, {"backends": SESSION.backends, "options": None}),
        "Session.prepare": (SESSION.prepare, {"key": "again", "build": GRAPH, "weights": None}),
        "Session.__contains__": (SESSION.__contains__, {"key": "k"}),
        "Session.feeds": (SESSION.feeds, {"key": "k", "feeds": ZEROS}),
        "Feeds.put": (SESSION.feeds("k", ZEROS).put, {"name": "x", "value": ZEROS["x"]}),
        "Session.run": (SESSION.run, {"key": "k", "feeds": ZEROS, "outputs": ["y"]}),
        "Session.scan": (SESSION.scan, {"key": "k", "feeds": {"x": np.zeros((1, 2, 3), "f4")}}),
        "Session.profile": (SESSION.profile, {"key": "k", "feeds": ZEROS, "runs": 1}),
        "Session.read_state": (SESSION.read_state, {"name": "held"}),
        "Session.meanwhile": (SESSION.meanwhile, {"work": lambda: None}),
        "Session.expect": (SESSION.expect, {"weights": [STORED]}),
        "Session.touch": (SESSION.touch, {"name": "held"}),
        "Session.write_state": (SESSION.write_state, {"name": "held", "data": ZEROS["x"]}),
        "Session.read_rows": (SESSION.read_rows, {"name": "held", "rows": [0]}),
        "Session.write_rows": (SESSION.write_rows, {"name": "held", "rows": [0], "data": one}),
        "Session.plan": (SESSION.plan, {"key": "k"}),
        "Session.forget": (SESSION.forget, {"key": "no plan's"}),
        "Session.inputs": (SESSION.inputs, {"key": "k"}),
        "Simulator": (sim.Simulator, {"plan": PLAN.plan, "initial": {}}),
        "Simulator.run": (simulated.run, {"feeds": [ZEROS], "order": None, "fresh": True}),
        "Simulator.write_state": (
            sim.Simulator(held, {}).write_state, {"name": "held", "data": ZEROS["x"]}
        ),
        "every_order": (lambda **k: list(sim.every_order(**k)), {"run": runs, "limit": 3}),
        "Random": (lambda **k: runs(sim.Random(**k)), {"seed": 1}),
        "Adversarial": (
            lambda **k: runs(sim.Adversarial(**k)), {"first": "copy:x", "then": "y"}
        ),
        "Scripted": (lambda **k: runs(sim.Scripted(**k)), {"script": [0]}),
        "sim_spec": (sim.sim_spec, {"name": "sim0"}),
        "open": (sim.open, {"name": "sim0", "machine": None}),
        "SimBackend": (sim.SimBackend, {"spec": SPEC, "machine": sim.Machine()}),
        "SimHost": (sim.SimHost, {"machine": sim.Machine(), "spec": SPEC}),
    }  # fmt: skip


def decoding() -> Calls:
    """A sampler, and the loop around a small model."""
    sampler, logits = Sampler(SamplerConfig(), 6), np.zeros(6, np.float32)
    model = open_model(ROOT / "tests" / "golden" / "tiny" / "llama_tied")
    given = {"model": model, "session": SESSION, "context": 64, "batch": 8}
    runner = Runner(**given)
    engine, step = Engine(runner, ()), model.build(runner.shape(1, 1, 1))

    def generate(**change: Any) -> list[int]:
        engine.reset()
        return list(engine.generate(**change))

    def text(**change: Any) -> object:
        engine.reset()
        return runner.text(**change)

    prompt = {"prompt": [1, 2], "pick": lambda row: int(row.argmax()), "accept": sampler.clone}
    return {
        "SamplerConfig": (
            lambda **k: Sampler(SamplerConfig(**k), 6).sample(logits), fields_of(SamplerConfig())
        ),
        "Sampler": (Sampler, {"config": SamplerConfig(), "vocab_size": 6}),
        "Sampler.sample": (sampler.sample, {"logits": logits}),
        "Sampler.probabilities": (sampler.probabilities, {"logits": logits}),
        "Sampler.law": (sampler.law, {"given": logits}),
        "Sampler.ahead": (sampler.ahead, {"places": [1]}),
        "Sampler.accept": (sampler.accept, {"token": 1}),
        "Sampler.accept_all": (sampler.accept_all, {"tokens": [1]}),
        "TreeShape": (TreeShape, fields_of(TreeShape())),
        "Draft": (Draft, fields_of(Draft((1, 2), (-1, 0), chances=(0.5, 0.5)))),
        "PromptLookup": (lambda **k: PromptLookup(**k), {"most": 4, "least": 2, "name": "lookup"}),
        "StepShape": (
            lambda **k: runner.plan(StepShape(**k)), fields_of(runner.shape(1, 1, 1))
        ),
        "Runner": (lambda **k: Runner(**k).text([1]), {**given, "cache_dtype": dtypes.F16}),
        "Runner.shape": (runner.shape, {"rows": 1, "wanted": 1, "reach": 1, "given": False}),
        "Runner.plan": (runner.plan, {"shape": runner.shape(1, 1, 1)}),
        "Runner.ready": (runner.ready, {"rows": 1, "reach": 1}),
        "Runner.movable": (runner.movable, {"rows": 2}),
        "Runner.prepare": (runner.prepare, {"tokens": [1]}),
        "Runner.text": (text, {"tokens": [1], "every": False}),
        "picking": (picking, {"step": step, "count": 2, "alone": True}),
        "spreading": (spreading, {"step": step}),
        "drawing": (drawing, {"step": step, "config": SamplerConfig()}),
        "move_graph": (move_graph, {"step": step, "count": 1, "slots": 65}),
        "Engine": (lambda **k: Engine(**k), {"runner": runner, "ends": ()}),
        "Engine.generate": (generate, {**prompt, "accept": lambda token: None, "limit": 1}),
        "Engine.room": (engine.room, {"prompt": [1, 2]}),
    }  # fmt: skip


CALLS = {**making(), **planning(), **running(), **decoding()}
NOTHING_TO_GIVE = {  # functions without an argument
    "cache_dir", "load_installed", "RawTensor.float32", "RawTensor.widened", "Session.close",
    "Engine.reset", "Sampler.clone", "Sampler.uniform", "CounterExample.to_json",
}  # fmt: skip
OURS = {  # what a session, an executor, an order or an engine calls, never a user
    "Memory", "Ref", "Scratch", "Launch", "Program", "Store", "Backend", "Machine", "SimBackend",
    "SimHost", "Order", "InOrder", "Adversarial", "Random", "Scripted", "Timed", "OpSpec",
    "CausalModel", "VerifiedPlan", "Rejected", "DeviceSpec",
}  # fmt: skip
BETWEEN_ROUNDS = {
    "Runner.follow",
    "Runner.step",
    "Runner.keep",
    "Runner.tapped",
    "verification_rows",
}


def public() -> Iterator[str]:
    """Functions, and methods of classes, that docs/library.md lists."""
    for room in (sys.modules["ggraph"], *map(importlib.import_module, library.ROOMS)):
        for name in getattr(room, "__all__", None) or vars(room):
            thing = getattr(room, name)
            own = getattr(thing, "__module__", "").startswith(room.__name__) and name[0] != "_"
            if own and inspect.isfunction(thing):
                yield name
            elif own and inspect.isclass(thing):
                yield from methods(thing)
    for noun in library.NOUNS:
        yield from methods(noun)


def methods(cls: type) -> Iterator[str]:
    for name, member in vars(cls).items():
        if name[0] != "_" and inspect.isfunction(getattr(member, "__func__", member)):
            yield f"{cls.__name__}.{name}"


def test_every_public_function_is_tried() -> None:
    assert cache_dir().name
    left = {n for n in public() if n.split(".")[0] not in OURS or n in CALLS}
    assert left - CALLS.keys() - NOTHING_TO_GIVE - BETWEEN_ROUNDS == set()
    assert len(left) >= 80


def test_every_argument_is_tried() -> None:
    several = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    for name, (function, good) in CALLS.items():
        taken = {n: p for n, p in inspect.signature(function).parameters.items() if n != "m"}
        assert {n for n, p in taken.items() if p.kind not in several} <= good.keys(), name


@pytest.mark.parametrize("name", CALLS)
def test_wrong_arguments_of_the_face_are_one_clear_error(name: str) -> None:
    function, good = CALLS[name]
    refused = 0
    for parameter in good:
        for what, value in ODD.items():
            if what == "class" and callable(good[parameter]):
                continue
            if what == "huge" and parameter in HOW_OFTEN:
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                try:
                    function(**{**good, parameter: value})
                except GgraphError as error:
                    assert str(error).isprintable(), (parameter, what)  # and so on one line
                    refused += 1
                except Exception as error:
                    raise AssertionError(f"{name}({parameter}={what}): {error!r}") from error
    answers = {"Session.__contains__", "Graph.get"}  # whatever they are asked
    assert refused >= 8 or not good or name in answers


def test_errors_name_the_function_and_the_value() -> None:
    with pytest.raises(InputError, match="explain: plan=3: expected a Plan or a VerifiedPlan"):
        explain(3, "y")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"pins: expected several, each a string or a Pin, got"):
        Options(pins="a=cpu")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="make_plan: devices='cpu': expected several DeviceSpecs"):
        make_plan(GRAPH, "cpu")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"quantize: values=.*: expected an array of numbers"):
        quantize(np.zeros((2, 32), np.complex64), dtypes.Q8_0)
    assert quantize([[0.5] * 32], dtypes.Q8_0).shape == (1, 34)  # type: ignore[arg-type]
