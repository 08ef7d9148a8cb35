"""What a disk gives back of recurrent models: rows with a state behind them, or nothing."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from serving_kit import RECURRENT, World
from test_serving_disk import disk_of, flipped, new, plain, torn

from ggraph.serving import disk as disk_module
from ggraph.serving.batch import Batch
from ggraph.serving.disk import BLOCK, SUFFIX, Disk, Spill
from ggraph.serving.text import Plain, Request, Text
from ggraph.serving.texts import Limits

PROMPT = [(7 * i) % 50 for i in range(BLOCK + 10)]


@pytest.fixture(scope="module", params=RECURRENT)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World.recurrent(request.param, tmp_path_factory.mktemp("disk"))


def answer(w: World, disk: Disk, prompt: Sequence[int], limit: int = 8) -> tuple[Batch, Text]:
    """A text of a batch that begins with an empty cache; it says what it would have said alone."""
    batch = w.fresh(Limits(texts=2, apart=1))
    batch.disk = Spill(disk, batch.runner)
    text = batch.submit(Request(prompt, Plain(lambda logits: int(logits.argmax())), limit))
    while not batch.idle:
        batch.step()
        batch.memory.check(batch.running)
    disk.close()
    assert new(text) == plain(w, prompt, limit)
    return batch, text


def states_in(folder: Path) -> dict[int, Path]:
    """Files of states, by how many rows they have behind the last whole block."""
    found = [(load_file(path), path) for path in folder.iterdir()]
    return {len(f["tokens"]): path for f, path in found if any("conv" in name for name in f)}


def test_another_process_goes_on_from_a_state(world: World, tmp_path: Path) -> None:
    """That of the prompt, or of the answer; a text that parts before either has nothing."""
    _, first = answer(world, disk_of(tmp_path), PROMPT)
    assert len(list(tmp_path.iterdir())) == 1 + 2 and len(states_in(tmp_path)) == 2
    said = len(first.tokens) - 1  # its last token was never read
    for prompt, known in (
        (PROMPT, len(PROMPT) - 1),
        ([*first.tokens, 9, 9], said),
        ([*first.tokens[:-3], 63, 62], len(PROMPT) - 1),
        ([*PROMPT[:-5], 63, 62], 0),
    ):
        again, text = answer(world, disk_of(tmp_path), prompt)
        assert (again.counters.restored, text.reused) == (known, known)
        assert text.read == len(prompt) - known


def test_others_share_what_was_restored(world: World, tmp_path: Path) -> None:
    """The state is kept in memory, too; it is read once."""
    answer(world, disk_of(tmp_path), PROMPT)
    batch = world.fresh(Limits(texts=2, apart=1))
    batch.disk = Spill(disk_of(tmp_path), batch.runner)
    greedy = Plain(lambda logits: int(logits.argmax()))
    texts = [batch.submit(Request([*PROMPT, i], greedy, 4)) for i in (7, 8, 9)]
    while not batch.idle:
        batch.step()
        batch.memory.check(batch.running)
    batch.disk.disk.close()
    assert batch.counters.restored == len(PROMPT) - 1
    assert [new(t) for t in texts] == [plain(world, [*PROMPT, i], 4) for i in (7, 8, 9)]


def test_a_short_text_is_kept_without_a_block(world: World, tmp_path: Path) -> None:
    prompt = PROMPT[: BLOCK // 2]
    answer(world, disk_of(tmp_path), prompt)
    again, text = answer(world, disk_of(tmp_path), prompt)
    assert again.counters.restored == len(prompt) - 1 and text.read == 1


def test_a_state_without_its_rows_is_of_no_use(world: World, tmp_path: Path) -> None:
    answer(world, disk_of(tmp_path), PROMPT)
    states = states_in(tmp_path).values()
    (block,) = [path for path in tmp_path.iterdir() if path not in states]
    block.unlink()
    again, text = answer(world, disk_of(tmp_path), PROMPT)
    assert (again.counters.restored, text.read) == (0, len(PROMPT))


@pytest.mark.parametrize("spoil", [torn, flipped])
def test_a_spoilt_state_is_deleted_and_computed_again(
    world: World, tmp_path: Path, spoil: object
) -> None:
    answer(world, disk_of(tmp_path), PROMPT)
    spoil(states_in(tmp_path)[len(PROMPT) - 1 - BLOCK])  # type: ignore[operator]
    batch, _ = answer(world, disk_of(tmp_path), PROMPT)
    assert batch.counters.restored == 0
    again, _ = answer(world, disk_of(tmp_path), PROMPT)  # it was written anew
    assert again.counters.restored == len(PROMPT) - 1


def test_another_text_s_state_under_this_name_is_refused(world: World, tmp_path: Path) -> None:
    """The tokens say so, although the digest is right."""
    answer(world, disk_of(tmp_path), PROMPT)
    path = states_in(tmp_path)[len(PROMPT) - 1 - BLOCK]
    block = load_file(path)
    del block["digest"]
    block["tokens"] = block["tokens"][::-1].copy()
    save_file({**block, "digest": disk_module.digest(block)}, path)
    batch, _ = answer(world, disk_of(tmp_path), PROMPT)
    assert batch.counters.restored == 0


def test_what_waits_for_the_disk_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States are large: a disk that is slow is not to fill the memory."""
    monkeypatch.setattr(disk_module, "MOST_WAITING", 1000)
    monkeypatch.setattr(Disk, "_write", lambda self: None)
    disk = disk_of(tmp_path)
    for i in range(9):
        disk.keep(f"{i}", [1], {"cache.k.0": np.zeros((1, 400), np.uint8)})
    assert disk._todo.qsize() == 2
    disk.close()


