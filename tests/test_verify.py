"""`verify` on plans by hand: what orders, what races, what is stale, what the certificate says."""

import json
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from verify_kit import (
    S0,
    S1,
    SIZE,
    copy,
    fault,
    free,
    get,
    plan,
    proof,
    put,
    record,
    run,
    sync,
    wait,
)

from ggraph.errors import PlanError
from ggraph.plan import Certificate, Command, Plan, VerifiedPlan
from ggraph.plan_json import plan_to_json
from ggraph.verify import CounterExample, Rejected, examine, races, verify

T = TypeVar("T")
INITIAL = {"initial": True}
END = sync()


# What orders, and what does not.


def test_one_stream_needs_no_event() -> None:
    p = plan({"x": 0, "y": 32}, run(S0, "x"), run(S0, "y", "x"), END)
    c = proof(p)
    assert (c.commands, c.unrolled, c.reads_proved, c.reuses) == (3, 6, 2, 0)


def test_list_position_orders_nothing_between_streams() -> None:
    f = fault(plan({"x": 0, "y": 32}, run(S0, "x"), run(S1, "y", "x"), END))
    assert f.kind == "race" and f.first and f.second
    assert (f.first.index, f.second.index, f.start, f.stop) == (0, 1, 0, SIZE)
    assert f.edge == "'x' on d.0 -> 'y' on d.1" and f.buffer == "mem"


def test_record_and_wait_order() -> None:
    proof(plan({"x": 0, "y": 32}, run(S0, "x"), record(S0), wait(S1), run(S1, "y", "x"), END))


def test_a_record_before_the_work_does_not_cover_it() -> None:
    f = fault(plan({"x": 0, "y": 32}, record(S0), run(S0, "x"), wait(S1), run(S1, "y", "x"), END))
    assert f.kind == "race"


def test_a_wait_sees_the_latest_record_that_was_enqueued() -> None:
    """The event is recorded again, on another stream, before the wait."""
    f = fault(
        plan(
            {"x": 0, "y": 32},
            *(run(S0, "x"), record(S0), record(S1), wait(S1), run(S1, "y", "x"), END),
        )
    )
    assert f.kind == "race"


def test_a_wait_before_the_first_record_holds_nothing_up() -> None:
    """Later runs wait for the record of the run before; the first run has none and is unsound."""
    commands = (wait(S1), run(S1, "y", "x"), run(S0, "x"), record(S0))
    assert fault(plan({"x": 0, "y": 32}, *commands, END)).kind == "unwritten"
    first_run = plan({"x": 0, "y": 32}, *commands, END, x=INITIAL)
    assert fault(first_run).kind == "stale"


def test_an_event_can_order_one_run_before_the_next() -> None:
    """Stream 1 reads x while the next run begins; only the event keeps its writer away."""
    body = (wait(S0, "read"), run(S0, "x"), record(S0), wait(S1), run(S1, "y", "x"))
    proof(plan({"x": 0, "y": 32}, *body, record(S1, "read")))
    f = fault(plan({"x": 0, "y": 32}, *body[1:], record(S1, "read")))
    assert f.kind == "race" and f.first and f.second
    assert (f.first.iteration, f.second.iteration) == (0, 1)


def test_host_steps_precede_what_is_enqueued_after_them() -> None:
    proof(plan({"hx": 0, "y": 0}, put("hx"), run(S0, "y", "hx"), END))
    f = fault(plan({"hx": 0, "y": 0}, run(S0, "y", "hx"), put("hx"), END, hx=INITIAL))
    assert f.kind == "stale" and f.second and f.second.iteration == 0


@pytest.mark.parametrize("waiting", [sync(), sync(stream=S0), sync(event="e")])
def test_the_host_reads_after_it_has_waited(waiting: object) -> None:
    proof(plan({"x": 0}, run(S0, "x"), record(S0), waiting, get("x")))  # type: ignore[arg-type]


@pytest.mark.parametrize("waiting", [(), (sync(stream=S1),), (record(S1, "f"), sync(event="f"))])
def test_the_host_must_wait_for_the_right_stream(waiting: tuple[object, ...]) -> None:
    f = fault(plan({"x": 0}, run(S0, "x"), *waiting, get("x"), END))  # type: ignore[arg-type]
    assert f.kind == "race" and "host_sync" in str(f.cheapest)


