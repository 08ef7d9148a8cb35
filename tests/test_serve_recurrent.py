"""Recurrent models behind the server: what everybody hears is what they would hear alone."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from mtp_kit import QWEN, TINY2, with_draft_layer
from serve_kit import Server, served
from small_model import small_model

from ggraph.decode.sampler import SamplerConfig
from models.run.generation import Generation
from models.run.load import Loaded, load

THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<|unused1|>\n{% endif %}"
)  # opens a thought that earlier answers have no more
PROMPTS = [f"{'to be or not to be ' * (i % 3)}{i}" for i in range(8)]


def text_alone(m: Loaded, prompt: str, limit: int) -> str:
    ids = m.tokenizer.encode(prompt, bos=None)
    return "".join(Generation(m, ids, SamplerConfig(temp=0.0), limit).run(None))


def said(server: Server, prompt: str, limit: int, drafters: list[str]) -> str:
    wish = {"speculative": {"drafters": drafters, "most": 4}, "ignore_eos": True}
    reply = server.client.completions.create(
        model="any", prompt=prompt, max_tokens=limit, temperature=0.0, extra_body=wish
    )
    return reply.choices[0].text


@pytest.mark.parametrize("name", ["lfm2", QWEN])
def test_many_clients_hear_what_each_would_alone(name: str, tmp_path: Path) -> None:
    """Of Qwen3.5 with a layer that may draft for them."""
    source = with_draft_layer(QWEN, tmp_path / "mtp") if name == QWEN else TINY2 / name
    path = small_model(tmp_path / "small.gguf", source=source)
    own = ("--head", str(path)) if name == QWEN else ()
    with (
        served(path, "--parallel", "4", "--queue", "12", *own) as running,
        closing(load(path, threads=1)) as alone,
    ):
        names = [["suffix"], [], ["head"] if own else ["suffix"], ["tree"] if own else ["lookup"]]
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda i: said(running, PROMPTS[i], 40, names[i % 4]), range(8)))
        for prompt, text in zip(PROMPTS, found, strict=True):
            wanted = text_alone(alone, prompt, 40)  # which ends with the first end token
            assert text.startswith(wanted) and wanted


def spoken(server: Server, messages: list[dict[str, str]]) -> tuple[str, int, int]:
    """An answer; how many tokens its prompt has, and how many of them the cache had."""
    reply = server.client.chat.completions.create(
        model="any", messages=messages, max_tokens=8, temperature=0.0,  # type: ignore[arg-type]
    )  # fmt: skip
    told = reply.usage
    assert told is not None and told.prompt_tokens_details is not None
    text = reply.choices[0].message.content or ""
    return text, told.prompt_tokens, told.prompt_tokens_details.cached_tokens or 0


def test_a_conversation_goes_on_from_its_messages(tmp_path: Path) -> None:
    """Although its template takes back what it wrote behind them: a state is kept before that."""
    changes = {"tokenizer.chat_template": THINKING}
    path = small_model(tmp_path / "small.gguf", source=TINY2 / QWEN, changes=changes)
    options = "--parallel", "2", "--disk-cache", str(tmp_path / "disk")
    with served(path, *options) as running:
        messages = [{"role": "user", "content": "to be or not to be, " * 4}]
        text, whole, cached = spoken(running, messages)
        assert cached == 0 and whole > 64
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "and?"}]
        _, longer, cached = spoken(running, messages)
        assert cached == whole - 1 - len("assistant\n") - 2  # two markers, letters, a line's end
        assert longer > whole
    with served(path, *options) as again:  # another process, which has the state from the disk
        _, _, cached = spoken(again, messages[:1])
        assert cached == whole - 1 - len("assistant\n") - 2
