"""One law of draws: reference, host sampler and GPU kernels give equal tokens."""

import math
from fractions import Fraction

import numpy as np
import pytest
from cuda_kit import bytes_of, need_driver, opened, run

from ggraph import Graph, Session, ops
from ggraph.backends import open_backend
from ggraph.decode.sampler import CANDIDATE, Sampler, SamplerConfig
from ggraph.dtype import F64
from ggraph.errors import InputError, ShapeError
from ggraph.ops.draw import MOST, NONE, greatest, powers, weights
from ggraph.ops.evaluate import evaluate
from ggraph.plan import Do
from ggraph.tensor import Array, Tensor, input

V = 300
CONFIGS = [
    SamplerConfig(seed=1),
    SamplerConfig(temp=1.5, top_k=V, top_p=1.0, min_p=0.0, seed=2),
    SamplerConfig(temp=0.3, top_k=7, top_p=0.6, min_p=0.0, seed=3),
    SamplerConfig(temp=2.0, top_k=100, top_p=1.0, min_p=0.2, seed=4),
    SamplerConfig(temp=1.0, top_k=5, top_p=0.0, min_p=1.0, seed=5),
    SamplerConfig(temp=1e-300, top_k=30, seed=6),
    SamplerConfig(temp=1.0, top_k=1, seed=7),
    SamplerConfig(temp=1.0, top_k=64, top_p=0.5, min_p=0.0, seed=8),
    SamplerConfig(temp=40.0, top_k=V, top_p=0.999999, min_p=0.0, seed=9),
]
NAMES = [f"temp {c.temp}, top_k {c.top_k}, top_p {c.top_p}" for c in CONFIGS]


def drawn(config: SamplerConfig, rows: int, size: int = V, always: bool = False) -> Tensor:
    return ops.draw(
        input("logits", (rows, size)), input("numbers", (rows,), F64), temp=config.temp,
        best=config.top_k, top_p=config.top_p, min_p=config.min_p, always=always, name="token",
    )  # fmt: skip


def hard(config: SamplerConfig, rows: int) -> dict[str, Array]:
    """Logits with ties, few finite ones, none, NaN and +inf among them; and numbers that fall upon
    an edge of the law or one step of float64 beside it, so that one wrong bit tips a token."""
    rng = np.random.default_rng(config.seed)
    logits = (rng.standard_normal((rows, V)) * rng.choice([0.01, 3, 40], (rows, 1))).astype("f4")
    logits[::3] = np.rint(logits[::3] * 4) / 4  # equal ones, at the border of top-k and of top-p
    logits[1::7][rng.random(logits[1::7].shape) < 0.97] = -np.inf
    logits[5] = -np.inf
    logits[6, 17] = np.inf
    logits[8, 200] = np.nan  # beside which there are `top_k` others, or not
    logits[9], logits[10, 7:] = np.nan, np.nan
    logits[11] = 0.0
    numbers = rng.random(rows)
    for row in range(12, rows, 2):
        ids = greatest(logits[row], config.top_k)
        law = weights(logits[row, ids].astype(float), config.temp, config.top_p, config.min_p)
        edge = rng.choice(np.cumsum(law)) / np.cumsum(law)[-1]
        numbers[row] = np.nextafter(edge, rng.choice([0, edge, 1]))
    return {"logits": logits, "numbers": np.minimum(numbers, 1 - 2.0**-53)}


class Numbered(Sampler):
    """A sampler with a number of ours."""

    number = 0.0

    def uniform(self) -> float:
        return self.number


def sampled(config: SamplerConfig, logits: Array, number: float, most: int) -> int:
    """What the host's sampler says, of all logits and of the greatest alone."""
    sampler = Numbered(config, logits.size)
    sampler.number = float(number)
    order = np.argsort(-np.where(np.isnan(logits), -np.inf, logits), kind="stable")[:most]
    best = np.empty(most, CANDIDATE)
    best["id"], best["logit"] = order, logits[order]
    try:
        token = sampler.sample(best)
    except InputError:
        return NONE
    if not np.isnan(logits).any():
        assert sampler.sample(logits) == token
    return token


