"""Placement: homes, pins, layers, expansion, offload, capacity, and what is refused."""

import re
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import CPU, SIM0, SIM1, SIM2, C, E, T, linear, schedule_of, tiny

from ggraph import ops
from ggraph.device import DeviceSpec
from ggraph.dtype import I32
from ggraph.errors import PlaceError
from ggraph.graph import Graph
from ggraph.pipeline import Options, make_plan
from ggraph.place import Pin, place
from ggraph.place.pins import match
from ggraph.tensor import input, state, weight

GRAPH = tiny()


def where(pins: tuple[str, ...] = (), **options: object) -> dict[str, tuple[str, str]]:
    """Device and cause of every tensor of the tiny graph on sim0, sim1, cpu."""
    placement = place(GRAPH, [SIM0, SIM1, CPU], pins, **options)  # type: ignore[arg-type]
    return {name: (p.device, p.cause) for name, p in placement.of.items()}


def test_every_tensor_has_a_cause() -> None:
    of = where(layers={"sim0": 1, "sim1": 1})
    assert set(of) == {t.name for t in GRAPH}
    assert of["x"] == ("cpu", "input, written by the host")
    assert of["blk.0.q.weight"] == ("sim0", "weight's home, layer split")
    assert of["blk.1.q"] == ("sim1", "weight's home of %blk.1.q.weight")
    assert of["cache.1"] == ("sim1", "state's home, layer split")
    assert of["blk.1.cached"] == ("sim1", "overwrites %cache.1")
    assert of["blk.1.seen"] == ("sim1", "follows %blk.1.cached")
    assert of["blk.0.out"][0] == "sim0" and of["blk.1.out"][0] == "sim1"
    assert of["blk.1.norm"] == ("sim1", "upgrade from sim0: 96 fewer bytes cross")
    assert of["y"][0] == "sim1", "what belongs to no layer stays with the last one before it"


@pytest.mark.parametrize("rows", [1, 2, 3, 64])
def test_where_windows_are_read_does_not_hang_on_their_number(rows: int) -> None:
    """Of a window with gaps all that it looks at crosses; half of a row's bytes would not."""
    x = input("x", (rows, 32))
    unit = ops.swiglu(ops.columns(x, 0, 16), ops.columns(x, 16, 16), name="unit")
    graph = Graph.of({"y": ops.mul_mat(weight("w", (8, 16)), unit)})
    of = place(graph, [SIM0, CPU]).of
    assert of["w"].device == of["y"].device == "sim0"
    assert (of["unit"].device, of["unit"].cause) == (
        "cpu", f"upgrade from sim0: {64 * rows} fewer bytes cross",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("reading", "pins", "home"),
    [
        (("sim0",), (), "sim0"),
        (("sim1", "sim0"), (), "sim0"),
        (("sim0", "sim2"), (), "sim2"),
        (("sim1",), ("x=sim0",), "sim0"),
    ],
)
def test_an_input_that_the_host_cannot_write_in_place_goes_to_who_reads_it(
    reading: tuple[str, ...], pins: tuple[str, ...], home: str
) -> None:
    """It is copied from the host once, and from there to none but the other readers. What the host
    sees has the input as ever."""
    devices, x = [SIM0, SIM1, SIM2], input("x", (T, E))
    graph = Graph.of({f"y{i}": ops.tanh(x[:, i:]) for i in range(len(reading))})
    pins += tuple(f"y{i}={device}" for i, device in enumerate(reading))
    assert place(graph, devices, pins).of["x"].device == home
    assert place(graph, [*devices, CPU], pins).of["x"].device == (
        "sim0" if "x=sim0" in pins else "cpu"
    )
    copies = [c for c in schedule_of(graph, devices, pins) if c.label.startswith("copy:x")]
    assert len({w.value for c in copies for w in c.writes if "host" not in w.value}) == len(
        {home, *reading}
    )


def test_layers_beyond_the_split_go_to_the_fallback() -> None:
    of = where(layers={"sim0": 1})
    assert of["blk.0.q"][0] == "sim0" and of["blk.1.q"][0] == "cpu"


