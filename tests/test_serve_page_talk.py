"""What the page at `/` sends of a talk: its script, run by Node beside a page and a server that are
played."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from models import serve

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="there is no node")
PAGE = Path(serve.__file__).with_name("page.html")
PLAYED = """
const nodes = {}, asked = [], replies = [];
const node = () => ({ heard: {}, value: "", append() {}, replaceChildren() {},
                      addEventListener(kind, what) { this.heard[kind] = what; } });
globalThis.document = { getElementById: id => nodes[id] ??= node(), createElement: node };
globalThis.localStorage = { getItem: () => null };
globalThis.fetch = async (where, what) => {
  if (!what.body) throw new Error("no model is told of");
  asked.push(JSON.parse(what.body).messages);
  return replies.shift()(what.signal);
};
const piece = text => new TextEncoder().encode(
  `data: ${JSON.stringify({ choices: [{ delta: { content: text } }] })}\\n\\n`);
const says = (text, ends) => signal => ({ ok: true, body: new ReadableStream({ start(to) {
  to.enqueue(piece(text));
  if (ends) to.close();
  else signal.addEventListener("abort", () => to.error(new DOMException("", "AbortError")));
} }) });
const refuses = () => ({ ok: false, json: async () => ({ error: { message: "too long" } }) });
const settled = async () => { for (let i = 0; i < 50; i++) await new Promise(setImmediate); };
const say = async (text, reply) => {
  replies.push(reply);
  nodes.text.value = text;
  nodes.ask.heard.submit({ preventDefault() {} });
  await settled();
};
"""


def sent(steps: str) -> list[list[list[str]]]:
    """The messages of each request, after these steps."""
    script = PAGE.read_text().partition("<script>")[2].partition("</script>")[0]
    told = "console.log(JSON.stringify(asked));"
    code = f"{PLAYED}\n(() => {{{script}}})();\n(async () => {{{steps}; {told}}})();"
    assert NODE is not None
    done = subprocess.run([NODE, "-e", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [[[m["role"], m["content"]] for m in messages] for messages in json.loads(done.stdout)]


def test_a_new_talk_knows_nothing_of_an_answer_that_it_cut_off() -> None:
    first, second, third = sent(
        'await say("one", says("half", false)); nodes.reset.heard.click(); await settled();'
        'await say("two", says("whole", true)); await say("three", says("a", true))'
    )
    assert first == [["user", "one"]] and second == [["user", "two"]]
    assert third == [["user", "two"], ["assistant", "whole"], ["user", "three"]]


def test_an_answer_that_was_stopped_is_part_of_the_talk() -> None:
    _, again = sent(
        'await say("one", says("half", false)); await say("", null); replies.pop();'
        'await say("two", says("a", true))'
    )
    assert again == [["user", "one"], ["assistant", "half"], ["user", "two"]]


def test_what_was_refused_is_not_asked_again() -> None:
    *_, again = sent(
        'await say("one", says("a", true)); await say("long", refuses);'
        'await say("two", says("b", true))'
    )
    assert again == [["user", "one"], ["assistant", "a"], ["user", "two"]]