@need_driver
@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
def test_one_token_everywhere(config: SamplerConfig) -> None:
    """Reference, sampler, both orders of the stand-in's threads: some 1,500 rows in all."""
    rows = 200 if config.top_k < V else 40  # of which the stand-in does six a second
    given = hard(config, rows)
    y = drawn(config, rows)
    found = evaluate(Graph.of({"token": y}), given)["token"]
    pairs = zip(given["logits"], given["numbers"], strict=True)
    assert found.tolist() == [sampled(config, *pair, config.top_k) for pair in pairs]
    assert (found == NONE).sum() >= 3 and found[11] >= 0
    stored = {s.name: bytes_of(s, given[s.name]) for s in y.sources}
    assert run(y, stored).tolist() == found.tolist()


@need_driver
def test_a_row_without_a_law_has_its_best_token_where_one_is_always_wanted() -> None:
    config, given = CONFIGS[0], hard(CONFIGS[0], 40)
    found = evaluate(Graph.of({"token": drawn(config, 40)}), given)["token"]
    y = drawn(config, 40, always=True)
    always = evaluate(Graph.of({"token": y}), given)["token"]
    none = found == NONE
    assert none.sum() >= 3 and np.array_equal(always[~none], found[~none])
    known = np.where(np.isnan(given["logits"]), -np.inf, given["logits"])
    assert np.array_equal(always[none], known.argmax(axis=1)[none])
    stored = {s.name: bytes_of(s, given[s.name]) for s in y.sources}
    assert run(y, stored).tolist() == always.tolist()


@need_driver
@pytest.mark.parametrize("size", [1, 33, 5000, 70_001])
def test_rows_of_any_length(size: int) -> None:
    """Long rows are searched by several blocks."""
    config = SamplerConfig(top_k=min(40, size), temp=1.3, top_p=0.99, min_p=0.0)
    rng = np.random.default_rng(size)
    logits = (rng.standard_normal((5, size)) * 3).astype(np.float32)
    y = drawn(config, 5, size)
    stored = {"logits": bytes_of(y.sources[0], logits)}
    for _ in range(4 if size < 10_000 else 1):
        numbers = rng.random(5)
        stored["numbers"] = bytes_of(y.sources[1], numbers)
        pairs = zip(logits, numbers, strict=True)
        assert run(y, stored).tolist() == [sampled(config, *p, config.top_k) for p in pairs]


@need_driver
def test_as_many_candidates_as_there_may_be() -> None:
    config = SamplerConfig(top_k=MOST, temp=9.0, top_p=0.9999, min_p=0.0)
    rng = np.random.default_rng(3)
    logits, numbers = rng.standard_normal((4, 4000)).astype(np.float32), rng.random(4)
    y = drawn(config, 4, 4000)
    stored = {"logits": bytes_of(y.sources[0], logits), "numbers": numbers.view(np.uint8)}
    pairs = zip(logits, numbers, strict=True)
    assert run(y, stored).tolist() == [sampled(config, *p, MOST) for p in pairs]


@pytest.mark.parametrize("config", CONFIGS[:4], ids=NAMES[:4])
def test_tokens_of_the_cpu_are_the_same(config: SamplerConfig) -> None:
    given, graph = hard(config, 100), Graph.of({"token": drawn(config, 100)})
    session = Session({"cpu": open_backend("cpu", threads=1)})
    session.prepare("k", graph)
    found = session.run("k", given)["token"].tolist()
    session.close()
    assert found == evaluate(graph, given)["token"].tolist()


@need_driver
def test_every_command_of_a_draw_is_the_gpus() -> None:
    graph = Graph.of({"token": drawn(CONFIGS[0], 40)})
    session = Session({"cuda0": opened()})
    plan = session.prepare("k", graph).plan
    work = [c for c in plan.schedule if c.do in (Do.LAUNCH, Do.COPY)]
    assert {c.actor.device for c in work} == {"cuda0"}
    given = hard(CONFIGS[0], 40)
    for _ in range(3):
        assert session.run("k", given)["token"].tolist() == evaluate(graph, given)["token"].tolist()
    session.close()


