"""What a request may hold, with bounds on everything. Fields that are not known are passed over."""

from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from ..pooling import Pooling
from .fields import (
    MINUS_ONE,
    MOST_LIST,
    Body,
    Effort,
    LongText,
    OrNull,
    Scalar,
    Stop,
    TokenIds,
    few,
    items,
    of_types,
    only,
    unable,
)
from .items import EitherFlat, FlatTool, Item, Reasoning, ResponseText
from .messages import Choice, Message, Tool

SHORT = 512  # letters or tokens of a prompt for which no thread begins
PLAIN_TEXT = {"type": "text"}  # as a form, which is none

DrafterName = Literal["suffix", "lookup", "head", "tree", "model"]


class Speculative(Body):
    """How this request drafts, what it leaves out as the server does by itself. The text is the
    same with any of it."""

    drafters: Annotated[list[DrafterName], items(5)] | None = None
    most: Annotated[int, Field(ge=0, le=64)] | None = None
    off: OrNull[bool] = False


class StreamOptions(Body):
    """What a stream brings beside text."""

    include_usage: OrNull[bool] = False


class JsonSchema(Body):
    """A named schema, as in `response_format`."""

    name: OrNull[Annotated[str, Field(max_length=256)]] = "answer"
    schema_: Annotated[OrNull[dict[str, Any]], Field(alias="schema")] = Field(default_factory=dict)
    strict: bool | None = None


class ResponseFormat(Body):
    """The form that an answer must have. A schema may stand in it, or in `json_schema`. One that is
    not `strict` is followed as far as that can be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    @property
    def lenient(self) -> bool:
        """Whether what no grammar can hold is passed over."""
        strict = self.strict if self.json_schema is None else self.json_schema.strict
        return strict is False


class Lane(Body):
    """What a client has of one choice, or of what comes before (-1) and after (-2) the choices:
    events that it was sent, and the ids of the tokens in them."""

    lane: Annotated[int, Field(ge=-2, lt=64)]
    events: OrNull[Annotated[int, Field(ge=0)]] = 0
    tokens: OrNull[TokenIds] = Field(default_factory=list)


class GoingOn(Body):
    """A request whose answer may have begun elsewhere, and may have to end elsewhere."""

    id: Annotated[str, Field(pattern=r"^[0-9a-f]{1,64}$")]
    created: Annotated[int, Field(ge=0, lt=1 << 53)]
    lanes: OrNull[Annotated[list[Lane], items(66)]] = Field(default_factory=list)


class Sampling(Body):
    """What all requests for text share. Defaults of sampling are those of `ggraph generate`."""

    model: Annotated[str, Field(max_length=512)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[Annotated[int, Field(ge=0, le=1 << 20)] | None, MINUS_ONE] = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    repeat_last_n: Annotated[int, Field(ge=-1, le=1 << 20)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63, strict=True)] | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(few)] | None
    ) = None
    stop: Stop | Annotated[list[Stop], items(16)] | None = None
    n: Annotated[int, Field(ge=1, le=64)] | None = None
    ignore_eos: OrNull[bool] = False
    stream: Annotated[bool, Field(strict=True)] | None = None  # so that `Telling` reads it alike
    stream_options: StreamOptions | None = None
    priority: OrNull[Annotated[int, Field(ge=-100, le=100)]] = 0
    speculative: Speculative | None = None
    response_format: ResponseFormat | None = None
    going_on: GoingOn | None = None
    grammar: Annotated[Any, only()] = None
    json_schema: Annotated[Any, only()] = None
    min_tokens: Annotated[Any, only(0)] = None

    @property
    def stops(self) -> list[str]:
        """Stop strings as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def shared(self) -> dict[str, Any]:
        """What another form of the same request has of this one."""
        return {name: getattr(self, name) for name in Sampling.model_fields if name != "n"}


