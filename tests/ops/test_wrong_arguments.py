"""Every public op with each argument of the wrong kind: a tensor, or one error of ours."""

import inspect
import warnings
from typing import Any

import numpy as np
import pytest

from ggraph import GgraphError, Tensor, input, ops, state, weight
from ggraph.tensor import OPS

NO_TENSOR: dict[str, Any] = {
    "None": None, "str": "x", "list": [1.0, 2.0], "array": np.zeros((2, 2), np.float32),
    "float": 1.5, "int": 3, "True": True, "class": Tensor, "NumPy's": np.float32(1),
}  # fmt: skip
ODD_TENSORS = {
    "i32": input("o", (3, 5), "i32"), "i64": input("o", (3, 5), "i64"),
    "i8": input("o", (3, 5), "i8"), "blocks": weight("o", (3, 64), "q8_0"),
    "bf16": input("o", (3, 5), "bf16"), "scalar": input("o", ()), "vector": input("o", (7,)),
    "deep": input("o", (1, 2, 1, 2, 1)), "empty": input("o", (0, 5)),
    "turned": input("o", (5, 3)).permute(1, 0),
}  # fmt: skip
ODD_NUMBERS: dict[str, Any] = {
    "None": None, "str": "x", "float": 0.5, "nan": float("nan"), "inf": float("inf"), "neg": -1,
    "zero": 0, "big": 10**400, "list": [1, 2], "none": (), "negs": (-1, -1), "floats": (0.5, 0.5),
    "True": True, "array": np.array([1, 2]), "np.int64": np.int64(1), "np.float32": np.float32(1),
    "tensor": input("t", (2,)), "dict": {}, "complex": 1j, "bools": (True, True),
}  # fmt: skip
PLAUSIBLE = {"shape": (4, 4), "axes": (0, 1), "kind": "max", "axis": 0, "start": 0, "eps": 1e-5}


def good_call(name: str) -> dict[str, Any]:
    """Arguments by parameter, as the op's first example has them where it is an op."""
    spec, leaves, attrs = OPS.get(name), iter(()), {}
    if spec is not None and spec.examples:
        example = spec.examples[0]
        attrs = dict(example.attrs)
        leaves = iter(
            (state if i == spec.overwrites else input)("abcdefghijk"[i], a.shape, a.dtype)
            for i, a in enumerate(example.args)
        )
    found: dict[str, Any] = {}
    for p in inspect.signature(getattr(ops, name)).parameters.values():
        several = p.kind is p.VAR_POSITIONAL or "Sequence" in str(p.annotation)
        if "Tensor" in str(p.annotation):
            if several:
                found[p.name] = list(leaves) or [input("a", (4, 4))]
            elif p.default is p.empty:
                found[p.name] = next(leaves, input("z", (4, 4)))
        elif p.default is p.empty and p.kind is not p.VAR_KEYWORD:
            found[p.name] = attrs.get(p.name, PLAUSIBLE.get(p.name, 1))
    return found


def call(name: str, given: dict[str, Any]) -> object:
    """The op with these arguments; what is variadic or positional as such."""
    bound = inspect.signature(getattr(ops, name)).parameters
    flat, named = [], {}
    for n, p in bound.items():
        if n in given and p.kind is p.VAR_POSITIONAL:
            value = given[n]
            flat += value if isinstance(value, list | tuple) else [value]
        elif n in given and p.kind is p.KEYWORD_ONLY:
            named[n] = given[n]
        elif n in given:
            flat.append(given[n])
        elif p.default is not p.empty and p.kind is not p.KEYWORD_ONLY:
            flat.append(p.default)
    return getattr(ops, name)(*flat, **named)


def odd_values(p: inspect.Parameter) -> dict[str, Any]:
    if "Tensor" not in str(p.annotation):
        return {} if p.kind is p.VAR_KEYWORD else ODD_NUMBERS
    kinds = NO_TENSOR | ODD_TENSORS
    listed = {f"[{k}]": [v] for k, v in kinds.items()} if "Sequence" in str(p.annotation) else {}
    return kinds | listed


@pytest.mark.parametrize("name", sorted(ops.__all__))
def test_wrong_arguments_are_one_clear_error(name: str) -> None:
    good, tried = good_call(name), 0
    for p in inspect.signature(getattr(ops, name)).parameters.values():
        for what, value in odd_values(p).items():
            tried += 1
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                try:
                    found = call(name, {**good, p.name: value})
                except GgraphError as error:
                    assert str(error), (p.name, what)
                    continue
                except Exception as error:
                    raise AssertionError(f"{name}({p.name}={what}): {error!r}") from error
            tensors = found if isinstance(found, tuple) else (found,)
            assert all(isinstance(t, Tensor) for t in tensors), (p.name, what)
    assert tried > 15


def test_errors_say_which_argument_and_what_it_wants() -> None:
    x = input("x", (2, 3))
    for wrong, said in (
        (lambda: ops.exp([1.0]), r"exp: x=\[1.0\]: expected a tensor \(feed an array as an input"),
        (lambda: ops.scale(x, "2"), "scale: factor='2': expected a number"),
        (lambda: ops.conv_2d(x, x, 1), "conv_2d: stride=1: expected 2 whole numbers"),
        (lambda: ops.repeat(x, (2.0, 3)), r"repeat: shape=.*: expected several whole numbers"),
        (lambda: ops.norm(x, np.array([1e-5])), "norm: eps=.*: expected a number"),
    ):
        with pytest.raises(GgraphError, match=said):
            wrong()
    assert ops.repeat(x, [np.int64(4), 3]).shape == (4, 3)
    assert ops.norm(x, np.float32(0.5)).attrs["eps"] == 0.5
