"""`ggraph eagle3` = `python -m models.eagle3`: plain and speculative, side by side."""

import sys
from contextlib import closing
from typing import Annotated

import typer

from ggraph import GgraphError
from ggraph.decode.sampler import SamplerConfig

from ..run.generation import Generation
from ..run.load import load
from .common import (
    AsJson,
    CacheType,
    Context,
    Devices,
    ModelPath,
    Threads,
    complain,
    device_names,
    model_path,
    notes,
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
)
from .profile import WithProfile, print_profile, profiled


def eagle3(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads standard input.")],
    model: ModelPath = None,
    head: Head = None,
    draft: Draft = None,
    model_draft: ModelDraft = None,
    draft_max: DraftMax = 8,
    draft_min: DraftMin = 0,
    draft_p_min: DraftPMin = 0.0,
    fixed: Fixed = False,
    tree: Tree = None,
    accept: Accept = "match",
    n_predict: Annotated[int, typer.Option("--n-predict", "-n", help="New tokens.")] = 128,
    temp: Annotated[float, typer.Option(help="Temperature; 0 takes the best token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampler.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text.")] = None,
    no_chat: Annotated[bool, typer.Option("--no-chat", help="Continue the text as is.")] = False,
    profile: WithProfile = False,
    ctx_size: Context = None,
    cache_type: CacheType = "f16",
    threads: Threads = None,
    device: Devices = "cpu",
    device_draft: DeviceDraft = None,
    exact: Annotated[bool, typer.Option("--exact", help="float32 activations.")] = False,
    as_json: AsJson = False,
) -> None:
    """Decode plainly and with drafts, and show that the text is the same and what it saved.

    Examples:

      python -m models.eagle3 "Plan a one day trip to DC."

      ggraph eagle3 --model llama.gguf --head head.gguf --tree 16,4,4 "Hello"
    """
    lengths = (draft_max, draft_min, draft_p_min)
    text = read_prompt(prompt)
    path = model_path(model, as_json)
    head = known_head(head, path, draft, model_draft)
    drafting = drafting_from(head, draft, model_draft, lengths, fixed, tree, accept)
    if draft is None and drafting.options.names == ("suffix",):
        notes().print(f"[dim]no EAGLE-3 head for {path.stem}: drafting with suffix[/dim]")
    with closing(
        load(
            path,
            ctx_size=ctx_size,
            threads=threads,
            devices=device_names(device),
            device_draft=device_draft,
            head=head,
            exact=exact,
            profile=profile,
            cache_type=cache_type,
        )
    ) as m:
        ids = m.prompt_ids(text, chat=not no_chat)
        run = Generation(m, ids, SamplerConfig(temp=temp, seed=seed), n_predict, stop or ())
        print_comparison(m, run, drafting, as_json)
        if profile:
            print_profile(profiled(m, run, drafting))


def main() -> None:
    """Entry point of `python -m models.eagle3`."""
    try:
        typer.run(eagle3)
    except GgraphError as error:
        complain(error)
        sys.exit(2)


if __name__ == "__main__":
    main()
