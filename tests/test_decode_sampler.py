"""The sampler against loop-written meanings, exact laws and its own replay."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggraph.decode.sampler import CANDIDATE, Sampler, SamplerConfig
from ggraph.errors import InputError

OFF = {"temp": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""Every stage but the draw switched off."""


def loop_law(logits, config, window):
    """All stages written as loops over Python floats: the meaning that the sampler must have."""
    l = [float(x) for x in logits]  # noqa: E741
    if config.repeat_last_n:
        last = window if config.repeat_last_n < 0 else window[-config.repeat_last_n :]
        for token, count in Counter(last).items():
            x = l[token]
            x = x * config.repeat_penalty if x <= 0 else x / config.repeat_penalty
            l[token] = x - count * config.frequency_penalty - config.presence_penalty
    order = sorted(range(len(l)), key=lambda i: (-l[i], i))
    if config.temp <= 0:
        return [float(i == order[0]) for i in range(len(l))]
    best = l[order[0]]
    if config.top_k > 0:
        order = order[: config.top_k]
    if config.top_p < 1:
        weights = [math.exp(l[i] - best) for i in order]
        kept, total = 0, 0.0
        while kept < len(order):
            total += weights[kept] / sum(weights)
            kept += 1
            if total >= config.top_p:
                break
        order = order[:kept]
    if config.min_p > 0:
        order = [i for i in order if l[i] >= best + math.log(config.min_p)]
    weights = {i: math.exp((l[i] - best) / config.temp) for i in order}
    return [weights.get(i, 0.0) / sum(weights.values()) for i in range(len(l))]


def chi_square(counts, law):
    """Pearson's statistic and its degrees of freedom over the possible outcomes."""
    expected = np.asarray(law) * sum(counts)
    possible = expected > 0
    assert not np.asarray(counts)[~possible].any()
    x = ((np.asarray(counts) - expected)[possible] ** 2 / expected[possible]).sum()
    return x, possible.sum() - 1


configs = st.builds(
    SamplerConfig,
    temp=st.sampled_from([-1.0, 0.0, 0.3, 0.8, 2.0]),
    top_k=st.sampled_from([-1, 0, 1, 3, 40, 1000]),
    top_p=st.sampled_from([0.0, 0.31, 0.957, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    repeat_penalty=st.sampled_from([0.5, 1.0, 2.0]),  # powers of two: exact in f32
    repeat_last_n=st.sampled_from([-1, 0, 1, 3]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -0.5]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 2**64),
)


@given(configs, st.integers(1, 60), st.integers(0, 2**32), st.lists(st.integers(0, 59), max_size=8))
def test_law_equals_the_loop_written_one(config, size, seed, window):
    # Quarters: exact sums, many ties.
    logits = (np.random.default_rng(seed).integers(-16, 16, size) / 4).astype(np.float32)
    window = [t % size for t in window]
    sampler = Sampler(config, size)
    sampler.accept_all(window)
    law = sampler.probabilities(logits)
    assert law.shape == (size,) and law.dtype == np.float64
    assert law.sum() == pytest.approx(1.0)
    np.testing.assert_allclose(law, loop_law(logits, config, window), atol=1e-9)


@given(st.integers(0, 2**32), st.integers(1, 40), st.sampled_from([0.5, 1.0, 1.4]))
def test_penalties_equal_the_loop_written_ones(seed, size, penalty):
    rng = np.random.default_rng(seed)
    config = SamplerConfig(
        **OFF, repeat_penalty=penalty, frequency_penalty=0.3, presence_penalty=0.2, repeat_last_n=5
    )
    logits = rng.normal(0, 3, size).astype(np.float32)
    window = rng.integers(0, size, 9).tolist()
    sampler = Sampler(config, size)
    sampler.accept_all(window)
    before = logits.copy()
    expected = loop_law(logits, config, window)
    np.testing.assert_allclose(sampler.probabilities(logits), expected, atol=1e-5)
    np.testing.assert_array_equal(logits, before)


@given(configs, st.integers(1, 60), st.integers(0, 2**32))
def test_sample_is_the_inverse_of_the_summed_law(config, size, seed):
    logits = np.random.default_rng(seed).normal(0, 2, size).astype(np.float32)
    sampler = Sampler(config, size)
    u = sampler.clone().uniform()
    total, expected = 0.0, None
    for token, p in enumerate(sampler.probabilities(logits)):
        total += p
        if expected is None and total > u:
            expected = token
    assert sampler.sample(logits) == expected


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temp": 1.5, "top_k": 0, "top_p": 0.7},
        {"top_k": 5, "top_p": 1.0, "min_p": 0.0},
        {**OFF, "min_p": 0.2},
        {**OFF, "repeat_penalty": 1.5, "frequency_penalty": 0.2},
    ],
)
def test_draws_follow_the_law(options):
    logits = np.random.default_rng(7).normal(0, 1.5, 30).astype(np.float32)
    sampler = Sampler(SamplerConfig(seed=11, **options), 30)
    sampler.accept_all([1, 2, 2, 3])
    counts = np.bincount([sampler.sample(logits) for _ in range(20_000)], minlength=30)
    x, freedom = chi_square(counts, sampler.probabilities(logits))
    assert x < freedom + 4.5 * math.sqrt(2 * max(freedom, 1)), (x, freedom, counts)