def test_the_host_may_wait_for_a_stream_that_never_gets_work() -> None:
    proof(plan({"x": 0}, run(S0, "x"), sync(stream=S1), sync(stream=S0), get("x")))


def test_inputs_are_not_overwritten_while_the_last_run_reads_them() -> None:
    f = fault(plan({"hx": 0, "y": 0}, put("hx"), run(S0, "y", "hx")))
    assert f.kind == "race" and f.second and f.second.iteration == 1
    proof(plan({"hx": 0, "y": 0}, put("hx"), run(S0, "y", "hx"), END))


def test_rotating_inputs_allow_one_run_more_in_flight() -> None:
    """With two slots the host needs to have waited for the run before last only."""
    body = (put("hx"), run(S0, "y", "hx"), record(S0))
    late = plan({"hx": (0, 32), "y": 0}, *body)
    assert fault(late).second.iteration == 2  # type: ignore[union-attr]
    assert [(r.first.iteration, r.second.iteration) for r in races(late)] == [(0, 2)]
    proof(plan({"hx": (0, 32), "y": 0}, sync(event="e"), *body))
    assert fault(plan({"hx": (0, 0), "y": 0}, *body)).kind == "race"


def test_host_memory_lives_until_its_copies_are_done() -> None:
    body = (put("hx"), copy(S0, "x", "hx"))
    assert fault(plan({"hx": 0, "x": 0}, *body, free("hx"), END)).kind == "race"
    proof(plan({"hx": 0, "x": 0}, *body, END, free("hx")))


def test_what_was_given_up_cannot_be_read() -> None:
    f = fault(plan({"hx": 0, "x": 0}, put("hx"), free("hx"), copy(S0, "x", "hx"), END))
    assert f.kind == "unwritten" and "gave up" in f.message


# Reuse.


def test_bytes_are_reused_after_their_last_reader() -> None:
    commands = (run(S0, "x"), run(S0, "y", "x"), run(S0, "z", "y"), run(S0, "w", "z"))
    c = proof(plan({"x": 0, "y": 32, "z": 0, "w": 32}, *commands, END))
    assert c.reuses == 4 and c.peak_bytes == 512 and c.live_bound_bytes == 2 * SIZE


def test_bytes_are_not_reused_before_their_last_reader() -> None:
    commands = (run(S0, "x"), run(S0, "y"), run(S0, "z", "x"))
    f = fault(plan({"x": 0, "y": 0, "z": 32}, *commands, END))
    assert f.kind == "stale" and f.values == ("x", "y")
    assert "keep 'x' until its last reader is done" in str(f.cheapest)


def test_reuse_across_streams_needs_every_reader() -> None:
    """The reader on stream 1 is not waited for."""
    body = (run(S0, "x"), record(S0), wait(S1), run(S1, "y", "x"), run(S0, "z"))
    f = fault(plan({"x": 0, "y": 32, "z": 0}, *body, END))
    assert f.kind == "race" and f.values == ("x", "z") and len(f.repairs) == 2
    waits, memory = sorted(f.repairs, key=lambda r: r.nbytes)
    assert (waits.waits, waits.nbytes, memory.waits, memory.nbytes) == (1, 0, 0, SIZE)


def test_a_freed_tail_is_seen_byte_by_byte() -> None:
    f = fault(plan({"x": 0, "y": 16, "z": 64}, run(S0, "x"), run(S0, "y"), run(S0, "z", "x"), END))
    assert f.kind == "stale" and (f.start, f.stop) == (16, 32)
    free_half = run(S0, "z", "x:0:16")
    proof(plan({"x": 0, "y": 16, "z": 64}, run(S0, "x"), run(S0, "y"), free_half, END))


def test_values_written_in_parts() -> None:
    halves = (run(S0, "x:0:16"), run(S0, "x:16:32"))
    proof(plan({"x": 0, "y": 32}, *halves, run(S0, "y", "x"), END))
    f = fault(plan({"x": 0, "y": 32}, halves[0], run(S0, "y", "x"), END))
    assert f.kind == "unwritten" and (f.start, f.stop) == (16, 32)


def test_reads_before_the_producer() -> None:
    f = fault(plan({"x": 0, "y": 32}, run(S0, "y", "x"), run(S0, "x"), END))
    assert f.kind == "unwritten" and "enqueue 'x' before 'y'" in str(f.cheapest)
    f = fault(plan({"x": 0, "y": 32, "z": 0}, run(S0, "z"), run(S1, "y", "x"), run(S0, "x"), END))
    assert f.kind == "race"
    p = plan({"x": 0, "y": 32}, sync(), run(S1, "y", "x"), sync(), run(S0, "x"), END)
    assert fault(p).cheapest and "and wait for it" in str(fault(p).cheapest)


