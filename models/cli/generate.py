"""`ggraph generate`: answer one prompt, with statistics."""

import resource
import sys
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Annotated, Any, TextIO

import typer

from ggraph import InputError
from ggraph.decode.sampler import SamplerConfig

from ..images import read_images
from ..run.generation import Drafting, Generation, speculation_facts
from ..run.load import Loaded
from ..run.text import argument
from .common import (
    COMPILING,
    AsJson,
    Images,
    ModelOptions,
    Prompt,
    note,
    print_json,
    timed,
)
from .draft import DraftFlags, print_comparison, speculation_line
from .flat import flat
from .interrupt import STATUS, Answering, answering
from .profile import print_profile, profiled

NPredict = Annotated[
    int, typer.Option("--n-predict", "-n", help="New tokens at most; -1: until the end.")
]
Compare = Annotated[
    bool, typer.Option("--compare", help="Decode plainly as well, and show what drafts save.")
]
Special = Annotated[
    bool,
    typer.Option(
        "--parse-special",
        help="With --no-chat: the texts of special tokens in the prompt are these tokens.",
    ),
]
INTERRUPT = "interrupt"


@dataclass(frozen=True)
class SamplerFlags:
    """How the next token is chosen."""

    temp: Annotated[float, typer.Option(help="Temperature; 0 takes the best token.")] = 0.8
    top_k: Annotated[int, typer.Option(help="Keep the k best tokens; 0: all.")] = 40
    top_p: Annotated[float, typer.Option(help="Keep the best tokens up to this share.")] = 0.95
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the best.")] = 0.05
    repeat_penalty: Annotated[float, typer.Option(help="Penalty on repetition; 1: none.")] = 1.0
    seed: Annotated[int, typer.Option(help="Seed of the sampler; -1: another each time.")] = -1

    @property
    def config(self) -> SamplerConfig:
        """The sampler that these describe. InputError for bad values."""
        return SamplerConfig(**{**asdict(self), "seed": None if self.seed < 0 else self.seed})


@flat
def generate(
    asked: Prompt,
    on: ModelOptions,
    sampler: SamplerFlags,
    drafts: DraftFlags,
    n_predict: NPredict = 256,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text.")] = None,
    system: Annotated[
        str | None, typer.Option("--system", "-sys", help="System message of the chat.")
    ] = None,
    no_chat: Annotated[bool, typer.Option("--no-chat", help="Continue the text as is.")] = False,
    special: Special = False,
    compare: Compare = False,
    image: Images = None,
    as_json: AsJson = False,
) -> None:
    """Answer a prompt and print how long everything took.

    Examples:

      ggraph generate "What is the capital of France?"

      ggraph generate --model qwen3.gguf --temp 0 -n 64 "Write a haiku."

      ggraph generate --draft suffix --compare "Repeat after me: to be or not to be."

      cat notes.txt | ggraph generate --no-chat -

      ggraph generate --no-chat --parse-special "<|im_start|>user ..."

      ggraph generate -m SmolVLM-256M-Instruct/ --image cat.jpg "What is in the picture?"

      ggraph generate -m smolvlm.gguf --mmproj mmproj.gguf --image cat.jpg "What is this?"
    """
    config, text = sampler.config, asked.text
    if system is not None and no_chat:
        raise InputError("--system is part of a chat, which --no-chat leaves out")
    if special and not no_chat:
        raise InputError(
            "--parse-special is for --no-chat: in a chat only the template's markers count"
        )
    system = None if system is None else argument(system, "--system")
    ends = [argument(s, "--stop") for s in stop or ()]
    wanted = compare or drafts.named
    path = on.path
    head = drafts.head_of(path) if wanted else None
    drafting = drafts.drafting(head, wanted, path)
    shown = read_images(image or ())
    on = on.seeing() if shown else on
    with closing(on.load(path, head, device_draft=drafts.device_draft)) as m:
        ids = m.prompt_ids(text, chat=not no_chat, system=system, special=special, images=shown)
        run = Generation(m, ids, config, n_predict, ends)
        if compare:
            print_comparison(m, run, drafting, as_json, on.profile)
        else:
            answer(m, run, drafting if wanted else None, as_json, on.profile)


def answer(
    m: Loaded, run: Generation, drafting: Drafting | None, as_json: bool, profile: bool
) -> None:
    """Print the answer as it comes, and the statistics, also after an interrupt."""
    pieces: list[str] = []
    with answering() as state:
        stopped = _printed(m, run, drafting, pieces, None if as_json else sys.stdout, state)
        facts = statistics(m, run, stopped)
        line = None if run.speculation is None else speculation_line(run.speculation)
        if as_json and not profile:
            print_json({"text": "".join(pieces), **facts})
        elif not as_json:
            report(facts, line)
    if stopped == INTERRUPT:
        raise typer.Exit(STATUS)
    if profile:  # the same answer once more
        facts["profile"] = profiled(m, run, drafting)
        if as_json:
            print_json({"text": "".join(pieces), **facts})
        else:
            print_profile(facts["profile"])


def _printed(
    m: Loaded,
    run: Generation,
    drafting: Drafting | None,
    pieces: list[str],
    out: TextIO | None,
    state: Answering,
) -> str:
    """Fill `pieces` with the answer, print it to `out`, and say why it ended."""
    stopped = INTERRUPT
    try:
        for piece in run.run(drafting):
            COMPILING.mute()
            pieces.append(piece)
            if piece and out is not None:
                print(piece, end="", flush=True, file=out)
        state.done()
        stopped = run.stopped
    except KeyboardInterrupt:
        pass
    return stopped


def report(facts: dict[str, Any], speculation: str | None) -> None:
    """Statistics under the text."""
    print(flush=True)
    more = ("" if speculation is None else f"\n{speculation}") + COMPILING.confession
    note(
        f"load {facts['load_seconds']:.2f} s · plan and verify {facts['plan_seconds']:.2f} s "
        f"({facts['plans']} plans) · prompt {facts['prompt_tokens']} tokens at "
        f"{facts['prompt_tokens_per_second']:.0f}/s · decode "
        f"{timed(facts['new_tokens'], facts['decode_tokens_per_second'])} · peak memory "
        f"{facts['peak_memory_bytes'] / 1e6:.0f} MB · ended by {facts['stopped_by']}{more}"
    )


def statistics(m: Loaded, run: Generation, stopped: str) -> dict[str, Any]:
    """What the run took; seconds and bytes."""
    s = run.statistics
    drafts = speculation_facts(run.speculation) if run.speculation is not None else {}
    return {
        "model": m.model.name,
        "load_seconds": m.load_seconds + m.session.load_seconds,
        "plan_seconds": m.session.plan_seconds,
        "plans": m.session.plans_made,
        "prompt_tokens": s.prompt_tokens,
        "prompt_seconds": s.prompt_seconds,
        "prompt_tokens_per_second": s.prompt_per_second,
        "new_tokens": s.new_tokens,
        "decode_seconds": s.decode_seconds,
        "decode_tokens_per_second": s.decode_per_second,
        "sample_seconds": s.sample_seconds,
        "peak_memory_bytes": peak_memory(),
        "stopped_by": stopped,
        "wall_seconds": time.perf_counter() - _START,
        **({"speculation": drafts} if drafts else {}),
    }


def peak_memory() -> int:
    """Largest resident size of this process so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


_START = time.perf_counter()
