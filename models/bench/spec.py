"""Measures drafts against plain decoding, prompt by prompt in one process.

Every prompt is decoded with each setting in turn, several rounds, a plain run before and after each
round; the texts must be equal. The prompt itself is read once: decoding is timed, and beside it, as
a second figure, decoding with what drafters took to read the prompt. A run in
which a plan was made is repeated: planning belongs to neither side. The ratio of a round is the
mean of its two plain runs over the speculative one, a prompt's the median over the rounds.

Plain decoding is held against itself by the same rule (a run against the mean of its neighbours):
ratios that scatter no more than these say nothing. Prompts that come out near the floor may get
further rounds, which count like the first, until it is clear on which side of it they stand.
"""

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ggraph import InputError
from ggraph.decode.sampler import SamplerConfig
from ggraph.decode.statistics import Statistics

from ..run.drafting import HEADS, DraftOptions, tree_shape
from ..run.generation import Drafting, Generation
from ..run.load import Loaded
from .peer import Peer, Reply

FLOOR = 0.97  # a prompt below this share of plain speed counts as slower
CLOSE = 1.03  # a few rounds cannot tell on which side of the floor a prompt below this stands
FEW = 10  # rounds are few up to here
LOT = 10  # further rounds made at once
CLEAR = 3.0  # standard errors between median and floor from which the side is clear
NORMAL_QUARTILES = 1.349  # standard deviations between the quartiles of a normal law
LOOP = 32  # tokens at the end of an answer that stood there before: a loop
TURNS = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)


@dataclass(frozen=True)
class Prompt:
    """A first turn. `group` is one of Spec-Bench's six, or the file's category."""

    name: str
    group: str
    category: str
    text: str


@dataclass(frozen=True)
class Setting:
    """A way to draft, with the name that tables show."""

    name: str
    drafting: Drafting


@dataclass
class Measured:
    """One prompt with one setting. `ratios` has one entry per round."""

    ratios: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    identical: bool = True
    did: Statistics | None = None
    whole_ratios: list[float] = field(default_factory=list)  # the reading of drafters counted too

    @property
    def ratio(self) -> float:
        """Median speed against plain decoding."""
        return statistics.median(self.ratios)

    @property
    def error(self) -> float:
        """Standard error of `ratio`, by the quartiles; 0 for a single round."""
        if len(self.ratios) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.ratios, n=4, method="inclusive")
        return math.sqrt(math.pi / 2 / len(self.ratios)) * (high - low) / NORMAL_QUARTILES

    @property
    def whole_ratio(self) -> float:
        """The same where what drafters took to read the prompt counts as decoding."""
        return statistics.median(self.whole_ratios or self.ratios)


@dataclass
class Answer:
    """What came of one prompt."""

    prompt: Prompt
    tokens: list[int]
    plain: list[float]  # tokens per second, before the first round and after each
    settings: dict[str, Measured]
    peer: list[Reply] = field(default_factory=list)  # llama.cpp with the same head, per round

    @property
    def noise(self) -> list[float]:
        """Speeds of plain runs against the mean time of the runs before and after."""
        if len(self.plain) < 3:
            return [self.plain[0] / self.plain[1]] if len(self.plain) == 2 else []
        threes = zip(self.plain, self.plain[1:], self.plain[2:], strict=False)
        return [here * (1 / before + 1 / after) / 2 for before, here, after in threes]

    @property
    def loops(self) -> bool:
        """Whether the answer's last 32 tokens stood in it before."""
        tail = self.tokens[-LOOP:]
        ends = range(len(self.tokens) - LOOP)
        return len(tail) == LOOP and any(self.tokens[s : s + LOOP] == tail for s in ends)


def read_prompts(path: Path, limit: int) -> list[Prompt]:
    """Up to `limit` first turns, as many from each group as there are. InputError: a bad file."""
    try:
        rows = [json.loads(line) for line in path.read_bytes().splitlines() if line.strip()]
        found = [
            Prompt(str(r.get("question_id", i)), _group(r, path), str(r["category"]), _turn(r))
            for i, r in enumerate(rows)
        ]
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: no prompts ({error}); each line: category and turns") from None
    if not found:
        raise InputError(f"{path} holds no prompts")
    groups: dict[str, list[Prompt]] = {}
    for p in found:
        groups.setdefault(p.group, []).append(p)
    in_turn = sorted((i, n) for n, g in enumerate(groups.values()) for i in range(len(g)))
    members = list(groups.values())
    return [members[n][i] for i, n in in_turn[:limit]]


