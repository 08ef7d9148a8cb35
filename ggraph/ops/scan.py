"""Selective state spaces, as a plain composition of other ops. Registers nothing.

Legend: T rows, H heads, D numbers of a head, N numbers of a state, G groups of heads that share b
and c (head h has those of h // (H / G)).
"""

from ggraph.errors import ShapeError
from ggraph.tensor import Tensor, apply


def ssm_scan(
    state: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor
) -> tuple[Tensor, Tensor]:
    """The rows of Mamba's recurrence and the state after them: f32 [T, H, D] and [H, D, N]. state
    [H, D, N], x [T, H, D], dt [T, H] to which softplus is applied here, a [H, N] or [H, 1]
    (negative), b and c [T, G, N], all f32.

    For each row: state * exp(softplus(dt) a) + softplus(dt) x b; the row is its product with c.
    Keep the state by `cpy(after, state)`; long texts go row by row through `session.scan`. ggml:
    GGML_OP_SSM_SCAN. Errors: ShapeError.
    """
    rows, heads, width = _sizes(state, x, dt, a, b, c)
    pace = apply("softplus", dt)  # [T, H]
    b, c = (_by_head(t, heads) for t in (b, c))  # [T, H, 1, N]
    rate, found = a.reshape(heads, 1, a.shape[1]), []
    for t in range(rows):
        step = pace[t].reshape(heads, 1, 1)
        taken = x[t].reshape(heads, width, 1) * step
        state = state * apply("exp", rate * step) + taken * b[t]  # [H, D, N]
        found.append((state * c[t]).sum(-1).reshape(1, heads, width))
    return apply("concat", *found, axis=0), state


def _sizes(
    state: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor
) -> tuple[int, int, int]:
    """T, H, D. ShapeError where the shapes name others, or none."""
    given = {"state": state, "x": x, "dt": dt, "a": a, "b": b, "c": c}
    told = ", ".join(f"{n} {t.dtype}{list(t.shape)}" for n, t in given.items())
    if len(state.shape) != 3 or len(x.shape) != 3 or len(b.shape) != 3:
        raise ShapeError(f"ssm_scan({told}): expected state, x and b of three axes")
    (heads, width, size), rows, groups = state.shape, x.shape[0], b.shape[1]
    fits = (
        x.shape == (rows, heads, width)
        and dt.shape == (rows, heads)
        and a.shape in ((heads, size), (heads, 1))
        and b.shape == c.shape == (rows, groups, size)
        and 0 not in (rows, heads, width, size, groups)
        and heads % groups == 0
    )
    if not fits or any(t.dtype.name != "f32" for t in given.values()):
        raise ShapeError(
            f"ssm_scan({told}): expected f32 x [T, H, D], dt [T, H], a [H, N] or [H, 1], b and c "
            "[T, G, N] beside state [H, D, N], none of them empty"
        )
    return rows, heads, width


def _by_head(t: Tensor, heads: int) -> Tensor:
    """[T, G, N] as [T, H, 1, N]."""
    rows, groups, size = t.shape
    apart = t.reshape(rows, groups, 1, size)
    each = apply("repeat", apart, shape=(rows, groups, heads // groups, size))
    return each.reshape(rows, heads, 1, size)
