"""Constants of the IR that kernels emit, each made and written as text once: making them anew took
half of the time that Python needs for a kernel."""

from llvmlite import ir

_MADE: dict[tuple[ir.Type, str], ir.Constant] = {}


def constant(t: ir.Type, value: object) -> ir.Constant:
    """A constant of type `t`; of a vector, one value for all lanes or a list of them."""
    key = (t, repr(value))  # which tells -0.0 from 0.0
    if key not in _MADE:
        _MADE[key] = ir.Constant(t, value)
    return _MADE[key]
