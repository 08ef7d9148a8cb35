"""Plans as JSON: there and back, the shipped example's verdict, and damage of every kind."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_strategies import plans
from typer.testing import CliRunner

from ggraph import json_parts
from ggraph.errors import FormatError, GgraphError, InputError, PlanError
from ggraph.plan import Certificate, Do, Plan
from ggraph.plan_builder import PlanBuilder
from ggraph.plan_json import plan_from_json, plan_to_json
from ggraph.verify import CounterExample, examine, races
from models.cli.app import app

DOCS = Path(__file__).parents[1] / "docs"
EXAMPLE = DOCS / "examples" / "llama_cpp_qkv_streams.json"
REPAIRED = DOCS / "examples" / "llama_cpp_qkv_streams_repaired.json"
RUN = CliRunner()


def loaded(path: Path = EXAMPLE) -> Any:
    return json.loads(path.read_text())


def verdict_of(text: str | bytes) -> Certificate | CounterExample:
    return examine(plan_from_json(text))


@given(plans())
def test_there_and_back_is_the_same_plan_and_verdict(p: Plan) -> None:
    text = json.dumps(plan_to_json(p))
    again = plan_from_json(text)
    assert json.dumps(plan_to_json(again)) == text
    assert again.schedule.commands == p.schedule.commands
    assert dict(again.memory.regions) == dict(p.memory.regions)
    assert str(examine(again)) == str(examine(p))


NAMED = ("device", "buffer", "tensor", "label", "event")


@pytest.mark.parametrize(
    "name", ["x" * 4096, "x" * 4097, "half \ud800"], ids=["at", "above", "half"]
)
def test_what_is_written_is_read(name: str) -> None:
    """A name that would be refused is not written, wherever it stands."""
    for part in NAMED:
        called = {p: name if p == part else p for p in NAMED}
        b = PlanBuilder()
        x = b.buffer(called["buffer"], b.device(called["device"]), 8)
        b.launch((called["device"], 0), called["label"], writes=[x[:].called(called["tensor"])])
        b.record((called["device"], 0), called["event"])
        if len(name) == 4096:
            assert len(plan_from_json(json.dumps(plan_to_json(b.plan()))).schedule.commands) == 2
        else:
            with pytest.raises(PlanError, match="a text of at most 4096 characters"):
                plan_to_json(b.plan())


def test_the_example_is_refused_for_the_norm_that_two_streams_still_read() -> None:
    verdict = verdict_of(EXAMPLE.read_text())
    assert isinstance(verdict, CounterExample)
    assert verdict.kind == "race"
    assert verdict.first is not None and verdict.second is not None
    labels = [loaded()["commands"][s.index]["label"] for s in (verdict.first, verdict.second)]
    assert labels == ["Kmul", "Qrms"]
    assert (verdict.buffer, verdict.start, verdict.stop) == ("compute@cuda0", 4160, 8256)


def test_every_race_of_the_example_is_one_of_two_kinds() -> None:
    """Qrms over attn_norm, which K and V read; Krms over Qmul, which Q's branch works on."""
    found = races(plan_from_json(EXAMPLE.read_text()))
    assert {(r.start, r.stop) for r in found} == {(4160, 8256), (8256, 9280)}
    assert {r.values[0] for r in found} == {"attn_norm", "Qmul"}


def test_the_repaired_example_is_proved() -> None:
    assert isinstance(verdict_of(REPAIRED.read_text()), Certificate)


def test_the_examples_differ_in_memory_alone() -> None:
    assert loaded()["commands"] == loaded(REPAIRED)["commands"]


def test_the_document_quotes_the_verdict_and_lists_every_key() -> None:
    page = (DOCS / "plan_json.md").read_text()
    assert str(verdict_of(EXAMPLE.read_text())).split("\n  nearby:")[0] in page
    assert all(f"`{d.value}`" in page for d in Do)
    for part in ("values", "commands", "buffers", "devices"):
        for item in loaded()[part]:
            assert all(f"`{key}`" in page for key in item), item


# The command.


def test_command_exit_status_says_the_verdict() -> None:
    refused = RUN.invoke(app, ["verify", str(EXAMPLE), "--all"])
    assert refused.exit_code == 1
    assert "refused: race" in refused.stdout and "Vmul" in refused.stdout
    told = " ".join(refused.stdout.split())
    assert (
        "one missing wait: " in told and "repair, fewest waits: 3, longest chain 14 -> 15" in told
    )
    proved = RUN.invoke(app, ["verify", str(REPAIRED)])
    assert proved.exit_code == 0
    assert "proved" in proved.stdout and "Hand-written from published facts" in proved.stdout


def test_command_in_json_and_from_standard_input() -> None:
    result = RUN.invoke(app, ["verify", "-", "--json", "--all"], input=EXAMPLE.read_bytes())
    facts = json.loads(result.stdout)
    assert result.exit_code == 1 and not facts["verified"]
    assert facts["counter_example"]["bytes"] == [4160, 8256]
    assert len(facts["races"]) == len(races(plan_from_json(EXAMPLE.read_text())))
    assert sum(c["races"] for c in facts["causes"]) == len(facts["races"])
    assert facts["repairs"]["fewest"]["proved"]
    proved = json.loads(RUN.invoke(app, ["verify", str(REPAIRED), "--json"]).stdout)
    assert proved["verified"] and proved["certificate"]["peak_bytes"] == 27776


