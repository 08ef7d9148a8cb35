"""y[pair, n] = x[row of pair, k] . W[expert of pair, n, k]^T: products with chosen experts.

Legend: a pair is a token and one of its u experts; m pairs; t number of a tile of outputs.
"""

from ggraph.backends.cpu.matmul import Walk, floats, homes, register, write_row
from ggraph.backends.cpu.simd import I32, I64, Kernel, Val
from ggraph.backends.cpu.tiles import LAYOUTS

ARGS = "w x y ids n k m u xs xu ys es experts"
SORTED = 1024  # pairs that are put in order at once
FEW_PAIRS = 16  # hardly any of so few share an expert
MOST_ROWS = 6  # every count of rows is code of its own


def _known(k: Kernel, expert: Val) -> Val:
    """Whether an id is an expert's, 0 or 1."""
    return k.select(expert >= 0, k.select(expert < k.arg("experts"), k.const(1, I64), 0), 0)


def _by_expert(k: Kernel, first: Val, count: Val) -> Val:
    """Address of `count` pairs from `first` on, int32, those of one expert behind one another; few
    as they come. Those of no expert come last."""
    order, at, ids = k.scratch(SORTED * 4), k.var(0), k.arg("ids")

    def append(pair: Val) -> None:
        k.store(order + at.value * 4, k.cast("trunc", pair, I32))
        at.value = at.value + 1

    with k.if_else(count <= FEW_PAIRS) as (few, many):
        with few:
            for pair in k.loop(0, count):
                append(first + pair)
        with many:
            for expert in k.loop(0, k.arg("experts") + 1):
                for pair in k.loop(0, count):
                    own = k.cast("sext", k.load(ids + (first + pair) * 4, I32), I64)
                    own = k.select(_known(k, own).ne(0), own, k.arg("experts"))
                    with k.when(own.eq(expert)):
                        append(first + pair)
    return order


def _alike(k: Kernel, order: Val, at: Val, count: Val) -> tuple[Val, Val]:
    """The expert of the pair at `at`, and how many from there on have the same."""
    ids, found = k.arg("ids"), k.var(1)

    def expert(i: Val) -> Val:
        pair = k.cast("sext", k.load(order + i * 4, I32), I64)
        return k.cast("sext", k.load(ids + pair * 4, I32), I64)

    def more() -> Val:
        following = k.minimum(at + found.value, count - 1)
        same = k.select(expert(following).eq(own), k.const(1, I64), 0)
        return k.select(at + found.value < count, same, 0).ne(0)

    own = expert(at)
    with k.while_(more):
        found.value = found.value + 1
    return own, found.value


def _walk_experts(k: Kernel, walk: Walk) -> None:
    """The same for m pairs of a token and one of its u experts, each with that expert's tiles, one
    behind the other as memory likes it; a tile meets all rows that want it, as many at a time as a
    pass takes.

    An id that is no expert's gives a row that is not a number.
    """
    n, m = k.words("n m")
    done, at = k.var(0), k.var(0)
    with k.while_(lambda: done.value < m):
        count = k.minimum(m - done.value, SORTED)
        order, at.value = _by_expert(k, done.value, count), 0
        with k.while_(lambda: at.value < count):
            expert, alike = _alike(k, order, at.value, count)
            for t in k.share((n + (walk.tile - 1)) // walk.tile):
                _expert_rows(k, walk, t, expert, order + at.value * 4, alike)
            at.value = at.value + alike
        done.value = done.value + count


def _expert_rows(k: Kernel, walk: Walk, t: Val, expert: Val, order: Val, alike: Val) -> None:
    """All pairs of one expert with its tile t."""
    first = k.var(0)
    with k.while_(lambda: first.value < alike):
        rows = k.minimum(alike - first.value, walk.rows)
        for count in range(1, walk.rows + 1):
            with k.when(rows.eq(count)):
                _expert_pass(k, walk, t, expert, order + first.value * 4, count)
        first.value = first.value + rows


def _expert_pass(k: Kernel, walk: Walk, t: Val, expert: Val, order: Val, count: int) -> None:
    """Some pairs of one expert with its tile t."""
    w, x, y, n, u, xs, xu, ys, es = k.words("w x y n u xs xu ys es")
    pairs = [k.cast("sext", k.load(order + 4 * i, I32), I64) for i in range(count)]
    with k.if_else(_known(k, expert).ne(0)) as (some, none):
        with some:
            weights = w + es * expert + t * walk.tile_bytes
            walk.run(weights, [x + xs * (pair // u) + xu * (pair % u) for pair in pairs])
        with none:
            for at in homes(k, walk.home, walk.tile, count):
                k.store(at, k.const(float("nan"), floats(k)))
    column, left = t * (walk.tile * 4), n - t * walk.tile
    for i, pair in enumerate(pairs):
        home = walk.home + i * (walk.tile * 4)
        write_row(k, walk.tile, home, y + ys * pair + column, k.const(0, I64), left)


MATMUL_ID = {
    a.name: register("matmul_id_" + a.name, ARGS, a, _walk_experts, MOST_ROWS)
    for a in LAYOUTS.values()
}
