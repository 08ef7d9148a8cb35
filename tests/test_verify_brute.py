"""The verdict against brute force: every order of small plans, executed on tagged bytes.

`plan_brute` shares nothing with `verify`: it has no happens-before, only queues and a memory. A
plan is refused exactly when some order shows a race, a wrong value or a clash, and for that reason.
The deep run is this file with 20,000 examples each (HYPOTHESIS_PROFILE=deep).
"""

import random
from collections.abc import Iterator
from itertools import combinations, pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_brute import TooLarge, brute, happens_before, period
from plan_strategies import MUTATIONS, Mutation, mutants, plans, random_plan, with_commands
from verify_kit import S0, S1, SIZE, accesses, copy, get, plan, put, record, run, sync, wait

from ggraph.plan import Command, Do, Plan
from ggraph.verify import CounterExample, examine, races

FORMAL = {"alignment", "bounds", "capacity", "declaration"}  # refused before any order is seen
SHOWN_BY = {
    "race": ("race",),
    "stale": ("wrong",),
    "unwritten": ("wrong", "unmade"),
    "alias": ("clash",),
}


def disagreement(p: Plan) -> str:
    """How verdict and execution differ; empty where they agree."""
    verdict = examine(p)
    kind = verdict.kind if isinstance(verdict, CounterExample) else ""
    if kind in FORMAL:
        return f"malformed: {verdict}"
    try:
        outcome = brute(p)
    except TooLarge:
        return ""  # nothing is claimed; the generator's own test says that there are hardly any
    if outcome.is_sound != (not kind):
        return f"{outcome} but {verdict}"
    shown = not kind or any(getattr(outcome, fault) for fault in SHOWN_BY[kind])
    return "" if shown else f"{outcome} but {verdict}"


@given(plans())
def test_verdicts_equal_brute_force(p: Plan) -> None:
    assert not disagreement(p)


@given(st.randoms(use_true_random=False))
def test_verdicts_on_mutants_equal_brute_force(r: random.Random) -> None:
    for name, mutant in mutants(random_plan(r), r):
        assert name == "misaligned" or not disagreement(mutant), name


