"""The Python face of the runner, under the name that it has in a clone and in the wheel alike."""

import subprocess
import sys
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from cli_kit import ROOT

from ggraph import Array, InputError
from ggraph.decode.sampler import SamplerConfig
from models.api import Chat
from models.bench.spec import read_prompts
from models.cli.bench import PROMPTS
from models.run.generation import Generation

HEAVY = {
    "difflib", "ggraph.alloc.search.offline", "html", "importlib.metadata", "jinja2",
    "llvmlite.binding", "logging", "networkx", "numba", "numpy.random", "pydantic", "starlette",
    "statistics", "subprocess", "zipfile",
}  # fmt: skip


def test_a_chat_answers_as_the_runner_does(model: Path) -> None:
    with Chat(model, threads=1, ctx_size=256) as chat:
        pieces = list(chat.answer("Hello", temp=0, limit=12))
        again = "".join(chat.answer("Hello", temp=0, limit=12))
        m = chat.loaded
        run = Generation(m, m.prompt_ids("Hello"), SamplerConfig(temp=0), 12)
        assert "".join(pieces) == again == "".join(run.run(None)) != ""
        other = "".join(chat.answer("Hello", system="Be brief", temp=0, limit=12))
        assert other != again, "the system message takes part"
        bad: list[dict[str, Any]] = [
            {"limit": -7}, {"limit": 1.5}, {"system": 5}, {"stop": "a"}, {"prompt": b"Hello"},
            {"temp": "0"},
        ]  # fmt: skip
        for given in bad:
            with pytest.raises(InputError, match=r"limit|n-predict|system|stop|prompt|temp"):
                chat.answer(**{"prompt": "Hello", **given})


def test_answers_in_turn_are_refused_rather_than_mixed(model: Path) -> None:
    """Both would read the rows of the one that was begun last."""
    with Chat(model, threads=1, ctx_size=256) as chat:
        alone = list(chat.answer("Another", temp=0, limit=12))
        for taken in (1, 5):
            first = chat.answer("Hello", temp=0, limit=12)
            for _ in range(taken):
                next(first)
            second = chat.answer("Another", temp=0, limit=12)
            begun = [next(second)]
            with pytest.raises(InputError, match="another text was begun"):
                next(first)
            assert [*begun, *second] == alone


def test_another_thread_begins_a_text_behind_a_step_and_not_amid_it(model: Path) -> None:
    others = list[Thread]()

    def pick(row: Array) -> int:
        others.append(Thread(target=chat.loaded.engine.reset))
        others[-1].start()
        others[-1].join(0.1)
        assert others[-1].is_alive()
        return int(row.argmax())

    with Chat(model, threads=1, ctx_size=256) as chat:
        text = chat.loaded.engine.generate([1, 2, 3], pick, lambda _: None, limit=4)
        next(text)
        others[0].join()
        assert chat.loaded.runner.past == 0
        with pytest.raises(InputError, match="another text was begun"):
            next(text)


def test_the_name_is_the_same_in_a_clone(model: Path) -> None:
    code = (
        "import sys; from ggraph_models.api import Chat\n"
        "with Chat(sys.argv[1], threads=1) as c: print(len(list(c.answer('Hi', limit=3))))\n"
        "print(sorted(n for n in sys.modules if n == 'models'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(model)],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]", "nothing is loaded twice under two names"


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("models.run.load", HEAVY),
        ("models.cli.generate", HEAVY - {"difflib", "subprocess"} | {"rich.progress"}),  # typer's
    ],
)
def test_what_most_runs_do_not_touch_is_not_imported(module: str, heavy: set[str]) -> None:
    """Each takes memory of every process: 0.2 to 30 MB."""
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert not heavy & set(done.stdout.split())


def test_default_prompts_come_along() -> None:
    assert len(read_prompts(PROMPTS, 99)) == 12
    assert PROMPTS.is_relative_to(ROOT / "models")