def test_what_nobody_writes_cannot_be_read() -> None:
    f = fault(plan({"x": 0, "y": 32}, run(S0, "y", "x"), END))
    assert f.kind == "unwritten" and not f.repairs and "nobody has written" in f.message


# In place.


def in_place(*commands: object, **traits: dict[str, object]) -> Plan:
    made = {"x": 0, "y": 0, "z": 64}
    used = {a.value for c in commands for a in c.writes}  # type: ignore[attr-defined]
    places = {name: at for name, at in made.items() if name in used}
    return plan(places, *commands, END, **traits)  # type: ignore[arg-type]


def test_in_place_needs_a_promise() -> None:
    body = (run(S0, "x"), run(S0, "y", "x"))
    f = fault(in_place(*body))
    assert f.kind == "alias" and f.cheapest and f.cheapest.apart == "y" and f.second is None
    assert f.message.endswith("over 'x', which it reads, and may not do that in place"), f.message
    proof(in_place(*body, y={"may_replace": ("x",)}))


def test_in_place_with_a_second_reader() -> None:
    promise = {"may_replace": ("x",)}
    late = (run(S0, "x"), run(S0, "y", "x"), run(S0, "z", "x"))
    assert fault(in_place(*late, y=promise)).kind == "stale"
    aside = (run(S0, "x"), record(S0), wait(S1), run(S1, "z", "x"), run(S0, "y", "x"))
    assert fault(in_place(*aside, y=promise)).kind == "race"


def test_in_place_byte_by_byte() -> None:
    """A promise covers a result that begins where its source does, not one beside it."""
    body = (run(S0, "x"), run(S0, "y", "x"))
    promise = {"may_replace": ("x",)}
    f = fault(plan({"x": 0, "y": 16}, *body, END, y=promise))
    assert (f.kind, f.start, f.stop) == ("alias", 16, 32), "what both touch"
    assert f.message.endswith("and may in place byte for byte alone"), f.message


def test_two_results_of_one_command_do_not_share() -> None:
    f = fault(in_place(run(S0, "x y")))
    assert f.kind == "alias" and "to the same bytes" in f.message
    f = fault(plan({"x": 16, "y": 0}, run(S0, "x:0:16 y:8:32"), END))
    assert (f.kind, f.start, f.stop) == ("alias", 16, 32), "what both touch"


# States, and what outlives a run.

STATE = {"x": {"initial": True}, "y": {"same_as": "x"}}


def test_states_are_carried_from_run_to_run() -> None:
    body = (run(S0, "z", "x"), run(S0, "y", "x"), END)
    proof(plan({"x": 0, "y": 0, "z": 64}, *body, carried={"x": "y"}, **STATE))
    f = fault(plan({"x": 0, "y": 0, "z": 64}, *body, **STATE))
    assert f.kind == "stale" and f.second and f.second.iteration == 1
    assert f.message.endswith("but finds 'y' of run 0 (no `carried` names 'x')")


def test_readers_of_the_old_state_come_before_the_overwrite() -> None:
    body = (run(S0, "y", "x"), run(S0, "z", "x"), END)
    f = fault(plan({"x": 0, "y": 0, "z": 64}, *body, carried={"x": "y"}, **STATE))
    assert f.kind == "stale" and not f.repairs  # they are one memory by declaration
    assert "carried" not in f.message


def test_a_state_that_nobody_updates_may_be_its_own_heir() -> None:
    body = (run(S0, "z", "x"), END)
    proof(plan({"x": 0, "z": 64}, *body, carried={"x": "x"}, x={"initial": True}))


def test_a_state_is_found_where_its_heir_begins() -> None:
    """The next run's x would be the second half of y."""
    body = (run(S0, "z", "x:0:16"), run(S0, "y"), END)
    half: dict[str, Any] = {"carried": {"x": "y"}, "x": {"initial": True, "nbytes": 16}}
    proof(plan({"x": 0, "y": 0, "z": 64}, *body, **half))
    f = fault(plan({"x": 16, "y": 0, "z": 64}, *body, **half))
    assert f.kind == "stale" and f.second and f.second.iteration == 1
    assert f.message.endswith("finds 'y' of run 0 at offset 0, where it should lie at 16")


