"""From a path to a model that answers: checkpoint, tokenizer, chat template, session."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from ggraph import InputError, ModelError, Options, Session, dtypes, open_backend
from ggraph.backends.cpu.backend import CpuBackend
from ggraph.decode.engine import Engine
from ggraph.decode.prices import Prices
from ggraph.decode.runner import Runner
from ggraph.formats import open_checkpoint
from ggraph.serving.encoder import Encoder
from ggraph.text.chat import RENDERER
from ggraph.text.prompt import sewn_prompt
from ggraph.text.tokenizer import Tokenizer

from ..heads.layouts import AnyHead, open_head
from ..lora import adapted
from ..registry import Model, open_model
from ..tower import Tower
from ..tower_files import open_mmproj, tower_of
from .eye import Eye

DEFAULT_CONTEXT = 4096  # tokens, where the model allows as many
CACHE_TYPES = {"f32": dtypes.F32, "f16": dtypes.F16, "q8_0": dtypes.Q8_0}


@dataclass(frozen=True, eq=False)
class Opened(ABC):
    """A model whose session is open. `load_seconds` covers files, tokenizer and devices."""

    model: Model
    session: Session
    tokenizer: Tokenizer
    load_seconds: float

    @property
    @abstractmethod
    def context(self) -> int:
        """Tokens of one text."""

    def close(self) -> None:
        """Give devices and memory back."""
        self.session.close()


@dataclass(frozen=True, eq=False)
class LoadedEncoder(Opened):
    """One that makes vectors of texts."""

    encoder: Encoder

    @property
    def context(self) -> int:
        """Tokens of one text."""
        return self.encoder.context


@dataclass(frozen=True, eq=False)
class Loaded(Opened):
    """One that goes on with texts: everything that a runner needs."""

    runner: Runner
    engine: Engine
    another: Callable[[], Session]  # opens one on the same devices
    head: AnyHead | None = None
    draft_session: Session | None = None  # where drafts run on devices of their own
    mmproj: Tower | None = None  # of a file beside the model's
    prices: Prices = field(init=False)  # of steps and guesses, kept from text to text

    def __post_init__(self) -> None:
        object.__setattr__(self, "prices", Prices(partial(_alone, self.session)))

    @cached_property
    def eye(self) -> Eye:
        """What reads images for it. InputError where nothing does, ModelError for a tower whose
        rows have another width."""
        model = self.model
        tower = self.mmproj or tower_of(model.checkpoint)
        if tower is None:
            raise InputError(
                f"{model.name} reads text only: it has no tower for images (--mmproj names a file)"
            )
        if tower.width != model.given_width:
            raise ModelError(
                f"{tower.name} makes rows of {tower.width} numbers, but {model.name} takes "
                f"{model.given_width}: they do not belong together"
            )
        if tower.sight.most and not model.turns_by_place:
            raise ModelError(
                f"{model.name} does not say by which pairs rows of an image are turned (files that "
                "`ggraph convert` writes do)"
            )
        return Eye(tower, self.tokenizer, self.another, self.context)

    @property
    def context(self) -> int:
        """Tokens of one text."""
        return self.runner.context

    @property
    def drafts(self) -> Session:
        """Where drafters run."""
        return self.session if self.draft_session is None else self.draft_session

    def prompt_ids(
        self,
        text: str,
        *,
        chat: bool = True,
        system: str | None = None,
        special: bool = False,
        images: Sequence[bytes] = (),
    ) -> list[int]:
        """Token ids of a prompt, inside the model's chat template unless `chat` is off; then the
        texts of special tokens in it may be meant as these (`special`). Images' files stand before
        the text, in a chat."""
        if not chat:
            if images:
                raise InputError("images are part of a chat, whose template says where they stand")
            return self.tokenizer.encode(text, special=special, bos=None)
        messages = [{"role": "user", "content": with_images(text, len(images))}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        return self.chat_ids(messages, images)

    def chat_ids(
        self, messages: Sequence[Mapping[str, Any]], images: Sequence[bytes] = ()
    ) -> list[int]:
        """Token ids of a conversation, with rows in the place of its images, whose files these are,
        in order. Raises what `prompt_ids` of a tokenizer and an `Eye` do."""
        if images:
            self.eye  # noqa: B018 before a template objects: who sees nothing is told so
        text, seam = sewn_prompt(self.tokenizer, messages)
        if not images:
            return self.tokenizer.encode_sewn(text, seam)
        return self.eye.ids(text, seam, images, self.context)

    def close(self) -> None:
        """Give devices and memory back."""
        if "eye" in vars(self):
            self.eye.close()
        if self.draft_session is not None:
            self.draft_session.close()
        super().close()


def with_images(text: str, count: int) -> Any:
    """A message's content: so many images, and the text behind them."""
    return [*[{"type": "image"}] * count, {"type": "text", "text": text}] if count else text


class OnlyReads(InputError):
    """The model is an encoder, which does not go on with texts."""

    def __init__(self, model: Model) -> None:
        super().__init__(
            f"{model.name} is an encoder ({model.config.architecture}): it makes vectors or scores "
            "of texts, and no text; `ggraph serve` gives them (/v1/embeddings, /v1/rerank)"
        )
        self.model = model


def _alone(session: Session) -> bool:
    """Whether the CPU's threads stood aside in the latest step."""
    backend = session.backends["cpu"]  # a session always has one
    return isinstance(backend, CpuBackend) and backend.pool.alone


def device_names(text: str) -> list[str]:
    """Names from a comma-separated list. InputError where it is empty, or names one twice."""
    names = [n.strip() for n in text.split(",") if n.strip()]
    if not names:
        raise InputError(f"--device {text!r} names no device")
    if len(set(names)) < len(names):
        raise InputError(f"--device {text!r} names a device twice")
    return names