def test_powers_are_those_of_e() -> None:
    """Within 3 ulp of the exact value, and exact at 0."""
    rng = np.random.default_rng(0)
    x = -rng.random(2000) * rng.choice([1e-9, 1e-2, 1, 30, 700], 2000)
    for at, found in zip(x.tolist(), powers(x).tolist(), strict=True):
        assert abs(Fraction(found) / _e_to(Fraction(at)) - 1) < Fraction(3, 1 << 53), at
    edges = np.array([0.0, -0.0, -700.0, -700.0000001, -1e300, -np.inf])
    assert powers(edges).tolist()[:2] == [1.0, 1.0] and powers(edges)[2] > 9e-305
    assert not powers(edges)[3:].any()
    many = np.tile(x, 20)
    assert np.array_equal(powers(many), np.tile(powers(x), 20)), "by chunks"


def _e_to(x: Fraction) -> Fraction:
    """e^x to 100 bits: of a small part by its series, then squared."""
    part, squarings = x, 0
    while abs(part) > Fraction(1, 64):
        part, squarings = part / 2, squarings + 1
    total = term = Fraction(1)
    for i in range(1, 24):
        term = term * part / i
        total += term
    for _ in range(squarings):
        total = _cut(total * total)
    return total


def _cut(x: Fraction) -> Fraction:
    """160 bits of it."""
    shift = 160 - (x.numerator.bit_length() - x.denominator.bit_length())
    return Fraction(round(x * Fraction(2) ** shift)) / Fraction(2) ** shift


@pytest.mark.parametrize("size", [1, 7, 5000, 49_152])
@pytest.mark.parametrize("distinct", [1, 3, 1 << 20])
def test_the_greatest_are_those_of_a_full_sort(size: int, distinct: int) -> None:
    rng = np.random.default_rng(size)
    values = rng.integers(0, distinct, size).astype(np.float32)
    values[rng.random(size) < 0.1] = -np.inf
    for k in (1, 2, 40, size // 3, size - 1, size, 0):
        wanted = np.sort(np.argsort(-values, kind="stable")[: k or size])
        assert np.array_equal(greatest(values, k), wanted), k


def test_draws_follow_the_law() -> None:
    """Pearson's statistic of tokens that the op draws by a sampler's numbers."""
    config = SamplerConfig(temp=1.2, top_k=20, seed=4)
    sampler = Sampler(config, V)
    row = (np.random.default_rng(7).standard_normal(V) * 1.5).astype(np.float32)
    count = 20_000
    given = {"logits": np.tile(row, (count, 1)), "numbers": sampler.ahead(range(count))}
    tokens = evaluate(Graph.of({"token": drawn(config, count)}), given)["token"]
    law = sampler.probabilities(row)
    possible = law > 0
    counts = np.bincount(tokens, minlength=V)
    assert not counts[~possible].any()
    x = ((counts - law * count)[possible] ** 2 / (law * count)[possible]).sum()
    freedom = possible.sum() - 1
    assert freedom > 5 and x < freedom + 4.5 * math.sqrt(2 * freedom), (x, freedom)
    assert [sampler.sample(row) for _ in range(50)] == tokens[:50].tolist(), "no number was used up"


def test_a_number_of_one_or_more_still_gives_a_candidate() -> None:
    logits = np.zeros((1, V), np.float32)
    logits[0, [3, 9]] = 20.0
    graph = Graph.of({"token": drawn(CONFIGS[0], 1)})
    for u, token in ((0.0, 3), (0.49, 3), (0.51, 9), (1.0, 9)):
        given = {"logits": logits, "numbers": np.array([u])}
        assert evaluate(graph, given)["token"].tolist() == [token]


def test_what_cannot_be_drawn_from_is_refused() -> None:
    with pytest.raises(ShapeError, match="expected 2 axes, got 1"):
        ops.draw(input("logits", (5,)), input("numbers", (1,), F64))
    logits, numbers = input("logits", (2, 5)), input("numbers", (2,), F64)
    for options, said in (
        ({"best": 0}, "k=0"), ({"best": 6}, "k=6: expected 1 to 5"), ({"best": 2, "top_p": -1.0},
        "top_p"), ({"best": 2, "min_p": 1.5}, "min_p"),
    ):  # fmt: skip
        with pytest.raises(ShapeError, match=said):
            ops.draw(logits, numbers, **options)
    with pytest.raises(ShapeError, match="expected f64"):
        ops.draw(logits, input("numbers", (2,)), best=2)
    wide = input("logits", (2, 5000))
    with pytest.raises(ShapeError, match="k=1025: expected 1 to 1024"):
        ops.draw(wide, numbers, best=MOST + 1)