@pytest.mark.parametrize("layers", list(product(range(4), repeat=2)))
def test_each_layer_goes_where_the_counts_say(layers: tuple[int, int]) -> None:
    """None on a device is a count, too."""
    of = where(layers={"sim0": layers[0], "sim1": layers[1]})
    told = [*["sim0"] * layers[0], *["sim1"] * layers[1], "cpu", "cpu"]
    assert [of[f"blk.{i}.q.weight"][0] for i in range(2)] == told[:2]


@pytest.mark.parametrize("number", ["9" * 11, "9" * 5000], ids=["large", "none"])
def test_a_layer_may_have_any_number(number: str) -> None:
    w = weight(f"blk.{number}.w", (4, 4))
    graph = Graph.of(
        {"y": ops.mul_mat(weight("blk.0.w", (4, 4)), ops.mul_mat(w, input("x", (1, 4))))}
    )
    of = place(graph, [SIM0, CPU], layers={"sim0": 1}).of
    assert of["blk.0.w"].device == "sim0"
    assert of[w.name].device == ("cpu" if len(number) < 18 else "sim0"), "no number, no layer"


def test_first_device_with_room_is_left_for_good_when_it_is_full() -> None:
    small = replace(SIM0, memory_bytes=3 * E * E * 4 + 100)
    of = place(GRAPH, [small, SIM1, CPU]).of
    first = [of[f"blk.0.{n}.weight"].device for n in "kqv"]
    assert first == ["sim0", "sim0", "sim0"], "in the order of their first readers"
    assert of["cache.0"].device == of["blk.1.q.weight"].device == "sim1"


def test_weights_of_one_x_are_never_torn_apart() -> None:
    """Wherever the first device's memory ends. One op of several weights is one reader; what reads
    beside no other value goes alone; a pin takes its weight out."""
    x = ops.scale(input("x", (3, 8)), 2.0)
    q, k, v = (ops.mul_mat(weight(n, (4, 8)), x, name=f"{n}.y") for n in "qkv")
    both = ops.mul_mats(weight("m", (4, 4)), ops.scale(q, 3.0), weight("n", (4, 4)))
    alone = [ops.scale(weight(n, (4,)), 2.0) for n in "ab"]
    graph = Graph.of({f"y{i}": t for i, t in enumerate((q, k, v, both, *alone))})
    whole = {"q": 128, "k": 128, "v": 128, "m": 64, "n": 64, "a": 16, "b": 16}
    seen = set()
    for room in range(0, sum(whole.values()) + 16, 16):
        of = place(graph, [replace(SIM0, memory_bytes=room), SIM1, CPU]).of
        homes = {n: of[n].device for n in whole}
        assert homes["q"] == homes["k"] == homes["v"] and homes["m"] == homes["n"], room
        there = sum(whole[n] for n, home in homes.items() if home == "sim0")
        assert there <= room
        seen.add(there)
    assert seen == {0, 384, 512, 528, 544}
    pinned = place(graph, [replace(SIM0, memory_bytes=256), SIM1, CPU], ["^k$=cpu"]).of
    assert [pinned[n].device for n in "qkv"] == ["sim0", "cpu", "sim0"]


def test_pins_decide_and_ops_follow_their_weights() -> None:
    of = where((r"blk\.(1)\.q\.weight=sim1", r"cache\.0=cpu"))
    assert of["blk.1.q.weight"] == ("sim1", r"pin blk\.(1)\.q\.weight=sim1")
    assert of["blk.1.q"][0] == "sim1" and of["blk.0.cached"][0] == "cpu"
    assert of["blk.1.k"][0] == "sim0"


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ((r"blk\.9=sim0",), "matches none of"),
        (("head=cuda7",), "unknown device 'cuda7'; known: sim0, sim1, cpu"),
        (("head",), "expected REGEX=DEVICE"),
        (("(=sim0",), "not a regular expression"),
        ((r"q$=sim0", "0.q$=cpu"), r"contradictory pins for %blk.0.q: q\$=sim0 and 0.q\$=cpu"),
        ((r"cache\.0=sim0", r"blk\.0\.cached=sim1"), "contradictory pins: %blk.0.cached"),
    ],
)
def test_bad_pins_are_refused(pins: tuple[str, ...], message: str) -> None:
    with pytest.raises(PlaceError, match=message):
        where(pins)


