"""`ggraph train-eagle3`: a head for your model, from answers that the model gives."""

import importlib
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ggraph import Array, InputError

from ..heads.layouts import default_taps
from ..registry import Model
from ..run.load import load
from ..train.data import AnswerOptions, describe, make_answers
from ..train.prompts import read_prompts, without
from .common import AsJson, Threads, apart, model_path, notes, print_json

Target = Annotated[
    Path | None,
    typer.Option("--target", "--model", "-m", help="GGUF file or folder; default: SmolLM2."),
]
Exclude = Annotated[
    list[Path] | None, typer.Option(help="Prompts that must not be trained on; repeatable.")
]
Taps = Annotated[str | None, typer.Option(help="Layer inputs to read; default 2, N/2 and N-3.")]
Alive = Annotated[
    int, typer.Option(help="Later steps learn where guesses were among the best N; 0: everywhere.")
]
Candidates = Annotated[
    int, typer.Option(help="Random tokens in a loss beside the likely ones; 0: all tokens.")
]
FeedbackNorm = Annotated[
    bool, typer.Option("--feedback-norm", help="EAGLE-3.1: feed the normed output back.")
]
Start = Annotated[
    Path | None, typer.Option(help="Go on from this head instead of from the target's layer.")
]
OwnShare = Annotated[float, typer.Option(help="Share of texts whose prompt the target makes up.")]
DraftVocabulary = Annotated[
    int, typer.Option(help="Draft tokens, 0 for all; a --start with fewer grows.")
]
SampledEvery = Annotated[
    int, typer.Option(help="Every such answer is sampled at 0.7, the others are greedy.")
]
Epochs = Annotated[float, typer.Option(help="How often all tokens are seen.")]
PromptShare = Annotated[
    float, typer.Option(help="Share of the prompts' positions that is learnt from, too.")
]
Type = Annotated[str, typer.Option("--type", help="Type of the GGUF file.")]
Round = Annotated[
    bool, typer.Option("--round", help="Learn with matrices rounded as --type stores them.")
]
BF16 = Annotated[
    bool, typer.Option("--bf16", help="Learn with products in bfloat16; faster with AMX.")
]
Openings = Annotated[
    Path | None,
    typer.Option(help="Like --prompts; one begins each prompt that it makes up."),
]
DATA, FOLDER, FILE = "data", "head", "head.gguf"


