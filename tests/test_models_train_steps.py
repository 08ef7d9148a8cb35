"""Lessons that leave positions or tokens out are those of everything, where they are kept."""

import copy
import importlib
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="training needs PyTorch (extra [train])")
nets: Any = importlib.import_module("models.train.net")
lessons: Any = importlib.import_module("models.train.steps")

VOCABULARY, DRAFT, WIDTH, STEPS = 96, 64, 16, 3
LENGTHS = (11, 5, 14)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "feedback_norm"])
def net(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(3)
    return nets.DraftNet(
        nets.NetConfig(
            width=WIDTH, taps=2, heads=4, kv_heads=2, head_dim=8, intermediate=24,
            vocabulary=DRAFT, rope_base=100.0, eps=1e-5, feedback_norm=request.param,
        )
    )  # fmt: skip


@pytest.fixture(scope="module")
def words() -> Any:
    random = torch.Generator().manual_seed(1)
    table = torch.randn(VOCABULARY, WIDTH, generator=random)
    ids = torch.randperm(VOCABULARY, generator=random)[:DRAFT].sort().values
    return lessons.Words.of(table, table.roll(1, 0), ids)


@pytest.fixture(scope="module")
def batch() -> Any:
    random = torch.Generator().manual_seed(2)
    n, b = max(LENGTHS), len(LENGTHS)
    features = torch.randn(b, n, 3 * WIDTH, generator=random)
    tokens = torch.randint(VOCABULARY, (b, n + STEPS), generator=random)
    wanted = torch.ones(b, n, dtype=torch.bool)
    wanted[2, :4] = False
    return lessons.Batch(features, tokens, wanted, torch.tensor(LENGTHS))


def test_a_step_at_some_positions_is_that_step_of_all(net: Any, words: Any, batch: Any) -> None:
    n = max(LENGTHS)
    embedded = words.embedding[batch.tokens]
    outs = net(batch.features[..., :-WIDTH], embedded[:, : n + STEPS - 1], STEPS)
    out, past = net.first(batch.features[..., :-WIDTH], embedded[:, :n])
    past.rows, past.columns = batch.wanted.nonzero(as_tuple=True)
    out = out[past.rows, past.columns]
    for i in range(1, STEPS):
        which = torch.arange(i, len(past.rows), 2)
        past.keep(which)
        out = net.further(out[which], embedded[past.rows, past.columns + i], past)
        assert len(out) > 3
        assert torch.allclose(out, outs[i][past.rows, past.columns], atol=1e-5)


def test_no_position_may_be_left(net: Any, words: Any, batch: Any) -> None:
    short = lessons.Batch(
        batch.features[:, :2], batch.tokens, batch.wanted[:, :2], torch.tensor([2, 2, 2])
    )
    results = lessons.run_steps(net, short, words, STEPS)
    assert [r.count for r in results[1:]] == [0, 0]
    assert [float(r.loss.detach()) for r in results[1:]] == [0.0, 0.0]


@pytest.mark.parametrize("loss", ["ce", "kl", "hard"])
def test_all_candidates_are_the_whole(net: Any, words: Any, batch: Any, loss: str) -> None:
    whole = lessons.run_steps(net, batch, words, STEPS, lessons.Lesson(loss))
    plenty = lessons.Lesson(loss, candidates=100 * DRAFT)
    for a, b in zip(whole, lessons.run_steps(net, batch, words, STEPS, plenty), strict=True):
        assert a.count == b.count and torch.equal(a.right, b.right)
        assert torch.allclose(a.loss, b.loss, rtol=1e-4)


def test_few_candidates_hold_the_likely_tokens_and_the_texts(
    net: Any, words: Any, batch: Any
) -> None:
    """A guess that is right among all tokens is right among fewer; losses are no greater."""
    whole = lessons.run_steps(net, batch, words, STEPS)
    few = lessons.run_steps(net, batch, words, STEPS, lessons.Lesson(candidates=1))
    for a, b in zip(whole, few, strict=True):
        assert a.count == b.count
        assert bool((b.right | ~a.right).all())
    hard = [lessons.Lesson("hard", candidates=c, seed=4) for c in (0, 1)]
    a, b = (lessons.run_steps(net, batch, words, 1, x)[0].loss.detach() for x in hard)
    assert 0 < float(b) < float(a)


def test_chains_go_on_only_where_guesses_were_near(net: Any, words: Any, batch: Any) -> None:
    whole = lessons.run_steps(net, batch, words, STEPS)
    for alive in (1, 20):
        found = lessons.run_steps(net, batch, words, STEPS, lessons.Lesson(alive=alive))
        assert torch.equal(found[0].known, whole[0].known)
        for i in range(1, STEPS):
            assert bool((found[i].known <= found[i - 1].known).all())
            assert torch.equal(found[i].right, whole[i].right & found[i].known)
        if alive == 1:  # exactly the chains that were right so far
            assert torch.equal(found[1].known, whole[1].known & whole[0].right)
        else:
            assert int(found[1].known.sum()) > int((whole[1].known & whole[0].right).sum())


@pytest.mark.parametrize("rows", [1, 63, 64, 65])
def test_products_in_bfloat16_are_those_of_rounded_factors(rows: int) -> None:
    x = torch.randn(2, rows, WIDTH, generator=torch.Generator().manual_seed(rows)).requires_grad_()
    net = nets.Matrix(WIDTH, 70)
    found = []
    for bf16 in (False, True):
        net.bf16 = bf16
        net.zero_grad()
        net(x).square().sum().backward()
        found.append((net(x).detach(), net.weight.grad, x.grad))
        x.grad = None
    for exact, low in zip(*found, strict=True):
        assert low.dtype == torch.float32 and low.shape == exact.shape
        assert 0 < float((low - exact).abs().max()) < 0.02 * float(exact.abs().max())


def test_lessons_in_bfloat16_are_nearly_the_exact_ones(net: Any, words: Any, batch: Any) -> None:
    low = copy.deepcopy(net)
    low.use_bf16()
    lesson = lessons.Lesson(candidates=8)
    results = [lessons.run_steps(n, batch, words, STEPS, lesson) for n in (net, low)]
    for a, b in zip(*results, strict=True):
        assert a.count == b.count
        assert 0 < abs(float((a.loss - b.loss).detach())) < 0.02 * float(a.loss.detach())
