"""The page at `/` in a real browser without a screen: Chromium, driven by its own driver."""

import base64
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from serve_kit import Server

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="there is no chromium, or no chromedriver"
)
OPTIONS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the W3C's name of an element's reference
ENDLESS = """const asked = window.fetch; window.fetch = (where, what) => asked(where,
  what?.body ? {...what, body: JSON.stringify({...JSON.parse(what.body),
    logit_bias: {256: -100, 257: -100}, max_tokens: MOST})} : what);"""


@dataclass
class Page:
    """A browser's window, by the WebDriver protocol (W3C recommendation)."""

    web: httpx.Client
    session: str

    def call(self, path: str, **body: Any) -> Any:
        reply = self.web.post(f"/session/{self.session}/{path}", json=body).json()["value"]
        assert not (isinstance(reply, dict) and "error" in reply), reply
        return reply

    def find(self, selector: str) -> str:
        found = self.call("element", using="css selector", value=selector)
        return str(found[ELEMENT])

    def click(self, selector: str) -> None:
        self.call(f"element/{self.find(selector)}/click")

    def type(self, selector: str, text: str) -> None:
        self.call(f"element/{self.find(selector)}/value", text=text)

    def run(self, script: str) -> Any:
        return self.call("execute/sync", script=script, args=[])

    def until(self, condition: str) -> Any:
        """What a condition gives, once it is true."""
        wait = f"""const done = arguments[0], look = () => {{
            const v = {condition}; v ? done(v) : setTimeout(look, 5); }}; look();"""
        return self.call("execute/async", script=wait, args=[])

    def picture(self, to: Path) -> None:
        shown = self.web.get(f"/session/{self.session}/screenshot").json()["value"]
        to.write_bytes(base64.b64decode(shown))


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    assert DRIVER is not None
    process = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = next(x for x in process.stdout if "started successfully on port" in x)
    port = int(line.rsplit(" ", 1)[1].strip().rstrip("."))
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as web:
        yield web
    process.terminate()
    process.communicate()


@pytest.fixture
def page(driver: httpx.Client, server: Server) -> Iterator[Page]:
    options = {"binary": CHROMIUM, "args": OPTIONS}
    wanted = {
        "alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
    }
    made = driver.post("/session", json={"capabilities": wanted}).json()["value"]
    assert "sessionId" in made, made
    window = Page(driver, made["sessionId"])
    window.call("timeouts", script=60_000)
    window.call("url", url=server.url)
    window.until("document.getElementById('facts').textContent")
    yield window
    logged = driver.post(f"/session/{window.session}/se/log", json={"type": "browser"})
    with suppress(httpx.HTTPError):
        driver.delete(f"/session/{window.session}")
    assert not [x for x in logged.json()["value"] if x["level"] == "SEVERE"], logged.text


def said(page: Page) -> list[str]:
    """All turns."""
    return list(page.run("return [...document.querySelectorAll('.turn')].map(x => x.textContent)"))


def test_an_answer_streams_in_with_its_figures(page: Page, tmp_path: Path) -> None:
    page.run(ENDLESS.replace("MOST", "40"))
    assert page.run("return document.getElementById('model').textContent") == "small"
    page.type("#text", "Say something.")
    page.click("#send")
    note = page.until("document.querySelector('.note')?.textContent")
    turns = said(page)
    assert turns[0] == "Say something." and len(turns) == 2 and turns[1]
    for told in ("40 tokens", "per second", "first after", "drafted kept", "read before"):
        assert told in note, note
    page.picture(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 1000
    page.type("#text", "And then?\ue007")  # the key Enter
    page.until("document.querySelectorAll('.note').length == 2")
    assert len(said(page)) == 4
    page.click("#reset")
    assert said(page) == []


def test_the_button_stops_an_answer(page: Page, server: Server) -> None:
    """And the server computes no more of it. The page itself looks and presses, at once."""
    page.run(ENDLESS.replace("MOST", "100000"))
    page.type("#text", "Go on.")
    page.click("#send")
    said = "document.querySelectorAll('.turn')[1]?.textContent.length > 10"
    press = "(b => { const was = b.textContent; b.click(); return was; })"
    assert page.until(f"{said} && {press}(document.getElementById('send'))") == "Stop"
    page.until("document.getElementById('send').textContent == 'Send'")
    assert not page.run("return document.querySelectorAll('.error').length")
    looked = 0
    while json.loads(httpx.get(f"{server.url}/health").text)["open"]:
        looked += 1
        assert looked < 2000, "the server still answers"


def test_what_is_said_is_text_and_no_page(page: Page) -> None:
    page.run(ENDLESS.replace("MOST", "2"))
    page.type("#text", "<img src=x onerror=document.title='bad'><b>b</b>")
    page.click("#send")
    page.until("document.querySelector('.note')")
    assert page.run("return document.querySelectorAll('#talk img, #talk b').length") == 0
    assert page.run("return document.title") == "ggraph"


def test_errors_are_shown(page: Page) -> None:
    page.run("window.fetch = () => Promise.reject(new Error('the server is gone'))")
    page.type("#text", "Hi")
    page.click("#send")
    page.until("document.querySelector('.error')?.textContent == 'the server is gone'")
    page.until("document.getElementById('send').textContent == 'Send'")
