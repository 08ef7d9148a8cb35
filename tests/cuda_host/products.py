"""The stand-in's products: NumPy in the place of cuBLASLt, and what that asks of its callers."""

import ctypes
from itertools import combinations, pairwise

import numpy as np

from ggraph.backends.cuda.driver import ALIGNED, Product
from ggraph.tensor import Array

ALGORITHMS = 2  # all of k at once, and by halves


class Fault(AssertionError):
    """A kernel, or a product, did what a GPU would refuse or leave undefined."""


def compute(p: Product, rank: int) -> None:
    """The product by one of the algorithms; the whole work space is overwritten."""
    w, x = _matrix(p.w, p.n, p.k, p.kind), _matrix(p.x, p.m, p.k, p.kind)
    ctypes.memset(p.space, 0xA5, p.space_bytes)
    cuts = (0, p.k // 2, p.k) if rank else (0, p.k)
    sums = sum(x[:, a:b] @ w[:, a:b].T for a, b in pairwise(cuts))
    _rows(p.y, p)[:] = sums + (_rows(p.rest, p) if p.rest else 0)


def checked(p: Product) -> dict[str, tuple[int, int]]:
    """The bytes of a product's operands, first and end. Fault for what cuBLASLt does not allow:
    rows of y that overlap, places where their type cannot begin, a work space that begins amid
    ALIGNED bytes, written bytes shared with anything but a whole y to which something is added."""
    width = 4 if p.kind == "f32" else 2
    span = 4 * ((p.m - 1) * p.row + p.n)
    sizes = {"w": width * p.n * p.k, "x": width * p.m * p.k, "y": span, "rest": span,
             "space": p.space_bytes}  # fmt: skip
    found = {what: (a, a + size) for what, size in sizes.items() if (a := getattr(p, what))}
    starts = {"w": width, "x": width, "y": 4, "rest": 4, "space": ALIGNED}
    if min(p.n, p.m, p.k) < 1 or p.row < p.n or not {"w", "x", "y"} <= found.keys():
        raise Fault(f"no product of the library's: {p}")
    if wrong := [what for what, (first, _) in found.items() if first % starts[what]]:
        raise Fault(f"{', '.join(wrong)} of a product not aligned: {p}")
    apart = {what: at for what, at in found.items() if what != "rest" or p.rest != p.y}
    for one, other in combinations(apart, 2):
        (a, b), (c, d) = apart[one], apart[other]
        if a < d and c < b and {"y", "space"} & {one, other}:
            raise Fault(f"{one} and {other} of a product overlap: {p}")
    return found


def _rows(address: int, p: Product) -> Array:
    """float32 [m, n] as y lies."""
    count = (p.m - 1) * p.row + p.n
    flat = np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))
    return np.lib.stride_tricks.as_strided(flat, (p.m, p.n), (p.row * 4, 4))


def _matrix(address: int, rows: int, k: int, kind: str) -> Array:
    """float32 [rows, k] of the values at an address."""
    size = rows * k * (4 if kind == "f32" else 2)
    raw: Array = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
    if kind == "f32":
        return raw.view(np.float32).reshape(rows, k)
    if kind == "f16":
        return raw.view(np.float16).astype(np.float32).reshape(rows, k)
    return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(rows, k)