@given(configs)
def test_every_configuration_draws_one_number_per_token(config):
    sampler, other = Sampler(config, 8), Sampler(SamplerConfig(seed=config.seed), 8)
    sampler.sample(np.arange(8, dtype=np.float32))
    other.uniform()
    assert sampler.uniform() == other.uniform()


@given(configs, st.integers(0, 2**32))
def test_a_clone_goes_on_alike_and_alone(config, seed):
    rng = np.random.default_rng(seed)
    rows = rng.normal(0, 2, (12, 20)).astype(np.float32)
    sampler = Sampler(config, 20)

    def run(s, rows):
        out = []
        for row in rows:
            out.append(s.sample(row))
            s.accept(out[-1])
        return out

    run(sampler, rows[:4])
    copy = sampler.clone()
    first = run(copy, rows[4:])
    assert run(copy, rows[4:]) is not None  # drives the copy further away from the original
    assert run(sampler, rows[4:]) == first


def test_equal_seeds_give_equal_tokens_and_no_seed_gives_other_streams():
    logits = np.zeros(1000, np.float32)
    config = SamplerConfig(**OFF, seed=5)
    a, b = Sampler(config, 1000), Sampler(config, 1000)
    assert [a.sample(logits) for _ in range(9)] == [b.sample(logits) for _ in range(9)]
    c, d = Sampler(SamplerConfig(**OFF), 1000), Sampler(SamplerConfig(**OFF), 1000)
    assert [c.uniform() for _ in range(4)] != [d.uniform() for _ in range(4)]


def test_greedy_takes_the_lowest_id_of_equal_ones():
    sampler = Sampler(SamplerConfig(temp=0), 5)
    assert sampler.sample(np.array([1, 3, 3, 0, 3], np.float32)) == 1
    sampler = Sampler(SamplerConfig(temp=0, repeat_penalty=2.0), 5)
    sampler.accept(1)
    assert sampler.sample(np.array([1, 3, 3, 0, 3], np.float32)) == 2


def test_edges():
    inf = math.inf
    one = np.array([-inf, -inf, 2.0, -inf], np.float32)
    for options in ({}, OFF, {"top_k": 1}, {"top_k": 99}, {"top_p": 0.0}, {"temp": 1e-6}):
        sampler = Sampler(SamplerConfig(**{**options, "seed": 3}), 4)
        assert [sampler.sample(one) for _ in range(20)] == [2] * 20
    ties = np.zeros(6, np.float32)
    law = Sampler(SamplerConfig(**{**OFF, "top_k": 2}), 6).probabilities(ties)
    assert law.tolist() == [0.5, 0.5, 0, 0, 0, 0]
    assert Sampler(SamplerConfig(seed=0), 1).sample(np.zeros(1, np.float32)) == 0