def train_eagle3(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for data, log and head.")],
    target: Target = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines with a prompt each, or one prompt a line.")
    ] = None,
    exclude: Exclude = None,
    tokens: Annotated[int, typer.Option(help="Tokens of answers to make.")] = 1_000_000,
    own_share: OwnShare = 0.75,
    openings: Openings = None,
    sampled_every: SampledEvery = 4,
    new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 160,
    lanes: Annotated[int, typer.Option(help="Texts that are decoded together.")] = 32,
    taps: Taps = None,
    draft_vocab: DraftVocabulary = 8192,
    steps: Annotated[int, typer.Option(help="Steps of the training-time test.")] = 3,
    loss: Annotated[str, typer.Option(help="ce, kl or hard.")] = "ce",
    rate: Annotated[float, typer.Option(help="Learning rate at its highest.")] = 1e-3,
    alive: Alive = 2,
    candidates: Candidates = 512,
    epochs: Epochs = 2.0,
    batch_tokens: Annotated[int, typer.Option(help="Tokens of an optimiser step.")] = 2048,
    feedback_norm: FeedbackNorm = False,
    prompt_share: PromptShare = 1.0,
    gguf_type: Type = "q8_0",
    round_: Round = False,
    bf16: BF16 = False,
    start: Start = None,
    seed: Annotated[int, typer.Option(help="Seed of answers and training.")] = 0,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Train an EAGLE-3 head for a model on its own answers. Interrupted runs go on.

    Needs PyTorch: pip install 'ggraph-runtime\\[train]'. Writes OUT/head, OUT/head.gguf, a log.

    Examples:

      ggraph train-eagle3 --prompts prompts.jsonl --out ./head-for-smollm2

      ggraph train-eagle3 --model qwen.gguf --own-share 1 --tokens 200000 --out ./head

      ggraph train-eagle3 --start ./head/head --seed 1 --rate 5e-4 --out ./better
    """
    given = _given(out, prompts, exclude or (), (target, openings, start))
    loop = _torch_part("loop")
    options = loop.TrainOptions(
        draft_vocab=draft_vocab, steps=steps, loss=loss, rate=rate, batch_tokens=batch_tokens,
        epochs=epochs, feedback_norm=feedback_norm, alive=alive, candidates=candidates, seed=seed,
        prompts=prompt_share, rounding=gguf_type.lower() if round_ else None, bf16=bf16,
    )  # fmt: skip
    loop.use_threads(threads)
    own = own_share if given else 1.0
    begun = tuple(read_prompts(openings)) if openings is not None else ()
    answers = AnswerOptions(new_tokens, 384, lanes, sampled_every, 0.7, own, seed, begun)
    model = _answered(model_path(target), given, out, answers, tokens, taps, threads)
    with _training(as_json) as tell:
        net, ids = loop.train(loop.Target.of(model), out / DATA, out, options, tell, start)
    _written(net, model, ids, out, gguf_type)
    _conclude(out / FILE, len(ids), as_json)


def _conclude(head: Path, vocabulary: int, as_json: bool) -> None:
    if as_json:
        print_json({"head": str(head), "draft_vocabulary": vocabulary})
    else:
        print(f"{head}: use it with ggraph eagle3 --head {head}")


def _given(
    out: Path, prompts: Path | None, exclude: Sequence[Path], others: Sequence[Path | None]
) -> list[str]:
    """The prompts, without those to exclude. InputError where the head would be written over one
    of these files or of the `others`, such as the head to go on from."""
    for written in (out / FILE, out / FOLDER / "model.safetensors"):
        apart(written, prompts, *exclude, *others)
    if prompts is None:
        return []
    return without(read_prompts(prompts), [p for f in exclude for p in read_prompts(f)])


def _answered(
    path: Path,
    given: Sequence[str],
    out: Path,
    options: AnswerOptions,
    tokens: int,
    taps: str | None,
    threads: int | None,
) -> Model:
    """Make what is missing of the answers; returns the target."""
    with closing(load(path, threads=threads)) as m:
        layers = _taps(taps) or default_taps(m.model.layer_count)
        with _bar("answers", tokens) as move:
            make_answers(m, given, layers, out / DATA, options, enough=tokens, report=move)
        return m.model


def _written(net: Any, model: Model, ids: Array, out: Path, gguf_type: str) -> None:
    """The head's files."""
    export = _torch_part("export")
    export.export_folder(net, model, describe(out / DATA)["taps"], ids, out / FOLDER)
    export.export_gguf(out / FOLDER, model, out / FILE, gguf_type)


def _torch_part(name: str) -> Any:
    """A module that needs PyTorch, loaded only for this command."""
    try:
        return importlib.import_module(f"..train.{name}", __package__)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise InputError(
            "training needs PyTorch, which is not installed: pip install 'ggraph-runtime[train]'"
        ) from None


def _taps(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = [p.strip() for p in text.split(",")]
    if not all(p.isdecimal() for p in parts):
        raise InputError(f"--taps {text!r}: expected layer numbers such as 2,15,27")
    return tuple(map(int, parts))


@contextmanager
def _bar(title: str, total: int) -> Iterator[Any]:
    columns = (TextColumn(title), BarColumn(), TextColumn("{task.completed:,} tokens"))
    with Progress(*columns, TimeRemainingColumn(), console=notes(), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda tokens: progress.update(task, completed=tokens)


@contextmanager
def _training(quiet: bool) -> Iterator[Any]:
    """A report that prints one line per checkpoint."""
    console = notes()

    def tell(entry: dict[str, Any]) -> None:
        hits = " ".join(f"{h:.1%}" for h in entry["hits"])
        console.print(
            f"{entry['tokens']:,} of {entry['of']:,} tokens, loss {entry['loss']:.3f}, accepted "
            f"length {entry['accepted_length']:.3f} ({hits}), {entry['seconds_left']:.0f} s left",
            soft_wrap=True,
        )

    yield (lambda entry: None) if quiet else tell
