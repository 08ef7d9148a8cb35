"""Which ops run on CUDA, and how: one table of rules.

`accepts` is asked by planning, so what has no rule, or has shapes or types that its kernel does not
take, goes to another device by an ordinary split.
"""

from ggraph.backends.cuda import (
    attention,
    elementwise,
    matmul,
    mixtures,
    orders,
    own,
    recurrent,
    rowwise,
)
from ggraph.backends.cuda.lowering import Lowering, Rule
from ggraph.backends.protocol import Launch
from ggraph.device import Need
from ggraph.errors import BackendError
from ggraph.tensor import Tensor, line

RULES: dict[str, Rule] = {
    **elementwise.RULES,
    **matmul.RULES,
    **rowwise.RULES,
    **orders.RULES,
    **attention.RULES,
    **mixtures.RULES,
    **recurrent.RULES,
}


def _rule(t: Tensor) -> Rule | None:
    """How the op runs; None where nobody wrote a kernel."""
    return own.RULE if t.spec is not None and t.spec.cuda else RULES.get(t.op)


def accepts(t: Tensor) -> bool:
    """Whether there is a kernel for this op, with these shapes and types."""
    rule = _rule(t)
    return rule is not None and t.is_contiguous and (t.size == 0 or rule.accepts(t))


def needs(t: Tensor) -> tuple[Need, ...]:
    """What a launch of `t` touches beside its operands."""
    rule = _rule(t)
    return rule.needs(t) if rule is not None and t.size and accepts(t) else ()


def emit(low: Lowering, launch: Launch) -> None:
    """Append the steps of one launch. BackendError for what `accepts` refuses."""
    t = launch.result.tensor
    if not accepts(t):
        raise BackendError(f"no CUDA kernel for {line(t)}; plan with the device's own spec")
    if t.size and (rule := _rule(t)) is not None:
        rule.emit(low, launch)
