"""Ops from outside whose kernel is CUDA source: see `ggraph.extend.register_op`.

A kernel takes a pointer for the result, one for each source, and then what it asks for by name.
"""

from typing import Any

from ggraph.backends.cuda.kernels import Parameter, Unit, declared
from ggraph.backends.cuda.layout import fits, four, sizes
from ggraph.backends.cuda.lowering import Lowering, Rule
from ggraph.backends.protocol import Launch
from ggraph.dtype import BF16, F16, F32, I8, I16, I32, I64, DType
from ggraph.errors import BackendError
from ggraph.tensor import OpSpec, Tensor, line

BEGIN = '#include "common.cuh"\n#line 1\n'  # the compiler's messages count the user's lines
TYPES: dict[str, tuple[DType, ...]] = {
    "float": (F32,), "u16": (F16, BF16), "i8": (I8,), "short": (I16,), "int": (I32,),
    "i64": (I64,),
}  # fmt: skip


def unit_of(spec: OpSpec) -> Unit:
    """What is compiled for the op."""
    return Unit(spec.name, own=BEGIN + spec.cuda)


def _accepts(t: Tensor) -> bool:
    """Whether nothing has gaps and the kernel's pointers are of the operands' types."""
    operands = (t, *t.sources)
    pointers, _ = _parameters(t)
    return all(
        s.is_contiguous and fits(s) and s.dtype in TYPES.get(p.kind, ())
        for p, s in zip(pointers, operands, strict=True)
    )


def _parameters(t: Tensor) -> tuple[list[Parameter], list[Parameter]]:
    """Pointers, and what comes behind them. BackendError for a kernel of another form."""
    assert t.spec is not None, line(t)
    asked = declared(unit_of(t.spec).text).get(t.op, ())  # register_op looks at comments, too
    count = 1 + len(t.sources)
    pointers, others = list(asked[:count]), list(asked[count:])
    known = {"count", *t.attrs, *(f"{p.name}_shape" for p in pointers)}
    right = all(p.format == "P" for p in pointers) and all(p.name in known for p in others)
    if len(pointers) < count or not right:
        raise BackendError(
            f"kernel {t.op}({', '.join(p.name for p in asked)}): expected pointers to the result "
            f"and {count - 1} sources, then of {', '.join(sorted(known))} what it needs"
        )
    return pointers, others


def _emit(low: Lowering, x: Launch) -> None:
    """One thread for each element of the result, in blocks of 256."""
    t = x.result.tensor
    assert t.spec is not None, line(t)
    pointers, others = _parameters(t)
    refs = dict(zip((p.name for p in pointers), (x.result, *x.sources), strict=True))
    known = {"count": t.size, **t.attrs}
    known |= {f"{name}_shape": sizes(ref.tensor) for name, ref in refs.items()}
    given: dict[str, Any] = {p.name: _value(known[p.name]) for p in others}
    given |= {name: low.at(ref) for name, ref in refs.items()}
    low.launch(unit_of(t.spec), t.op, (-(-t.size // 256), 1, 1), 256, given)


def _value(value: object) -> Any:
    """A shape or an attribute as the kernel's parameter takes it."""
    return four(value, 1) if isinstance(value, tuple) else value


RULE = Rule(_accepts, _emit)