def test_states_take_turns_without_a_copy() -> None:
    """Three generations in three slots. Only where the first run reads a state does it stand."""
    where = {"y": (0, 32, 64), "x": (64, 0, 32), "w": (32, 64, 0), "z": 96}
    body = (run(S0, "y", "x", "w"), run(S0, "z", "w"), END)
    turns: dict[str, Any] = {"carried": {"x": "y", "w": "x"}, "x": INITIAL, "w": INITIAL}
    proof(plan(where, *body, **turns))
    f = fault(plan({**where, "w": (64, 64, 0)}, *body, **turns))
    assert f.kind == "stale" and "means 'x' from before the first run" in f.message


def test_slots_of_a_weight_do_not_overlap() -> None:
    f = fault(plan({"x": (0, 16), "z": 64}, run(S0, "z", "x"), END, x=INITIAL))
    assert f.kind == "stale" and (f.start, f.stop) == (16, 32)


def test_a_second_run_must_not_find_its_state_overwritten() -> None:
    body = (run(S0, "z", "x"), run(S0, "w"), END)
    f = fault(plan({"x": 0, "z": 64, "w": 0}, *body, x=INITIAL))
    assert f.kind == "stale" and f.second and f.second.iteration == 1


def test_weights_are_intact_at_the_end_though_nobody_reads_them() -> None:
    f = fault(plan({"x": 0, "w": 0}, run(S0, "w"), END, x=INITIAL))
    assert f.kind == "stale" and "what follows needs" in f.message and f.second is None
    two = plan({"x": 0, "w": 0}, x=INITIAL, w=INITIAL)
    assert fault(two).kind == "stale"


def test_kept_values_outlive_the_run() -> None:
    body = (run(S0, "x"), run(S0, "w"), END)
    assert fault(plan({"x": 0, "w": 0}, *body, x={"kept": True})).kind == "stale"
    proof(plan({"x": 0, "w": 32}, *body, x={"kept": True}))


# The answer.


@pytest.mark.parametrize("body", [(), (run(S0, "x"), END)], ids=["empty", "short"])
def test_more_runs_than_a_proof_can_walk_through_are_refused(body: tuple[Command, ...]) -> None:
    """However few commands there are."""
    p = plan({"x": 0}, *body, x={"initial": not body})
    for iterations in (1 << 24, 1 << 70):
        verdict = examine(p, iterations=iterations)
        assert isinstance(verdict, CounterExample) and verdict.kind == "capacity"
        assert f"in {iterations} runs" in verdict.message
    assert not isinstance(examine(p, iterations=100), CounterExample)


def test_verify_seals_or_raises() -> None:
    good = plan({"x": 0}, run(S0, "x"), END)
    verified = verify(good, iterations=5)
    assert plan_to_json(verified.plan) == plan_to_json(good)
    assert verified.certificate.unrolled == 10
    with pytest.raises(Rejected, match="unwritten") as caught:
        verify(plan({"x": 0, "y": 32}, run(S0, "y", "x"), END))
    assert isinstance(caught.value, PlanError)
    assert caught.value.counter_example.values == ("x",)
    with pytest.raises(TypeError):
        VerifiedPlan(good, verified.certificate, seal=object())


@pytest.mark.parametrize("listed", ["reads", "writes", "may_replace", "offsets", "commands"])
def test_what_was_proved_is_held_where_no_list_can_change(listed: str) -> None:
    """Whoever made the plan keeps a list of its own: what is done to it changes no proof."""
    body = (run(S0, "x"), run(S0, "y", "x"), END)
    given = plan({"x": 0, "y": 0}, *body, y={"may_replace": ("x",)})
    schedule, memory = given.schedule, given.memory

    def held(noun: T) -> T:
        return replace(noun, **{listed: list(getattr(noun, listed))})  # type: ignore[type-var]

    if listed in ("reads", "writes"):
        schedule = replace(schedule, commands=tuple(map(held, schedule.commands)))
    elif listed == "may_replace":
        schedule = replace(schedule, values={n: held(v) for n, v in schedule.values.items()})
    elif listed == "offsets":
        memory = replace(memory, regions={n: held(r) for n, r in memory.regions.items()})
    else:
        schedule = held(schedule)
    sealed = verify(Plan(schedule, memory)).plan
    nouns = (*sealed.schedule, *sealed.schedule.values.values(), *sealed.memory.regions.values())
    found = [getattr(n, listed) for n in (sealed.schedule, *nouns) if hasattr(n, listed)]
    assert found and {type(f) for f in found} == {tuple}
    assert plan_to_json(sealed) == plan_to_json(given)