@given(
    st.lists(st.text("ab.*\\^$(= \n", min_size=1, max_size=3), min_size=1, unique=True), st.data()
)
def test_a_name_pins_itself_alone(names: list[str], data: st.DataObject) -> None:
    """Looked up or searched for, whatever a name holds: sessions pin what they hold so."""
    leaves = [weight(name, (2,)) for name in names]
    graph = Graph.of({f"y{i}": ops.neg(x) for i, x in enumerate(leaves)})
    one = data.draw(st.sampled_from(names))
    for pin in (Pin(one, "sim0", whole=True), Pin(rf"^{re.escape(one)}\Z", "sim0")):
        assert match(graph, [SIM0], [pin]) == {one: pin}
    with pytest.raises(PlaceError, match="matches none of"):
        match(graph, [SIM0], [Pin(one + "c", "sim0", whole=True)])


def test_pins_speak_of_the_graph_before_it_was_rewritten() -> None:
    """A pin holds what stands for the tensors that it matches, whatever else it matches; where
    nothing does, the refusal says so."""
    fused = frozenset({"rms_norm_mul", "mul_mats"})
    devices = [replace(SIM0, fused=fused), replace(CPU, fused=fused)]
    r = ops.rms_norm(input("x", (T, E)), name="r")
    n = ops.mul(r, weight("n.weight", (E,)), name="n")
    q, k, c = linear(n, "q"), linear(n, "k"), ops.scale(n, 2.0, name="c")
    graph = Graph.of({"sum": ops.mul(ops.add(q, c), k)})

    def placed(pins: tuple[str, ...], **options: bool) -> dict[str, str]:
        plan = make_plan(graph, devices, Options(pins=pins, **options)).plan  # type: ignore[arg-type]
        return {t.name: plan.schedule.splits.placement.of[t.name].device for t in plan.graph}

    assert placed(())["q@joined"] == "sim0"
    assert placed(("^(q|k)$=cpu",))["q@joined"] == placed(("^[qkc]$=cpu",))["q@joined"] == "cpu"
    assert "q@joined" not in placed(("^[qc]$=cpu",))
    with pytest.raises(PlaceError, match=r"pin \^r\$=cpu: all that it matches became part"):
        placed(("^r$=cpu",))
    assert placed(("^r$=cpu",), rewrites=False)["r"] == "cpu"
    with pytest.raises(PlaceError, match=rf"z=cpu: .* matches none of {len(graph)} tensor"):
        placed(("z=cpu",))


def test_a_pin_on_an_overwriting_result_moves_its_state() -> None:
    assert where((r"blk\.0\.cached=sim1",))["cache.0"][0] == "sim1"


def test_a_device_is_asked_what_it_can_run() -> None:
    weak = DeviceSpec("sim0", "sim", ops=frozenset({"mul_mat", "add"}))
    of = place(GRAPH, [weak, CPU]).of
    assert of["blk.0.norm"].device == "cpu" and of["blk.0.q"].device == "sim0"
    with pytest.raises(PlaceError, match=r"sim0 cannot run %blk.0.norm.*pin blk.0.norm=sim0"):
        place(GRAPH, [weak, CPU], [Pin("blk.0.norm", "sim0")])
    with pytest.raises(PlaceError, match=r"no device can run %n: .* asked: sim0"):
        norm = ops.rms_norm(input("h", (T, E)), eps=1e-5)
        place(Graph.of({"n": norm}), [weak])


