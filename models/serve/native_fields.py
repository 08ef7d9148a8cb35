"""What requests in llama-server's own form may hold."""

from typing import Annotated, Any

from pydantic import AliasChoices, BeforeValidator, Field

from .fields import MOST_LIST, Body, LongText, OrNull, TokenIds, few, items, only
from .schema import EmbeddingsRequest, ResponseFormat, Sampling, ToRead

NEVER = -100.0  # what is added to the logit of a token whose bias is false


def _by_token(value: Any) -> Any:
    """Biases by their tokens, which may also come as a list of pairs."""
    if isinstance(value, list) and all(map(_is_pair, value)):
        value = {str(token): bias for token, bias in value}
    if isinstance(value, dict):
        return {token: NEVER if bias is False else bias for token, bias in value.items()}
    return value


def _is_pair(given: Any) -> bool:
    return isinstance(given, list) and len(given) == 2 and isinstance(given[0], int | str)


class NativeRequest(Sampling):
    """What `/completion` and `/infill` share. A line that begins with less than `n_indent` spaces
    or tabs ends the answer, and so do `t_max_predict_ms` behind its first token, once it has a
    line's end. The reply has only `response_fields` where that names any, `a/b` for what is within
    `a`. Names of llama-server's ways to sample that are not here may have their defaults."""

    n_predict: OrNull[Annotated[int, Field(ge=-1, lt=1 << 63)]] = -1
    n: Annotated[int, Field(ge=1, le=64)] | None = Field(
        None, validation_alias=AliasChoices("n_cmpl", "n")
    )
    n_indent: OrNull[Annotated[int, Field(ge=0, le=1024)]] = 0
    t_max_predict_ms: OrNull[Annotated[int, Field(ge=-1, lt=1 << 31)]] = 0
    n_probs: OrNull[Annotated[int, Field(ge=0, le=20)]] = 0
    return_tokens: OrNull[bool] = False
    response_fields: OrNull[Annotated[list[Annotated[str, Field(max_length=256)]], items(64)]] = (
        Field(default_factory=list)
    )
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Field(ge=-100, le=100)]],
            BeforeValidator(few),
            BeforeValidator(_by_token),
        ]
        | None
    ) = None
    json_schema: dict[str, Any] | None = None
    grammar: Annotated[Any, only("", instead="json_schema")] = None
    lora: Annotated[Any, only([])] = None
    post_sampling_probs: Annotated[Any, only(False)] = None
    dynatemp_range: Annotated[Any, only(0)] = None
    typical_p: Annotated[Any, only(1)] = None
    dry_multiplier: Annotated[Any, only(0)] = None
    xtc_probability: Annotated[Any, only(0)] = None
    mirostat: Annotated[Any, only(0)] = None

    @property
    def tells_tokens(self) -> bool:
        """Whether the reply has token ids beside text, as each event of a stream has."""
        return self.return_tokens or bool(self.stream)

    @property
    def form(self) -> ResponseFormat | None:
        """The form that an answer must have, by either name."""
        if self.json_schema is None:
            return self.response_format
        return ResponseFormat(type="json_schema", schema_=self.json_schema)


class NativeCompletion(NativeRequest):
    """POST /completion. A prompt is text or token ids, or a list of such. Special tokens in text
    are found unless `parse_special` is false: here prompts are such as `/apply-template` writes."""

    prompt: LongText | TokenIds | Annotated[list[LongText | TokenIds], items(64, least=1)]
    parse_special: OrNull[bool] = True


class Extra(Body):
    """A part of another file, which a model is told before the one with the gap."""

    filename: OrNull[Annotated[str, Field(max_length=4096)]] = "file"
    text: OrNull[LongText] = ""


class InfillRequest(NativeRequest):
    """POST /infill. The gap is behind `input_prefix` and `prompt`, which is what stands before it
    in its line."""

    input_prefix: LongText
    input_suffix: LongText
    input_extra: OrNull[Annotated[list[Extra], items(MOST_LIST)]] = Field(default_factory=list)
    prompt: OrNull[LongText] = ""


class NativeEmbedding(EmbeddingsRequest):
    """POST /embedding: the same as /v1/embeddings, whose vectors have length 1."""

    input: Annotated[ToRead, Field(validation_alias=AliasChoices("content", "input"))]
    encoding_format: Annotated[Any, only("float")] = None
    embd_normalize: Annotated[Any, only(2)] = None
