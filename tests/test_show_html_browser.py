"""Pages as a browser lays them out: no text runs over an edge or over another, memory grows.

A script that the test adds measures the finished page and leaves its findings in the title.
"""

import html
import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from worlds import CPU, SIM0, SIM1, tiny

from ggraph.hazards import find, hazard_html, run_hazard
from ggraph.pipeline import Options, make_plan
from ggraph.show_html import plan_html

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium to lay pages out")

MEASURE = """<script>
const all=q=>[...document.querySelectorAll(q)],box=e=>e.getBoundingClientRect();
const shown=e=>{const b=box(e);return b.width>0&&b.height>0};
const outside=(e,f)=>{const a=box(e),b=box(f);
  return a.left<b.left-1||a.right>b.right+1||a.top<b.top-1||a.bottom>b.bottom+1};
const meet=(e,f)=>{const a=box(e),b=box(f);
  return a.left<b.right&&b.left<a.right&&a.top<b.bottom-3&&b.top<a.bottom-3};
const pairs=l=>l.flatMap((e,i)=>l.slice(i+1).map(f=>[e,f]));
const words=l=>l.map(e=>e.textContent);
const clipped=()=>words(all('svg text').filter(e=>shown(e)&&outside(e,e.ownerSVGElement)));
const state=()=>({clipped:clipped(),labels:all('.box .label').filter(shown).length,
  height:all('.grows .drawn').map(e=>box(e).height)});
const found={wider:document.documentElement.scrollWidth-innerWidth,
  cut:words(all('.names span,h1,.fact b,.fact span').filter(e=>e.scrollWidth>e.clientWidth+1&&
    getComputedStyle(e).display!=='inline')),
  over:all('.drawn').flatMap(s=>pairs([...s.querySelectorAll('.culprit')]).filter(p=>meet(...p))
    .map(words)),
  unexplained:words(all('.fact').filter(e=>!e.dataset.tip)),
  narrow:all('.meter i').map(e=>box(e).width),
  first:state()};
all('[data-scales=tall]').slice(0,1).forEach(z=>{z.value=3;z.oninput()});
found.tall=state();
all('[data-scales=wide]').slice(0,1).forEach(z=>{z.value=3;z.oninput()});
found.wide=state();
found['all labelled']=found.first.labels===all('.box').length;
document.title=JSON.stringify(found);</script>"""


@cache
def pages() -> dict[str, str]:
    options = Options(layers={"sim0": 1, "sim1": 1}, streams=2)
    split = make_plan(tiny(), [SIM0, SIM1, CPU], options)
    title = "a_very_long_title_without_a_space" * 9
    return {
        "plan": plan_html(split.plan, vars(split.certificate), title=title),
        "race": hazard_html(run_hazard(find("01P"), orders=0)),
    }


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", ["plan", "race"])
def test_a_page_in_a_browser(tmp_path: Path, name: str, width: int) -> None:
    found = measured(tmp_path, pages()[name], width)
    assert found["wider"] <= 0 and found["cut"] == [], found
    assert found["over"] == [], "names of culprits over one another"
    assert found["first"]["clipped"] == found["tall"]["clipped"] == found["wide"]["clipped"] == []
    assert found["first"]["height"], "a page without a picture of memory"
    grown = zip(found["first"]["height"], found["tall"]["height"], strict=True)
    assert all(abs(tall - 8 * once) < 1 for once, tall in grown)
    assert found["first"]["labels"] <= found["tall"]["labels"] <= found["wide"]["labels"]
    assert found["first"]["labels"] < found["wide"]["labels"] or found["all labelled"]
    assert all(w > width / 4 for w in found["narrow"])
    if name == "plan":
        assert found["unexplained"] == []


def measured(folder: Path, page: str, width: int) -> dict[str, Any]:
    """What the script finds on the page in a window as wide."""
    path = folder / "page.html"
    path.write_text(page.replace("</body>", MEASURE + "</body>"))
    done = subprocess.run(
        [
            str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            f"--user-data-dir={folder / 'profile'}", f"--window-size={width},1400", "--dump-dom",
            path.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    title = re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)
    assert title is not None, done.stdout[:500]
    found: dict[str, Any] = json.loads(html.unescape(title[1]))
    return found