def test_what_is_overwritten_lies_where_all_that_overwrites_it_can_run() -> None:
    """Found by scripts/fuzz_graphs.py: a GPU that rounds halves, but cannot set a part of them."""
    weak = DeviceSpec("sim0", "sim", ops=frozenset({"floor", "add"}))
    y = ops.floor(weight("w", (31, 1))).named("y")
    last = ops.set(y, input("x", (1, 1)), (3, 0)).named("last")
    of = place(Graph.of({"z": last}), [weak, CPU]).of
    assert {p.device for n, p in of.items() if n != "w"} == {"cpu"}
    sole = DeviceSpec("cpu", "cpu", host_visible=True, ops=frozenset({"set"}))
    with pytest.raises(PlaceError, match=r"sim0 cannot run %z.* it overwrites %y there"):
        place(Graph.of({"z": last}), [weak, sole])


def test_weights_of_a_dtype_that_a_device_cannot_read_stay_away() -> None:
    halves = DeviceSpec("sim0", "sim", weight_dtypes=frozenset({"f16"}))
    assert place(GRAPH, [halves, CPU]).of["blk.0.q"].device == "cpu"


def test_a_full_device_lists_what_was_placed_there() -> None:
    tight = replace(CPU, memory_bytes=600)
    with pytest.raises(
        PlaceError,
        match=r"cpu: %blk.0.k.weight .* capacity 600 bytes, 864 .* %blk.0.v.weight 256, %x 96",
    ):
        place(GRAPH, [tight])
    with pytest.raises(PlaceError, match=r"sim1: %.*does not fit: capacity 100"):
        place(GRAPH, [SIM0, replace(SIM1, memory_bytes=100)], layers={"sim0": 1, "sim1": 1})


@pytest.mark.parametrize("devices", [[], [CPU, CPU]])
def test_devices_must_be_there_and_distinct(devices: list[DeviceSpec]) -> None:
    with pytest.raises(PlaceError, match="distinct devices"):
        place(GRAPH, devices)


def test_unknown_device_in_layers() -> None:
    with pytest.raises(PlaceError, match="layers cuda0=3"):
        where(layers={"cuda0": 3})


def test_a_large_batch_is_offloaded_where_the_weight_is_read_whole() -> None:
    fast = replace(SIM0, offload_rows=2)
    of = place(GRAPH, [fast, CPU], [r"cache=cpu"], layers={"cpu": 2}).of
    assert of["blk.0.q"].cause == f"offload of {T} rows from cpu"
    slow = replace(SIM0, offload_rows=T + 1)
    assert place(GRAPH, [slow, CPU], layers={"cpu": 2}).of["blk.0.q"].device == "cpu"


def test_a_small_shared_weight_draws_nobody() -> None:
    h = input("h", (T, E))
    shared = weight("shared", (E,))
    a = ops.mul(linear(h, "blk.0.a"), shared, name="a")
    g = Graph.of({"b": ops.mul(linear(a, "blk.1.b"), shared)})
    of = place(g, [SIM0, SIM1, CPU], layers={"sim0": 1, "sim1": 1}).of
    assert of["shared"].device == "sim0" and of["a"].device == "sim0" and of["b"].device == "sim1"


@pytest.mark.parametrize("kind", ["frequencies", "as large"])
def test_a_shared_weight_is_small_beside_the_largest_operand(kind: str) -> None:
    """Not beside the smallest: a step's positions take fewer bytes than rotary frequencies. As
    large is not small."""
    h, at = input("x", (1, 1, 16)), input("at", (1,), I32)
    few, many = weight("few", (8,)), weight("many", (1, 1, 16))
    for i in range(2):
        h = ops.mul_mat(weight(f"blk.{i}.w", (16, 16)), h, name=f"h{i}")
        last = ops.rope(h, at, few, n_rot=16) if kind == "frequencies" else ops.mul(h, many)
        h = last.named(f"shared{i}")
    of = place(Graph.of({"y": h}), [SIM0, SIM1, CPU], layers={"sim0": 1, "sim1": 1}).of
    shared = "few" if kind == "frequencies" else "many"
    assert (of[shared].device, of["h1"].device) == ("sim0", "sim1")
    assert of["y"].device == ("sim1" if kind == "frequencies" else "sim0")