def test_the_empty_plan_is_sound() -> None:
    c = proof(plan({}))
    assert c == Certificate(0, 0, 0, 0, 0, 512, 0, 0, ends_complete=True)


MADE = {"x": 0, "y": 32}
NEVER = "is declared and not initial, and no command writes it"
NO_STATE = "is carried on, but is no state: initial, and written by no command"
PROMISES: dict[str, tuple[Plan, str, str]] = {
    "what nobody touches": (plan(MADE, run(S0, "x"), END), "unwritten", f"'y' {NEVER}"),
    "what is written in no byte": (
        plan(MADE, run(S0, "x"), run(S0, "y:4:4"), END),
        "unwritten",
        f"'y' {NEVER}",
    ),
    "what is only given up": (plan({"hx": 0}, free("hx")), "unwritten", f"'hx' {NEVER}"),
    "nothing but a promise": (plan({"x": 0}), "unwritten", f"'x' {NEVER}"),
    "what is kept": (plan({"x": 0}, x={"kept": True}), "unwritten", "what follows needs 'x'"),
    "the heir of a state": (
        plan({"x": 0, "y": 0}, carried={"x": "y"}, **STATE),
        "stale",
        "what follows needs 'x' and means 'y'",
    ),
    "the heir of no state": (
        plan(MADE, run(S0, "x"), run(S0, "y", "x"), END, carried={"x": "y"}),
        "declaration",
        f"'x' {NO_STATE}",
    ),
    "a state that is made anew": (
        plan(MADE, run(S0, "x"), run(S0, "y", "x"), END, carried={"x": "y"}, x=INITIAL),
        "declaration",
        f"'x' {NO_STATE}",
    ),
}


@pytest.mark.parametrize("case", PROMISES)
def test_what_a_plan_promises_it_makes(case: str) -> None:
    """A value that is declared is there before the first run, or some command writes it."""
    p, kind, says = PROMISES[case]
    f = fault(p)
    assert f.kind == kind and says in f.message and f.values, str(f)


def test_where_no_byte_is_declared_or_all_are_there_nothing_need_be_done() -> None:
    for p in (plan({}), plan({"x": 0}, x=INITIAL), plan({"x": 0}, x={"nbytes": 0})):
        assert (proof(p).commands, proof(p).reads_proved) == (0, 0)


def test_a_counter_example_reads_well() -> None:
    body = (run(S0, "x"), record(S0), wait(S1), run(S1, "y", "x", seconds=3e-6), run(S0, "z"))
    text = str(fault(plan({"x": 0, "y": 32, "z": 0}, *body, END)))
    assert text.splitlines() == [
        "race: 'y' and 'z' touch the same bytes and nothing orders them",
        "  run 0, command 3: d.1 launch     y reads x[0:32] writes y[0:32]",
        "  run 0, command 4: d.0 launch     z writes z[0:32]",
        "  bytes [0, 32) of mem",
        "  missing: 'y' on d.1 -> 'z' on d.0",
        "  repair: give 'x' bytes that nobody else uses (32 bytes)",
        "  repair: record after 'y' on d.1, wait before 'z' on d.0 (1 wait, up to 3.0 us later)",
        "  nearby:",
        "        1      d.0 record     e",
        "        2      d.1 wait       e",
        "  >     3      d.1 launch     y reads x[0:32] writes y[0:32]",
        "  >     4      d.0 launch     z writes z[0:32]",
        "        5     host host_sync  sync",
    ]


def test_concurrency_has_a_price_in_bytes() -> None:
    body = (run(S0, "x"), run(S1, "y"), END, run(S0, "z", "x", "y"), END)
    c = proof(plan({"x": 0, "y": 32, "z": 64}, *body))
    assert c.live_bound_bytes == 3 * SIZE and c.concurrency_bytes == 512 - 3 * SIZE