def _turn(row: Mapping[str, Any]) -> str:
    """The first thing that was asked. TypeError where that is no list of texts."""
    if not isinstance(row["turns"], list) or not isinstance(row["turns"][0], str):
        raise TypeError(f"turns is {row['turns']!r:.40}")
    return row["turns"][0]


def _group(row: Mapping[str, Any], path: Path) -> str:
    category = str(row["category"])
    return "multi-turn" if category in TURNS and path.stem == "spec_bench" else category


def parse_setting(text: str, head: bool) -> Setting:
    """`suffix`, `suffix+eagle3`, `eagle3:4` (chain of 4), `eagle3:16/4/4` (tree). Without a number
    the length is chosen while decoding. InputError for anything else."""
    names, _, shape = text.strip().partition(":")
    listed = tuple(names.split("+"))
    if set(HEADS) & set(listed) and not head:
        raise InputError(f"setting {text!r} needs a head: give one with --head")
    if "/" in shape:
        tree = tree_shape(shape.replace("/", ","))
        assert tree is not None
        options = DraftOptions(listed, tree.total_tokens - 1, fixed=True, tree=tree)
    elif shape.isdecimal():
        options = DraftOptions(listed, int(shape), fixed=True)
    elif not shape:
        options = DraftOptions(listed)
    else:
        raise InputError(f"setting {text!r}: expected NAMES, NAMES:LENGTH or NAMES:TOTAL/DEPTH/K")
    return Setting(text.strip(), Drafting(options))


def measure(
    m: Loaded,
    prompts: Sequence[Prompt],
    settings: Sequence[Setting],
    limit: int,
    rounds: int,
    close_rounds: int = 0,
    peer: Peer | None = None,
) -> Iterator[Answer]:
    """Answers as they come; `limit` new tokens each, greedy. `peer` drafts with the same head.
    Prompts near the floor get up to `close_rounds` beyond the others' `rounds`.

    Before the first, its prompt is decoded in every way without being measured, so that costs are
    known and memory was touched.
    """
    m.engine.remembers = True
    try:
        for i, prompt in enumerate(prompts):
            ids = m.prompt_ids(prompt.text)
            run = Generation(m, ids, SamplerConfig(temp=0.0, seed=0), limit)
            for drafting in (None, *(s.drafting for s in settings)) if i == 0 else ():
                _planned(run, drafting)
            answer = Answer(prompt, [], [], {s.name: Measured() for s in settings})
            _rounds(answer, run, settings, rounds)
            left = close_rounds
            while left > 0 and _close(answer, settings):
                _rounds(answer, run, settings, min(LOT, left))
                left -= LOT
            if peer is not None:
                answer.peer = [peer.ask(ids, limit, ignore_end=False) for _ in range(rounds)]
            yield answer
    finally:
        m.engine.remembers = False


def _rounds(answer: Answer, run: Generation, settings: Sequence[Setting], count: int) -> None:
    """So many rounds more; the order of the settings turns round from one to the next."""
    before, rate, _share = _planned(run, None)
    answer.tokens = list(run.tokens)
    answer.plain.append(rate)
    for number in range(count):
        order = settings if number % 2 == 0 else settings[::-1]
        took = {s.name: _one(answer, run, s) for s in order}
        after, rate, _share = _planned(run, None)
        answer.plain.append(rate)
        for name, seconds in took.items():
            ratio = (before + after) / 2 / seconds if seconds else 1.0
            found = answer.settings[name]
            reading = found.did.reading_seconds if found.did is not None else 0.0
            found.ratios.append(ratio)
            found.whole_ratios.append(ratio * seconds / (seconds + reading) if seconds else 1.0)
        before = after


def _close(answer: Answer, settings: Sequence[Setting]) -> bool:
    """Whether a setting that chooses its lengths, so as to lose nothing, stands near the floor:
    after a few rounds, not far above it; after more, not clearly on either side."""
    free = [answer.settings[s.name] for s in settings if not s.drafting.options.fixed]
    if any(len(f.ratios) < FEW for f in free):
        return any(f.ratio < CLOSE for f in free)
    return any(abs(f.ratio - FLOOR) < CLEAR * f.error for f in free)


def _one(answer: Answer, run: Generation, setting: Setting) -> float:
    """One run with one setting; its seconds."""
    found = answer.settings[setting.name]
    seconds, rate, share = _planned(run, setting.drafting)
    found.identical &= run.tokens == answer.tokens
    found.rates.append(rate)
    found.shares.append(share)
    found.did = run.speculation
    return seconds