def test_command_says_what_an_empty_list_proves() -> None:
    """Nothing, where nothing is promised; a promise that nobody keeps is refused."""
    document: dict[str, Any] = {
        "format": "ggraph.plan",
        "version": 1,
        "devices": [{"name": "g"}],
        "buffers": [{"name": "m", "device": "g", "nbytes": 64, "alignment": 16}],
        "values": [],
        "commands": [],
    }
    logits = {"name": "logits", "device": "g", "nbytes": 64, "buffer": "m", "offsets": [0]}
    for value, status, says in (
        ([], 0, "nothing was at stake"),
        ([logits | {"initial": True}], 0, "nothing was at stake"),
        ([logits], 1, "'logits' is declared and not initial, and no command writes it"),
        ([logits | {"kept": True}], 1, "what follows needs 'logits'"),
    ):
        text = json.dumps(document | {"values": value})
        for more in ([], ["--all"]):
            answer = RUN.invoke(app, ["verify", "-", *more], input=text)
            assert answer.exit_code == status
            assert says in " ".join(answer.stdout.replace("│", " ").split()), answer.stdout
    assert "nothing was at stake" not in RUN.invoke(app, ["verify", str(REPAIRED)]).stdout


def test_command_refuses_what_is_no_plan(tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text('{"format": "ggraph.plan", "version": 1}')
    for name, where in ((str(broken), f"{broken}: plan."), ("-", "standard input: plan.")):
        found = RUN.invoke(app, ["verify", name], input=broken.read_bytes()).exception
        assert isinstance(found, FormatError) and str(found).startswith(where), found
    assert isinstance(RUN.invoke(app, ["verify", str(tmp_path)]).exception, InputError)
    gone = RUN.invoke(app, ["verify", str(tmp_path / "none.json")])
    assert isinstance(gone.exception, InputError)


def of_two_devices(*commands: Any) -> Plan:
    """A plan of these commands that touches no byte."""
    document = {
        "format": "ggraph.plan",
        "version": 1,
        "devices": [{"name": "g0"}, {"name": "g1"}],
        "buffers": [],
        "values": [],
        "commands": [{"label": c["do"], **c} for c in commands],
    }
    return plan_from_json(json.dumps(document))


def test_what_a_graph_would_refuse_of_events_and_the_host_is_refused_without_one() -> None:
    """An executor asks one device for an event, and the host cannot wait for itself."""
    marks = [{"do": "record", "actor": [d, 0], "event": "e"} for d in ("g0", "g1")]
    sync = {"do": "host_sync", "actor": "host", "waits_for": "host"}
    launch = {"do": "launch", "actor": ["g0", 0], "event": "e"}
    for commands, says in (
        ([marks[0], launch], "launch can neither record 'e' nor wait for it"),
        (marks, "event 'e' is recorded on g0 and on g1"),
        ([sync], "host_sync on the host itself"),
    ):
        verdict = examine(of_two_devices(*commands))
        assert isinstance(verdict, CounterExample) and verdict.kind == "declaration"
        assert verdict.message == says
    assert not isinstance(examine(of_two_devices(*marks[:1] * 2)), CounterExample)


# Damage.


def test_a_byte_order_mark_is_no_part_of_the_document() -> None:
    text = EXAMPLE.read_text()
    marked = "\ufeff" + text
    assert plan_to_json(plan_from_json(marked)) == plan_to_json(plan_from_json(text))
    for wrong in (marked + "x", marked + "\ufeff"):
        with pytest.raises(FormatError, match="more follows the object"):
            plan_from_json(wrong.encode())
    with pytest.raises(FormatError, match="the text is empty"):
        plan_from_json("\ufeff")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe\x00", "not UTF-8: invalid start byte, position 0"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "plan: expected an object"),
        (b'{"format": "ggraph.plan", "format": "x"}', "a key is repeated"),
        (b'{"format": "x"}', "plan.format: expected 'ggraph.plan', got 'x'"),
        (b'{"format": "ggraph.plan", "version": 2}', "plan.version: expected 1, got 2"),
        (b'{"format": "ggraph.plan", "version": true}', "plan.version: expected 1, got True"),
        (b'{"format": "ggraph.plan", "version": 1.0}', "plan.version: expected 1, got 1.0"),
        (b'{"format": "ggraph.plan", "version": NaN}', "NaN is no number"),
        (b'{"format": "ggraph.plan", "version": ' + b"9" * 5000 + b"}", "not JSON"),
    ],
)
def test_texts_that_are_no_plan(text: bytes, says: str) -> None:
    with pytest.raises(FormatError) as error:
        plan_from_json(text)
    assert says in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("path", "new", "says"),
    [
        (("devices", 0, "streams"), "4", r"plan.devices[0].streams: expected a whole number"),
        (("devices", 0, "alignment"), 24, "alignment 24 is not a power of two"),
        (("devices", 0, "name"), "host", "a device cannot be called 'host'"),
        (("buffers", 0, "nbytes"), -1, "plan.buffers[0].nbytes: expected a whole number"),
        (("buffers", 1, "name"), "compute@cuda0", "'compute@cuda0' stands there twice"),
        (("values", 0, "offsets"), [], "1 to 64 offsets"),
        (("values", 0, "device"), None, "plan.values[0].device: expected a text"),
        (("values", 0, "colour"), "red", "plan.values[0]: unknown keys 'colour'"),
        (("values", 0, "offset"), [0], "'offset'; known: nbytes, name, device, same_as,"),
        (("places",), [], "plan: unknown keys 'places'; known: format, version, mode, carried,"),
        (("commands", 0, "do"), "fly", "plan.commands[0].do: expected one of launch"),
        (("commands", 0, "actor"), ["host", 0], 'expected "host" or [device, stream]'),
        (("commands", 0, "writes"), [["x@host", 0]], "expected [value, start, stop]"),
        (("commands", 3, "seconds"), "1", "expected a number of seconds"),
        (("carried",), ["cache_k"], "expected an object of texts"),
        (("log",), ["\ud800"], "half characters"),
    ],
)
def test_a_wrong_field_is_named_with_its_path(path: Any, new: Any, says: str) -> None:
    root = spot = loaded()
    for key in path[:-1]:
        spot = spot[key]
    spot[path[-1]] = new
    with pytest.raises(FormatError) as error:
        plan_from_json(json.dumps(root))
    assert says in str(error.value)


