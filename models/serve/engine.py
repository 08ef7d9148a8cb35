"""A loaded model as a server uses it: prompts to requests, requests to tickets."""

import secrets
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from ggraph import GgraphError, InputError, ModelError
from ggraph.decode.draft.eagle import TreeShape
from ggraph.decode.draft.lookup import PromptLookup, SuffixDrafter
from ggraph.decode.draft.tree import Drafter
from ggraph.decode.given import words
from ggraph.decode.policy import Adaptive
from ggraph.decode.sampler import Sampler, SamplerConfig
from ggraph.decode.speculation import Speculation
from ggraph.json_parts import texts
from ggraph.serving.batch import Batch
from ggraph.serving.blocks import ListBlock
from ggraph.serving.disk import Disk, Spill
from ggraph.serving.heads import HeadDrafter, ListHead
from ggraph.serving.prefix import alike
from ggraph.serving.prices import SharedPrices
from ggraph.serving.smaller import ListModel
from ggraph.serving.steps import ListRunner
from ggraph.serving.text import Request
from ggraph.serving.texts import Limits
from ggraph.text.prompt import sewn_prompt
from ggraph.text.stream import THINK, THOUGHT, TextStream

from ..heads.assistant import AssistantHead
from ..heads.dflash import BlockHead
from ..registry import Model
from ..run.drafting import goes_on
from ..run.eye import Eye
from ..run.load import Loaded, LoadedEncoder
from .errors import Refused
from .gaps import marks_of, with_gap
from .grammar import Grammars, schema_of
from .inbox import Inbox
from .messages import Message, images_of
from .reader import Answers, EncoderService, Reader
from .schema import ResponseFormat, Sampling, Speculative
from .settings import Settings
from .told import Retold, journal_of
from .voice import AnswerVoice, Form
from .worker import Ticket, Worker

FULL_TEXTS = 4  # of the longest kind that the cache holds unless told otherwise
STATES = 2  # of a recurrent model for each text that may run: its own, and one that is kept
LEVELS = BRANCHES = 4  # of a head's tree, as its authors have it
NO_WAY = "NoExtensionBias"  # what llguidance says where no token may come next
WITHOUT_HEAD: dict[str, Callable[[], Drafter]] = {
    "suffix": SuffixDrafter, "lookup": PromptLookup,
}  # fmt: skip
SAMPLING = {
    "temperature": "temp", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "seed": "seed",
    "repeat_penalty": "repeat_penalty", "repeat_last_n": "repeat_last_n",
    "frequency_penalty": "frequency_penalty", "presence_penalty": "presence_penalty",
}  # fmt: skip


@dataclass
class Wanted:
    """How a prompt is to be answered, beside what `Sampling` says."""

    limit: int  # of tokens; -1: none
    top: int | None = None
    form: Callable[[], Form] | None = None  # a new one for each answer
    stem: int = -1  # tokens of the prompt that later ones are likely to begin with
    shown: frozenset[int] = frozenset()  # special tokens that are text
    thinking: bool | None = None  # whether the prompt has opened a thought; None: all is text
    called: bool = False  # whether the answer is calls, in which no stop string is looked for
    best: bool = False  # whether the first answer to a prompt takes the best tokens
    stream: Callable[..., TextStream] = TextStream  # of what an answer says