def test_top_p_beyond_its_sorted_head_equals_the_full_sort():
    logits = np.random.default_rng(3).normal(0, 0.5, 5000).astype(np.float32)
    config = SamplerConfig(**{**OFF, "top_p": 0.8})
    law = Sampler(config, 5000).probabilities(logits)
    order = np.argsort(-logits, kind="stable")
    weights = np.exp(logits.astype(np.float64))
    total = np.cumsum((weights / weights.sum())[order])
    assert set(np.flatnonzero(law)) == set(order[: int((total < 0.8).sum()) + 1])


@pytest.mark.parametrize("temp", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_law_are_refused(bad, temp):
    logits = np.full(8, bad, np.float32)
    if bad != -math.inf:
        logits[:5] = 1.0
    sampler = Sampler(SamplerConfig(temp=temp, seed=0), 8)
    with pytest.raises(InputError, match="logits: greatest value is"):
        sampler.sample(logits)
    with pytest.raises(InputError, match="logits"):
        sampler.probabilities(logits)


def test_wrong_shapes_and_tokens_are_refused():
    sampler = Sampler(SamplerConfig(seed=0), 8)
    with pytest.raises(InputError, match=r"expected shape \(8,\), got \(7,\)"):
        sampler.sample(np.zeros(7, np.float32))
    for token in (-1, 8):
        with pytest.raises(InputError, match=f"token {token}"):
            sampler.accept(token)
    with pytest.raises(InputError, match="vocabulary of 0"):
        Sampler(SamplerConfig(), 0)


@pytest.mark.parametrize(
    "options",
    [
        {"temp": math.nan},
        {"temp": "hot"},
        {"top_k": 1.5},
        {"top_p": -0.1},
        {"min_p": 1.1},
        {"min_p": math.nan},
        {"repeat_penalty": 0.0},
        {"repeat_last_n": -2},
        {"frequency_penalty": math.inf},
        {"seed": -1},
        {"seed": True},
    ],
)
def test_config_names_the_value_that_is_wrong(options):
    (name,) = options
    with pytest.raises(InputError, match=name):
        SamplerConfig(**options)


def greatest(logits, count):
    """What a device brings back of a row: the best `count`, of equal ones those of lower ids."""
    order = np.argsort(-logits, kind="stable")[:count]
    found = np.empty(count, CANDIDATE)
    found["id"], found["logit"] = order, logits[order]
    return found


@pytest.mark.parametrize("distinct", [4, 60, 1 << 20])
@pytest.mark.parametrize("changes", [{}, {"top_p": 1.0, "min_p": 0.0}, {"top_k": 1}, {"temp": 0.0}])
def test_the_greatest_logits_alone_decide(distinct, changes):
    """Tokens and laws are those of all logits, bit for bit, ties at the border included."""
    config = SamplerConfig(**{"seed": 3, "top_k": 20, "temp": 1.3, **changes})
    rng = np.random.default_rng(5)
    whole, part = Sampler(config, 500), Sampler(config, 500)
    for _ in range(200):
        logits = (rng.integers(0, distinct, 500) / distinct * 9 - 4).astype(np.float32)
        logits[rng.random(500) < rng.choice([0.1, 0.97])] = -np.inf  # sometimes fewer than top_k
        logits[rng.integers(500)] = 3.0
        known = greatest(logits, 20)
        rng.shuffle(known)
        assert part.probabilities(known).tobytes() == whole.probabilities(logits).tobytes()
        assert part.sample(known) == whole.sample(logits)


def test_too_few_logits_are_refused():
    for config in (SamplerConfig(), SamplerConfig(top_k=0), SamplerConfig(repeat_penalty=1.1)):
        with pytest.raises(InputError, match="the greatest 30 alone do not decide"):
            Sampler(config, 500).sample(greatest(np.arange(500, dtype=np.float32), 30))
    none = greatest(np.full(500, -np.inf, np.float32), 40)
    with pytest.raises(InputError, match="greatest value is -inf"):
        Sampler(SamplerConfig(), 500).sample(none)