def test_all_races_are_listed() -> None:
    """Two unordered branches: write against read, read against write, and once more next run."""
    p = plan({"x": 0, "y": 0, "z": 64}, run(S0, "x"), run(S0, "z", "x"), run(S1, "y"))
    found = races(p)
    pairs = [(r.first.index, r.second.index, r.writes) for r in found]
    assert pairs == [
        (0, 2, (True, True)),
        (1, 2, (False, True)),
        (2, 0, (True, True)),
        (2, 1, (True, False)),
    ]
    assert str(found[1]).startswith("bytes [0, 32) of mem: run 0, command 1: d.0 launch")
    assert "(reads 'x') and run 0, command 2" in str(found[1])
    assert isinstance(examine(p), CounterExample) and not races(plan({"x": 0}, run(S0, "x"), END))


def test_what_touches_no_byte_meets_nobody() -> None:
    """An empty access is no access: no race, no live byte, and none to be found elsewhere."""
    p = plan({"x": 0, "y": 0}, run(S1, "x"), run(S0, "x:4:4"), run(S1, "y"), END)
    assert not races(p) and proof(p).live_bound_bytes == SIZE


def test_live_bytes_are_counted_where_they_are_touched() -> None:
    """Of x only the ends are ever used; what lies between is nobody's."""
    p = plan({"x": 0, "y": 32}, run(S0, "x:0:4"), run(S0, "x:28:32"), run(S0, "y", "x:0:4"), END)
    assert proof(p).live_bound_bytes == SIZE + 4


def test_a_counter_example_is_data_too() -> None:
    p = plan({"x": 0, "y": 0}, run(S0, "x"), run(S1, "y"), END)
    data = fault(p).to_json()
    assert (data["kind"], data["buffer"], data["bytes"]) == ("race", "mem", [0, SIZE])
    assert data["values"] == ["x", "y"] and data["missing"] == "'x' on d.0 -> 'y' on d.1"
    assert [(c["run"], c["index"]) for c in data["commands"]] == [(0, 0), (0, 1)]
    assert len(data["repairs"]) == 2 and json.loads(json.dumps(data)) == data
    alone = fault(plan({"x": 1}, run(S0, "x"))).to_json()
    assert alone["commands"] == [None, None]


def test_every_pair_that_must_be_ordered_is_counted() -> None:
    """Per run: y's read of x after x (1); from the second run on x again after y's read and after
    x, y after y (3). w reads x as well: a pair more, and one more for the next x."""
    two = proof(plan({"x": 0, "y": 32}, run(S0, "x"), run(S0, "y", "x"), END))
    assert two.pairs_checked == 2 * 1 + 3
    body = (run(S0, "x"), run(S0, "y", "x"), record(S0), wait(S1), run(S1, "w", "x"), END)
    assert proof(plan({"x": 0, "y": 32, "w": 64}, *body)).pairs_checked == 2 * 2 + 5


def test_the_first_command_may_be_the_culprit() -> None:
    f = fault(plan({"x": 0, "y": 0, "z": 64}, run(S0, "y"), run(S0, "z", "x"), x=INITIAL))
    assert f.kind == "stale" and f.first is not None and f.first.index == 0
    assert f.second is not None and f.second.index == 1
    assert [line for line in f.nearby.splitlines() if line.startswith("  >")] != []
    never = fault(plan({"x": 0, "z": 64}, run(S0, "z", "x")))
    assert never.kind == "unwritten" and never.first is None


def test_both_culprits_are_named_wherever_they_stand() -> None:
    """The first command spoils what the last one reads, with a long list between them; a wrong
    value, bytes that were given up, and a race."""
    between = [run(S0, "w:0:0") for _ in range(9)]
    stale = (run(S0, "y"), *between, run(S0, "z", "x"))
    gone = (free("hx"), *between, run(S0, "z", "hx"))
    places = {"x": 0, "y": 0, "z": 64, "w": 96, "hx": 0}
    apart = (run(S1, "x"), *between, run(S0, "z", "x"))
    for kind, commands in (("stale", stale), ("unwritten", gone), ("race", apart)):
        f = fault(plan(places, *commands, x=INITIAL, hx=INITIAL))
        assert f.kind == kind and f.first and f.second, str(f)
        assert (f.first.index, f.second.index) == (0, 10)
        marked = [line.split()[1] for line in f.nearby.splitlines() if line.startswith("  >")]
        assert marked == ["0", "10"]
        assert (kind == "unwritten") == f.message.endswith("finds bytes that 'free hx' gave up")


def test_a_fault_without_bytes_names_none() -> None:
    assert "bytes [" not in str(fault(plan({"x": 1}, run(S0, "x"))))
