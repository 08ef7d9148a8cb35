"""Kernels of short convolutions that remember a text's last inputs.

Legend: as in `courses.py`; n channels, P remembered inputs, K = P + 1.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

from ggraph.backends.cpu.codegen import words
from ggraph.backends.cpu.codegen.simd import F32, I64, Kernel, Val, Var, kernel, vec
from ggraph.backends.cpu.kernels.courses import each_changed, each_replayed, entry, follow, walk

MAX_KERNEL = 8  # inputs that a convolution sees
VECTORS = 4  # of channels at once: rows lie too far apart for what is left of a line to stay
TURN = 16  # rows for all channels: each is pages apart, and pages that are known at once are few


def _push(k: Kernel, window: list[Var], value: Val) -> None:
    """The oldest input leaves, the newest comes."""
    for older, newer in pairwise(window):
        older.value = newer.value
    window[-1].value = value


def _load(k: Kernel, at: Val, left: Val | None) -> Val:
    """Channels that are done together, as many as are `left`."""
    return words.load_some(k, at, left, VECTORS * k.isa.lanes)


def _window(k: Kernel, count: int) -> list[Var]:
    """Zeros for the channels of so many inputs."""
    return [k.var(0.0, vec(F32, VECTORS * k.isa.lanes)) for _ in range(count)]


def _channels(k: Kernel, body: Callable[[Val, Val | None], None]) -> None:
    """`body(first channel, how many are left)` for this thread's part of them."""
    n, step = k.arg("n"), VECTORS * k.isa.lanes
    for unit in k.share((n + (step - 1)) // step):
        c = unit * step
        with k.if_else(c + step <= n) as (whole, part):
            with whole:
                body(c, None)
            with part:
                body(c, n - c)


def _remembered(k: Kernel, window: list[Var], slot: Val, c: Val, left: Val | None) -> None:
    """The inputs before the step's first row: the state's (zeros where a text begins), then those
    that were replayed. The newest stands last."""
    state, log, n = k.words("state log n")
    with k.if_else(entry(k, k.arg("past"), slot).ne(0)) as (known, new):
        with known:
            for i, held in enumerate(window):
                at = (slot * len(window) + i) * n + c
                held.value = _load(k, state + at * 4, left)
        with new:
            for held in window:
                held.value = 0.0
    each_replayed(k, slot, lambda row: _push(k, window, _load(k, log + (row * n + c) * 4, left)))


def _conv_turn(k: Kernel, taps: int, first: Val, c: Val, left: Val | None) -> None:
    """Some channels of a turn of rows, from row `first` on."""
    x, xs, w, y, m, n = k.words("x xs w y m n")
    window = _window(k, taps - 1)
    weights = [_load(k, w + (n * j + c) * 4, left) for j in range(taps)]
    last = k.var(m)

    def row(t: Val) -> None:
        _push(k, window, _load(k, x + t * xs + c * 4, left))

    def base(slot: Val) -> None:
        _remembered(k, window, slot, c, left)

    for t in k.loop(first, k.minimum(first + TURN, m)):
        follow(k, t, last, taps - 1, base, row)
        own = _load(k, x + t * xs + c * 4, left)
        total = weights[-1] * own
        for held, weight in zip(window, weights, strict=False):
            total = words.fma(k, held.value, weight, total)
        _push(k, window, own)
        words.store_some(k, y + (t * n + c) * 4, total, left)


def _conv(k: Kernel, taps: int) -> None:
    """y[t] = the last `taps` inputs of row t's course by w, oldest first."""
    for first in k.loop(k.const(0, I64), k.arg("m"), TURN):
        _channels(k, partial(_conv_turn, k, taps, first))


def _conv_next(k: Kernel, taps: int) -> None:
    """y = the last taps - 1 inputs of every text: the state's own bytes."""
    x, xs, y, n = k.words("x xs y n")

    def channels(c: Val, left: Val | None) -> None:
        window = _window(k, taps - 1)

        def after(slot: Val, last: Val) -> None:
            def row(t: Val) -> None:
                _push(k, window, _load(k, x + t * xs + c * 4, left))

            walk(k, last, taps - 1, lambda _: _remembered(k, window, slot, c, left), row)
            for i, held in enumerate(window):
                at = y + ((slot * len(window) + i) * n + c) * 4
                words.store_some(k, at, held.value, left)

        each_changed(k, after)

    _channels(k, channels)


def _by_taps(k: Kernel, body: Callable[[Kernel, int], None]) -> None:
    for taps in range(2, MAX_KERNEL + 1):
        with k.when(k.arg("taps").eq(taps)):
            body(k, taps)


@kernel("state log x xs w y parents replay past slots m n taps r limit")
def ssm_conv(k: Kernel) -> None:
    """Rows by a short convolution; w is [K, n]."""
    _by_taps(k, _conv)


@kernel("state log x xs y parents replay past certain slots m n taps r limit")
def ssm_conv_next(k: Kernel) -> None:
    """What the convolution remembers of each text."""
    _by_taps(k, _conv_next)
