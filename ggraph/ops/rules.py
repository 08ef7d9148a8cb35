"""What shape rules and references share: checks, typed attributes, optional sources.

Optional sources, one way for all ops: they come after the required ones in a fixed order, and for
each there is a boolean attribute `has_<source>`. A rule's signature says so: in
"q k v mask? length?" the attributes are `has_mask` and `has_length`; "x+" means one or more.
"""

from collections.abc import Callable, Sequence

import numpy as np

from ggraph.dtype import I32, I64, DType
from ggraph.errors import ShapeError
from ggraph.tensor import Array, Attr, Attrs, Cost, Meta, Rule, Tensor

WORDS = {Tensor: "a tensor (feed an array as an input, or keep it as a weight)"}
"""What an op's function expects, where the name of a type would not do."""


def rule(op: str, signature: str, body: Rule) -> Rule:
    """`body` behind a check of the number of sources; its ShapeErrors get the call in front."""
    names = signature.split()
    required = [n.rstrip("+") for n in names if not n.endswith("?")]
    optional = [(n.rstrip("?"), f"has_{n.rstrip('?')}") for n in names if n.endswith("?")]
    any_number = signature.endswith("+")

    def infer(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
        try:
            wanted = required + [n for n, has in optional if flag(attrs, has)]
            if len(sources) != len(wanted) and not (any_number and len(sources) > len(wanted)):
                raise ShapeError(f"expected the sources ({', '.join(wanted)}), got {len(sources)}")
            return body(sources, attrs)
        except ShapeError as e:
            shown = ", ".join(f"{s.label} {s.dtype}{list(s.shape)}" for s in sources)
            raise ShapeError(f"{op}({shown}): {e}") from None

    return infer


def expect(holds: bool, message: Callable[[], str] | str) -> None:
    """ShapeError with `message` unless `holds`; a callable message is only made when needed."""
    if not holds:
        raise ShapeError(message if isinstance(message, str) else message())


def _attr(attrs: Attrs, key: str) -> Attr:
    if key not in attrs:
        raise ShapeError(f"the attribute {key!r} is missing; got {', '.join(attrs) or 'none'}")
    return attrs[key]


def integer(attrs: Attrs, key: str) -> int:
    """The attribute `key`, which must be an integer."""
    value = _attr(attrs, key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ShapeError(f"{key}={value!r}: expected an integer")
    return value


def real(attrs: Attrs, key: str) -> float:
    """The attribute `key`, which must be a number."""
    value = _attr(attrs, key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ShapeError(f"{key}={value!r}: expected a number")
    return float(value)


def flag(attrs: Attrs, key: str) -> bool:
    """The attribute `key`, which must be a boolean."""
    value = _attr(attrs, key)
    if not isinstance(value, bool):
        raise ShapeError(f"{key}={value!r}: expected True or False")
    return value


def choice(attrs: Attrs, key: str, known: Sequence[str]) -> str:
    """The attribute `key`, which must be one of the `known` words."""
    value = _attr(attrs, key)
    if not isinstance(value, str) or value not in known:
        raise ShapeError(f"{key}={value!r}: expected one of {', '.join(known)}")
    return value


def integers(attrs: Attrs, key: str, count: int | None = None) -> tuple[int, ...]:
    """The attribute `key`, which must be a tuple of `count` (any number) integers."""
    value = _attr(attrs, key)
    if not isinstance(value, tuple | list) or not all(isinstance(v, int) for v in value):
        raise ShapeError(f"{key}={value!r}: expected a tuple of integers")
    if count is not None and len(value) != count:
        raise ShapeError(f"{key}={value!r}: expected {count} integers, one per axis")
    return tuple(int(v) for v in value)


def rank(t: Tensor, least: int, most: int | None = None) -> None:
    """ShapeError unless `t` has `least` to `most` axes (no upper bound by default)."""
    n = len(t.shape)
    if n < least or (most is not None and n > most):
        span = f"{least}" if most == least else f"{least} to {most}" if most else f"{least} or more"
        raise ShapeError(f"{t.label}: expected {span} axes, got {n}")


def real_valued(t: Tensor) -> None:
    """ShapeError unless `t` holds real numbers (block types do)."""
    expect(t.dtype.is_float, lambda: f"{t.label}: expected a float type, got {t.dtype}")


def plain_float(t: Tensor) -> None:
    """ShapeError unless `t` is of a plain float type; block types must be cast first."""
    ok = t.dtype.is_float and not t.dtype.is_block
    expect(ok, lambda: f"{t.label}: expected a plain float type, got {t.dtype} (cast it first)")


def index_type(t: Tensor, *known: DType) -> None:
    """ShapeError unless `t` holds indices: i32, or one of `known` where given."""
    types = known or (I32,)
    expect(
        t.dtype in types,
        lambda: f"{t.label}: expected {' or '.join(d.name for d in types)}, got {t.dtype}",
    )


ROW_INDEX = (I32, I64)


def same_shape(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    """The first source's shape and dtype; it must be of a plain float type."""
    plain_float(sources[0])
    return Meta(sources[0].shape, sources[0].dtype)


def same_row(sources: Sequence[Tensor], attrs: Attrs) -> Meta:
    """Like `same_shape`, for ops on rows: at least one axis."""
    rank(sources[0], 1)
    return same_shape(sources, attrs)


def owns_all(t: Tensor) -> None:
    """ShapeError unless `t` covers the whole value it looks at, in order.

    What an op overwrites must be a whole value: the result is the new content of all its bytes.
    """
    whole = t.offset == 0 and t.is_contiguous and t.size == t.root.size
    expect(whole, lambda: f"{t.label} is a window on {t.root.label}; only whole values can change")


def repeats_into(b: Tensor, a: Tensor) -> None:
    """ShapeError unless b broadcasts into a's shape, as in NumPy."""
    tail = a.shape[len(a.shape) - len(b.shape) :] if len(b.shape) <= len(a.shape) else None
    fits = tail is not None and all(m in (1, n) for n, m in zip(tail, b.shape, strict=True))
    expect(fits, lambda: f"cannot broadcast {list(b.shape)} of {b.label} into {list(a.shape)}")


def last_axis(shape: Sequence[int], attrs: Attrs) -> tuple[int, ...]:
    """The axes along which an op of rows reduces."""
    return (len(shape) - 1,)


def present(rest: Sequence[Array], *flags: bool) -> list[Array | None]:
    """The optional arrays in their fixed order, None for those that are absent."""
    given = iter(rest)
    return [next(given) if here else None for here in flags]


def identity(a: Array, *_: Array, **attrs: Attr) -> Array:
    """The first source itself: the meaning of every op that only moves bytes."""
    return a


def free(t: Tensor) -> Cost:
    """Nothing: the cost of a view."""
    return Cost(0, 0)


def moved(t: Tensor) -> Cost:
    """Bytes of the result, read and written once; no arithmetic."""
    return Cost(0, 2 * t.nbytes)


def f64(a: Array) -> Array:
    """Float64 copy, for sums that should not lose digits."""
    return a.astype(np.float64)


def like(values: Array, x: Array) -> Array:
    """Values in the type in which x is computed: float64 for f64, else float32."""
    found: Array = values.astype(x.dtype, copy=False)
    return found


def f32(a: Array) -> Array:
    """Float32 form, the result type of references."""
    values: Array = a.astype(np.float32, copy=False)
    return values
