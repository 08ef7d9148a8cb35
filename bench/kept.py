"""How `bench/results` keeps what was measured: a summary that people read, raw runs packed.

    python bench/kept.py RESULT.json [RESULT.json ...] --into bench/results/heads

A summary is JSON with one line per row of its tables and numbers of nine digits. Single runs and
prompts (`answers`), thousands of lines, go beside it into NAME.answers.json.gz; the same runs give
the same file. `read` puts both together again.
"""

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

DEPTH = 3  # levels of a summary that have lines of their own
DIGITS = 9

Result = dict[str, Any]


def rounded(value: Any, digits: int = DIGITS) -> Any:
    """The same with numbers of so many digits; `DIGITS` are more than any clock gives."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {k: rounded(v, digits) for k, v in value.items()}
    return [rounded(v, digits) for v in value] if isinstance(value, list) else value


def text(value: Any, depth: int = DEPTH) -> str:
    """JSON with `depth` levels of lines; what lies deeper, or holds plain values, is one line."""
    inner = value.values() if isinstance(value, dict) else value
    if not depth or not isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    if not any(isinstance(v, (dict, list)) for v in inner) and depth < DEPTH:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    if isinstance(value, dict):
        parts = [f"{json.dumps(k)}: {text(v, depth - 1)}" for k, v in value.items()]
    else:
        parts = [text(v, depth - 1) for v in value]
    body = ",\n".join(parts).replace("\n", "\n ")
    opened, closed = "{}" if isinstance(value, dict) else "[]"
    return f"{opened}\n {body}\n{closed}"


def raw_of(path: Path) -> Path:
    """Where the raw runs of a summary lie."""
    return path.with_suffix(".answers.json.gz")


def write(path: Path, found: Result) -> None:
    """Keep a result: the summary at `path`, its answers packed beside it."""
    found = rounded(found)
    answers = found.pop("answers", None)
    path.write_text(text(found) + "\n")
    if answers is not None:
        raw_of(path).write_bytes(gzip.compress(json.dumps(answers).encode(), mtime=0))


def read(path: Path) -> Result:
    """A result as `write` kept it, or as the benchmark wrote it; `answers` where they are there."""
    found: Result = json.loads(path.read_text())
    if raw_of(path).is_file():
        found["answers"] = json.loads(gzip.decompress(raw_of(path).read_bytes()))
    return found


def measured_on(found: Result) -> str:
    """Processor, instructions, commit and date of a result, as pages name them."""
    parts = [found.get("processor") or "processor not recorded", found.get("instructions")]
    parts += [f"commit {found.get('commit') or 'not recorded'}", str(found.get("date", ""))[:10]]
    return ", ".join(p for p in parts if p)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--into", type=Path, required=True)
    given = parser.parse_args()
    for path in given.results:
        write(given.into / path.name, read(path))
        print(f"wrote {given.into / path.name}")


if __name__ == "__main__":
    main()
