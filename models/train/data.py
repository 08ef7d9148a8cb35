"""Training data for EAGLE-3 heads: the target's own answers, with its features.

Legend: N tokens of a text, A taps, E width of the target.

A folder of data holds `data.json` (what it was made from) and shards `part-*.npz`, each of some
texts: `tokens` i32 (all texts joined), `lengths`, `prompts` (prompt lengths), `index` i64 per text,
and `features` f16 [sum of (N - 1), (A + 1) * E]: the taps, then the final norm's output, from which
the target's logits follow. A shard appears under its name only when it is whole, so that an
interrupted run goes on where it stopped.
"""

import io
import json
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ggraph import Array, InputError
from ggraph.decode.acceptance import Pick
from ggraph.decode.sampler import Sampler, SamplerConfig
from ggraph.errors import FormatError
from ggraph.serving.batch import Batch
from ggraph.serving.steps import ListRunner
from ggraph.serving.text import Plain, Request
from ggraph.serving.text import Text as Answered
from ggraph.serving.texts import Limits

from ..run.load import Loaded
from ..run.outputs import write_whole
from .prompts import OWN_TOKENS, OwnPrompt, Turn

SHARD_TEXTS = 64
LEAST_TEXT = 128  # tokens
OWN_INDEX = 1 << 24  # texts whose prompt the target wrote count from here
DESCRIPTION = "data.json"


@dataclass(frozen=True)
class AnswerOptions:
    """How answers are made. Every `sampled_every`-th prompt is answered at `temperature`, the
    others greedily; 0 samples none. Texts are cut at `text_tokens` with the prompt counted.

    `own_share` of the texts have prompts that the target itself makes up, sampled behind the chat
    template's opening of a user's turn: they are what it was tuned on. With `openings` such a
    prompt begins with one of them, so that it is of a kind that the head will meet.
    """

    new_tokens: int = 160
    text_tokens: int = 384
    lanes: int = 32
    sampled_every: int = 4
    temperature: float = 0.7
    own_share: float = 0.75
    seed: int = 0
    openings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.own_share <= 1:
            raise InputError(f"own_share {self.own_share}: expected 0 to 1")
        if self.new_tokens < 1 or self.lanes < 1 or self.sampled_every < 0:
            raise InputError(
                f"{self.new_tokens} new tokens, {self.lanes} lanes, every {self.sampled_every}th "
                "sampled: expected positive numbers"
            )
        if self.text_tokens < LEAST_TEXT:
            raise InputError(f"texts of {self.text_tokens} tokens: expected {LEAST_TEXT} or more")


@dataclass(frozen=True)
class Text:
    """One answered prompt: tokens [N], features f16 [N - 1, (A + 1) * E]."""

    index: int
    prompt_length: int
    tokens: Array
    features: Array


def features_of(m: Loaded, taps: Sequence[int]) -> tuple[int, ...]:
    """Layers whose inputs are kept: the taps, and the final norm as one past the last layer."""
    layers = m.model.layer_count
    if any(not 0 <= t < layers for t in taps) or len(set(taps)) != len(taps):
        raise InputError(f"taps {list(taps)}: expected distinct layers below {layers}")
    return (*taps, layers)


def make_answers(
    m: Loaded,
    prompts: Sequence[str],
    taps: Sequence[int],
    folder: Path,
    options: AnswerOptions,
    *,
    enough: int | None = None,
    report: Callable[[int], None] | None = None,
) -> None:
    """Answer prompts in order until `enough` tokens are stored, going on from what is there.

    `report(tokens)` is told after every shard. InputError where the folder was made from
    another model, other taps or other options.
    """
    kept = features_of(m, taps)
    described = {
        "model": m.model.name,
        "width": m.model.width,
        "taps": list(taps),
        "options": {k: v for k, v in asdict(options).items() if k != "openings"},
        **({"openings": list(options.openings)} if options.openings else {}),
    }
    openings = _encoded(m, options)
    _describe(folder, described)
    seen, stored = _progress(folder)
    if enough is not None and stored >= enough:
        return
    slots, length = options.lanes * options.text_tokens, options.text_tokens
    runner = ListRunner(m.model, m.session, slots, length, taps=kept, texts=options.lanes)
    together = Batch(runner, Limits(options.lanes, rows=max(options.lanes, Limits.rows)))
    tokens, batch = stored, list[Text]()
    for index, done in _answered(together, _requests(m, prompts, openings, seen, options)):
        batch.append(_text(index, done))
        if len(batch) == SHARD_TEXTS:
            tokens, batch = tokens + _store(folder, batch), []
            if report is not None:
                report(tokens)
            if enough is not None and tokens >= enough:
                return
    if batch:
        tokens += _store(folder, batch)
        if report is not None:
            report(tokens)


