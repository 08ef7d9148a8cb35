"""The tree search, the climbs that steer it, and what a longer search is worth."""

from itertools import pairwise

import numpy as np
import pytest
from packing_kit import crowded, intervals, sound, stacked

from ggraph.alloc import fit
from ggraph.alloc.fit import Ints, Packing
from ggraph.alloc.search import canon, instances, offline
from ggraph.alloc.search import climb as climbing
from ggraph.alloc.search.canon import Floats


def test_a_height_below_the_bound_is_refuted() -> None:
    p, cliques, bound = intervals(5, 10)
    tree = climbing.Tree(p, cliques)
    got = tree.attempt(np.arange(len(p)), bound - 32, 10**9, 10**9)
    assert got.at is None and 0 < got.used < 10**9
    assert got.placed == 0 and got.blame.any()


def test_the_tree_search_is_exact() -> None:
    """It finds the optimum of every order of placement, and refutes everything below."""
    for seed in range(25):
        p, live, _, best = crowded(seed)
        tree = climbing.Tree(p, offline.cliques_of(live))
        found = tree.attempt(np.arange(6), best, 10**8, 10**8)
        assert found.at is not None and sound(p, found.at) and (found.at + p.size).max() <= best
        assert found.placed == tree.room.weight.sum()
        below = tree.attempt(np.arange(6), best - 1, 10**8, 10**8)
        assert below.at is None and below.used < 10**8


@pytest.mark.parametrize("first", [True, False])
def test_parts_that_nothing_connects_are_undone_together(first: bool) -> None:
    """An easy part before or behind one that cannot be solved at its bound: all is as it was."""
    # Blocks 1 to 5 of size 1 conflict in a ring: no two cliques hold three, yet three are needed.
    ring = [(k, k % 5 + 1) for k in range(1, 6)]
    live = np.zeros((6, 6), dtype=np.int8)
    live[0 if first else 5, 0] = 1
    near = np.zeros((6, 6), dtype=bool)
    for c, pair in enumerate(ring, start=int(first)):
        live[c, list(pair)] = 1
        near[pair] = near[pair[::-1]] = True
    start = np.concatenate([[0], near.sum(axis=1).cumsum()])
    p, m, bound, best = Packing(np.ones(6, np.int64), start, np.nonzero(near)[1]), 6, 2, 3
    tree = climbing.Tree(p, offline.cliques_of(live))
    for height, solved in ((bound, False), (best, True)):
        state, cliques = canon.begun(tree.room, tree.total, 10**7, 10**7), len(tree.total)
        assert canon.solve(tree.room, state, np.arange(m), 0, cliques, 0, -1, height) is solved
        assert state.work[0] > 0 and (state.at >= 0).all() == solved
        if not solved:
            assert (state.at == -1).all() and (state.total == tree.total).all()
            assert not state.low.any() and not state.top.any()


def test_the_tree_search_lowers_a_packing_that_is_too_high() -> None:
    """From a stack of everything it comes down, as far as the bound where the work suffices."""
    p, cliques, bound = intervals(11)
    goal = stacked(p, bound, 4_000_000)
    climbing.climb(p, cliques, goal)
    assert sound(p, goal.at) and goal.top == int((goal.at + p.size).max())
    assert bound <= goal.top < p.size.sum()
    idle = stacked(p, bound, 0)
    climbing.climb(p, cliques, idle)
    assert idle.top == p.size.sum() and idle.work == 0


def test_more_work_is_never_worse() -> None:
    """A climb with more work passes through all that one with less has found."""
    for seed in range(6):
        p, cliques, bound = intervals(seed, 24)
        tops = []
        for work in (10_000, 100_000, 170_000, 1_000_000):
            goal = stacked(p, bound, work)
            climbing.climb(p, cliques, goal)
            assert sound(p, goal.at) and (goal.at + p.size).max() == goal.top
            tops.append(goal.top)
        assert tops == sorted(tops, reverse=True) and tops[-1] >= bound