def test_names_of_states_are_what_they_were(tmp_path: Path) -> None:
    """Written out, since files of an earlier server are found by them."""
    disk, tokens = disk_of(tmp_path, b"model"), list(range(2 * BLOCK + 3))

    def of(*parts: bytes) -> bytes:
        return hashlib.sha256(b"".join(parts)).digest()

    def raw(first: int, end: int) -> bytes:
        return b"".join(t.to_bytes(4, "little") for t in tokens[first:end])

    ends = [of(b"model")]
    for at in (0, BLOCK):
        ends.append(of(ends[-1], raw(at, at + BLOCK)))
    assert [name for _, name in disk.missing(tokens)] == [f"{e.hex()}{SUFFIX}" for e in ends[1:]]
    for count in (1, BLOCK - 1, BLOCK, BLOCK + 1, len(tokens)):
        block = count // BLOCK
        name = of(ends[block], b"state", raw(block * BLOCK, count)).hex() + SUFFIX
        assert disk.state_name(tokens[:count]) == name
    disk.close()


class Counted(list[int]):
    """Tokens that count how many of them are copied."""

    copied = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.copied += len(found) if isinstance(at, slice) else 1
        return found


def test_a_state_is_looked_for_in_time_that_grows_with_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind blocks that are all there, of which no end has a state but the first."""
    monkeypatch.setattr(Disk, "_write", lambda self: None)
    disk, tokens, hashed = disk_of(tmp_path), Counted(range(100 * BLOCK)), 0
    disk._sizes |= {name: 1 for _, name in disk.missing(tokens)}
    first = disk.state_name(tokens[:BLOCK])
    assert first is not None
    disk._sizes[first] = 1
    real = disk_module._hash

    def counted(at: bytes, raw: bytes, what: bytes = b"") -> bytes:
        nonlocal hashed
        hashed += len(raw) // 4
        return real(at, raw, what)

    monkeypatch.setattr(disk_module, "_hash", counted)
    tokens.copied = 0
    assert disk.state(tokens, 0) == (BLOCK, first)
    assert tokens.copied <= 4 * len(tokens) and hashed <= len(tokens) * (BLOCK // 2 + 2)
