"""Chat templates: messages to the prompt text a model was trained on.

Semantics are Hugging Face's (`apply_chat_template`): jinja2 with trimmed blocks, `raise_exception`,
`strftime_now`, `tojson`, loop controls and `{% generation %}`. Templates come out of downloaded
files; they run in a process of their own (renderer.py), which is ended when it takes too long.
"""

import atexit
import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ggraph.errors import FormatError, GgraphError, InputError
from ggraph.lazy import lazy
from ggraph.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import subprocess
else:
    subprocess = lazy("subprocess")

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""What a model gets that has no template but knows the ChatML markers."""

_MAX_SOURCE = 1 << 18  # letters; the longest published templates have some 20,000
_MAX_REPLY = 1 << 26  # bytes of one rendering
_PROGRAM = Path(__file__).with_name("renderer.py")
_START = (
    "import runpy, sys; sys.path += sys.argv[2:]; runpy.run_path(sys.argv[1], None, '__main__')"
)
_SECONDS = 10.0  # for one rendering; real ones take milliseconds


class Renderer:
    """The process that runs templates, started when it is first needed and after it was ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process, so that it is ready by the time it is asked. Costs nothing twice."""
        with self._lock:
            self._running()

    def ask(self, request: Mapping[str, Any]) -> dict[str, str]:
        """Its answer; `{"stopped": reason}` when there was none in time, or none at all.

        InputError when the request is no JSON.
        """
        try:
            line = json.dumps(request, default=dict).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as e:
            raise InputError(f"chat messages and variables must be JSON: {e}") from None
        with self._lock:
            process, late = self._running(), threading.Event()
            reply = _within(_SECONDS, process, line, late)
            if reply.endswith(b"\n") and not late.is_set():
                answer: dict[str, str] = json.loads(reply)
                return answer
            self._end()
        return {"stopped": f"it took over {_SECONDS:g} s" if late.is_set() else "it grew too large"}

    def close(self) -> None:
        """End the process; the next question starts another one."""
        with self._lock:
            self._end()

    def forget(self) -> None:
        """In a forked copy of this program: the process answers to the other one."""
        self._lock, self._process = threading.Lock(), None

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _START, str(_PROGRAM), *filter(None, sys.path)],
                env=None
                if os.name == "nt"
                else {},  # its secrets are none of a template's business
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _within(
    seconds: float, process: "subprocess.Popen[bytes]", line: bytes, late: threading.Event
) -> bytes:
    """The process's next line; it is killed, and `late` set, when that takes too long."""
    assert process.stdin is not None and process.stdout is not None, process.args

    def end() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(seconds, end)
    timer.start()
    try:
        process.stdin.write(line)
        process.stdin.flush()
        return process.stdout.readline(_MAX_REPLY)
    except BrokenPipeError:
        return b""
    finally:
        timer.cancel()
        timer.join()  # from here on it has either ended the process or never will


RENDERER = Renderer()
atexit.register(RENDERER.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=RENDERER.forget)


class ChatTemplate:
    """A compiled chat template. `bos` and `eos` are the texts of those tokens.

    FormatError when the source is no template.
    """

    def __init__(self, source: str, bos: str = "", eos: str = "") -> None:
        if not isinstance(source, str) or len(source) > _MAX_SOURCE:
            got = f"{len(source)} letters" if isinstance(source, str) else type(source).__name__
            raise FormatError(f"chat template: expected at most {_MAX_SOURCE} letters, got {got}")
        self.source = source
        self._tokens = {"bos_token": bos, "eos_token": eos}
        self._ask(None)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "ChatTemplate":
        """The template that came with a vocabulary, or ChatML where it has that format's markers.

        InputError when there is neither: then only plain completion makes sense.
        """
        source = tokenizer.chat_template
        if source is None:
            missing = [t for t in ("<|im_start|>", "<|im_end|>") if tokenizer.id_of(t) is None]
            if missing:
                raise InputError(
                    "the model has no chat template, and the default (ChatML) needs "
                    f"{' and '.join(missing)}, which its vocabulary lacks: use it without chat"
                )
            source = CHATML
        return cls(source, tokenizer.bos_text, tokenizer.eos_text)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str:
        """The prompt text. Markers that somebody typed look like the template's own in it: to
        encode what others wrote, use `prompt_ids` (prompt.py).

        `messages` are mappings with `role` and mostly `content`; `extra` are the template's own
        variables (tools, enable_thinking, ...). InputError when the messages are not such or the
        template refuses them; FormatError when the template fails or would run away.
        """
        check_messages(messages)
        variables = {**self._tokens, "tools": None, "documents": None, **extra}
        variables |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        return self._ask(variables)

    @property
    def wants_parts(self) -> bool:
        """Whether it shows a message's text only as a part of a list, beside which images are."""
        return _wants_parts(self.source, *self._tokens.values())

    def _ask(self, variables: dict[str, Any] | None) -> str:
        """The text; without variables the template is only compiled."""
        [(kind, said)] = RENDERER.ask({"source": self.source, "variables": variables}).items()
        if kind == "text":
            return said
        if kind == "refused":
            raise InputError(f"the chat template refuses the messages: {said}")
        raise FormatError(f"chat template{said if kind == 'broken' else f' {kind}: {said}'}")


@lru_cache(maxsize=8)
def _wants_parts(*template: str) -> bool:
    """Found by asking it: templates have no other way to say so."""
    probe, shown = "a word", list[bool]()
    for content in (probe, [{"type": "text", "text": probe}]):
        try:
            said = ChatTemplate(*template).render([{"role": "user", "content": content}])
            shown.append(said.count(probe) == 1)
        except GgraphError:
            shown.append(False)
    return shown == [False, True]


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """InputError where they are no mappings with roles."""
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise InputError(f"messages: expected a list, got {type(messages).__name__}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InputError(f"messages[{i}]: expected a mapping, got {type(message).__name__}")
        if not isinstance(message.get("role"), str):
            raise InputError(f"messages[{i}]: expected a role, got {message.get('role')!r}")
