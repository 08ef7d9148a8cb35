"""What a disk gives back is what was computed, or nothing."""

import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from serving_kit import CONTEXT, World
from small_model import learnable_model

from ggraph import InputError
from ggraph.formats import open_checkpoint
from ggraph.formats.gguf import write_gguf
from ggraph.serving import disk as disk_module
from ggraph.serving.batch import Batch
from ggraph.serving.disk import BLOCK, PART, SUFFIX, Disk, Spill
from ggraph.serving.text import Plain, Request, Text
from ggraph.serving.texts import Limits
from models.run.load import load
from models.serve.identity import of as identity_of

PROMPT = [(7 * i) % 50 for i in range(CONTEXT - 10)]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World.of(learnable_model(tmp_path_factory.mktemp("disk")))


def best(logits: np.ndarray) -> int:
    return int(np.argmax(logits))


def plain(w: World, prompt: Sequence[int], limit: int) -> list[int]:
    w.plain.engine.reset()
    return list(w.plain.engine.generate(prompt, best, lambda _: None, limit=limit))


def answer(w: World, disk: Disk, prompt: Sequence[int], limit: int = 8) -> tuple[Batch, Text]:
    """A text of a batch that begins with an empty cache. Its rows are on the disk at the end."""
    batch = w.fresh(Limits())
    batch.disk = Spill(disk, batch.runner)
    text = batch.submit(Request(prompt, Plain(best), limit))
    while not batch.idle:
        batch.step()
        batch.memory.check(batch.running)
    disk.close()
    return batch, text


def new(text: Text) -> list[int]:
    return text.tokens[len(text.request.prompt) :]


def disk_of(folder: Path, identity: bytes = b"model", most: int = 1 << 30) -> Disk:
    return Disk(folder, identity, most)


def test_another_process_finds_the_same_rows(world: World, tmp_path: Path) -> None:
    """Whole blocks, and never the last token's row, whose logits are wanted."""
    first, text = answer(world, disk_of(tmp_path), PROMPT)
    assert first.counters.restored == 0 and len(list(tmp_path.iterdir())) == 1
    for prompt, known in (
        (PROMPT, BLOCK),
        (PROMPT[:BLOCK], BLOCK - 1),
        ([*PROMPT[: BLOCK + 3], 9, 9], BLOCK),
        ([*PROMPT[: BLOCK - 1], 60, 61, 62], 0),
    ):
        again, text = answer(world, disk_of(tmp_path), prompt)
        assert again.counters.restored == known
        assert new(text) == plain(world, prompt, 8)
        assert text.reused == known


def test_what_the_cache_still_has_is_not_read(world: World, tmp_path: Path) -> None:
    """A block of which a part is in the cache is read from there on."""
    answer(world, disk_of(tmp_path), PROMPT)
    batch = world.fresh(Limits())
    batch.disk = Spill(disk_of(tmp_path), batch.runner)
    texts = []
    for prompt in (PROMPT[:20], PROMPT):
        texts.append(batch.submit(Request(prompt, Plain(best), 1)))
        while not batch.idle:
            batch.step()
    assert batch.counters.restored == BLOCK - 20
    assert new(texts[1]) == plain(world, PROMPT, 1)
    batch.disk.disk.close()


