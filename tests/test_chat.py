"""A conversation in the terminal, as a process of its own."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from image_kit import made
from small_model import learnable_model, small_model
from test_images import png

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


def test_images_are_shown_with_the_next_line(tmp_path: Path) -> None:
    """Those of the command line with the first one; what is no image is refused, and forgotten."""
    path = made(tmp_path) / "smolvlm"
    files = [tmp_path / "a.png", tmp_path / "b.png"]
    for shade, file in zip((0, 255), files, strict=True):
        file.write_bytes(png(20, 20, shade=shade))
    (tmp_path / "c.png").write_text("none")
    said = f"ab\n/image {tmp_path / 'c.png'}\ncd\n/image {files[1]}\n/image {tmp_path}/d\nef\n"
    done = subprocess.run(
        [sys.executable, "-m", "models", "chat", "-m", str(path), "-t", "1", "-n", "8",
         "--temp", "0", "--image", str(files[0])],
        cwd=ROOT, input=said, capture_output=True, text=True, check=True,
    )  # fmt: skip
    images = [f.read_bytes() for f in files]
    talk, words = list[dict[str, Any]](), list[str]()
    m = load(path, threads=1)
    for count, text in ((1, "ab"), (2, "ef")):
        talk.append(
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}
        )
        run = Generation(m, m.chat_ids(talk, images[:count]), SamplerConfig(temp=0), 8)
        words.append("".join(run.run(None)))
        talk.append({"role": "assistant", "content": words[-1]})
    m.close()
    assert done.stdout == f"{words[0]}\n{words[1]}\n" and words[0] != words[1]
    assert "no image (PNG" in done.stderr and f"cannot read {tmp_path}/d" in done.stderr


def test_a_full_context_is_told_with_a_way_out(tmp_path: Path) -> None:
    """An answer that was cut, lines that do not fit any more, and one that never will."""
    path = learnable_model(tmp_path)
    said = f"ab\n{'y' * 30}\ncd\n/reset\n{'x' * 2000}\nab\n"
    done = subprocess.run(
        [sys.executable, "-m", "models", "chat", "-m", str(path), "-t", "1", "-c", "40",
         "--temp", "0"],
        cwd=ROOT, input=said, capture_output=True, text=True, check=True,
    )  # fmt: skip
    way = "(/reset forgets the conversation, -c at the start gives more)"
    cut = f"the answer was cut: the context of 40 tokens is full {way}"
    err = done.stderr.splitlines()
    assert [line for line in err if "cut" in line] == [cut, cut]
    full = [line for line in err if "but the context holds" in line]
    assert len(full) == 3 and all(line.endswith(way) for line in full[:2])
    assert way not in full[2] and "(-c sets another)" in full[2], "nothing is there to forget"
    assert len(done.stdout.splitlines()) == 2


def test_a_line_that_no_template_takes_is_not_kept(tmp_path: Path) -> None:
    chat = "{% for m in messages %}{{ raise_exception('bad') if m.content == 'x' else m.content }}"
    path = small_model(tmp_path / "m.gguf", {"tokenizer.chat_template": chat + "{% endfor %}"})
    done = subprocess.run(
        [sys.executable, "-m", "models", "chat", "-m", str(path), "-t", "1", "-n", "3",
         "--temp", "0"],
        cwd=ROOT, input="x\nab\n", capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr.count("bad") == 1 and done.stdout.strip()
