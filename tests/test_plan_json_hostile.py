"""Plans from strangers: texts that want the memory, the terminal, or the page."""

import gzip
import io
import json
import random
import tracemalloc
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from plan_strategies import plan_of, random_plan
from rich.console import Console
from typer.testing import CliRunner

from ggraph import json_parts, plan_json
from ggraph.device import DeviceSpec
from ggraph.errors import FormatError, printable
from ggraph.json_parts import Parts
from ggraph.plan import Access, Actor, Buffer, Command, Do, Plan, Region, Value
from ggraph.plan_json import plan_from_json, plan_to_json
from ggraph.record.causes import diagnose
from ggraph.record.iree import plan_from_iree
from ggraph.show_html import plan_html
from ggraph.verify import Certificate, CounterExample, Rejected, examine, pairs, races, verify
from models.cli.app import app
from models.cli.common import complain

RUN = CliRunner()
EXAMPLE = Path(__file__).parents[1] / "docs" / "examples" / "llama_cpp_qkv_streams.json"


# Memory: what is refused is refused while it is read.


@pytest.mark.parametrize(
    ("begin", "body", "says"),
    [
        (b'{"commands":[{"reads":[', b"[],", "not JSON: one part of more than"),
        (b'{"commands":[{"reads":[', b"1,", "not JSON: one part of more than"),
        (b'{"carried":[', b"{},", "not JSON: one part of more than"),
        (b"[", b"[],", "not JSON: one part of more than"),
        (b'{"log":[', b'"",', "expected a list of at most 32768 items"),
        (b'{"commands":[', b"[],", "plan.commands[0]: expected an object, got []"),
        (b'{"log":["', b"x", "not JSON: one part of more than"),
    ],
)
def test_what_grows_without_end_is_refused_before_it_is_held(
    begin: bytes, body: bytes, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bounds are 32 times smaller here; so is what may be held, of a list of items too."""
    monkeypatch.setattr(json_parts, "LARGEST", json_parts.LARGEST >> 5)
    monkeypatch.setattr(json_parts, "MOST_OPENED", json_parts.MOST_OPENED >> 5)
    monkeypatch.setattr(plan_json, "MAX_ITEMS", plan_json.MAX_ITEMS >> 5)
    text = begin + body * ((8 << 20) // len(body))
    tracemalloc.start()
    with pytest.raises(FormatError) as error:
        plan_from_json(text)
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert says in str(error.value) and len(str(error.value)) < 400
    most = 24 << (15 if "items" in says else 20)
    assert held < most, f"{held} bytes were held for {len(text)}"


@pytest.mark.parametrize("window", [1, 2, 3, 7, 64, 1 << 16])
def test_the_size_of_a_window_changes_nothing(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers, names of several bytes and escapes are cut everywhere."""
    monkeypatch.setattr(json_parts, "WINDOW", window)
    text = '{"a" : 123456 ,"ü€𝄞":[ "\\u20ac\\n", -1.5e3, {"k":[]} ,true,null], "e":[],"n":{} }  '
    for raw in (text.encode(), text.replace(" ", "").encode()):
        parts, found = Parts(raw), {}
        for key in parts.members():
            found[key] = list(parts.items()) if parts.begins_list() else parts.value()
        assert found == json.loads(raw)


@pytest.mark.parametrize("cut", range(0, 60, 3))
def test_a_text_that_ends_early_is_no_json(cut: int) -> None:
    text = '{"a": 12, "b": ["x", {"k": [1, 2]}], "c": -1.5, "d": "ü"}'.encode()
    parts = Parts(text[:cut])
    with pytest.raises(FormatError, match=r"^plan: "):
        for _ in parts.members():
            _ = list(parts.items()) if parts.begins_list() else parts.value()


# The terminal: names cannot pretend to be lines of ours.

EVIL = "\x1b[2J\x1b[H\u202e+-- proved ----+\n| 12 commands |\r\x9b1m\u2028"


def poisoned() -> Any:
    """The example with control characters in its log and in names of all kinds."""
    document = json.loads(EXAMPLE.read_text())
    text = json.dumps(document).replace("Qrms", json.dumps("Qrms" + EVIL)[1:-1])
    text = text.replace("compute@cuda0", json.dumps("compute" + EVIL)[1:-1])
    return {**json.loads(text), "log": [EVIL]}


@pytest.mark.parametrize("options", [[], ["--all"]])
def test_no_control_character_reaches_the_terminal(options: list[str], tmp_path: Path) -> None:
    path = tmp_path / "evil.json"
    path.write_text(json.dumps(poisoned()))
    result = RUN.invoke(app, ["verify", str(path), *options])
    assert result.exit_code == 1 and "refused: race" in result.output
    assert all(ch.isprintable() or ch == "\n" for ch in result.output)
    assert not any(line.startswith(("| 12", "+--")) for line in result.output.splitlines())


@pytest.mark.parametrize("key", ["carried", "colour"])
def test_no_control_character_reaches_an_error(key: str) -> None:
    document = {**poisoned(), key + EVIL: 1, "carried": {EVIL: 3}}
    with pytest.raises(FormatError) as error:
        plan_from_json(json.dumps(document))
    assert str(error.value).isprintable()


def test_no_control_character_of_an_error_reaches_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What other compilers dump stands in errors as it is; a refusal has lines of its own."""
    recorded = Path(__file__).parent / "recorded" / "four_products.dump.mlir.gz"
    dump = gzip.decompress(recorded.read_bytes()).decode()
    with pytest.raises(FormatError) as error:
        plan_from_iree(dump.replace("stream.cmd.dispatch", f"stream.cmd{EVIL}"))
    complain(error.value)
    said = capsys.readouterr().err
    assert said.startswith("ggraph: iree: @main") and said[:-1].isprintable()
    with pytest.raises(Rejected) as refused:
        verify(plan_from_json(json.dumps(poisoned())))
    complain(refused.value)
    first, *rest = capsys.readouterr().err.splitlines()
    assert first.startswith("ggraph: race: ") and len(rest) > 3
    assert all(line.isprintable() for line in (first, *rest))


def test_every_text_of_a_verdict_is_lines_of_printable_characters() -> None:
    plan = plan_from_json(json.dumps(poisoned()))
    verdict = examine(plan)
    for text in (str(verdict), *map(str, races(plan)), *map(str, plan.schedule)):
        assert text.replace("\n", "").isprintable()
    assert printable("blk.0 ü") == "blk.0 ü"
    assert printable("a\tb\u202ec") == "a\\tb\\u202ec"
    screen = io.StringIO()
    Console(file=screen).print(str(verdict))
    assert "\x1b" not in screen.getvalue()


# Time: what a few bytes ask for.


def crowded(count: int, *, writing: bool) -> Plan:
    """A command on each of many streams; all touch one byte."""
    device = DeviceSpec("d", "sim", alignment=1, streams=count)
    values = [Value(f"v{i}" if writing else "w", "d", 1, initial=not writing) for i in range(count)]
    touched = [(Access(v.name, 0, 1),) for v in values]
    commands = [
        Command(Do.LAUNCH, Actor("d", i), f"c{i}", None, *((), a) if writing else (a, ()))
        for i, a in enumerate(touched)
    ]
    regions = {v.name: Region("m", (0,), 1) for v in values}
    return plan_of([device], list({v.name: v for v in values}.values()), commands,
                   [Buffer("m", "d", 1, 1)], regions)  # fmt: skip


def test_more_races_than_can_be_listed_are_said_to_be_too_many(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each pair of 1,500 commands: no answer in 400 seconds."""
    few = 12 * 11  # of a run and the next
    monkeypatch.setattr(pairs, "MOST_RACES", few)
    assert len(races(crowded(12, writing=True))) == few
    many = crowded(13, writing=True)
    with pytest.raises(Rejected, match=f"capacity: more than {few} races: too many to list"):
        races(many)
    assert diagnose(many) is None
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_to_json(many)))
    result = RUN.invoke(app, ["verify", str(path), "--all"])
    assert result.exit_code == 1 and "refused: race" in result.output
    assert "too many to list" in result.output
    found = json.loads(RUN.invoke(app, ["verify", str(path), "--all", "--json"]).output)
    assert found["races"] == [f"capacity: more than {few} races: too many to list"]