def open_session(
    devices: Sequence[str] = ("cpu",),
    options: Options | None = None,
    **backend_options: Any,
) -> Session:
    """A session on the named devices; the CPU is added as the last resort where it is missing.

    `backend_options` are the CPU's.
    """
    names = list(dict.fromkeys(devices))
    if not names:
        raise InputError("no device was named")
    if "cpu" not in names:
        names.append("cpu")
    backends = {n: open_backend(n, **(backend_options if n == "cpu" else {})) for n in names}
    return Session(backends, options)


def load(
    path: str | Path,
    *,
    ctx_size: int | None = None,
    threads: int | None = None,
    devices: Sequence[str] = ("cpu",),
    device_draft: str | None = None,
    options: Options | None = None,
    head: str | Path | None = None,
    exact: bool = False,
    profile: bool = False,
    cache_type: str = "f16",
    lora: Sequence[tuple[str | Path, float]] = (),
    mmproj: str | Path | None = None,
) -> Loaded:
    """Open a model for decoding.

    `ctx_size` is in tokens (default: the model's, at most 4096; 0: the model's). `head` is an
    EAGLE-3 head for the model, whose layers are then tapped, or the model's own path: its file may
    hold layers that draft. `device_draft` gives drafters a
    session of their own there,
    with its own copy of what they borrow from the model. `exact` computes with float32
    activations instead of 8-bit ones. `profile` makes the CPU able to time every op. `cache_type`
    is how keys and values are kept: one of `CACHE_TYPES`. `lora` are adapters, each with what it
    is multiplied by. `mmproj` is a GGUF file with the tower that makes rows of images, where that
    is not in the model's own folder.
    Raises FormatError, ModelError, InputError or BackendError; OnlyReads for an encoder.
    """
    begun = time.perf_counter()
    RENDERER.start()  # a tenth of a second, beside the loading
    path = Path(path)
    if not path.exists():
        raise InputError(f"no model at {path}")
    if cache_type not in CACHE_TYPES:
        raise InputError(f"cache type {cache_type!r}; known: {', '.join(CACHE_TYPES)}")
    model = adapted(open_model(path), [(Path(file), factor) for file, factor in lora])
    if not model.causal:
        raise OnlyReads(model)
    tower = None if mmproj is None else open_mmproj(Path(mmproj), open_checkpoint(mmproj))
    context = _context(model, ctx_size)
    model = model.reaching(context)
    options = replace(options or Options(), exact=exact or bool(options and options.exact))
    other = Options(exact=options.exact)
    cpu: dict[str, Any] = {"threads": threads, "exact": options.exact, "profile": profile}
    session = open_session(devices, options, **cpu)
    session.expect(model.catalogue.values())  # beside tokenizer and plans
    tokenizer = _tokenizer(model, path)
    beside = open_session([device_draft], other, **cpu) if device_draft else None
    drafting = open_head(Path(head), model) if head is not None else None
    taps = tuple(dict.fromkeys(drafting.taps)) if drafting is not None else ()
    kept = _cache_dtype(model, cache_type)
    runner = Runner(model, session, context, taps=taps, cache_dtype=kept)
    engine = Engine(runner, tokenizer.eos_ids)
    seconds = time.perf_counter() - begun
    another = partial(open_session, devices, other, **cpu)
    return Loaded(
        model, session, tokenizer, seconds, runner, engine, another, drafting, beside, tower
    )


def load_served(path: str | Path, texts: int, **how: Any) -> Loaded | LoadedEncoder:
    """The same, or an encoder that reads up to so many texts a step; `how` as of `load`."""
    try:
        return load(path, **how)
    except OnlyReads as found:
        own = {n: how[n] for n in ("ctx_size", "threads", "devices", "exact") if n in how}
        return load_encoder(found.model, texts=texts, **own)


def load_encoder(
    model: Model,
    *,
    ctx_size: int | None = None,
    threads: int | None = None,
    devices: Sequence[str] = ("cpu",),
    exact: bool = False,
    texts: int = 16,
) -> LoadedEncoder:
    """The same for an encoder that was opened, which reads up to so many texts a step. InputError
    for a model that is none."""
    begun = time.perf_counter()
    if model.causal:
        raise InputError(f"{model.name} is no encoder, but goes on with texts")
    context = _context(model, ctx_size)
    session = open_session(devices, Options(exact=exact), threads=threads, exact=exact)
    session.expect(model.catalogue.values())
    tokenizer = _tokenizer(model, Path(model.checkpoint.path))
    encoder = Encoder(model, session, context, texts=texts)
    return LoadedEncoder(model, session, tokenizer, time.perf_counter() - begun, encoder)


def _cache_dtype(model: Model, name: str) -> dtypes.DType:
    dtype, head = CACHE_TYPES[name], model.config.head_dim
    if head % dtype.block:
        raise InputError(f"cache type {name}: {model.name} has {head} numbers per head")
    return dtype


def _context(model: Model, wanted: int | None) -> int:
    if wanted is None:
        return min(model.context_length, DEFAULT_CONTEXT)
    if wanted == 0:
        return model.context_length
    if not 1 <= wanted <= model.context_length:
        raise InputError(
            f"context of {wanted} tokens: {model.name} was trained for 1 to {model.context_length}"
        )
    return wanted


def _tokenizer(model: Model, path: Path) -> Tokenizer:
    if model.checkpoint.format == "gguf":
        return Tokenizer.from_gguf(model.checkpoint.metadata)
    return Tokenizer.from_hf(path, model.vocab_size)
