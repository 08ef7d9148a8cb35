"""`ggraph eagle3` = `python -m models.eagle3`: plain and speculative, side by side."""

from contextlib import closing
from typing import Annotated

import typer

from ggraph.decode.sampler import SamplerConfig

from ..run.generation import Generation
from ..run.text import argument
from .common import AsJson, ModelOptions, Prompt, note
from .draft import DraftFlags, print_comparison
from .flat import flat


@flat
def eagle3(
    asked: Prompt,
    on: ModelOptions,
    drafts: DraftFlags,
    n_predict: Annotated[int, typer.Option("--n-predict", "-n", help="New tokens.")] = 128,
    temp: Annotated[float, typer.Option(help="Temperature; 0 takes the best token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampler.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text.")] = None,
    no_chat: Annotated[bool, typer.Option("--no-chat", help="Continue the text as is.")] = False,
    as_json: AsJson = False,
) -> None:
    """Decode plainly and with drafts, and show that the text is the same and what it saved.

    Examples:

      ggraph eagle3 "Plan a one day trip to DC."

      ggraph eagle3 --model llama.gguf --head head.gguf --tree 16,4,4 "Hello"
    """
    text = asked.text
    path = on.path
    head = drafts.head_of(path)
    drafting = drafts.drafting(head, True, path)
    if drafts.draft is None and drafting.options.names == ("suffix",):
        note(f"no EAGLE-3 head for {path.stem}: drafting with suffix")
    with closing(on.load(path, head, device_draft=drafts.device_draft)) as m:
        ids = m.prompt_ids(text, chat=not no_chat)
        ends = [argument(s, "--stop") for s in stop or ()]
        run = Generation(m, ids, SamplerConfig(temp=temp, seed=seed), n_predict, ends)
        print_comparison(m, run, drafting, as_json, on.profile)