def test_an_overwrite_lies_with_its_state_even_where_the_device_must_be_left() -> None:
    g = Graph.of(
        {"s": ops.set_rows(state("s0", (T, E)), input("r", (T, E)), input("i", (T,), I32))}
    )
    weak = DeviceSpec("sim0", "sim", ops=frozenset({"add"}))
    assert place(g, [weak, CPU]).of["s"].device == "cpu"
    with pytest.raises(PlaceError, match=r"cannot run %s.*it overwrites %s0 there"):
        place(g, [weak, CPU], ["s0=sim0"])


def test_counts_and_sizes_below_0_are_refused_as_such() -> None:
    with pytest.raises(PlaceError, match="layers sim0=-1: expected 0 or more layers"):
        place(GRAPH, [SIM0], layers={"sim0": -1})
    for field in ("memory_bytes", "max_buffer_bytes"):
        with pytest.raises(PlaceError, match=f"{field} -1.*expected 0 or more"):
            replace(SIM0, **{field: -1})


def test_a_pattern_that_holds_values_and_views_pins_the_values() -> None:
    """A view is followed only where nothing else is meant."""
    a, b = (
        ops.scale(input("x", (T, E)), 2.0, name="a"),
        ops.scale(input("z", (T, E)), 2.0, name="b"),
    )
    graph = Graph.of({"y": ops.add(ops.rows(a, 0, 1, name="b.view"), ops.rows(b, 0, 1, name="c"))})
    assert set(match(graph, [SIM0, CPU], ["^b=sim0"])) == {"b"}
    assert set(match(graph, [SIM0, CPU], ["^(b.view|c)$=sim0"])) == {"a", "b"}
    assert place(graph, [SIM0, SIM1, CPU], ["^b=sim1", "^[ay]$=cpu"]).of["b"].device == "sim1"


def test_a_weight_that_no_device_can_serve_alone_lies_on_the_last_with_room() -> None:
    """Its two readers run on different devices; what exactly fits, fits."""
    w = weight("w", (4, 4))
    graph = Graph.of({"n": ops.neg(w), "s": ops.scale(w, 2.0)})
    able = [replace(SIM0, ops=frozenset({"neg"})), replace(SIM1, ops=frozenset({"scale"}))]
    for rooms, home in [((64, 64), "sim1"), ((64, 63), "sim0")]:
        devices = [replace(d, memory_bytes=n) for d, n in zip(able, rooms, strict=True)]
        assert place(graph, devices).of["w"].device == home
    with pytest.raises(PlaceError, match="sim1: %w does not fit: capacity 63"):
        place(graph, [replace(d, memory_bytes=63) for d in able])
    assert [place(graph, able).of[n].device for n in "ns"] == ["sim0", "sim1"]


def test_only_what_overwrites_a_result_ties_it_to_a_device() -> None:
    """A reader that writes elsewhere may run elsewhere."""
    near = replace(SIM0, ops=frozenset({"mul_mat", "scale"}))
    rows = linear(ops.scale(input("x", (T, E)), 2.0, name="h"), "rows")
    cache = ops.set_rows(state("s", (C, E)), rows, input("i", (T,), I32), name="new")
    of = place(Graph.of({"new": cache}), [near, CPU]).of
    assert [of[n].device for n in ("rows", "h", "s", "new")] == ["sim0", "sim0", "cpu", "cpu"]


def expanded(pins: tuple[str, ...], lacks: str = "") -> tuple[str, str]:
    """Where an op `z` of two values and two readers, all of one size, is put, and why."""
    a, b = (ops.scale(input(f"x{i}", (T, E)), 2.0, name=n) for i, n in enumerate("ab"))
    z = ops.add(a, b, name="z")
    graph = Graph.of({"r": ops.neg(z), "q": ops.neg(ops.scale(z, 3.0, name="q0"))})
    every = frozenset(t.op for t in graph.nodes)
    devices = [replace(SIM0, ops=every - {lacks}), SIM1, CPU]
    of = place(graph, devices, pins).of["z"]
    return of.device, of.cause


