"""What stands in a gap of a text: prompts for models that were taught to fill one in."""

from collections.abc import Sequence
from dataclasses import dataclass

from ggraph.text.tokenizer import Tokenizer

from .errors import Refused
from .native_fields import Extra, InfillRequest

MARKS = ("fim_pre", "fim_suf", "fim_mid")  # of what is before, of what is behind, of the gap
LETTERS_PER_TOKEN = 64  # a longer text cannot fit, and is refused or cut before anybody reads it
# Names where such belong: no request tells the repository's, or that of the file with the gap
REPOSITORY, FILE = "project\n", "file\n"
# At most a quarter of the context is kept for the answer, a half for other files: of these always
# the same, so that what is read ahead with no text around a gap is in the cache when there is one.
# What stands behind the gap has at least a quarter of what is left
ANSWER = BEHIND = 4
FILES = 2
STEPS = 8  # in which the beginning of a text is left out, lest it begin elsewhere with each letter


def marks_of(tokenizer: Tokenizer, param: str) -> list[int]:
    """The ids around a gap. Refused, naming a field, where the vocabulary has none."""
    found = tokenizer.vocabulary.fim
    marks = [found[role] for role in MARKS if role in found]
    if len(marks) < len(MARKS):
        raise Refused(f"{param}: this model has no tokens for filling in", param=param)
    return marks


def with_gap(marks: Sequence[int], before: Sequence[int], behind: Sequence[int]) -> list[int]:
    """Token ids of a text with a gap: what stands before it, what stands behind, where it is."""
    one, two, three = marks
    return [one, *before, two, *behind, three]


@dataclass(frozen=True)
class Gap:
    """Token ids of a prompt. Later ones are likely to begin with the first `stem`; `cut` says
    whether something of what was given did not fit."""

    ids: list[int]
    stem: int
    cut: bool


def fitted(tokenizer: Tokenizer, asked: InfillRequest, context: int) -> Gap:
    """A prompt that leaves room for the answer in so many tokens. Of what does not fit other files
    are left out first, the first of them before the others, then what is farthest from the gap.
    Refused as by `marks_of`."""
    marks, head = marks_of(tokenizer, "input_prefix"), tokenizer.encode("")
    least = context // ANSWER
    answer = least if asked.n_predict < 0 else min(asked.n_predict, least)
    room = max(0, context - answer - len(head) - len(marks))
    given = asked.input_prefix + asked.prompt, asked.input_suffix
    most = room * LETTERS_PER_TOKEN
    texts = given[0][_dropped(len(given[0]), most) :], given[1][:most]
    before, behind = (tokenizer.encode(text, bos=False) for text in texts)
    rest = behind[: max(room // BEHIND, room - len(before))]
    kept = before[_dropped(len(before), room - len(rest)) :]
    left = min(context // FILES, room - len(kept) - len(rest))
    files, left_out = _files(tokenizer, asked.input_extra, left)
    whole = texts == given and (kept, rest) == (before, behind)
    stem = len(head) + len(files) if files else -1
    return Gap([*head, *files, *with_gap(marks, kept, rest)], stem, left_out or not whole)


def _files(tokenizer: Tokenizer, given: Sequence[Extra], room: int) -> tuple[list[int], bool]:
    """Other files as models know them from repositories, or as text where the vocabulary has no
    token before a file, at most `room` ids; whether any was left out. The last ones stay."""
    fim, head, tail = tokenizer.vocabulary.fim, list[int](), list[int]()
    if (mark := fim.get("fim_sep")) is not None:
        tail = [mark, *tokenizer.encode(FILE, bos=False)]
        if "fim_rep" in fim:
            head = [fim["fim_rep"], *tokenizer.encode(REPOSITORY, bos=False)]
    room -= len(head) + len(tail)
    found = list[list[int]]()
    for file in reversed(given):
        text = f"{file.filename}\n{file.text}" + ("\n\n" if mark is None else "")
        if len(text) > room * LETTERS_PER_TOKEN:
            break
        ids = tokenizer.encode(text, bos=False, most=room)
        if mark is not None:
            ids = [mark, *ids]
        if len(ids) > room:
            break
        found.append(ids)
        room -= len(ids)
    ids = [i for file in reversed(found) for i in file]
    return [*head, *ids, *tail] if found else [], len(found) < len(given)


def _dropped(count: int, most: int) -> int:
    """How many of so many are left out at the beginning for the others to fit: a multiple of a
    step, so that a text that grows begins where it did, and is found in the cache."""
    step = max(1, most // STEPS)
    return -(-max(0, count - most) // step) * step