def test_another_model_has_other_names(world: World, tmp_path: Path) -> None:
    answer(world, disk_of(tmp_path, b"one"), PROMPT)
    batch, _ = answer(world, disk_of(tmp_path, b"another"), PROMPT)
    assert batch.counters.restored == 0 and len(list(tmp_path.iterdir())) == 2


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flipped(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def replaced(path: Path) -> None:
    """Sound, but of other rows."""
    save_file({"cache.k.0": np.zeros((BLOCK, 64), np.uint8)}, path)


def others(path: Path) -> None:
    """Another text's rows under this name: the tokens say so."""
    block = load_file(path)
    block["tokens"] = block["tokens"][::-1].copy()
    save_file(block, path)


@pytest.mark.parametrize("spoil", [torn, flipped, empty, replaced, others])
def test_a_spoilt_file_is_deleted_and_computed_again(
    world: World, tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    answer(world, disk_of(tmp_path), PROMPT)
    (path,) = tmp_path.iterdir()
    spoil(path)
    batch, text = answer(world, disk_of(tmp_path), PROMPT)
    assert batch.counters.restored == 0
    assert new(text) == plain(world, PROMPT, 8)
    again, _ = answer(world, disk_of(tmp_path), PROMPT)  # it was written anew
    assert again.counters.restored == BLOCK


def test_what_was_used_longest_ago_goes_first(world: World, tmp_path: Path) -> None:
    answer(world, disk_of(tmp_path), PROMPT)
    (size,) = [f.stat().st_size for f in tmp_path.iterdir()]
    prompts = [[i, *PROMPT] for i in range(3)]
    for prompt in prompts:
        answer(world, disk_of(tmp_path, most=2 * size + 10), prompt)
    assert len(list(tmp_path.iterdir())) == 2
    found = [answer(world, disk_of(tmp_path), p)[0].counters.restored for p in prompts[1:]]
    assert found == [BLOCK, BLOCK]
    assert disk_of(tmp_path, most=0)._sizes == {} and not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_had_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot use"):
        disk_of(tmp_path / "file")
    with pytest.raises(InputError, match="expected 0 or more"):
        disk_of(tmp_path, most=-1)


def test_the_identity_is_of_model_options_and_code(tmp_path: Path) -> None:
    """The same for the same, however it was opened; another for another cache, for other weights,
    and where the same weights turn otherwise."""
    path = learnable_model(tmp_path)
    found = []
    for options in ({}, {"threads": 1, "ctx_size": 64}, {"cache_type": "f32"}, {"exact": True}):
        m = load(path, **options)  # type: ignore[arg-type]
        found.append(identity_of(m))
        m.close()
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    c = open_checkpoint(path)
    turned = {**c.metadata, "llama.rope.freq_base": 20000.0}
    write_gguf(tmp_path / "turned.gguf", turned, list(c.tensors.values()))
    for other in (path, tmp_path / "turned.gguf"):
        m = load(other)
        found.append(identity_of(m))
        m.close()
    assert found[0] == found[1] and len(set(found)) == 5


def test_a_disk_that_was_full_is_written_to_again(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever says so, and where not even the part can be taken away: what comes later is kept."""
    real, left = disk_module.save, [OSError("full"), SafetensorError("full"), None, None]
    take = Path.unlink

    def saved(block: dict[str, np.ndarray]) -> bytes:
        if (error := left.pop(0)) is not None:
            raise error
        return real(block)

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == PART and len(left) == 3:
            raise OSError("read-only")
        take(path, missing_ok)

    monkeypatch.setattr(disk_module, "save", saved)
    monkeypatch.setattr(Path, "unlink", unlink)
    disk = disk_of(tmp_path)
    for i in range(4):
        disk.keep(f"{i}{SUFFIX}", [i], {"cache.k.0": np.zeros((1, 4), np.uint8)})
    disk.close()
    found = sorted(f.name for f in tmp_path.iterdir())
    assert found == [f"0{PART}", f"2{SUFFIX}", f"3{SUFFIX}"] and not disk._waiting
    assert {f.stat().st_mode & 0o777 for f in tmp_path.iterdir()} == {0o600}
    disk_of(tmp_path).close()
    assert len(list(tmp_path.iterdir())) == 2, "a part goes with the next start"


def test_a_full_disk_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The real one: files of this process have no room for a while, which is counted and said
    once."""
    disk, block = disk_of(tmp_path), {"cache.k.0": np.zeros((1, 1 << 20), np.uint8)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        for name in "ac":
            disk.keep(f"{name}{SUFFIX}", [1], block)
        until = time.monotonic() + 10
        while disk._waiting and time.monotonic() < until:
            time.sleep(0.01)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    disk.keep(f"b{SUFFIX}", [1], block)
    disk.close()
    assert [f.name for f in tmp_path.iterdir()] == [f"b{SUFFIX}"]
    assert (disk.unwritten, disk.held) == (2, (tmp_path / f"b{SUFFIX}").stat().st_size)
    (said,) = [r.getMessage() for r in caplog.records]
    assert said.startswith(f"{tmp_path}: a block cannot be kept: ")