def _answered(
    batch: Batch, requests: Iterator[tuple[int, Request]]
) -> Iterator[tuple[int, Answered]]:
    """Each text with its index once it has ended; a new one begins then."""
    busy: dict[Answered, int] = {}
    while True:
        while len(busy) < batch.limits.texts and (new := next(requests, None)) is not None:
            busy[batch.submit(new[1])] = new[0]
        if not busy:
            return
        for done in batch.step():
            yield busy.pop(done), done


def _longest(options: AnswerOptions) -> int:
    return options.new_tokens + (OWN_TOKENS if options.own_share else 0)


def _text(index: int, a: Answered) -> Text:
    """A finished text; where the target wrote the prompt, the answer begins after it."""
    voice = a.request.voice
    own = voice.choose if isinstance(voice, Plain) else None
    written = own.written if isinstance(own, OwnPrompt) else 0
    features = np.concatenate(a.features).astype(np.float16)
    if not np.isfinite(features).all():
        raise InputError(f"text {index}: the target's features do not fit float16")
    start = min(len(a.request.prompt) + written, len(a.tokens) - 1)
    return Text(index, start, np.asarray(a.tokens, np.int32), features)


def _encoded(m: Loaded, options: AnswerOptions) -> list[list[int]]:
    """The openings as tokens. InputError where one leaves no room for a text."""
    found = [m.tokenizer.encode(opening, bos=False) for opening in options.openings]
    longest = max(map(len, found), default=0)
    if 2 * longest > options.text_tokens:
        raise InputError(
            f"an opening of {longest} tokens: expected at most {options.text_tokens // 2}"
        )
    return found


def _requests(
    m: Loaded,
    prompts: Sequence[str],
    openings: Sequence[Sequence[int]],
    seen: set[int],
    options: AnswerOptions,
) -> Iterator[tuple[int, Request]]:
    """Texts that are not there yet: given prompts in order, with the target's own among them.

    Given prompts keep their index, own ones count from `OWN_INDEX`. Ends with the given prompts,
    unless all are the target's own. Prompts that leave less than a quarter of a text are passed
    over.
    """
    turn = Turn.of(m.tokenizer) if options.own_share else None
    most = options.text_tokens * 3 // 4
    given = own = 0
    while True:
        if turn is not None and own <= options.own_share * (given + own):
            if OWN_INDEX + own not in seen:
                yield OWN_INDEX + own, _own(m, turn, openings, OWN_INDEX + own, options)
            own += 1
            continue
        if given == len(prompts):
            return
        if given not in seen and len(ids := m.prompt_ids(prompts[given])) <= most:
            yield given, _request(m, ids, _answering(m, given, options), 1, options)
        given += 1


def _answering(m: Loaded, index: int, options: AnswerOptions) -> Pick:
    """A sampler of the text's own, seeded by its index: no text depends on its neighbours."""
    every = options.sampled_every
    sampled = every and index % every == every - 1
    return _sampler(m, options.temperature if sampled else 0.0, index, options)


def _own(
    m: Loaded, turn: Turn, openings: Sequence[Sequence[int]], index: int, options: AnswerOptions
) -> Request:
    write = _sampler(m, 1.0, index + OWN_INDEX, options)
    pick = OwnPrompt(turn, m.tokenizer.eos_ids, write, _answering(m, index, options))
    if not openings:
        return _request(m, turn.before, pick, pick.end_count, options)
    chosen = int(np.random.default_rng((options.seed, index)).integers(len(openings)))
    return _request(m, (*turn.before, *openings[chosen]), pick, pick.end_count, options)


