"""The wheel must work in an empty environment, from a folder with a `models/` of its own.

    python scripts/check_wheel.py [--run]

Builds the wheel, installs it into a new virtual environment, and runs `ggraph --version`, `--help`
and a plan there; with --run the main job too (fetches the default model when it is not cached).
"""

import argparse
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(command: list[str], folder: Path) -> str:
    """Standard output of a command, which must succeed."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> None:
    """Build, install, run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", action="store_true", help="run the main job as well")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        run(
            [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(work), str(ROOT)],
            work,
        )
        wheel = next(work.glob("*.whl"))
        venv.create(work / "env", with_pip=True)
        bin_folder = work / "env" / "bin"
        run([str(bin_folder / "pip"), "install", "-q", str(wheel)], work)
        user = work / "user"
        (user / "models").mkdir(parents=True)
        (user / "models" / "__init__.py").write_text("raise RuntimeError('the wrong models')\n")
        ggraph = str(bin_folder / "ggraph")
        print(run([ggraph, "--version"], user).strip())
        assert "generate" in run([ggraph, "--help"], user), "--help does not list generate"
        tiny = ROOT / "tests" / "golden" / "tiny" / "llama_tied"
        assert "verified:" in run([ggraph, "plan", str(tiny)], user), "no certificate in the plan"
        found = run(
            [str(bin_folder / "python"), "-c", "import ggraph_models as m; print(m.__file__)"], user
        )
        assert "site-packages" in found, f"ggraph_models is {found.strip()}"
        shown = "from ggraph_models.cli.bench import PROMPTS; print(PROMPTS, PROMPTS.is_file())"
        spec = run([str(bin_folder / "python"), "-c", shown], user)
        assert "ggraph_models" in spec and "True" in spec, (
            "the default prompts are not the wheel's own"
        )
        face = "from ggraph_models.api import Chat; print(Chat.answer.__name__)"
        assert "answer" in run([str(bin_folder / "python"), "-c", face], user)
        if given.run:
            print(run([ggraph, "generate", "--temp", "0", "-n", "24", "Say hello."], user).strip())
        print(f"{wheel.name}: {wheel.stat().st_size} bytes, works")


if __name__ == "__main__":
    main()
