"""A model by its name on the Hugging Face hub, as llama.cpp's `-hf` takes it: USER/REPO[:TYPE].

What is downloaded, where it is kept and who asks is huggingface_hub's affair, with its own switches
(HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE). Here a file is chosen, and whatever goes wrong
becomes one line. Where the hub cannot be reached, what an earlier run fetched is used.
"""

import re
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any

from ggraph import InputError
from ggraph.formats.gguf import part_names

USUAL_TYPE = "Q4_K_M"  # what llama.cpp takes where no type is named
TOWER = "mmproj"  # in names of files with towers, as llama.cpp has it
FOLDER_FILES = (".json", ".jinja", ".safetensors")
Tell = Callable[[str], None]


def fetch_hub(name: str, tell: Tell) -> Path:
    """Path of the model called `name`: of the GGUF file of that type (else Q4_K_M, else the first),
    of the first part where it is split, or of a folder where the repository has safetensors alone.
    `tell` hears what is downloaded. InputError for a bad name, an unknown one, a hub that cannot be
    reached, a full disk."""
    repo, kind = _parsed(name)
    hub: Any = import_module("huggingface_hub")  # a fifth of a second, for those who ask alone
    try:
        revision, sizes = _listed(hub, repo)
    except Exception as error:  # of whichever HTTP client huggingface_hub stands on today
        kept = None if _refused(error) else _kept(hub, repo)
        if kept is None:
            raise InputError(f"-hf {name}: {_reason(error)}") from None
        chosen = _chosen(name, (p.relative_to(kept).as_posix() for p in kept.rglob("*")), kind)
        return kept / chosen if chosen is not None else kept
    chosen = _chosen(name, sizes, kind)
    wanted = [f for f in sizes if _of_folder(f)] if chosen is None else part_names(chosen)
    try:
        missing = [f for f in wanted if not _is_kept(hub, repo, f, revision)]
        if missing:
            tell(f"fetching {chosen or repo} ({sum(sizes[f] for f in missing) / 1e6:.0f} MB)")
        paths = [Path(hub.hf_hub_download(repo, f, revision=revision)) for f in wanted]
    except Exception as error:  # as above, and a full disk
        raise InputError(f"-hf {name}: {_reason(error)}") from None
    return paths[0] if chosen is not None else paths[0].parents[wanted[0].count("/")]


def fetch_tower(name: str, tell: Tell) -> Path | None:
    """Path of the tower for images that a repository has beside its GGUF files, which was fetched
    before or is now: of Q8_0, else F16, else the first. None where there is none, as in a folder,
    which holds its own. InputError as for `fetch_hub`."""
    repo, _ = _parsed(name)
    hub: Any = import_module("huggingface_hub")
    try:
        revision, sizes = _listed(hub, repo)
        if (chosen := _tower(sizes)) is None:
            return None
        if not _is_kept(hub, repo, chosen, revision):
            tell(f"fetching {chosen} ({sizes[chosen] / 1e6:.0f} MB)")
        return Path(hub.hf_hub_download(repo, chosen, revision=revision))
    except Exception as error:  # as above
        kept = None if _refused(error) else _kept(hub, repo)
        if kept is None:
            raise InputError(f"-hf {name}: {_reason(error)}") from None
        chosen = _tower(p.relative_to(kept).as_posix() for p in kept.rglob("*"))
        return None if chosen is None else kept / chosen


def _tower(files: Iterable[str]) -> str | None:
    """The one of a repository's towers that is taken."""
    found = sorted(f for f in files if f.endswith(".gguf") and TOWER in f.lower())
    typed = (f for kind in ("q8_0", "f16") for f in found if re.search(f"[.-]{kind}[.-]", f, re.I))
    return next(typed, found[0] if found else None)


def _parsed(name: str) -> tuple[str, str | None]:
    """Repository and type. InputError where it is not of the form USER/REPO[:TYPE]."""
    repo, colon, kind = name.partition(":")
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", repo) is None or (colon and not kind):
        raise InputError(f"-hf {name}: expected USER/REPO or USER/REPO:TYPE, such as a/model:Q4_0")
    return repo, kind or None


def _listed(hub: Any, repo: str) -> tuple[str, dict[str, int]]:
    """The newest revision and its files with their bytes."""
    found = hub.HfApi().model_info(repo, files_metadata=True)
    return found.sha, {f.rfilename: f.size or 0 for f in found.siblings}


def _is_kept(hub: Any, repo: str, file: str, revision: str) -> bool:
    """Whether a file of that revision was fetched before."""
    return isinstance(hub.try_to_load_from_cache(repo, file, revision=revision), str)


def _kept(hub: Any, repo: str) -> Path | None:
    """The folder of what was fetched last of a repository."""
    try:
        place = import_module("huggingface_hub.constants").HF_HUB_CACHE
        repos = hub.scan_cache_dir(place).repos
    except hub.CacheNotFound:
        return None
    revisions = [r for x in repos if x.repo_id == repo for r in x.revisions]
    newest = max(revisions, key=lambda r: r.last_modified, default=None)
    return None if newest is None else Path(newest.snapshot_path)


def _chosen(name: str, files: Iterable[str], kind: str | None) -> str | None:
    """The GGUF file of type `kind`, of no type the usual one or the first, whole rather than the
    first of its parts; None where the repository is a folder of safetensors. InputError where it
    has none."""
    names = sorted(files)
    ggufs = [f for f in names if f.endswith(".gguf") and TOWER not in f.lower()]
    if not ggufs:
        if "config.json" in names and kind is None:
            return None
        wanted = f"a GGUF file of type {kind}" if kind else "a GGUF file or a config.json"
        raise InputError(f"-hf {name}: the repository has not {wanted}")
    own = rf"(?<![A-Za-z0-9]){re.escape(kind or USUAL_TYPE)}[.-]"  # F16 is no end of BF16
    typed = [f for f in ggufs if re.search(own, f, re.I)]
    if kind and not typed:
        raise InputError(f"-hf {name}: no file of that type; there are {', '.join(ggufs)}")
    return min(typed or ggufs, key=lambda f: part_names(f) != [f])


def _of_folder(file: str) -> bool:
    """Whether a model's folder is read from it: what is at the top, and how vectors are pooled."""
    place = PurePosixPath(file)
    pooling = place.parent.name.endswith("_Pooling") and place.name == "config.json"
    return ("/" not in file and place.suffix in FOLDER_FILES) or pooling


def _refused(error: Exception) -> bool:
    """Whether the hub answered, and the answer was no."""
    return 400 <= getattr(getattr(error, "response", None), "status_code", 0) < 500


def _reason(error: Exception) -> str:
    """What went wrong, in one line."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403, 404):
        return (
            f"the hub does not give it out (status {status}): no such repository, or one that "
            "asks for an account (HF_TOKEN)"
        )
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    if status is not None or isinstance(error, (OSError, ValueError)):
        return line
    return f"the hub cannot be reached, and nothing is kept of this model: {line}"