def test_a_search_with_few_nodes_ends_and_says_how_far_it_got() -> None:
    p, cliques, bound = intervals(3, 40)
    tree = climbing.Tree(p, cliques)
    reached = []
    for nodes in (1, 10, len(p) // 2):
        got = tree.attempt(np.arange(len(p)), 2 * bound, 10**9, nodes)
        assert got.at is None and got.used > 0
        reached.append(got.placed)
    assert 0 < reached[0] < reached[1] < reached[2] < tree.room.weight.sum()


def test_a_climb_ends_without_progress_and_the_next_begins_from_another_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Towards a height that does not exist; keys get noise after a lap."""
    monkeypatch.setattr(climbing, "PATIENCE", 2)
    p, live, _, best = crowded(4)
    tree = climbing.Tree(p, offline.cliques_of(live))
    rng, work = np.random.default_rng(0), 10**9
    goal = climbing.Goal(np.zeros(6, np.int64), best, best - 1, work)
    climbing.climb_once(tree, goal, 0, rng)
    assert goal.top == best and 0 < goal.work < work
    plain = [tree.key(k, rng) for k in range(climbing.LAP)]
    again = [tree.key(k, rng) for k in range(climbing.LAP)]
    np.testing.assert_array_equal(plain, again)
    assert any((a != b).any() for a, b in pairwise(plain[: len(climbing.KEYS)]))
    noisy = [tree.key(climbing.LAP, rng) for _ in range(20)]
    assert any((noisy[0] != b).any() for b in noisy)
    assert all((np.sort(x) == np.linspace(0, 1, 6)).all() for x in (*plain, *noisy))


def test_keys_put_the_largest_first() -> None:
    """Load, then life: of two blocks under the same load the longer life goes first."""
    live = np.array([[1, 1, 0], [0, 1, 0], [0, 0, 1]], dtype=np.int8)
    near = np.array([[0, 1, 0], [1, 0, 0], [0, 0, 0]], dtype=bool)
    start = np.concatenate([[0], near.sum(axis=1).cumsum()])
    p = Packing(np.array([5, 1, 9]), start, np.nonzero(near)[1])
    tree = climbing.Tree(p, offline.cliques_of(live))
    assert np.argsort(tree.key(0, np.random.default_rng(0))).tolist() == [2, 1, 0]
    assert tree.traits["life"].tolist() == [1, 2, 1] and tree.traits["load"].tolist() == [6, 6, 9]
    longer = offline.cliques_of(live, np.array([7, 2, 1]))
    key = climbing.Tree(p, longer).key(0, np.random.default_rng(0))
    assert np.argsort(key).tolist() == [2, 0, 1]


def test_without_cliques_a_longer_search_is_never_worse_than_an_earlier_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offline, "EPOCH", 40_000)
    for seed in range(6):
        p, _, bound = intervals(seed, 14)
        start = np.argsort(-p.size)
        at, heights = fit.packed(p, start)[1], []
        for epochs in (0, 1, 3, 7):
            seconds = epochs * 40_000 / offline.STEPS_PER_SECOND
            found = offline.search(p, start, at, bound, None, seconds)
            assert sound(p, found)
            heights.append(int((found + p.size).max()))
        assert heights == sorted(heights, reverse=True) and heights[-1] >= bound


def test_a_longer_search_is_never_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whole epochs or parts of them, once the annealing before the climbs is complete."""
    monkeypatch.setattr(offline, "EPOCH", 40_000)
    for seed in range(6):
        p, cliques, bound = intervals(seed, 14)
        start = np.argsort(-p.size)
        at, heights = fit.packed(p, start)[1], []
        for epochs in (0, 1, 1.5, 3, 7.25):
            seconds = epochs * 40_000 / offline.STEPS_PER_SECOND
            found = offline.search(p, start, at, bound, cliques, seconds)
            assert sound(p, found)
            heights.append(int((found + p.size).max()))
        assert heights == sorted(heights, reverse=True) and heights[-1] >= bound


def test_annealing_alone_ends_where_the_bound_cannot_be_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Epochs of one, two, four pieces, the last one cut to the work that is left."""
    monkeypatch.setattr(offline, "EPOCH", 1000)
    p, _, bound = intervals(1, 10)
    spent: list[tuple[int, int]] = []

    def noted(p: Packing, order: Ints, bound: int, work: int, seed: int) -> tuple[int, Ints]:
        assert len(spent) < 9, f"no end in sight: {spent}"
        spent.append((work, seed))
        return int(p.size.sum()), np.zeros(10, np.int64)

    monkeypatch.setattr(offline, "anneal", noted)
    goal = stacked(p, bound, 5000)
    offline._anneal_in_epochs(p, np.arange(10), goal)
    assert spent == [(1000, 0), (2000, 1), (2000, 2)] and goal.work == 0


@pytest.mark.parametrize(("epochs", "share"), [(0.5, 500), (1.0, 1000), (7.0, 1000)])
def test_a_fifth_of_one_epoch_is_spent_on_annealing_and_the_rest_on_climbs(
    epochs: float, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offline, "EPOCH", 5000)
    p, cliques, bound = intervals(2, 24)
    goals = []
    monkeypatch.setattr(offline, "climb", lambda p, c, goal: goals.append(goal))
    stack = stacked(p, bound, 0)
    seconds = epochs * 5000 / offline.STEPS_PER_SECOND
    offline.search(p, np.arange(len(p)), stack.at, 1, cliques, seconds)
    assert [g.work for g in goals] == [int(epochs * 5000) - share]


@pytest.mark.parametrize("climb", range(len(climbing.AIMS)))
def test_a_height_one_above_the_bound_is_asked_for_the_bound(climb: int) -> None:
    """Whatever the climb's aim is."""
    p, live, _, best = crowded(7)
    tree, rng = climbing.Tree(p, offline.cliques_of(live)), np.random.default_rng(0)
    goal = climbing.Goal(np.zeros(6, np.int64), best + 1, best, 10**8)
    climbing.climb_once(tree, goal, climb, rng)
    assert goal.top == best and sound(p, goal.at)


def test_lives_of_a_file_are_as_long_as_it_says() -> None:
    text = "id,lower,upper,size\na,0,7,4\nb,2,3,4\nc,5,90,4\n"
    assert instances.from_csv(text, "lives").cliques.life.tolist() == [7, 1, 85]
    rows = np.array([[1, 0, 0], [1, 1, 0], [0, 0, 0]], dtype=np.int8)
    assert offline.cliques_of(rows).life.tolist() == [2, 1, 1]


def test_a_climb_goes_on_from_what_got_at_least_as_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of searches that place 5, 3, 5, 4 bytes the second and the fourth are forgotten."""
    monkeypatch.setattr(climbing, "PATIENCE", 2)
    p, live, _, best = crowded(4)
    tree, rng = climbing.Tree(p, offline.cliques_of(live)), np.random.default_rng(0)
    placed, tried, shaken = iter((5, 3, 5, 4, 4)), [], []

    def attempt(score: Floats, height: int, work: int, nodes: int) -> climbing.Trial:
        tried.append(score)
        return climbing.Trial(None, 1, next(placed), np.ones(6))

    def noted(score: Floats, blame: Floats, rng: np.random.Generator) -> Floats:
        shaken.append(score)
        return score + 1.0

    monkeypatch.setattr(tree, "attempt", attempt)
    monkeypatch.setattr(tree, "shaken", noted)
    climbing.climb_once(tree, climbing.Goal(np.zeros(6, np.int64), best, 0, 99), 0, rng)
    first = [int(score[0] - tried[0][0]) for score in shaken]
    assert first == [0, 0, 1, 1] and len(tried) == 4