def test_the_limit_holds_where_nothing_races(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges that overlap are compared, whoever reads them."""
    assert races(crowded(40, writing=False)) == ()
    monkeypatch.setattr(pairs, "MOST_LOOKS", 0)
    with pytest.raises(Rejected, match="capacity: more than 0 overlapping ranges"):
        races(crowded(40, writing=False))


# The page: whatever `verify` says, it can be drawn.


class Wellformed(HTMLParser):
    """Counts elements; names that are no elements of ours would be a hole."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1


def drawn(plan: Plan) -> str:
    verdict = examine(plan)
    if isinstance(verdict, Certificate):
        return plan_html(plan, vars(verdict))
    return plan_html(plan, {}, verdict)


def test_values_of_no_bytes_are_drawn() -> None:
    """A value without bytes lies between two others, and between nothing at all."""
    device = DeviceSpec("d", "sim", alignment=1)
    values = [Value("a", "d", 4), Value("empty", "d", 0), Value("b", "d", 4)]
    regions = {"a": Region("m", (0,), 4), "empty": Region("m", (2,), 0), "b": Region("m", (4,), 4)}
    stream = Actor("d")
    commands = [
        Command(Do.LAUNCH, stream, v.name, None, (), (Access(v.name, 0, v.nbytes),)) for v in values
    ]
    plan = plan_of([device], values, commands, [Buffer("m", "d", 8, 1)], regions)
    assert isinstance(examine(plan), Certificate)
    assert "empty" in drawn(plan)
    bare = plan_of([device], values[1:2], commands[1:2], [Buffer("m", "d", 0, 1)], regions)
    bare = replace(bare, memory=replace(bare.memory, regions={"empty": Region("m", (0,), 0)}))
    assert isinstance(examine(bare), Certificate)
    assert drawn(bare)


ODD: tuple[Any, ...] = (None, True, -1, 0, 1, 2, 64, 1 << 62, 0.5, "", "host", "x", EVIL, [], {})


def damaged(document: Any, r: random.Random) -> Any:
    """The document with one to four of its places changed."""
    copy = json.loads(json.dumps(document))
    for _ in range(r.choice((1, 1, 2, 4))):
        spot: Any = copy
        key: Any = None
        for _ in range(r.randint(1, 6)):
            keys = list(spot) if isinstance(spot, dict) else list(range(len(spot)))
            if not keys:
                break
            key = r.choice(keys)
            if not isinstance(spot[key], (dict, list)):
                break
            last, spot = spot, spot[key]
            if r.random() < 0.15:
                spot = last
                break
        if isinstance(spot, (dict, list)) and key is not None and _has(spot, key):
            spot[key] = r.choice(ODD)
    return copy


def _has(spot: Any, key: Any) -> bool:
    if isinstance(spot, dict):
        return key in spot
    return isinstance(key, int) and key < len(spot)


@pytest.mark.parametrize("seed", range(6))
def test_every_plan_that_can_be_read_can_be_judged_and_drawn(seed: int) -> None:
    r = random.Random(seed)
    documents = [json.loads(EXAMPLE.read_text()), *(plan_to_json(random_plan(r)) for _ in range(5))]
    judged = 0
    for _ in range(250):
        try:
            plan = plan_from_json(json.dumps(damaged(r.choice(documents), r)))
        except FormatError:
            continue
        judged += 1
        verdict = examine(plan)
        assert isinstance(verdict, (Certificate, CounterExample))
        page = Wellformed()
        page.feed(drawn(plan))
        assert page.tags["svg"] >= 1 and page.tags["script"] == 1
    assert judged > 20