def _request(
    m: Loaded, prompt: Sequence[int], pick: Pick, turns: int, options: AnswerOptions
) -> Request:
    """A text with its features that ends with so many end tokens, or is cut."""
    limit = min(_longest(options), options.text_tokens - len(prompt))
    return Request(prompt, Plain(pick, m.tokenizer.eos_ids, turns), limit, features=True)


def _sampler(m: Loaded, temperature: float, index: int, options: AnswerOptions) -> Pick:
    config = SamplerConfig(temp=temperature, seed=options.seed * 1_000_003 + index)
    return Sampler(config, m.model.vocab_size).sample


def _describe(folder: Path, described: dict[str, Any]) -> None:
    path = folder / DESCRIPTION
    folder.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        write_whole(path, (json.dumps(described, indent=2) + "\n").encode())
    elif (before := describe(folder)) != described:
        known = sorted({*before, *described})
        different = [k for k in known if before.get(k) != described.get(k)]
        raise InputError(f"{folder} was made otherwise: {', '.join(different)} differ")


def describe(folder: Path) -> dict[str, Any]:
    """What a folder of data was made from."""
    try:
        described = json.loads((folder / DESCRIPTION).read_text())
    except (OSError, ValueError) as error:
        raise FormatError(f"{folder} holds no training data: {error}") from None
    if not isinstance(described, dict):
        raise FormatError(f"{folder / DESCRIPTION}: not a JSON object")
    return described


def _store(folder: Path, texts: Sequence[Text]) -> int:
    """Write one shard; returns its tokens."""
    path = folder / f"part-{len(shards(folder)):05d}.npz"
    tokens = np.concatenate([t.tokens for t in texts])
    packed = io.BytesIO()
    np.savez(
        packed,
        tokens=tokens,
        lengths=np.array([len(t.tokens) for t in texts]),
        prompts=np.array([t.prompt_length for t in texts]),
        index=np.array([t.index for t in texts]),
        features=np.concatenate([t.features for t in texts]),
    )
    write_whole(path, packed.getvalue())
    return len(tokens)


def shards(folder: Path) -> list[Path]:
    """The whole shards of a folder, in order."""
    return sorted(folder.glob("part-*.npz"))


def _progress(folder: Path) -> tuple[set[int], int]:
    done: set[int] = set()
    tokens = 0
    for path in shards(folder):
        with np.load(path) as shard:
            done |= set(shard["index"].tolist())
            tokens += len(shard["tokens"])
    return done, tokens


def read_shard(path: Path, *, features: bool = True) -> list[Text]:
    """The texts of one shard, on demand without features. FormatError for a damaged one."""
    names = ("tokens", "lengths", "prompts", "index", *(("features",) if features else ()))
    try:
        with np.load(path) as shard:
            parts = {k: shard[k] for k in names}
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise FormatError(f"{path}: {error}") from None
    lengths = parts["lengths"]
    rows = parts.get("features", np.empty((int((lengths - 1).sum()), 0), np.float16))
    if len(parts["tokens"]) != lengths.sum() or len(rows) != (lengths - 1).sum():
        raise FormatError(
            f"{path}: {len(parts['tokens'])} tokens and {len(rows)} rows, expected "
            f"{lengths.sum()} and {(lengths - 1).sum()}"
        )
    texts, at = [], 0
    for i, n in enumerate(lengths.tolist()):
        tokens, prompt, index = parts["tokens"][at : at + n], parts["prompts"][i], parts["index"][i]
        texts.append(Text(int(index), int(prompt), tokens, rows[at - i : at - i + n - 1]))
        at += n
    return texts


def apart(t: Text) -> Text:
    """A text whose features do not keep those of its whole shard in memory."""
    return replace(t, features=t.features.copy())
