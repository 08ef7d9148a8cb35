"""The page of a plan: complete, self-contained, and red exactly where there is a race."""

import random
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from graph_kit import random_devices, random_graph, random_options
from hypothesis import given
from hypothesis import strategies as st
from plan_strategies import plans
from worlds import CPU, SIM0, SIM1, tiny

from ggraph.hazards import HAZARDS, Hazard, find, hazard_html, plan_of, run_hazard
from ggraph.pipeline import Options, make_plan
from ggraph.plan import Plan
from ggraph.plan_json import plan_from_json
from ggraph.show_html import plan_html
from ggraph.show_html.chart import Axis
from ggraph.show_html.memory import Box, Scale, short_bytes
from ggraph.show_html.page import MEANINGS
from ggraph.show_html.timeline import Span
from ggraph.verify import CounterExample, examine

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
VOID = {"meta", "input"}


class Balance(HTMLParser):
    """Every element that is opened is closed, in the order of nesting."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: dict[str, int] = {}
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        classes = (dict(attrs).get("class") or "").split()
        for c in (tag, *classes):
            self.counts[c] = self.counts.get(c, 0) + 1
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, (tag, self.open[-3:])
        self.open.pop()


def counted(text: str) -> dict[str, int]:
    return Balance(text).counts


def split_plan() -> Plan:
    options = Options(layers={"sim0": 1, "sim1": 1}, streams=2)
    return make_plan(tiny(), [SIM0, SIM1, CPU], options).plan


def test_a_page_shows_every_command_value_split_and_cause() -> None:
    plan = split_plan()
    text = plan_html(plan, {"peak bytes": 12345})
    counts = counted(text)
    assert counts["bar"] == len(plan.schedule.commands)
    owned = {b.name for b in plan.memory.buffers.values() if not b.external}
    assert counts["box"] == sum(r.buffer in owned for r in plan.memory.regions.values())
    assert counts["event"] > 0 and "12,345" in text
    assert "weight&#x27;s home, layer split" in text
    assert "hot" not in counts and "raced" not in counts and "bad" not in counts


def test_nothing_is_loaded_from_anywhere() -> None:
    text = plan_html(split_plan(), {})
    assert not re.search(r"(src|href)=|https?://|@import|url\((?!#)", text)


def test_names_cannot_break_out_of_the_page() -> None:
    nasty = "</script><script>alert(1)</script>\"'&"
    plan = plan_from_json(
        (EXAMPLES / "llama_cpp_qkv_streams.json").read_text().replace('"Kmul"', repr_json(nasty))
    )
    verdict = examine(plan)
    assert isinstance(verdict, CounterExample)
    text = plan_html(plan, {nasty: nasty}, verdict, title=nasty)
    assert counted(text)["script"] == 1 and "alert(1)</script>" not in text


def repr_json(text: str) -> str:
    return '"' + text.replace('"', '\\"') + '"'


def test_the_race_of_the_published_schedule_is_red() -> None:
    plan = plan_from_json((EXAMPLES / "llama_cpp_qkv_streams.json").read_text())
    verdict = examine(plan)
    assert isinstance(verdict, CounterExample)
    text = plan_html(plan, {}, verdict, title="example")
    counts = counted(text)
    assert counts["hot"] == 2 and counts["race"] == 1 and counts["raced"] == 1
    culprits = re.findall(r'<text class="culprit"[^>]*>([^<]*)<', text)
    assert sorted(culprits) == ["Kmul", "Qrms", "no order"]
    assert "bytes [4,160, 8,256) of compute@cuda0" in text


@given(plans())
def test_any_plan_has_a_page(p: Plan) -> None:
    verdict = examine(p)
    fault = verdict if isinstance(verdict, CounterExample) else None
    counts = counted(plan_html(p, {}, fault))
    assert counts.get("bad", 0) == (fault is not None)
    assert counts["bar"] == len(p.schedule.commands)
    sites = {s.index for s in (fault.first, fault.second) if s is not None} if fault else set()
    assert counts.get("hot", 0) == len(sites)


@given(st.randoms(use_true_random=False))
def test_any_planned_graph_has_a_page(r: random.Random) -> None:
    graph, devices = random_graph(r, 8), random_devices(r)
    verified = make_plan(graph, devices, random_options(r, graph, devices))
    counts = counted(plan_html(verified.plan, vars(verified.certificate)))
    assert counts["bar"] == len(verified.plan.schedule.commands)


@pytest.mark.parametrize("hazard", HAZARDS, ids=lambda h: h.id)
def test_every_hazard_has_a_page_with_its_race_and_its_repair(hazard: Hazard) -> None:
    text = hazard_html(run_hazard(hazard, orders=0))
    counts = counted(text)
    assert ("bad" in counts) == (hazard.bad is not None)
    assert counts["good"] == 1
    assert counts.get("hot", 0) >= (1 if hazard.bad is not None else 0)
    if hazard.expected is not None and hazard.expected.kind == "race":
        assert counts["hot"] == 4, "both culprits, as simulated and as planned"
        assert counts["raced"] == 1


def test_a_hazard_that_is_not_as_expected_says_so() -> None:
    report = run_hazard(find("28"), orders=0)
    broken = type(report)(**{**vars(report), "failures": ("something else",)})
    assert "not as expected" in hazard_html(broken)


def test_the_bad_plan_differs_from_the_fixed_one_in_colour_alone() -> None:
    h = find("01P")
    assert h.bad is not None
    assert "hot" not in counted(plan_html(plan_of(h, h.fixed), {}))


@pytest.mark.parametrize(("seconds", "last"), [(1e-6, "1 us"), (0.37, "350 ms"), (2.0, "2 s")])
def test_ticks_are_round_and_few(seconds: float, last: str) -> None:
    ticks = list(Axis(seconds).ticks())
    assert 4 <= len(ticks) <= 11 and ticks[0][0] == 0
    assert ticks[-1][1] == last


def test_an_empty_axis_has_room() -> None:
    axis = Axis(0.0)
    assert axis.x(0.0) == "0.600%" and axis.width(0.0, 0.0) == "0.050%"
    assert list(axis.ticks())


def test_sizes_are_short() -> None:
    assert [short_bytes(n) for n in (0, 1023, 1536, 3 << 20, 5 << 30)] == [
        "0 B", "1023 B", "1.5 KiB", "3 MiB", "5 GiB",
    ]  # fmt: skip


def test_a_large_value_leaves_the_others_room() -> None:
    """Small values keep most of the picture; addresses keep their order and fill it."""
    boxes = [Box(str(i), i, 512 * i, 512 * (i + 1), Span(0, 1)) for i in range(40)]
    boxes.append(Box("logits", 40, 20_480, 1_000_000, Span(0, 1)))
    scale = Scale.of(1_000_000, boxes, 320.0)
    assert scale.y(0) == 320.0 and abs(scale.y(1_000_000)) < 1e-9
    assert 320.0 - scale.y(20_480) > 0.4 * 320.0
    heights = [scale.y(a) for a in range(0, 1_000_000, 997)]
    assert heights == sorted(heights, reverse=True)
    assert min(scale.y(b.start) - scale.y(b.stop) for b in boxes) > 2.0


def test_texts_at_the_right_edge_grow_to_the_left() -> None:
    axis = Axis(1.0)
    assert axis.edge(0.5) == "" and axis.edge(0.95) == " last"
    text = plan_html(split_plan(), {})
    ticks = re.findall(r'class="tick([ a-z]*)" x="([\d.]+)%"', text)
    assert ticks and all((kind == " last") == (float(x) > 85) for kind, x in ticks)


def test_the_figures_of_a_certificate_are_explained() -> None:
    certificate = make_plan(tiny(), [CPU]).certificate
    assert set(vars(certificate)) <= set(MEANINGS)
    text = plan_html(split_plan(), vars(certificate))
    assert text.count('class="fact" title=') == len(vars(certificate))


def test_a_long_title_breaks_rather_than_widens_the_page() -> None:
    text = plan_html(split_plan(), {}, title="a_very_long_title_without_a_space" * 9)
    assert re.search(r"h1,[^{]*{overflow-wrap:anywhere}", text)
