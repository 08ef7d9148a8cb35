"""What decides the defaults of `ggraph train-eagle3`: heads that differ in one option each.

    python scripts/ablations.py run --data DATA --work WORK [--tokens 112000] [--threads 1]
    python scripts/ablations.py page

DATA holds answers as `ggraph train-eagle3` keeps them in OUT/data; where there are none, the target
writes prompts of its own and answers them. Every variant is trained from the same beginning on the
same texts in the same order (another seed: in another order) and written as a GGUF head under WORK;
what is there already is kept, so that an interrupted run goes on. Then all heads are judged on
texts that none was trained on: by simulated rounds on the stored answers, and by decoding their
prompts, all heads in turn in one process, plain runs before and after.

Results go to bench/results/training/ablations.json; `page` writes them as a table and a picture
into docs/training.md. Evaluation sets are not touched: they must not decide defaults.
Needs PyTorch: pip install 'ggraph-runtime[train]'.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT)]  # a clone need not be installed

import kept
import pages

from ggraph import Array
from models.bench.machine import load_average, machine
from models.bench.spec import Answer, Prompt, measure, parse_setting, summary
from models.heads.layouts import default_taps
from models.registry import open_model
from models.run.fetch import fetch_default
from models.run.load import Loaded, load
from models.train.data import AnswerOptions, Text, describe, make_answers, shards
from models.train.export import export_folder, export_gguf
from models.train.loop import batch_of, surveyed, train, use_threads
from models.train.net import DraftNet
from models.train.parts import Target, TrainOptions
from models.train.prompts import Turn
from models.train.steps import Words, accepted_lengths, run_steps

RESULTS = ROOT / "bench" / "results" / "training" / "ablations.json"
PAGE = ROOT / "docs" / "training.md"
PICTURE = ROOT / "docs" / "training" / "ablations.svg"
SCRIPT = "scripts/ablations.py"
BASE, CHAIN = "base", 4
FIXED, FREE = f"eagle3:{CHAIN}", "eagle3"  # a chain of 4, and a length that follows costs
LEAST = 16  # tokens of a held-out answer whose prompt is decoded
OWN = AnswerOptions(own_share=1.0)
HEAD = (
    "", "head, MB", "tokens seen", "answers' tokens it can say", "guesses right by depth",
    "tokens a round, held-out answers", "against base", "tokens a round, decoding",
    "chain of 4, clock", "chain of 4, counted", "free length, clock",
)  # fmt: skip
WIDE, LEFT, BAR = 720, 250, 24  # of the picture, in its units

Row = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """One head: its name, what differs from the base, its share of the base's tokens, and the head
    that it is held against."""

    name: str
    what: str
    options: Row
    tokens: float = 1.0
    against: str = BASE


DOUBLE = "tokens-double"
CHANGES = (
    Variant("vocabulary-4096", "4,096 draft tokens", {"draft_vocab": 4096}),
    Variant("vocabulary-16384", "16,384 draft tokens", {"draft_vocab": 16384}),
    Variant("steps-1", "1 step", {"steps": 1}),
    Variant("steps-5", "5 steps", {"steps": 5}),
    Variant("feedback-norm", "feedback behind the norm (3.1)", {"feedback_norm": True}),
)
VARIANTS = (
    Variant(BASE, "base", {}),
    Variant("other-seed", "another seed: what chance does", {"seed": 1}),
    *CHANGES,
    Variant("tokens-half", "half the tokens", {}, 0.5),
    Variant(DOUBLE, "twice the tokens", {}, 2.0),
    *(
        replace(v, name=f"{v.name}-double", what=f"{v.what}, twice", tokens=2.0, against=DOUBLE)
        for v in CHANGES
    ),
)


def answered(target: Path, data: Path, tokens: int, threads: int) -> None:
    """Make what is missing of the answers, unless `data` was made by another command."""
    if shards(data) and describe(data).get("options") != asdict(OWN):
        return
    with closing(load(target, threads=threads)) as m:
        make_answers(m, [], default_taps(m.model.layer_count), data, OWN, enough=tokens)


def judged(net: DraftNet, ids: Array, target: Target, held: Sequence[Text]) -> Row:
    """What chains of 4 would bring on held-out answers: a length and a weight for each text."""
    arrays = (target.embedding, target.output, np.asarray(ids, np.int64))
    words = Words.of(*(torch.from_numpy(a) for a in arrays))
    lengths, hits, weights, known = [], [], [], 0
    net.cpu().eval()
    for text in held:
        batch = batch_of([text], CHAIN, torch.device("cpu"))
        with torch.no_grad():
            results = run_steps(net, batch, words, CHAIN)
        length, right = accepted_lengths(results, CHAIN)
        lengths.append(length)
        hits.append(right)
        weights.append(int(results[0].known.sum()))
        known += int(np.isin(text.tokens[text.prompt_length :], ids).sum())
    said = sum(len(t.tokens) - t.prompt_length for t in held)
    return {
        "lengths": lengths, "weights": weights, "covered": known / said,
        "hits": np.average(hits, axis=0, weights=weights).tolist(),
    }  # fmt: skip


def trained(target: Target, held: Sequence[Text], learnt: int, v: Variant, given: Any) -> Row:
    """Train, export and judge one head in WORK/NAME; what is there already is kept."""
    folder, data = given.work / v.name, given.data
    if (folder / "result.json").is_file():
        found: Row = json.loads((folder / "result.json").read_text())
        return found
    options = TrainOptions(
        batch_tokens=given.batch_tokens, epochs=given.tokens * v.tokens / learnt,
        draft_vocab=given.draft_vocab, save_seconds=given.save_seconds,
    )  # fmt: skip
    options = replace(options, **v.options)
    net, ids = train(target, data, folder, options, lambda e: print(v.name, e, flush=True))
    export_folder(net, target.model, describe(data)["taps"], ids, folder / "head")
    export_gguf(folder / "head", target.model, folder / "head.gguf", given.type)
    log = [json.loads(line) for line in (folder / "training.jsonl").read_text().splitlines()]
    found = {
        "options": asdict(options), "tokens": log[-1]["tokens"],
        "seconds": log[-1]["seconds"], "draft_vocabulary": len(ids),
        "bytes": (folder / "head.gguf").stat().st_size,
        "held": judged(net, ids, target, held),
    }  # fmt: skip
    (folder / "result.json").write_text(json.dumps(found) + "\n")
    return found


def held_prompts(m: Loaded, held: Sequence[Text], count: int, new: int) -> list[Prompt]:
    """User's turns of held-out texts, as many as wanted from the first to the last; those whose
    prompt and `new` tokens the context does not hold are passed over."""
    turn = Turn.of(m.tokenizer)
    found = []
    for t in held:
        inside = t.tokens[len(turn.before) : t.prompt_length - len(turn.after)]
        text = m.tokenizer.decode(inside.tolist())
        fits = text and len(m.prompt_ids(text)) + new <= m.runner.context
        if fits and len(t.tokens) - t.prompt_length >= LEAST:
            found.append(Prompt(str(t.index), "held-out", "held-out", text))
    return [found[i * len(found) // count] for i in range(min(count, len(found)))]


def decoded(path: Path, heads: Sequence[str], held: Sequence[Text], given: Any) -> Row:
    """Held-out prompts decoded with every head in turn, prompt by prompt: summaries by head.

    A plain run stands before and after each round of each head. Every head has a model and a
    session of its own: heads in one session would share their weights' names.
    """
    ways = [parse_setting(s, True) for s in (FIXED, FREE)]
    answers: dict[str, list[Answer]] = {name: [] for name in heads}
    with ExitStack() as stack:
        runs: dict[str, Iterator[Answer]] = {}
        for name in heads:
            head = given.work / name / "head.gguf"
            m = load(path, head=head, threads=given.threads, ctx_size=given.ctx_size)
            stack.enter_context(closing(m))
            prompts = held_prompts(m, held, given.prompts, given.new_tokens)
            runs[name] = measure(m, prompts, ways, given.new_tokens, given.rounds)
        for number in range(len(prompts)):
            for name, run in runs.items():
                answers[name].append(next(run))
            print(f"decoded {number + 1} of {len(prompts)}", flush=True)
    return {name: {w.name: figures(a, w.name) for w in ways} for name, a in answers.items()}


def figures(answers: Sequence[Answer], setting: str) -> Row:
    """A summary, the speed of each prompt, and the least seconds of any run for a round of drafts
    and for a plain step: what a crowded machine does not change."""
    found = [(a, a.settings[setting]) for a in answers]
    rounds = [
        (len(a.tokens) - 1) / max(s.rates) / s.did.rounds
        for a, s in found
        if s.did is not None and s.did.rounds and max(s.rates) > 0
    ]
    return {
        **summary(answers, setting),
        "speedups": [s.ratio for _, s in found],
        "least_round_seconds": min(rounds),
        "least_plain_seconds": 1 / max(max(a.plain) for a in answers),
    }


def weighed(values: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """Weighted mean and its standard error over texts."""
    v, w = np.asarray(values, float), np.asarray(weights, float) / np.sum(weights)
    mean = float(v @ w)
    return mean, math.sqrt(float(w**2 @ (v - mean) ** 2) * len(v) / max(1, len(v) - 1))


def against(found: Row, base: Row) -> tuple[float, float]:
    """Mean difference of a head from another, text by text, and its standard error."""
    differences = np.subtract(found["held"]["lengths"], base["held"]["lengths"])
    return weighed(differences.tolist(), base["held"]["weights"])


def run(given: argparse.Namespace) -> None:
    """Answers, heads, figures; the result file."""
    use_threads(given.threads)
    path = given.model or fetch_default()
    answered(path, given.data, int(2.2 * given.tokens), given.threads)
    target = Target.of(open_model(path))
    held, learnt = surveyed(shards(given.data))
    chosen = [v for v in VARIANTS if not given.only or v.name in given.only.split(",")]
    variants = {
        v.name: {**trained(target, held, learnt, v, given), "what": v.what, "against": v.against}
        for v in chosen
    }
    result = {
        **machine(), "model": target.model.name, "threads": given.threads, "chain": CHAIN,
        "new_tokens": given.new_tokens, "rounds": given.rounds, "held_texts": len(held),
        "learnt_texts_tokens": learnt, "variants": variants,
    }  # fmt: skip
    result["decoding"] = decoded(path, list(variants), held, given)
    result["load_average"] = [result["load_average"], load_average()]
    kept.write(given.json, result)
    print(f"wrote {given.json}")


def table(found: Row) -> str:
    """All heads, one a line."""
    rows = []
    for name, v in found["variants"].items():
        length, error = weighed(v["held"]["lengths"], v["held"]["weights"])
        base = found["variants"].get(v["against"], v)
        more, paired = against(v, base)
        chain, free = (found["decoding"][name][s] for s in (FIXED, FREE))
        rows.append((
            v["what"], f"{v['bytes'] / 1e6:.1f}", f"{v['tokens']:,}",
            f"{v['held']['covered']:.1%}", ", ".join(f"{h:.1%}" for h in v["held"]["hits"]),
            f"{length:.3f} ± {error:.3f}",
            "-" if base is v else f"**{more:+.3f}** ± {paired:.3f}",
            f"{chain['acceptance_length']:.3f}", speed(chain), f"{counted(found, name):.3f}x",
            speed(free),
        ))  # fmt: skip
    return pages.table(HEAD, rows)


def speed(row: Row) -> str:
    """A mean speed with its standard error over prompts."""
    mean, error = weighed(row["speedups"], [1.0] * len(row["speedups"]))
    return f"{mean:.3f}x ± {error:.3f}"


def counted(found: Row, name: str) -> float:
    """Speed of a head's chains of 4 by the least seconds that plain steps and rounds took.

    Rounds of heads with equally many draft tokens cost the same: the median of their least seconds
    counts.
    """
    heads, decoding = found["variants"], found["decoding"]
    like = [n for n in heads if heads[n]["draft_vocabulary"] == heads[name]["draft_vocabulary"]]
    a_round = np.median([decoding[n][FIXED]["least_round_seconds"] for n in like])
    plain = np.median([d[FIXED]["least_plain_seconds"] for d in decoding.values()])
    return float(decoding[name][FIXED]["acceptance_length"] * plain / a_round)


def text(found: Row) -> str:
    """Picture, what was measured, table."""
    first = found["decoding"][BASE][FIXED]
    plain = [r[FIXED]["plain_against_itself_mean"] for r in found["decoding"].values()]
    least = min(r[FIXED]["plain_against_itself_least"] for r in found["decoding"].values())
    before, after = found["load_average"]
    options = found["variants"][BASE]["options"]
    equal = all(w["identical"] for ways in found["decoding"].values() for w in ways.values())
    return (
        f"![tokens a round by variant]({PICTURE.relative_to(PAGE.parent)})\n\n"
        f"{found['model']}. Base: {options['draft_vocab']:,} draft tokens, {options['steps']} "
        f"steps, feedback without norm; batches of {options['batch_tokens']:,} tokens, rate "
        f"{options['rate']:g}. {found['held_texts']} held-out texts; {first['prompts']} of their "
        f"prompts decoded greedily, {found['new_tokens']} tokens, {found['rounds']} rounds, "
        f"{found['threads']} thread(s), plain decoding {first['plain_tokens_per_second']:.0f} "
        f"tokens/s and {min(plain):.2f}x to {max(plain):.2f}x of itself by the same rule (single "
        f"prompts from {least:.2f}x). {found['processor']}, {found['usable_cores']} cores, on "
        f"which {before:.1f} to {after:.1f} processes wanted to run (ours is one), "
        f"{found['date'][:10]}. Texts: {'identical to plain' if equal else 'DIFFERENT'}.\n\n"
        f"{table(found)}"
    )


def picture(found: Row) -> str:
    """A bar for every head from one token a round on, with its standard error."""
    rows = [
        (v["what"], *weighed(v["held"]["lengths"], v["held"]["weights"]))
        for v in found["variants"].values()
    ]
    scale = (WIDE - LEFT - 60) / max(0.01, *(mean + error - 1 for _, mean, error in rows))
    high = 40 + BAR * len(rows)
    line = LEFT + (rows[0][1] - 1) * scale
    parts = [
        f'<text x="{LEFT}" y="18">tokens a round on held-out answers, chains of {CHAIN}; bars '
        "begin at 1</text>",
        f'<line x1="{line:.1f}" x2="{line:.1f}" y1="26" y2="{high - 6}" stroke="#888"/>',
    ]
    for i, (what, mean, error) in enumerate(rows):
        y, end = 30 + BAR * i, LEFT + (mean - 1) * scale
        low, top = end - error * scale, end + error * scale
        parts.append(
            f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end">{what}</text>'
            f'<rect x="{LEFT}" y="{y}" width="{max(0.0, end - LEFT):.1f}" height="{BAR - 6}" '
            f'fill="#1f6feb" fill-opacity="0.7"/><line x1="{low:.1f}" x2="{top:.1f}" '
            f'y1="{y + 9}" y2="{y + 9}" stroke="black"/>'
            f'<text x="{top + 4:.1f}" y="{y + 13}">{mean:.3f}</text>'
        )
    return pages.drawing(WIDE, high, parts)


def write_page(given: argparse.Namespace) -> None:
    """Table and picture from the result file."""
    found = kept.read(given.json)
    given.picture.parent.mkdir(parents=True, exist_ok=True)
    given.picture.write_text(picture(found))
    given.page.write_text(pages.placed(given.page.read_text(), SCRIPT, "Ablations", text(found)))
    print(f"wrote {given.page} and {given.picture}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    verbs = parser.add_subparsers(dest="what", required=True)
    measured, shown = verbs.add_parser("run"), verbs.add_parser("page")
    for part in (measured, shown):
        part.add_argument("--json", type=Path, default=RESULTS)
    shown.add_argument("--page", type=Path, default=PAGE)
    shown.add_argument("--picture", type=Path, default=PICTURE)
    measured.add_argument("--data", type=Path, required=True)
    measured.add_argument("--work", type=Path, required=True)
    measured.add_argument("--model", type=Path)
    measured.add_argument("--only", default="", help="names of variants, comma-separated")
    measured.add_argument("--type", default="q8_0")
    measured.add_argument("--save-seconds", type=float, default=120)
    for name, value in (
        ("tokens", 112_000), ("batch-tokens", 1024), ("draft-vocab", 8192), ("threads", 1),
        ("prompts", 16), ("new-tokens", 96), ("rounds", 3), ("ctx-size", 1024),
    ):  # fmt: skip
        measured.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    (run if given.what == "run" else write_page)(given)


if __name__ == "__main__":
    main()
