"""The public face with each argument of the wrong kind: it works, or raises one error of ours."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ggraph import (
    DeviceSpec,
    GgraphError,
    Graph,
    InputError,
    Options,
    Session,
    dtypes,
    explain,
    input,
    make_plan,
    open_backend,
    ops,
    register_op,
    show,
    state,
    verify,
    weight,
)
from ggraph.formats.quantise import quantize
from ggraph.formats.quants import dequantize
from ggraph.ops.evaluate import evaluate
from ggraph.tensor import Arg, Example
from ggraph.testing import check_op, check_plan

X = input("x", (2, 3))
GRAPH = Graph.of({"y": X + 1})
ZEROS = {"x": np.zeros((2, 3), np.float32)}
ODD: dict[str, Any] = {
    "None": None, "string": "x", "int": 3, "negative": -1, "float": 0.5, "NaN": float("nan"),
    "list": [1], "tuple": (), "dict": {}, "dict of None": {"x": None}, "array": np.zeros((2, 3)),
    "objects": np.array([None, "x"], object), "complex": np.zeros((2, 3), np.complex64),
    "strings": np.array(["a"]), "tensor": X, "graph": GRAPH, "class": int, "bytes": b"x",
    "set": {1}, "path": Path("nowhere"), "list of None": [None], "jagged": [[1], [1, 2]],
}  # fmt: skip


def calls() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Public functions with arguments that work."""
    session = Session({"cpu": open_backend("cpu", threads=1)})
    plan = session.prepare("k", GRAPH)
    kept = ops.cpy(input("r", (2, 3)), state("held", (2, 3)))
    session.prepare("s", Graph.of({"z": ops.cont(kept)}))
    device, leaf = DeviceSpec("d", "sim", memory_bytes=1 << 20), {"shape": (2,), "dtype": "f32"}
    op = {"name": "odd", "meaning": abs, "examples": [Example((Arg((2, 2)),))]}
    rows = {"x": np.zeros((1, 2, 3), np.float32)}
    return {
        "input": (input, {"name": "q", **leaf}),
        "weight": (weight, {"name": "q", **leaf}),
        "state": (state, {"name": "q", **leaf}),
        "Graph.of": (Graph.of, {"outputs": {"y": X + 1}, "also": (), "name": "g"}),
        "explain": (explain, {"plan": plan, "tensor": "y"}),
        "show": (show, {"noun": GRAPH}),
        "make_plan": (make_plan, {"graph": GRAPH, "devices": [device], "options": Options()}),
        "verify": (verify, {"plan": plan.plan}),
        "open_backend": (open_backend, {"name": "cpu"}),
        "register_op": (register_op, op),
        "prepare": (session.prepare, {"key": "again", "build": GRAPH, "weights": None}),
        "run": (session.run, {"key": "k", "feeds": ZEROS}),
        "scan": (session.scan, {"key": "k", "feeds": rows}),
        "read_state": (session.read_state, {"name": "held"}),
        "write_state": (session.write_state, {"name": "held", "data": ZEROS["x"]}),
        "plan": (session.plan, {"key": "k"}),
        "inputs": (session.inputs, {"key": "k"}),
        "quantize": (quantize, {"values": np.zeros((2, 32)), "dtype": dtypes.Q8_0}),
        "dequantize": (dequantize, {"raw": np.zeros((2, 34), np.uint8), "dtype": dtypes.Q8_0}),
        "evaluate": (evaluate, {"graph": GRAPH, "feeds": ZEROS}),
        "check_op": (check_op, {"name": "relu", "devices": ("cpu",)}),
        "check_plan": (check_plan, {"graph": GRAPH, "feeds": ZEROS, "orders": 1}),
        "Session": (Session, {"backends": session.backends}),
    }


CALLS = calls()


@pytest.mark.parametrize("name", CALLS)
def test_wrong_arguments_of_the_face_are_one_clear_error(name: str) -> None:
    function, good = CALLS[name]
    refused = 0
    for parameter in good:
        for what, value in ODD.items():
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                try:
                    function(**{**good, parameter: value})
                except GgraphError as error:
                    assert str(error), (parameter, what)
                    refused += 1
                except Exception as error:
                    raise AssertionError(f"{name}({parameter}={what}): {error!r}") from error
    assert refused >= 8


def test_errors_name_the_function_and_the_value() -> None:
    with pytest.raises(InputError, match="explain: plan=3: expected a Plan or a VerifiedPlan"):
        explain(3, "y")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="make_plan: devices='cpu': expected several DeviceSpecs"):
        make_plan(GRAPH, "cpu")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"quantize: values=.*: expected an array of numbers"):
        quantize(np.zeros((2, 32), np.complex64), dtypes.Q8_0)
    assert quantize([[0.5] * 32], dtypes.Q8_0).shape == (1, 34)  # type: ignore[arg-type]