@dataclass(eq=False)
class Service(Reader):
    """A model that answers."""

    m: Loaded
    cache_tokens: InitVar[int | None] = None
    disk: Disk | None = None  # for what the cache forgets
    smaller: Model | None = None  # that drafts
    slots: int = field(init=False)  # of the cache
    batch: Batch = field(init=False)
    sees: bool = field(init=False, default=False)  # whether it reads images

    def __post_init__(self, cache_tokens: int | None) -> None:
        m, parallel = self.m, self.settings.parallel
        self.slots = FULL_TEXTS * m.runner.context if cache_tokens is None else cache_tokens
        runner = ListRunner(
            m.model, m.session, self.slots, m.runner.context,
            cache_dtype=m.runner.cache_dtype, taps=(m.model.layer_count,),
            texts=STATES * parallel,
        )  # fmt: skip
        spill = None if self.disk is None else Spill(self.disk, runner)
        self.batch = Batch(runner, Limits(texts=parallel), m.prices, self._guessers(), spill)
        self.worker = Worker(self.batch, parallel + self.settings.queued)
        with suppress(InputError, ModelError):  # who shows an image is told
            m.eye.most = self.slots  # whoever is not in the cache any more has his read again
            self.sees = True

    def stop(self) -> None:
        """End every answer, and write what the disk is to keep."""
        super().stop()
        if self.disk is not None:
            self.disk.close()

    def _guessers(self) -> list[ListHead]:
        """Who drafts for all texts together. InputError for a head that is of no use here."""
        m, head, found = self.m, self.m.head, list[ListHead]()
        if head is not None and getattr(head, "masked", None) is not None:
            raise InputError(f"{head.name} drafts in parallel, which a server cannot use yet")
        if isinstance(head, AssistantHead):
            raise InputError(
                f"{head.name} drafts from the model's own cache, which a server cannot"
            )
        if isinstance(head, BlockHead):
            found.append(ListBlock(head, m.drafts, self.slots, m.runner.context))
        elif head is not None:
            found.append(ListHead(head, m.drafts, self.slots, m.runner.context))
        if self.smaller is not None:
            found.append(ListModel(self.smaller, m.drafts, self.slots, m.runner.context))
        return found

    @cached_property
    def grammars(self) -> Grammars:
        """Made when the first form is asked for: it takes a moment."""
        return Grammars(self.m.tokenizer, self.m.model.vocab_size)

    def form(self, wanted: ResponseFormat | None) -> Callable[[], Form] | None:
        """The form of an answer. Refused for a schema that cannot be followed."""
        schema = schema_of(wanted)
        if schema is None or wanted is None:
            return None
        form = self.grammars.json_schema(schema, lenient=wanted.lenient)
        if "$ref" in str(schema):  # else what no text can follow is known by now
            self._check(form.fresh())
        return form.fresh

    def _check(self, form: Form) -> None:
        """Refused, before anything runs, for a form that has no beginning."""
        try:
            form.allow(np.zeros(self.m.model.vocab_size, np.float32))
        except Refused as error:
            if NO_WAY not in str(error):
                raise
            raise Refused(
                "schema: no text can follow it, since a $ref leads back to itself",
                param="response_format",
            ) from None

    @property
    def eye(self) -> Eye:
        """What reads images. Refused where nothing does."""
        try:
            return self.m.eye
        except (InputError, ModelError) as error:
            raise Refused(str(error), param="messages") from None

    def images_in(self, messages: Sequence[Message]) -> list[bytes]:
        """What is in the files of a conversation's images. Refused where the model sees none."""
        return images_of(messages) if any(m.images for m in messages) and self.eye else []

    def chat_ids(
        self,
        messages: Sequence[dict[str, Any]],
        images: Sequence[bytes] = (),
        *,
        read: bool = True,
        **extra: Any,
    ) -> list[int]:
        """Token ids of a conversation, with rows in the place of its images' where they are `read`.
        Refused where it is too long, with tools and calls, or the template objects."""
        text, seam = self._sewn(messages, extra)
        if not images:
            return self._fits(self.m.tokenizer.encode_sewn(text, seam, self.context), "messages")
        try:
            ids = self.eye.ids(text, seam, images, self.context, read=read)
        except InputError as error:
            raise Refused(str(error), param="messages") from None
        return self._fits(ids, "messages")

    def chat_text(self, messages: Sequence[dict[str, Any]], **extra: Any) -> str:
        """What the template makes of a conversation: in it markers count, whoever wrote them."""
        text, seam = self._sewn(messages, extra)
        return text.replace(seam, "")

    def _sewn(self, messages: Sequence[dict[str, Any]], extra: dict[str, Any]) -> tuple[str, str]:
        """As `sewn_prompt`. Refused where there are more letters than fit."""
        self.check_letters(sum(map(len, texts([messages, extra]))), "messages")
        text, seam = sewn_prompt(self.m.tokenizer, messages, **extra)
        self.check_letters(len(text), "messages")
        return text, seam

    def stem_of(
        self,
        ids: list[int],
        messages: Sequence[dict[str, Any]],
        images: Sequence[bytes] = (),
        **extra: Any,
    ) -> int:
        """How many of a conversation's ids its next turn will begin with: those of the messages,
        without what asks for the answer, which a template may write otherwise once there is one.
        -1 where nobody needs to know, or the template cannot say."""
        if self.m.model.recurrent:
            with suppress(GgraphError):
                asked = {**extra, "add_generation_prompt": False}
                return alike(ids, self.chat_ids(messages, images, **asked))
        return -1

    def thinking(self, ids: list[int]) -> bool | None:
        """Whether a conversation's ids end within a thought; None where the template writes none,
        or the vocabulary has no tokens for what is around it."""
        t = self.m.tokenizer
        if THOUGHT not in (t.chat_template or "") or None in map(t.id_of, (THINK, THOUGHT)):
            return None
        last = next((i for i in reversed(words(ids)) if t.decode([i]).strip()), None)
        return last == t.id_of(THINK)

    def gap_ids(
        self, before: str | Sequence[int], behind: str, *, special: bool = False
    ) -> list[int]:
        """Token ids of a text with a gap, as models are asked to fill it in, behind what every
        prompt begins with. Refused where the vocabulary has no tokens for these, as for
        `text_ids`."""
        t, parts = self.m.tokenizer, list[Sequence[int]]()
        marks = marks_of(t, "suffix")
        for part in (before, behind):
            self.check_letters(len(part), "prompt")
        for part in (before, behind):
            if isinstance(part, str):
                part = t.encode(part, special=special, bos=False, most=self.context)
            parts.append(part)
        return self.text_ids([*t.encode(""), *with_gap(marks, *parts)])

    def check_room(self, prompts: int, body: Sampling) -> None:
        """Refused where there is no room for the answers to so many; asked before they are read,
        too."""
        count = prompts * (body.n or 1)
        if count > self.settings.choices:
            most = self.settings.choices
            raise Refused(f"{count} answers asked for, at most {most} may be", param="n")
        self.worker.check_room(count, "n")

    def answer(self, prompts: Sequence[list[int]], body: Sampling, wanted: Wanted) -> Answers:
        """Begin `n` answers to each prompt. Refused where there is no room, or a field is wrong."""
        self.check_room(len(prompts), body)
        count = body.n or 1
        journal = journal_of(body.going_on, self.m.model.vocab_size)
        said = Inbox(eager=bool(body.stream) or journal is not None)
        config, tickets, requests = self._config(body), list[Ticket](), []
        first = replace(config, temp=0.0) if wanted.best else config
        for i, ids in enumerate(p for p in prompts for _ in range(count)):
            ticket = Ticket(i, said)
            own = replace(config, seed=(config.seed or 0) + i % count) if i % count else first
            told = [] if journal is None else journal.told(i)
            requests.append(self._request(ticket, ids, own, body, wanted, told))
            tickets.append(ticket)
        for ticket, request in zip(tickets, requests, strict=True):
            self.worker.submit(ticket, request)
        return Answers(tickets, said, sum(map(len, prompts)), journal)

    def _config(self, body: Sampling) -> SamplerConfig:
        given = {
            ours: v for name, ours in SAMPLING.items() if (v := getattr(body, name)) is not None
        }
        seed = given.get("seed", -1)
        given["seed"] = secrets.randbelow(1 << 31) if seed == -1 else seed % (1 << 64)
        return SamplerConfig(**given)

    def _request(
        self,
        ticket: Ticket,
        ids: list[int],
        config: SamplerConfig,
        body: Sampling,
        wanted: Wanted,
        told: list[int],
    ) -> Request:
        m = self.m
        sampler = Sampler(config, m.model.vocab_size)
        if config.penalises:  # else nobody looks at them, which are many
            sampler.accept_all(ids if config.repeat_last_n < 0 else ids[-config.repeat_last_n :])
        stops = () if wanted.called else body.stops
        voice = AnswerVoice(
            sampler,
            wanted.stream(m.tokenizer, stops, wanted.shown, wanted.thinking),
            frozenset() if body.ignore_eos else m.tokenizer.eos_ids,
            lambda saying: self.worker.hear(ticket, saying),
            self._bias(body),
            wanted.form() if wanted.form is not None else None,
            wanted.top,
            deque(told),
        )
        drafts = self._drafts(body.speculative)
        if told:
            others = drafts or Speculation()
            drafts = Retold(told, others.drafters, others.policy)
        return Request(ids, voice, wanted.limit, body.priority, drafts, stem=wanted.stem)

    def _bias(self, body: Sampling) -> dict[int, float]:
        most, found = self.m.model.vocab_size, {}
        for name, value in (body.logit_bias or {}).items():
            if not name.isdecimal() or len(name) > 9 or int(name) >= most:
                message = f"logit_bias: token {name[:20]!r}, expected 0 to {most - 1}"
                raise Refused(message, param="logit_bias")
            found[int(name)] = value
        return found

    def _drafts(self, wanted: Speculative | None) -> Speculation | None:
        options = wanted or Speculative()
        most = self.settings.draft if options.most is None else options.most
        if options.off or not most or options.drafters == []:
            return None
        policy = Adaptive(most=most, prices=SharedPrices(self.batch.prices))
        names = options.drafters or self.default_drafters
        drafters = [self._drafter(name, policy, most) for name in dict.fromkeys(names)]
        return Speculation(drafters, policy)

    @property
    def default_drafters(self) -> list[str]:
        """Repetitions of the text and, where there are such, the head and the smaller model."""
        return ["suffix", *(g.kind for g in self.batch.guessers)]

    def _drafter(self, name: str, policy: Adaptive, most: int) -> Drafter:
        if name in WITHOUT_HEAD:
            return WITHOUT_HEAD[name]()
        kind = "head" if name == "tree" else name
        found = [g for g in self.batch.guessers if g.kind == kind]
        if not found:
            raise Refused(f"speculative.drafters: this server has no {kind}", param="speculative")
        if name == "tree" and isinstance(found[0], ListBlock):
            raise Refused("speculative.drafters: this head makes no trees", param="speculative")
        branches = min(BRANCHES, len(found[0].head.target_ids))
        tree = grown_to(most, branches) if name == "tree" else None
        return HeadDrafter(name, goes_on(policy, name), tree, asks=kind)


def grown_to(nodes: int, branches: int) -> TreeShape:
    """A head's tree of so many nodes."""
    most = branches + LEVELS * branches**2
    return TreeShape(1 + min(nodes, most), LEVELS, branches)


def service_of(
    m: Loaded | LoadedEncoder,
    settings: Settings,
    cache_tokens: int | None = None,
    disk: Disk | None = None,
    smaller: Model | None = None,
) -> Reader:
    """What a server has of a model of either kind. An encoder has no use for the last three."""
    if isinstance(m, LoadedEncoder):
        return EncoderService(m, settings)
    return Service(m, settings, cache_tokens, disk, smaller)
