"""Kernels of mixtures of experts: the shares of those chosen, and their results together.

Legend: m token rows, x experts, u experts per token, n columns.
"""

from ggraph.backends.cpu.codegen import words
from ggraph.backends.cpu.codegen.simd import F32, F32X8, I32, I64, Kernel, Val, kernel
from ggraph.backends.cpu.kernels.elementwise import in_eights, in_parts


def _chosen(k: Kernel, ids: Val, at: Val, limit: Val) -> Val:
    """An expert's number, or -1 where there is none of that number."""
    found = k.cast("sext", k.load(ids + at * 4, I32), I64)
    return k.select(words.within(k, found, limit), found, -1)


@kernel("x ids y m n u xs normalise scale:f")
def moe_shares(k: Kernel) -> None:
    """y[m, u] = x[m, ids] * scale, divided by their sum first where `normalise` is not 0."""
    x, ids, y, m, n, u, xs, normalise = k.words("x ids y m n u xs normalise")
    for r in k.share(m):
        total = k.var(k.const(0.0, F32))
        for j in k.loop(0, u):
            own = _chosen(k, ids, r * u + j, n)
            value = k.var(k.const(float("nan"), F32))
            with k.when(own >= 0):
                value.value = k.load(x + xs * r + own * 4, F32)
            k.store(y + (r * u + j) * 4, value.value)
            total.value = total.value + value.value
        whole = k.select(normalise.ne(0), total.value, 1.0)
        for j in k.loop(0, u):
            at = y + (r * u + j) * 4
            k.store(at, k.load(at, F32) / whole * k.arg("scale"))


@kernel("x shares y m n u")
def moe_mix(k: Kernel) -> None:
    """y[m, n] = the sum of x[m, u, n] * shares[m, u], expert after expert."""
    x, shares, y, n, u = k.words("x shares y n u")

    def piece(r: Val, start: Val, stop: Val) -> None:
        def eight(c: Val, left: Val | None) -> None:
            total = k.var(0.0, F32X8)
            for j in k.loop(0, u):
                share = k.splat(k.load(shares + (r * u + j) * 4, F32), 8)
                own = words.load_some(k, x + ((r * u + j) * n + c) * 4, left)
                total.value = total.value + own * share
            words.store_some(k, y + (r * n + c) * 4, total.value, left)

        in_eights(k, start, stop, eight)

    in_parts(k, piece)


@kernel("x rows ids y m n limit")
def add_id(k: Kernel) -> None:
    """y[m, n] = x[m, n] + rows[ids[m], n]; not a number for an id beyond `limit` rows."""
    x, rows, ids, y, n, limit = k.words("x rows ids y n limit")

    def piece(r: Val, start: Val, stop: Val) -> None:
        own = _chosen(k, ids, r, limit)

        def eight(c: Val, left: Val | None) -> None:
            at = (r * n + c) * 4
            more = words.load_some(k, rows + (k.maximum(own, 0) * n + c) * 4, left)
            more = k.select(own >= 0, more, float("nan"))
            words.store_some(k, y + at, words.load_some(k, x + at, left) + more, left)

        in_eights(k, start, stop, eight)

    in_parts(k, piece)