Limit = Annotated[int, Field(ge=-1, lt=1 << 63)] | None  # of tokens; -1 bounds nothing
TemplateKwargs = Annotated[
    dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w{0,63}$")], Scalar],
    Field(max_length=32),
    BeforeValidator(few),
]
OWN_NAMES = frozenset(  # of a template's variables
    ("messages", "tools", "documents", "bos_token", "eos_token", "tokenizer",
     "add_generation_prompt", "continue_final_message")
)  # fmt: skip


class ChatRequest(Sampling):
    """POST /v1/chat/completions. With `continue_final_message` the answer goes on in the last
    message, which is the assistant's."""

    messages: Annotated[list[Message], items(MOST_LIST, least=1)]
    max_tokens: Limit = None
    max_completion_tokens: Limit = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], items(128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Choice | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[Any, only([])] = None
    modalities: Annotated[Any, only(["text"])] = None
    chat_template_kwargs: TemplateKwargs | None = None
    reasoning_effort: Effort | None = None
    reasoning_format: Literal["none", "auto", "deepseek"] | None = None
    add_generation_prompt: OrNull[bool] = True
    continue_final_message: OrNull[bool] = False

    @field_validator("chat_template_kwargs")
    @classmethod
    def _of_the_template_s_own(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        for name in OWN_NAMES.intersection(value or ()):
            message = "{name} is not a variable of a template's own"
            raise PydanticCustomError("own", message, {"name": name})
        return value

    @field_validator("top_logprobs")
    @classmethod
    def _beside_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise PydanticCustomError("own", "say logprobs true beside it: else none are told")
        return value

    @field_validator("continue_final_message")
    @classmethod
    def _instead_of_a_new_one(cls, value: bool, info: ValidationInfo) -> bool:
        messages = info.data.get("messages") or [Message(role="user")]
        if value and info.data.get("add_generation_prompt"):
            message = "say add_generation_prompt false beside it: there is no new message"
            raise PydanticCustomError("own", message)
        if value and not (messages[-1].role == "assistant" and messages[-1].is_text):
            message = "expected a last message of the assistant, with text and no calls"
            raise PydanticCustomError("own", message)
        return value

    @property
    def variables(self) -> dict[str, Any]:
        """What the chat template is told beside messages and tools."""
        effort = {"reasoning_effort": self.reasoning_effort} if self.reasoning_effort else {}
        ends = {"add_generation_prompt": self.add_generation_prompt}
        goes_on = {"continue_final_message": True} if self.continue_final_message else {}
        return {**effort, **(self.chat_template_kwargs or {}), **ends, **goes_on}


def each(given: Any) -> list[Any]:
    """The texts of a field that holds one, or a list of them: each is a string or token ids. An
    empty list is one that is empty."""
    one = isinstance(given, str) or not given or isinstance(given[0], int)
    return [given] if one else given


class CompletionRequest(Sampling):
    """POST /v1/completions. A prompt is text or token ids, or a list of either. Special tokens in
    text are found where it says `parse_special`; else they are text, as whatever a user typed. With
    a `suffix` the answer is what stands between the two."""

    prompt: Annotated[
        LongText
        | TokenIds
        | Annotated[list[LongText], items(64)]
        | Annotated[list[TokenIds], items(64)],
        BeforeValidator(lambda prompt: "" if prompt is None else prompt),  # a new text's beginning
    ]
    max_tokens: Limit = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Annotated[Any, only(False)] = None
    suffix: LongText | None = None
    parse_special: OrNull[bool] = False
    best_of: int | None = None

    @field_validator("best_of")
    @classmethod
    def _as_many_as_told(cls, value: int | None, info: ValidationInfo) -> int | None:
        """Answers are not chosen among: all that are made are told."""
        if value not in (None, 1, info.data.get("n") or 1):
            raise unable("or say as many as n")
        return value

    @property
    def is_short(self) -> bool:
        """Whether it is one prompt, without a form, that can be read within a millisecond."""
        short = [len(p) <= SHORT for p in each(self.prompt)] == [True]
        return short and not self.suffix and self.response_format is None


ToRead = (
    LongText
    | TokenIds
    | Annotated[list[LongText], items(256, least=1)]
    | Annotated[list[TokenIds], items(256, least=1)]
)


class EmbeddingsRequest(Body):
    """POST /v1/embeddings. `pooling` of the last layer's states, as the model's files say it where
    it is not given; the result has length 1, of its first `dimensions` where that is given."""

    model: Annotated[str, Field(max_length=512)] | None = None
    input: ToRead
    encoding_format: Literal["float", "base64"] | None = None
    pooling: Pooling | None = None
    parse_special: OrNull[bool] = False
    dimensions: Annotated[int, Field(ge=1)] | None = None


class Document(Body):
    """One of those to rerank, in the form of an object."""

    text: LongText


class RerankRequest(Body):
    """POST /v1/rerank: the `top_n` documents that answer the query best, all of them where that is
    not given; with their texts where `return_documents`."""

    model: Annotated[str, Field(max_length=512)] | None = None
    query: LongText
    documents: Annotated[list[LongText | Document], items(256, least=1)]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: OrNull[bool] = False

    @property
    def texts(self) -> list[str]:
        """Those of the documents."""
        return [d if isinstance(d, str) else d.text for d in self.documents]


CHANCES = "message.output_text.logprobs"  # of what a response is to hold beside text


def _with_chances(include: Any) -> bool:
    return isinstance(include, list) and CHANCES in include


Metadata = Annotated[  # what a client notes on a response, which is given back
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
    BeforeValidator(few),
]


class ResponsesRequest(Sampling):
    """POST /v1/responses. What `store` keeps is there for `previous_response_id`."""

    input: LongText | Annotated[list[Item], items(MOST_LIST, least=1)]
    instructions: LongText | None = None
    max_output_tokens: Limit = None
    text: OrNull[ResponseText] = ResponseText()
    tools: Annotated[Annotated[list[FlatTool], items(128)] | None, of_types("function")] = None
    tool_choice: Literal["none", "auto", "required"] | EitherFlat | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: Annotated[str, Field(max_length=256)] | None = None
    store: bool | None = None
    metadata: Metadata | None = None
    reasoning: Reasoning | None = None
    n: Annotated[Any, only(1)] = None
    include: Any = None  # but for chances all of tools that are not here
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: Annotated[Any, only(PLAIN_TEXT, instead="text.format")] = None
    conversation: Annotated[Any, only()] = None
    prompt: Annotated[Any, only()] = None
    background: Annotated[Any, only(False)] = None
    truncation: Annotated[Any, only("disabled")] = None

    @property
    def chances(self) -> bool:
        """Whether those of its tokens are told."""
        return _with_chances(self.include)

    @field_validator("top_logprobs")
    @classmethod
    def _where_they_are_told(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not _with_chances(info.data.get("include")):
            message = "say {chances} in include beside it: else none are told"
            raise PydanticCustomError("own", message, {"chances": CHANCES})
        return value


class InputTokensRequest(ResponsesRequest):
    """POST /v1/responses/input_tokens: what is only counted, with or without new items."""

    input: OrNull[LongText | Annotated[list[Item], items(MOST_LIST)]] = Field(default_factory=list)


class InputItemsQuery(Body):
    """Which items GET /v1/responses/{id}/input_items is to tell."""

    limit: OrNull[Annotated[int, Field(ge=1, le=100)]] = 20
    order: OrNull[Literal["asc", "desc"]] = "desc"
    after: str | None = None


class TokenizeRequest(Body):
    """POST /tokenize."""

    content: LongText
    add_special: OrNull[bool] = False
    parse_special: OrNull[bool] = False
    with_pieces: OrNull[bool] = False


class DetokenizeRequest(Body):
    """POST /detokenize."""

    tokens: TokenIds