def _planned(run: Generation, drafting: Drafting | None) -> tuple[float, float, float]:
    """Seconds after the prompt, tokens per second and cores used, of a run that planned nothing."""
    for _ in range(8):  # drafts that depend on the clock may meet a new shape more than once
        made = run.m.session.plans_made
        wall, cpu = time.perf_counter(), time.process_time()
        "".join(run.run(drafting))
        cores = (time.process_time() - cpu) / (time.perf_counter() - wall)
        if run.m.session.plans_made == made:
            break
    seconds = run.statistics.decode_seconds
    return seconds, (len(run.tokens) - 1) / seconds if seconds else 0.0, cores


def summary(answers: Sequence[Answer], setting: str) -> dict[str, Any]:
    """The figures of one setting over some answers. Acceptance lengths count the bonus token."""
    found = [a.settings[setting] for a in answers]
    did = [f.did for f in found if f.did is not None]
    rounds = sum(d.rounds for d in did)
    kept, drafted = sum(d.accepted for d in did), sum(d.drafted for d in did)
    ratios = [f.ratio for f in found]
    noise = [statistics.median(a.noise) for a in answers if a.noise]
    return {
        "prompts": len(answers),
        "plain_tokens_per_second": statistics.mean(statistics.median(a.plain) for a in answers),
        "tokens_per_second": statistics.mean(statistics.median(f.rates) for f in found),
        "mean_speedup": statistics.mean(ratios),
        "mean_speedup_with_reading": statistics.mean(f.whole_ratio for f in found),
        "least_speedup": min(ratios),
        "below_floor": sum(r < FLOOR for r in ratios),
        "plain_against_itself_mean": statistics.mean(noise) if noise else None,
        "plain_against_itself_least": min(noise) if noise else None,
        "plain_against_itself_below_floor": sum(r < FLOOR for r in noise),
        "acceptance_length": (kept + rounds) / rounds if rounds else 0.0,
        "drafted": drafted,
        "accepted": kept,
        "acceptance_rate": kept / drafted if drafted else 0.0,
        "identical": all(f.identical for f in found),
    }


def peer_summary(answers: Sequence[Answer]) -> dict[str, Any]:
    """llama.cpp's tokens per second and share of drafted tokens kept, over the last rounds."""
    drafted = sum(a.peer[-1].drafts[0] for a in answers)
    kept = sum(a.peer[-1].drafts[1] for a in answers)
    rates = [statistics.median(r.decode_per_second for r in a.peer) for a in answers]
    return {
        "tokens_per_second": statistics.mean(rates), "drafted": drafted, "accepted": kept,
        "acceptance_rate": kept / drafted if drafted else 0.0,
    }  # fmt: skip


def tables(answers: Sequence[Answer], settings: Sequence[Setting]) -> dict[str, Any]:
    """For each setting: a summary per group, over all, and over answers that do not loop."""
    groups = list(dict.fromkeys(a.prompt.group for a in answers))
    parts: dict[str, Callable[[Answer], bool]] = {
        **{g: (lambda a, g=g: a.prompt.group == g) for g in groups},  # type: ignore[misc]
        "all": lambda a: True,
        "without loops": lambda a: not a.loops,
    }
    chosen = {name: [a for a in answers if test(a)] for name, test in parts.items()}
    return {
        s.name: {name: summary(part, s.name) for name, part in chosen.items() if part}
        for s in settings
    }


def facts(answer: Answer) -> dict[str, Any]:
    """One prompt's row of the JSON result."""
    return {
        "prompt": answer.prompt.name, "group": answer.prompt.group,
        "category": answer.prompt.category, "tokens": len(answer.tokens), "loops": answer.loops,
        "plain_tokens_per_second": answer.plain, "plain_against_itself": answer.noise,
        "settings": {
            name: {
                "tokens_per_second": f.rates, "speedups": f.ratios, "speedup": f.ratio,
                "speedup_error": f.error,
                "speedup_with_reading": f.whole_ratio,
                "identical": f.identical, "cores": f.shares,
                "steps_by_rows": f.did.by_rows if f.did else {},
                "rounds": f.did.rounds if f.did else 0,
                "acceptance_length": f.did.acceptance_length if f.did else 0.0,
                "drafted": f.did.drafted if f.did else 0,
                "accepted": f.did.accepted if f.did else 0,
            }
            for name, f in answer.settings.items()
        },
        **({"llama_cpp": peer_summary([answer])} if answer.peer else {}),
    }  # fmt: skip


def outcome(answers: Sequence[Answer], settings: Sequence[Setting]) -> dict[str, Any]:
    """All that the JSON result says of the answers: each of them, the tables, llama.cpp's share."""
    return {
        "answers": [facts(a) for a in answers],
        "tables": tables(answers, settings),
        **({"llama_cpp": peer_summary(answers)} if any(a.peer for a in answers) else {}),
    }
