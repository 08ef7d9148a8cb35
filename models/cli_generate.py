"""`ggraph generate`: answer one prompt, with statistics. Floor 10."""

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Annotated, Any

import typer

from ggraph import InputError
from ggraph.decode.sampler import Sampler, SamplerConfig
from ggraph.decode.stream import TextStream

from .cli_common import (
    AsJson,
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
from .load import Loaded, load

EXAMPLES = """Examples:

  ggraph generate "What is the capital of France?"

  ggraph generate --model qwen3.gguf --temp 0 -n 64 "Write a haiku."

  cat notes.txt | ggraph generate --no-chat -
"""


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads standard input.")],
    model: ModelPath = None,
    n_predict: Annotated[
        int, typer.Option("--n-predict", "-n", help="New tokens at most; -1: until the end.")
    ] = 256,
    temp: Annotated[float, typer.Option(help="Temperature; 0 takes the best token.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Keep the k best tokens; 0: all.")] = 40,
    top_p: Annotated[float, typer.Option(help="Keep the best tokens up to this share.")] = 0.95,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the best.")] = 0.05,
    repeat_penalty: Annotated[float, typer.Option(help="Penalty on repetition; 1: none.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampler; -1: another each time.")] = -1,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text.")] = None,
    system: Annotated[str | None, typer.Option(help="System message of the chat.")] = None,
    no_chat: Annotated[bool, typer.Option("--no-chat", help="Continue the text as is.")] = False,
    ctx_size: Context = None,
    threads: Threads = None,
    device: Devices = "cpu",
    exact: Annotated[
        bool, typer.Option("--exact", help="Compute with float32 activations (slower).")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Answer a prompt and print how long everything took."""
    config = SamplerConfig(
        temp=temp, top_k=top_k, top_p=top_p, min_p=min_p, repeat_penalty=repeat_penalty,
        seed=None if seed < 0 else seed,
    )  # fmt: skip
    if n_predict < -1:
        raise InputError(f"--n-predict {n_predict}: expected a count, or -1 for no limit")
    text = read_prompt(prompt)
    path = model_path(model, as_json)
    names = device_names(device)
    with closing(load(path, ctx_size=ctx_size, threads=threads, devices=names, exact=exact)) as m:
        ids = m.prompt_ids(text, chat=not no_chat, system=system)
        pieces, stopped = [], "length"
        stream = TextStream(m.tokenizer, stop or ())
        try:
            for piece in answer(m, ids, config, n_predict, stream):
                pieces.append(piece)
                if not as_json:
                    print(piece, end="", flush=True)
            stopped = m.engine.statistics.stopped_by
        except KeyboardInterrupt:
            stopped = "interrupt"
        if stream.stopped is not None:
            stopped = "stop string"
        report(m, "".join(pieces), stopped, as_json)


generate.__doc__ = f"{generate.__doc__}\n\n{EXAMPLES}"


def answer(
    m: Loaded, ids: list[int], config: SamplerConfig, limit: int, stream: TextStream
) -> Iterator[str]:
    """The answer's text, piece by piece, without what ends it."""
    sampler = Sampler(config, m.model.vocab_size)
    sampler.accept_all(ids)
    tokens = m.engine.generate(ids, sampler.sample, sampler.accept, limit=limit)
    for token in tokens:
        if token in m.engine.ends:
            continue
        piece = stream.push(token)
        if piece:
            yield piece
        if stream.stopped is not None:
            return
    rest = stream.finish()
    if rest:
        yield rest


def report(m: Loaded, text: str, stopped: str, as_json: bool) -> None:
    """Statistics under the text, or everything as one JSON object."""
    facts = statistics(m, stopped)
    if as_json:
        print_json({"text": text, **facts})
        return
    print(flush=True)
    notes().print(
        f"[dim]load {facts['load_seconds']:.2f} s · plan and verify {facts['plan_seconds']:.2f} s "
        f"({facts['plans']} plans) · prompt {facts['prompt_tokens']} tokens at "
        f"{facts['prompt_tokens_per_second']:.0f}/s · decode {facts['new_tokens']} tokens at "
        f"{facts['decode_tokens_per_second']:.1f}/s · peak memory "
        f"{facts['peak_memory_bytes'] / 1e6:.0f} MB · ended by {stopped}[/dim]",
        soft_wrap=True,
    )


def statistics(m: Loaded, stopped: str) -> dict[str, Any]:
    """What the run took; seconds and bytes."""
    s = m.engine.statistics
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
    }


def peak_memory() -> int:
    """Largest resident size of this process so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


_START = time.perf_counter()