def test_of_equal_neighbours_the_last_source_and_the_first_reader_are_followed() -> None:
    homes = ("^a$=sim0", "^b$=sim1")
    assert expanded(homes) == ("sim1", "expansion from source %b")
    assert expanded(("^a$=sim1", "^b$=sim0"), lacks="add") == (
        "sim1", "expansion from source %a",
    )  # fmt: skip
    assert expanded(homes, lacks="add")[0] == "sim1"
    assert expanded(("^r$=sim0", "^q0$=sim1")) == ("sim0", "expansion from reader %r")


def test_layers_need_numbers_only_of_what_no_pin_holds() -> None:
    h = ops.mul_mat(weight("w", (E, E)), input("x", (T, E)))
    graph = Graph.of({"y": ops.mul_mat(weight("v", (E, E)), h)})
    of = place(graph, [SIM0, CPU], ["^w$=cpu", "^v$=sim0"], layers={"sim0": 1}).of
    assert [of[n].device for n in "wv"] == ["cpu", "sim0"]
    with pytest.raises(PlaceError, match="which layer v belongs to"):
        place(graph, [SIM0, CPU], ["^w$=cpu"], layers={"sim0": 1})


def offloaded(graph: Graph, homes: tuple[str, ...], rows: int = 2) -> str:
    """Where `y` runs when sim0 takes work on `rows` rows or more, and other devices none."""
    return place(graph, [replace(SIM0, offload_rows=rows), SIM1, CPU], homes).of["y"].device


def test_only_host_weights_are_offloaded() -> None:
    """Not states, which no run may leave, and not what another device's memory holds. One row is a
    batch where that is asked for; what picks slices counts its choices' rows, not the slots of
    each."""
    x, s = input("x", (T, E)), state("s", (T, E))
    of_state = Graph.of({"y": ops.add(s, x)})
    assert offloaded(of_state, ("^s$=cpu",)) == "cpu"
    product = Graph.of({"y": linear(x, "w")})
    at = {"layers": {"cpu": 0, "sim1": 9}}
    numbered = Graph.of({"y": linear(x, "blk.0.w")})
    fast = replace(SIM0, offload_rows=2)
    assert place(numbered, [fast, SIM1, CPU], **at).of["y"].device == "sim1"  # type: ignore[arg-type]
    assert place(numbered, [fast, CPU], layers={"cpu": 9}).of["y"].device == "sim0"
    assert offloaded(product, ("^w.weight$=cpu",)) == "cpu", "a pin says where the work is, too"
    one = Graph.of({"y": ops.mul_mat(weight("blk.0.w", (E, E)), input("x", (1, E)))})
    deep = Graph.of({"y": linear(input("x", (1, T, E)), "blk.0.w")})
    for graph, rows, home in [
        *((one, 1, "sim0"), (one, 2, "cpu"), (one, 0, "cpu")),
        *((deep, T, "sim0"), (deep, T + 1, "cpu")),
    ]:
        devices = [replace(SIM0, offload_rows=rows), CPU]
        assert place(graph, devices, layers={"cpu": 9}).of["y"].device == home


def test_an_op_that_picks_slices_is_offloaded_for_the_weight_it_picks_from_alone() -> None:
    ids = input("ids", (T, 2), I32)
    picked = Graph.of({"y": ops.mul_mat_id(weight("w", (4, E, E)), input("x", (T, 1, E)), ids)})
    assert offloaded(picked, ("^w$=cpu",), T) == "sim0"
    assert offloaded(picked, ("^w$=cpu",), T + 1) == "cpu"
    assert offloaded(picked, ("^w$=cpu", "^y$=sim1")) == "sim1"
    wide = weight("rows", (T, 2, 64))  # larger than the experts, so that it draws
    other = Graph.of({"y": ops.mul_mat_id(weight("w", (2, 1, 64)), wide, ids)})
    assert offloaded(other, ("^(rows|w)$=cpu",)) == "cpu"
