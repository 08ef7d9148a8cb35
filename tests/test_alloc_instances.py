"""The exchange format of packing problems."""

import importlib
import json
from pathlib import Path

import numpy as np
import pytest
from alloc_kit import act, schedule
from packing_kit import of_all_trials

from ggraph.alloc import hb, lower_bounds
from ggraph.alloc.check import alignments
from ggraph.alloc.search import instances, offline
from ggraph.device import DeviceSpec
from ggraph.errors import FormatError
from ggraph.plan import HOST_ACTOR, Actor, Command, Do, Schedule, Value
from ggraph.verify import Rejected, verify

BENCH = Path(__file__).parent.parent / "bench" / "instances"


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3moe", "eagle3"])
def test_the_models_of_the_benchmark_can_be_planned(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their weights exist by name only: what builders ask of a checkpoint must be known there."""
    monkeypatch.syspath_prepend(BENCH.parent)
    bench = importlib.import_module("alloc")
    scheduled = bench.planned(bench.model_graph(name, 16), 2)
    found = instances.from_schedule(scheduled, "sim0", name)
    assert found.bound == lower_bounds(scheduled)["sim0"].nbytes
    assert len(found.names) > 20


def small() -> Schedule:
    device = DeviceSpec("d", "sim", alignment=32, streams=2)
    x, a, b = (Value(n, "d", 64) for n in "xab")
    kept = Value("kept", "d", 32, kept=True)
    run = [
        act(Do.LAUNCH, Actor("d", 0), [], [x]),
        act(Do.LAUNCH, Actor("d", 0), [x], [a]),
        act(Do.LAUNCH, Actor("d", 1), [], [b]),
        act(Do.LAUNCH, Actor("d", 0), [a], [kept]),
        Command(Do.HOST_SYNC, HOST_ACTOR, "end"),
    ]
    return schedule([device], [x, a, b, kept], run)


def test_a_schedule_survives_the_file() -> None:
    s = small()
    there = instances.from_schedule(s, "d", "small")
    back = instances.from_json(
        instances.to_json(there, alignment=alignments(s)["d"], about="a test")
    )
    assert (back.name, back.names, back.bound) == ("small", there.names, there.bound)
    assert back.bound_method == "antichain" and back.no_reuse == 224
    for field in ("size", "start", "near"):
        assert (getattr(back.packing, field) == getattr(there.packing, field)).all()
        assert (getattr(back.listed, field) == getattr(there.listed, field)).all()
    assert (back.birth == there.birth).all() and (back.life == there.life).all()
    assert there.birth[there.names.index("kept")] == 0


def test_bounds_of_the_published_instances_hold() -> None:
    files = sorted(BENCH.glob("*.json"))
    assert len(files) >= 30
    for path in files:
        i = instances.from_json(path.read_text())
        assert i.name == path.stem
        owner = np.repeat(np.arange(len(i.names)), np.diff(i.cliques.start))
        heaviest = np.bincount(i.cliques.member, weights=i.packing.size[owner]).max()
        assert heaviest <= i.bound <= i.no_reuse


def test_interval_files() -> None:
    i = instances.from_csv("id,lower,upper,size\na,0,2,4\nb,1,3,8\nc,2,4,16\n", "t")
    assert i.names == ("a", "b", "c") and i.bound == 24
    assert i.packing.near.tolist() == [1, 0, 2, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("id,lower,upper\na,0,2\n", "expected columns"),
        ("id,lower,upper,size\na,0,x,4\n", "expected columns"),
        ("id,lower,upper,size\na,0,2,0\n", "row a: size 0"),
        ("id,lower,upper,size\na,2,2,4\n", r"row a: size 4 in \[2, 2\)"),
        (f"id,lower,upper,size\na,0,2,{1 << 65}\n", "62 bits"),
        (f"id,lower,upper,size\na,{-(1 << 63)},{(1 << 63) - 1},1\n", "62 bits"),
        (f"id,lower,upper,size\na,0,2,{1 << 61}\nb,0,2,{1 << 61}\n", "62 bits"),
    ],
)
def test_bad_interval_files(text: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        instances.from_csv(text, "t")


def test_bad_json() -> None:
    good = json.loads(
        instances.to_json(instances.from_schedule(small(), "d", "s"), alignment=32, about="")
    )
    for change, message in (
        ({"format": "other"}, "expected format"),
        ({"cliques": 3}, "cliques is a int"),
        ({"cliques": [[99]]}, "not a concurrent"),
        ({"blocks": [{"id": 0}]}, "not a concurrent"),
    ):
        with pytest.raises(FormatError, match=message):
            instances.from_json(json.dumps({**good, **change}))
    for column in ("lower", "upper", "size"):
        for number in (1 << 65, -(1 << 63), 1e300, float("inf"), float("nan")):
            rows = [{**row, column: number} for row in good["blocks"]]
            with pytest.raises(FormatError, match="not a concurrent"):
                instances.from_json(json.dumps({**good, "blocks": rows}))
    for text in ("[]", "{", "3"):
        with pytest.raises(FormatError):
            instances.from_json(text)


def test_nothing_to_export() -> None:
    with pytest.raises(FormatError, match="0 blocks on 'host', nothing to export"):
        instances.from_schedule(small(), "host", "s")


def a_to_k(letter: str) -> instances.Instance:
    (path,) = (BENCH / "minimalloc").glob(f"{letter}.*.csv")
    return instances.from_csv(path.read_text(), path.stem)


@pytest.mark.parametrize("letter", "ABCDEFGHIJK")
def test_solutions_of_the_public_instances_are_verified(letter: str) -> None:
    """`verify` knows nothing of the search: every read at a life's end finds its own block."""
    i = a_to_k(letter)
    _, at, order = hb.solve(i.packing, i.birth, i.life)
    found = offline.search(i.packing, order, at, i.bound, i.cliques, 0.002)
    for offsets in (at, found):
        proved = verify(instances.to_plan(i, offsets)).certificate
        assert proved.reads_proved == 2 * len(i.names)
        assert proved.peak_bytes == (offsets + i.packing.size).max() >= i.bound
        assert proved.live_bound_bytes == i.bound


def test_a_packing_with_an_overlap_is_refused() -> None:
    i = a_to_k("A")
    _, at, _ = hb.solve(i.packing, i.birth, i.life)
    for block in (0, 40, 150):
        near = i.packing.near[i.packing.start[block] : i.packing.start[block + 1]]
        wrong = at.copy()
        wrong[block] = at[near[0]] + i.packing.size[near[0]] - 1
        with pytest.raises(Rejected, match="stale"):
            verify(instances.to_plan(i, wrong))


@pytest.mark.parametrize("letter", "ADI")
def test_trials_that_end_at_a_bound_end_with_the_same_packing(letter: str) -> None:
    """`least` saves the orders behind the first that meets it, and changes nothing else."""
    i = a_to_k(letter)
    why, at, order = of_all_trials(i.packing, i.birth, i.life)
    total = int((at + i.packing.size).max())
    for least in (0, total - 1, total):
        again = hb.solve(i.packing, i.birth, i.life, least)
        assert again[0] == why
        assert (again[1] == at).all()
        assert (again[2] == order).all()
    first = hb.solve(i.packing, i.birth, i.life, 1 << 60)
    assert first[0] == "program order, best fit"
