"""`ggraph generate`: answer one prompt, with statistics."""

import resource
import sys
import time
from contextlib import closing
from typing import Annotated, Any

import typer

from ggraph.decode.sampler import SamplerConfig

from ..run.generation import Drafting, Generation, speculation_facts
from ..run.load import Loaded, load
from .common import (
    AsJson,
    CacheType,
    Context,
    Devices,
    ModelPath,
    Threads,
    device_names,
    model_path,
    notes,
    print_json,
    read_prompt,
)
from .draft import (
    Accept,
    DeviceDraft,
    Draft,
    DraftMax,
    DraftMin,
    DraftPMin,
    Fixed,
    Head,
    ModelDraft,
    Tree,
    drafting_from,
    known_head,
    print_comparison,
    speculation_line,
)
from .profile import WithProfile, print_profile, profiled

NPredict = Annotated[
    int, typer.Option("--n-predict", "-n", help="New tokens at most; -1: until the end.")
]
Compare = Annotated[
    bool, typer.Option("--compare", help="Decode plainly as well, and show what drafts save.")
]
EXAMPLES = """Examples:

  ggraph generate "What is the capital of France?"

  ggraph generate --model qwen3.gguf --temp 0 -n 64 "Write a haiku."

  ggraph generate --draft suffix --compare "Repeat after me: to be or not to be."

  cat notes.txt | ggraph generate --no-chat -
"""


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads standard input.")],
    model: ModelPath = None,
    n_predict: NPredict = 256,
    temp: Annotated[float, typer.Option(help="Temperature; 0 takes the best token.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Keep the k best tokens; 0: all.")] = 40,
    top_p: Annotated[float, typer.Option(help="Keep the best tokens up to this share.")] = 0.95,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the best.")] = 0.05,
    repeat_penalty: Annotated[float, typer.Option(help="Penalty on repetition; 1: none.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampler; -1: another each time.")] = -1,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text.")] = None,
    system: Annotated[str | None, typer.Option(help="System message of the chat.")] = None,
    no_chat: Annotated[bool, typer.Option("--no-chat", help="Continue the text as is.")] = False,
    head: Head = None,
    draft: Draft = None,
    model_draft: ModelDraft = None,
    draft_max: DraftMax = 8,
    draft_min: DraftMin = 0,
    draft_p_min: DraftPMin = 0.0,
    fixed: Fixed = False,
    tree: Tree = None,
    accept: Accept = "match",
    compare: Compare = False,
    profile: WithProfile = False,
    ctx_size: Context = None,
    cache_type: CacheType = "f16",
    threads: Threads = None,
    device: Devices = "cpu",
    device_draft: DeviceDraft = None,
    exact: Annotated[bool, typer.Option("--exact", help="float32 activations (slower).")] = False,
    as_json: AsJson = False,
) -> None:
    """Answer a prompt and print how long everything took."""
    config = SamplerConfig(
        temp=temp, top_k=top_k, top_p=top_p, min_p=min_p, repeat_penalty=repeat_penalty,
        seed=None if seed < 0 else seed,
    )  # fmt: skip
    lengths = (draft_max, draft_min, draft_p_min)
    asked = compare or not (head is None and draft is None and model_draft is None)
    text = read_prompt(prompt)
    path, names = model_path(model, as_json), device_names(device)
    head = known_head(head, path, draft, model_draft) if asked else None
    drafting = drafting_from(head, draft, model_draft, lengths, fixed, tree, accept)
    with closing(
        load(
            path, ctx_size=ctx_size, threads=threads, devices=names, head=head, exact=exact,
            device_draft=device_draft if asked else None, profile=profile, cache_type=cache_type,
        )
    ) as m:  # fmt: skip
        ids = m.prompt_ids(text, chat=not no_chat, system=system)
        run = Generation(m, ids, config, n_predict, stop or ())
        if compare:
            print_comparison(m, run, drafting, as_json)
        else:
            answer(m, run, drafting if asked else None, as_json, profile)


generate.__doc__ = f"{generate.__doc__}\n\n{EXAMPLES}"


def answer(
    m: Loaded, run: Generation, drafting: Drafting | None, as_json: bool, profile: bool
) -> None:
    """Print the answer as it comes, and the statistics, also after an interrupt."""
    pieces, stopped = [], "interrupt"
    try:
        for piece in run.run(drafting):
            pieces.append(piece)
            if piece and not as_json:
                print(piece, end="", flush=True)
        stopped = run.stopped
    except KeyboardInterrupt:
        pass
    facts = statistics(m, run, stopped)
    line = None if run.speculation is None else speculation_line(run.speculation)
    if profile:
        facts["profile"] = profiled(m, run, drafting)
    if as_json:
        print_json({"text": "".join(pieces), **facts})
        return
    report(facts, line)
    if profile:
        print_profile(facts["profile"])


def report(facts: dict[str, Any], speculation: str | None) -> None:
    """Statistics under the text."""
    print(flush=True)
    drafts = "" if speculation is None else f"\n{speculation}"
    notes().print(
        f"[dim]load {facts['load_seconds']:.2f} s · plan and verify {facts['plan_seconds']:.2f} s "
        f"({facts['plans']} plans) · prompt {facts['prompt_tokens']} tokens at "
        f"{facts['prompt_tokens_per_second']:.0f}/s · decode {facts['new_tokens']} tokens at "
        f"{facts['decode_tokens_per_second']:.1f}/s · peak memory "
        f"{facts['peak_memory_bytes'] / 1e6:.0f} MB · ended by {facts['stopped_by']}{drafts}[/dim]",
        soft_wrap=True,
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