@pytest.mark.parametrize("key", ["format", "version", "devices", "buffers", "values", "commands"])
def test_what_is_missing_is_named(key: str) -> None:
    document = loaded()
    del document[key]
    with pytest.raises(FormatError, match=rf"^plan\.{key}: missing$"):
        plan_from_json(json.dumps(document))


@pytest.mark.parametrize("window", [1, 7, 64, 1 << 16])
@pytest.mark.parametrize("indent", [None, 1])
def test_a_slip_is_named_by_its_place_in_the_document(
    window: int, indent: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However far in the text, and behind letters of several bytes: what an editor goes to."""
    monkeypatch.setattr(json_parts, "WINDOW", window)
    text = json.dumps({"log": ["ü€𝄞"], **loaded()}, indent=indent, ensure_ascii=False)
    for spoilt in (text.find("ü") - 1, text.find(":"), text.rfind('"do"'), text.rfind(": ")):
        raw = text[:spoilt].encode()
        line, byte = raw.count(b"\n") + 1, len(raw) - (raw.rfind(b"\n") + 1) + 1
        with pytest.raises(FormatError, match=rf"\(line {line}, byte {byte} of it\)"):
            plan_from_json(text[:spoilt] + "\\" + text[spoilt + 1 :])


ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    63,
    1 << 61,
    1 << 70,
    0.5,
    "",
    "host",
    "x",
    [],
    {},
    [0],
    ["x", 0, 9],
)


def damaged(r: random.Random) -> Any:
    """The example with one to three of its nodes replaced, dropped, doubled or swapped."""
    root = loaded()
    for _ in range(r.randint(1, 3)):
        spot = root
        while True:
            keys = list(spot) if isinstance(spot, dict) else list(range(len(spot)))
            if not keys:
                break
            key = r.choice(keys)
            if isinstance(spot[key], (dict, list)) and r.random() < 0.8:
                spot = spot[key]
                continue
            _damage(spot, key, r)
            break
    return root


def _damage(spot: Any, key: Any, r: random.Random) -> None:
    kind = r.randrange(4)
    if kind == 0:
        spot[key] = copy.deepcopy(r.choice(ODD))
    elif kind == 1:
        del spot[key]
    elif kind == 2:
        other = r.choice(list(spot) if isinstance(spot, dict) else range(len(spot)))
        spot[key], spot[other] = spot[other], spot[key]
    elif isinstance(spot, list):
        spot.insert(key, spot[key])
    else:
        spot[f"{key}"] = r.randrange(0, 30000, 16)


@given(st.randoms(use_true_random=False))
def test_damaged_plans_give_a_verdict_or_one_clear_error(r: random.Random) -> None:
    try:
        verdict = verdict_of(json.dumps(damaged(r)))
    except GgraphError as error:
        assert isinstance(error, FormatError)
        assert len(str(error).splitlines()) == 1
        return
    assert str(verdict)


@given(st.binary(max_size=64), st.integers(0, 8000), st.integers(0, 64))
def test_damaged_texts_give_a_verdict_or_one_clear_error(new: bytes, at: int, cut: int) -> None:
    text = EXAMPLE.read_bytes()
    try:
        assert str(verdict_of(text[:at] + new + text[at + cut :]))
    except GgraphError as error:
        assert isinstance(error, FormatError)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
        max_leaves=20,
    )
)
def test_any_json_value_is_refused(value: Any) -> None:
    with pytest.raises(FormatError):
        plan_from_json(json.dumps(value))