def delayed(r: random.Random) -> Plan:
    """s1 is what n was a run ago, s2 what s1 was: nothing is copied, slots rotate. Sound, or with
    too few slots, or with a state that looks at other bytes of its heir."""
    slots, delay, nbytes = r.choice((1, 2, 3)), r.choice((1, 2)), r.choice((SIZE, SIZE // 2))
    names = [f"s{d + 1}" for d in range(delay)]
    places: dict[str, int | tuple[int, ...]] = {"n": tuple(SIZE * k for k in range(slots)), "y": 96}
    shift = r.choice((0, 0, 0, SIZE // 2))
    for d, name in enumerate(names):
        places[name] = tuple(SIZE * ((k - d - 1) % slots) + shift for k in range(slots))
    body = [run(S0, "n"), run(r.choice((S0, S1)), "y", *(f"{n}:0:{nbytes}" for n in names))]
    r.shuffle(body)
    body.append(r.choice((sync(), record(S1))))
    traits = {n: {"initial": True, "nbytes": nbytes} for n in names}
    return plan(places, *body, carried=dict(pairwise(reversed(["n", *names]))), **traits)


@given(st.randoms(use_true_random=False))
def test_verdicts_on_states_in_rotating_slots_equal_brute_force(r: random.Random) -> None:
    assert not disagreement(delayed(r))


@given(plans())
def test_looking_at_neighbours_is_enough(p: Plan) -> None:
    """The proof looks at neighbours in a byte's history, `races` at all pairs."""
    verdict = examine(p)
    if isinstance(verdict, CounterExample):
        assert verdict.kind != "race" or races(p)
    else:
        assert not races(p)


@given(plans())
def test_all_races_are_all_pairs_that_no_chain_of_rules_orders(p: Plan) -> None:
    """Every two accesses of two periods that share a byte, compared one by one."""
    commands, regions = p.schedule.commands, p.memory.regions
    runs, count = 2 * period(p), len(commands)
    before, wanted = happens_before(commands * runs), set[tuple[int, int, str, str]]()

    def uses(u: int) -> Iterator[tuple[str, int, int, bool, str]]:
        c = commands[u % count]
        for a, writes in (*((a, False) for a in c.reads), *((a, True) for a in c.writes)):
            region = regions[a.value]
            base = region.offsets[u // count % len(region.offsets)]
            yield region.buffer, base + a.start, base + a.stop, writes, a.value

    for v in range(count * runs):
        for u in (u for u in range(v) if u not in before[v]):
            for (b, s, e, w, x), (c, t, f, r, y) in product(uses(u), uses(v)):
                if b == c and max(s, t) < min(e, f) and (w or r):
                    wanted.add((u % count, v % count, x, y))
    found = races(p)
    assert {(r.first.index, r.second.index, *r.values) for r in found} == wanted
    assert len(found) == len(wanted) and all(r.start < r.stop for r in found)


@given(plans(most=3))
def test_states_stand_for_orders(p: Plan) -> None:
    """Walking each linear extension by itself shows what the search over states shows."""
    try:
        literal = brute(p, runs=2, memo=False)
    except TooLarge:
        return
    merged = brute(p, runs=2)
    assert (literal.race, literal.wrong, literal.clash) == (merged.race, merged.wrong, merged.clash)
    assert merged.states <= literal.states


def test_the_generator_makes_sound_and_unsound_plans() -> None:
    """Kinds of all sorts, and few with more orders than brute force walks through."""
    kinds: dict[str, int] = {}
    too_large = 0
    for seed in range(200):
        p = random_plan(random.Random(seed))
        verdict = examine(p)
        kind = verdict.kind if isinstance(verdict, CounterExample) else "sound"
        kinds[kind] = kinds.get(kind, 0) + 1
        try:
            brute(p)
        except TooLarge:
            too_large += 1
    assert too_large <= 2
    assert set(kinds) >= {"sound", "race", "stale", "alias"} and kinds["sound"] >= 60, kinds


# One sound plan, and each class of mutant of it. x is copied to a device, y and z are computed on
# two streams, w joins them and is read; t is put in place over z; y's bytes pass to v.

SOUND = plan(
    {"hx": 0, "x": 0, "y": 32, "z": 64, "w": 96, "t": 64, "v": 32},
    put("hx"),
    copy(S0, "x", "hx"),
    record(S0, "x"),
    wait(S1, "x"),
    run(S0, "y", "x"),
    run(S1, "z", "x"),
    record(S1, "z"),
    wait(S0, "z"),
    run(S0, "w", "y", "z"),
    run(S0, "t", "z"),
    run(S0, "v", "w"),
    sync(stream=S0),
    get("w"),
    get("t"),
    get("v"),
    sync(),
    t={"may_replace": ("z",)},
)


# Streams that meet, and bytes beside operands that one launch fills and two read.

MEETING = plan(
    {"hx": 0, "x": 0, "scratch": 32, "y": 64, "z": 96},
    put("hx"),
    copy(S0, "x", "hx"),
    record(S0, "met.0"),
    record(S1, "met.1"),
    wait(S0, "met.1"),
    wait(S1, "met.0"),
    run(S1, "scratch", "x"),
    run(S1, "y", "scratch"),
    run(S1, "z", "scratch", "x"),
    sync(),
    get("y"),
    get("z"),
    sync(),
)


# A copy within one memory, whose source nobody reads behind it.

MOVING = plan(
    {"x": 0, "y": 32, "z": 64},
    run(S0, "x"),
    copy(S0, "y", "x"),
    run(S0, "z", "y"),
    sync(),
    get("z"),
)


@pytest.mark.parametrize("sound", [SOUND, MEETING, MOVING], ids=["replaced", "meeting", "moving"])
def test_the_examples_are_sound(sound: Plan) -> None:
    assert not isinstance(examine(sound), CounterExample) and not disagreement(sound)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.__name__)
def test_every_class_of_mutant_is_rejected(mutation: Mutation) -> None:
    """Each class is refused at least once, and a mutant is let off only where no order shows it."""
    refused = 0
    for seed in range(80):
        mutant = mutation((SOUND, MEETING, MOVING)[seed % 3], random.Random(seed))
        if mutant is None:
            continue
        verdict = examine(mutant)
        refused += isinstance(verdict, CounterExample)
        if not (isinstance(verdict, CounterExample) and verdict.kind in FORMAL):
            assert not disagreement(mutant), mutation.__name__
    assert refused, mutation.__name__


COPIES = {
    "halves_swapped": (["x:0:16", "x:16:32"], ["y:16:32", "y:0:16"], "alias"),
    "onto_itself_behind": (["x:0:16"], ["y:8:24"], "alias"),
    "onto_itself_before": (["x:16:32"], ["y:8:24"], "alias"),
    "each_byte_onto_itself": (["x"], ["y"], ""),
    "in_other_pieces": (["x:0:8", "x:8:32"], ["y:0:24", "y:24:32"], ""),
    "one_piece_in_two": (["x:8:16", "x:16:32"], ["y:8:32"], ""),
    "pieces_in_another_order": (["x:16:32", "x:0:16"], ["y:16:32", "y:0:16"], ""),
    "one_byte_twice": (["x:0:16", "x:0:16"], ["y:0:16", "y:16:32"], "alias"),
}


@pytest.mark.parametrize("allowed", ["may_replace", "same_as"])
@pytest.mark.parametrize("case", COPIES)
def test_a_copy_onto_its_source_moves_no_byte(case: str, allowed: str) -> None:
    """It has no order within, so that a byte may be gone before it is read."""
    reads, writes, kind = COPIES[case]
    move = Command(Do.COPY, S0, "move", "y", accesses(reads), accesses(writes))
    promise = ("x",) if allowed == "may_replace" else "x"
    end = sync(stream=S0)
    p = plan({"x": 0, "y": 0}, run(S0, "x"), move, end, y={allowed: promise})
    verdict = examine(p)
    found = verdict.kind if isinstance(verdict, CounterExample) else ""
    assert found == kind, str(verdict)
    assert not disagreement(p)


CELL = 8  # bytes; a value has four


def pieces(r: random.Random, value: str, cells: list[int]) -> list[str]:
    """These cells of a value as ranges, some of the neighbours joined."""
    joined: list[tuple[int, int]] = []
    for cell in cells:
        if joined and joined[-1][1] == cell and r.random() < 0.7:
            joined[-1] = (joined[-1][0], cell + 1)
        else:
            joined.append((cell, cell + 1))
    return [f"{value}:{start * CELL}:{stop * CELL}" for start, stop in joined]


def in_pieces(r: random.Random) -> Plan:
    """x, and one command that reads cells of x and w and makes cells of y and z, which may lie on
    x and on one another, with leave or without it."""
    do = r.choice((Do.LAUNCH, Do.COPY))
    reads, count = r.choices(range(4), k=r.randint(1, 6)), r.randint(1, 8)
    made = r.sample(range(8), len(reads) if do is Do.COPY else count)
    sources = pieces(r, "x", reads)
    if do is Do.LAUNCH:
        sources += pieces(r, "w", reads[::-1])
    results = pieces(r, "y", [c for c in made if c < 4])
    results += pieces(r, "z", [c - 4 for c in made if c >= 4])
    move = Command(do, S0, "move", "y", accesses(sources), accesses(results))
    places = {"x": 0, "w": 96, "y": r.choice((0, 0, 16)), "z": r.choice((0, 16, 32, 64))}
    leave: dict[str, dict[str, object]] = {
        name: r.choice(({}, {"may_replace": ("x",)}, {"same_as": "x"} if not places[name] else {}))
        for name in "yz"
    }
    return plan(places, run(S0, "x"), run(S0, "w"), move, sync(), **leave)


@given(st.randoms(use_true_random=False))
def test_results_on_sources_in_pieces_equal_brute_force(r: random.Random) -> None:
    """And the bytes that the verdict names are all those that two accesses have in common."""
    p = in_pieces(r)
    assert not disagreement(p)
    verdict, move = examine(p), p.schedule.commands[2]
    if isinstance(verdict, CounterExample) and verdict.kind == "alias":
        base = {name: region.offset for name, region in p.memory.regions.items()}
        spans = [(base[a.value] + a.start, base[a.value] + a.stop)
                 for a in (*move.reads, *move.writes)]  # fmt: skip
        common = {(max(s, t), min(e, f)) for (s, e), (t, f) in combinations(spans, 2)}
        assert (verdict.start, verdict.stop) in common and verdict.start < verdict.stop


@pytest.mark.parametrize(("read", "sound"), [("x:8:16", True), ("x:0:16", False)])
def test_what_one_result_overwrites_another_may_replace_byte_for_byte(
    read: str, sound: bool
) -> None:
    """The ranges that are read of it are not joined for the one's sake."""
    reads, writes = accesses(["x:0:8", read]), accesses(["y:8:16", "z:0:8"])
    move = Command(Do.LAUNCH, S0, "move", "y", reads, writes)
    leave = {"y": {"may_replace": ("x",)}, "z": {"same_as": "x"}}
    p = plan({"x": 0, "y": 0, "z": 0}, run(S0, "x"), move, sync(), **leave)
    verdict = examine(p)
    assert isinstance(verdict, CounterExample) != sound, str(verdict)
    assert not disagreement(p)


def test_states_that_change_places_are_seen_after_every_run() -> None:
    """Each must hold what the other held: wrong after the first run, right again after the second.
    However many runs are asked for, a chain of heirs is followed to its end."""
    initial = {"initial": True}
    p = plan({"x": 0, "y": 32}, carried={"x": "y", "y": "x"}, x=initial, y=initial)
    assert not disagreement(p)
    for runs in (0, 1500):
        verdict = examine(p, iterations=runs)
        assert isinstance(verdict, CounterExample) and verdict.kind == "stale", str(verdict)
        assert "what follows needs" in verdict.message
    body = (run(S0, "z", "x"), sync())
    still = plan({"x": 0, "z": 64}, *body, carried={"x": "x"}, x=initial)
    assert not isinstance(examine(still, iterations=1500), CounterExample)


def test_swapping_host_steps_is_seen() -> None:
    commands = list(SOUND.schedule.commands)
    commands[11], commands[12] = commands[12], commands[11]
    verdict = examine(with_commands(SOUND, commands))
    assert isinstance(verdict, CounterExample) and verdict.kind == "race"


def test_every_run_of_a_period_may_be_the_last() -> None:
    """`k` is kept and rotates; `w` lies on its first slot only, where an even run leaves it."""
    slots = {"k": (0, 32), "w": 0}
    kept = plan(slots, run(S0, "k"), run(S0, "w"), k={"kept": True, "slots": 2})
    late = plan({"k": (32, 0), "w": 0}, run(S0, "k"), run(S0, "w"), k={"kept": True, "slots": 2})
    for p in (kept, late):
        verdict = examine(p)
        assert isinstance(verdict, CounterExample) and verdict.kind == "stale"
        assert verdict.values == ("k", "w") and not disagreement(p)
