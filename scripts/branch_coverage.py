"""Branch coverage of the two rooms that must have all of it: the allocator and the verifier.

    nice python scripts/branch_coverage.py [--html FOLDER]

Runs the tests of `ggraph/alloc` and `ggraph/verify` with numba's compiler off, so that its
functions are seen as well, and exits with 1 if a line or a branch of the two was not taken.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("ggraph/alloc", "ggraph/verify")
TESTS = ("test_alloc*.py", "test_verify*.py", "test_pipeline.py", "test_explain.py")


def main() -> int:
    """Run, report, and say whether all of it was covered."""
    parser = argparse.ArgumentParser(description="branch coverage of the allocator and verifier")
    parser.add_argument("--html", type=Path, help="folder for annotated sources")
    given = parser.parse_args()
    tests = sorted(str(p) for pattern in TESTS for p in (ROOT / "tests").glob(pattern))
    with tempfile.TemporaryDirectory() as folder:
        data = {"COVERAGE_FILE": str(Path(folder) / "data"), "NUMBA_DISABLE_JIT": "1"}
        environment = {**os.environ, **data, "HYPOTHESIS_PROFILE": "ci"}

        def coverage(*words: str) -> int:
            command = [sys.executable, "-m", "coverage", *words]
            return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode

        source = f"--source={','.join(ROOMS)}"
        failed = coverage("run", "--branch", source, "-m", "pytest", "-q", *tests)
        if given.html is not None:
            coverage("html", "-d", str(given.html.resolve()))
        short = coverage("report", "--show-missing", "--skip-covered", "--fail-under=100")
    return 1 if failed or short else 0


if __name__ == "__main__":
    sys.exit(main())
