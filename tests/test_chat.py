"""A conversation in the terminal, as a process of its own."""

import subprocess
import sys
from pathlib import Path

from small_model import learnable_model

from ggraph.decode.sampler import SamplerConfig
from ggraph.text.prompt import prompt_ids
from models.run.generation import Generation
from models.run.load import load

ROOT = Path(__file__).parent.parent


def test_a_talk_remembers_forgets_and_goes_on_after_a_refusal(tmp_path: Path) -> None:
    path = learnable_model(tmp_path)
    said = "ab\n/stats\ncd\n/reset\nab\n" + "x" * 2000 + "\n/what\n/quit\nnever\n"
    done = subprocess.run(
        [sys.executable, "-m", "models", "chat", "-m", str(path), "-t", "1", "-n", "8",
         "--temp", "0", "--system", "s", "--draft", "suffix"],
        cwd=ROOT, input=said, capture_output=True, text=True, check=True,
    )  # fmt: skip
    with_system, words = [{"role": "system", "content": "s"}], []
    m = load(path, threads=1)
    for text in ("ab", "cd"):
        with_system.append({"role": "user", "content": text})
        ids = prompt_ids(m.tokenizer, with_system)
        words.append("".join(Generation(m, ids, SamplerConfig(temp=0), 8).run(None)))
        with_system.append({"role": "assistant", "content": words[-1]})
    m.close()
    assert done.stdout == f"{words[0]}\n{words[1]}\n{words[0]}\n"
    assert "answer 8 tokens" in done.stderr and "drafted tokens kept" in done.stderr
    assert "the context holds" in done.stderr and "/reset forgets" in done.stderr
