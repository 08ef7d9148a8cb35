"""Images: tiles, towers, and rows in the place of tokens.

`golden/images` holds configs, tokenizers, images, and what transformers 5.24 gave in float32 for
weights that are a rule (ruled_weights.py, scripts/golden_images.py).
"""

import base64
import dataclasses
import io
import json
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_kit import ggraph_here, refused_here
from encoder_kit import TOLERANCE
from golden_kit import TOLERANCE as LOGITS
from image_kit import (
    NAMES,
    QWEN,
    TILED,
    made,
    said,
    seeing,
    spread_error,
    talk_of,
    tiles_of,
    ways,
)
from PIL import Image
from small_model import small_model
from test_cuda_models import left_to_the_cpu, planned

from ggraph.backends.cpu.backend import CpuBackend
from ggraph.decode.draft.lookup import SuffixDrafter
from ggraph.decode.given import (
    Given,
    first_given,
    given_feeds,
    given_rows,
    has_given,
    later,
    pieces,
    words,
)
from ggraph.decode.policy import Fixed
from ggraph.decode.rows import Rows, columns, padded, visibility
from ggraph.decode.runner import Runner
from ggraph.decode.sampler import Sampler, SamplerConfig
from ggraph.decode.speculation import Speculation
from ggraph.dtype import F32
from ggraph.errors import InputError, ModelError
from ggraph.formats import open_checkpoint
from ggraph.formats.gguf import write_gguf
from ggraph.serving.batch import Batch
from ggraph.serving.disk import BLOCK, Disk, Spill
from ggraph.serving.steps import ListRunner
from ggraph.serving.text import Plain, Request
from ggraph.serving.texts import Limits
from ggraph.text.chat import ChatTemplate
from models.api import Chat
from models.images import MOST_PIXELS, picture
from models.registry import open_model
from models.run.convert import tower_to_gguf
from models.run.load import load, open_session
from models.tower import Sight, Tower
from models.tower_files import open_mmproj, tower_of


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders, and GGUF files of them."""
    return made(tmp_path_factory.mktemp("images"))


def tower(folder: Path) -> Tower:
    found = tower_of(open_checkpoint(folder))
    assert found is not None
    return found


def rows_of(t: Tower, tiles: Sequence[np.ndarray], **more: Any) -> np.ndarray:
    found = list[np.ndarray]()
    with open_session(threads=1, **more) as session:
        for tile in tiles:
            count = t.sight.count(tile)
            session.prepare(count, partial(t.build, count), t.weight)
            found.append(np.array(session.run(count, t.feeds(tile))["rows"]))
    return np.concatenate(found)


def png(width: int, height: int, mode: str = "RGB", shade: Any = 7) -> bytes:
    out = io.BytesIO()
    Image.new(mode, (width, height), shade).save(out, "PNG")
    return out.getvalue()


@pytest.mark.parametrize("name", TILED)
def test_tiles_and_pixels_are_those_of_the_processor(name: str, root: Path) -> None:
    """Tiles to the bit; and pixels, read here patch by patch in the order of lines."""
    sight, expected = tower(root / name).sight, said(name)
    seen = [picture(data, sight) for data in talk_of(name)[1]]
    assert np.array_equal(np.concatenate([p.tiles for p in seen]), expected["tiles"])
    grids = {"smolvlm": [(3, 3), (1, 3)], "gemma3": [(0, 0), (0, 0)]}
    assert [(p.lines, p.columns) for p in seen] == grids[name]
    p, side = sight.patch, sight.side
    for tile, pixels in zip(expected["tiles"], expected["pixels"], strict=False):
        patches, at = sight.patches(tile), sight.positions
        assert sorted(at) == list(range(side**2))
        for patch, i in zip(patches, at, strict=True):
            y, x = i // side * p, i % side * p
            assert np.abs(patch - pixels[:, y : y + p, x : x + p].ravel()).max() < 1e-6
    few = side // sight.merge  # neighbours of one row stand together
    first = at[: sight.merge**2].reshape(sight.merge, -1)
    assert first.tolist() == [[y * side + x for x in range(2)] for y in range(2)] and few == 3


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_those_of_transformers(name: str, root: Path) -> None:
    """From a folder and from llama.cpp's form of file."""
    file, expected = root / f"{name}-mmproj.gguf", said(name)
    for t in (tower(root / name), open_mmproj(file, open_checkpoint(file))):
        tiles = [tile for d in talk_of(name)[1] for tile in picture(d, t.sight).tiles]
        want = expected["rows"].reshape(-1, t.width)
        got = rows_of(t, tiles if name in QWEN else tiles[: len(want) // t.sight.rows], exact=True)
        assert spread_error(got, want) < TOLERANCE


@pytest.mark.parametrize("form", [0, 1], ids=["folder", "gguf"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name: str, form: int, root: Path) -> None:
    """Of a conversation with images, whose ids are the processor's; however it is cut."""
    talk, images = talk_of(name)
    expected = said(name)
    with seeing(ways(root, name)[form]) as m:
        ids = m.chat_ids(talk, images)
        assert list(words(ids)) == expected["ids"].tolist()
        runner, last = m.runner, len(expected["logits"])
        runner.prepare(ids)
        plans = m.session.plans_made
        logits = runner.text(ids).logits
        assert m.session.plans_made == plans  # they were there
        runner.past = 0
        every = runner.text(ids, every=True).logits
        assert spread_error(every[-last:], expected["logits"]) < LOGITS
        assert np.array_equal(every[-1:], logits)
        for runner.batch in (48, 11):
            runner.past = 0
            assert np.array_equal(runner.text(ids, every=True).logits, every)
        runner.past = 0
        blind = runner.text(words(ids), every=True).logits  # who sees says something else
        assert spread_error(blind[-last:], expected["logits"]) > 100 * LOGITS


@pytest.mark.parametrize("kind", ["q8_0", "f16", "bf16"])
def test_packed_towers_make_rows_that_point_the_same_way(
    kind: str, root: Path, tmp_path: Path
) -> None:
    t = tower(root / "smolvlm")
    tower_to_gguf(t, tmp_path / "p.gguf", kind)
    c = open_checkpoint(tmp_path / "p.gguf")
    packed = open_mmproj(tmp_path / "p.gguf", c)
    types = {n: t.dtype.name for n, t in c.tensors.items()}  # llama.cpp adds what is F32 alone
    added = [n for n in types if n.endswith((".bias", "position_embd.weight")) or "ln" in n]
    assert len(added) > 20 and {types[n] for n in added} == {"f32"}
    assert types["v.patch_embd.weight"] == "f16" and types["v.blk.0.ffn_up.weight"] == kind
    tiles = said("smolvlm")["tiles"][:3]
    a, b = rows_of(t, tiles, exact=True), rows_of(packed, tiles)
    cosine = (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
    assert cosine.min() > 0.998


@pytest.mark.parametrize("name", NAMES)
def test_every_op_has_a_kernel(name: str, root: Path) -> None:
    """On the CPU, and in a plan for a GPU; of the tower, and of a step with rows given."""
    t, model = tower(root / name), open_model(root / name)
    session = open_session(threads=2, profile=True)
    backend = session.backends["cpu"]
    assert isinstance(backend, CpuBackend) and backend.profile is not None
    backend.profile.on = True
    tile = tiles_of(name)[-1]
    build = partial(t.build, t.sight.count(tile))
    session.prepare("tile", build, t.weight)
    [rows] = [session.run("tile", t.feeds(tile))["rows"]]
    runner = Runner(model.beside("m."), session, 64)
    runner.text([5, *(Given(r, 7) for r in rows), 6])
    found = {op for op, _ in backend.profile.times}
    session.close()
    assert len(found) > 6 and [op for op in found if op.endswith("(NumPy)")] == []
    graphs = [build(), model.build(runner.shape(16, 1, 16, given=True))]
    assert [label for g in graphs for label in left_to_the_cpu(planned(g, 1))] == []


def test_a_given_row_is_no_token() -> None:
    """It is itself whoever compares it, it is a token to who knows nothing else, and who takes its
    number for one finds out."""
    row = np.arange(4, dtype=np.float32)
    a, same, other = Given(row, 3), Given(row.copy(), 3), Given(row + 1, 3)
    assert a == same and hash(a) == hash(same) and a != other and a > 1 << 200
    tokens = [1, a, 2]
    assert (has_given(tokens), first_given(tokens), list(words(tokens))) == (True, 1, [1, 3, 2])
    assert not has_given([1, 2]) and first_given([1, 2]) == 2 and words([1, 2]) == [1, 2]
    with pytest.raises(OverflowError):
        padded(tokens, 4, 0)
    feeds = given_feeds(tokens, np.arange(4, dtype=np.int32), 4)
    assert feeds["which"].tolist() == [0, 5, 2, 3] and np.array_equal(feeds["given"][1], row)
    assert not feeds["given"][[0, 2, 3]].any()
    sampler = Sampler(SamplerConfig(repeat_penalty=2.0, temp=0), 8)
    sampler.accept_all(tokens)  # an image's token is in the text
    logits = np.ones(8, np.float32)
    assert sampler.sample(logits) == 0 and sampler.sample(np.where(np.arange(8) < 4, 1, 0.7)) == 0


def test_a_block_is_in_one_piece() -> None:
    """Or two where its first rows are known. All of its rows are numbers of the whole block: what
    is behind a row changes what the decoder makes of it."""
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    block, alone = given_rows(rows, 7, together=True), given_rows(rows, 7)
    assert [later(r) for r in block] == [3, 2, 1, 0] and {later(r) for r in [*alone, 5]} == {0}
    other = given_rows(np.concatenate([rows[:3], rows[3:] + 1]), 7, together=True)
    assert not set(block) & set(other) and len(set(block)) == 4
    assert block == given_rows(rows.copy(), 7, together=True) and not set(block) & set(alone)
    text = [1, 2, *block, 3, 4]
    cut = [(8, [8]), (7, [7, 1]), (6, [6, 2]), (5, [2, 5, 1]), (4, [2, 4, 2]), (3, [2, 4, 2])]
    assert [(most, [len(p) for p in pieces(text, most)]) for most, _ in cut] == cut
    assert [len(p) for p in pieces(text[4:], 1)] == [2, 1, 1]
    assert [len(p) for p in pieces([1, 2, *alone], 4)] == [4, 2]
    whole = Rows(text, range(5, 13), range(5, 13))
    seen = visibility(whole, 8, 32)
    assert [int((r == 0).sum()) for r in seen] == [6, 7, 11, 11, 11, 11, 12, 13]
    few, which = columns(whole, 8, 32)
    assert np.array_equal(few[which].T, seen)  # as devices make the mask of it
    assert [int((r == 0).sum()) for r in visibility(whole, 8, 32, 3)] == [3, 3, 6, 5, 4, 3, 3, 3]


def test_an_architecture_that_takes_no_rows_says_so(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an image would be what its token is."""
    monkeypatch.setattr("models.blocks.placed", lambda x, given: x)
    with (
        seeing({"path": root / "smolvlm"}) as m,
        pytest.raises(ModelError, match="llama: the graph takes no rows in the place of tokens"),
    ):
        m.runner.text(m.prompt_ids("a", images=[png(9, 9)]))


@pytest.mark.parametrize("name", ["smolvlm", "qwen2_5_vl", "qwen3_vl"])
def test_drafts_change_nothing(name: str, root: Path) -> None:
    """Of an answer to a prompt with images, which drafters know as tokens."""
    talk, images = talk_of(name)
    with seeing({"path": root / name}) as m:
        ids, said_by = m.chat_ids(talk, images), list[list[int]]()
        for drafts in (None, Speculation([SuffixDrafter()], Fixed(4), longest=4)):
            m.engine.reset()
            sampler = Sampler(SamplerConfig(temp=0), m.model.vocab_size)
            said_by.append(list(m.engine.generate(
                ids, sampler.sample, sampler.accept, limit=40, drafts=drafts
            )))  # fmt: skip
        assert said_by[0] == said_by[1] and len(said_by[0]) > 8
        assert m.engine.statistics.drafted > 0


def answers(batch: Batch, prompts: Sequence[Sequence[int]], limit: int = 12) -> list[list[int]]:
    texts = [batch.submit(Request(p, Plain(lambda x: int(x.argmax())), limit)) for p in prompts]
    while not batch.idle:
        batch.step()
    return [t.tokens[len(p) :] for t, p in zip(texts, prompts, strict=True)]


def batch_of(m: Any, slots: int = 1024) -> Batch:
    runner = ListRunner(m.model, m.session, slots, 512, cache_dtype=F32)
    return Batch(runner, Limits(texts=4, beside=16))


@pytest.mark.parametrize("name", NAMES)
def test_texts_of_a_batch_have_the_bits_that_they_have_alone(name: str, root: Path) -> None:
    """With images beside others without; an image that was seen is not computed again, and another
    one is, behind the same words."""
    with seeing({"path": root / name}) as m:
        shown = [png(30, 20, shade=s) for s in (0, 255)]
        seen = [m.prompt_ids("What?", images=[i]) for i in shown]
        prompts = [*seen, m.prompt_ids("What?"), m.prompt_ids("And what?", images=shown)]
        assert list(words(seen[0])) == list(words(seen[1]))
        alone = [answers(batch_of(m), [p])[0] for p in prompts]
        assert alone[0] != alone[1]
        turns = [*seen[0], *alone[0], *m.prompt_ids("And what?", images=shown[1:])]
        later = answers(batch_of(m), [turns])
        batch = batch_of(m)  # all of them have one cache, the session's
        assert answers(batch, prompts) == alone
        before = batch.counters.reused
        assert answers(batch, [seen[0]]) == alone[:1]
        kept = batch.counters.reused - before  # all but the last token's row is there
        assert kept == (0 if m.model.recurrent else len(seen[0]) - 1)
        assert answers(batch, [turns]) == later and batch.counters.reused > kept
        fresh = batch_of(m)
        answers(fresh, [seen[0]])
        assert answers(fresh, [seen[1]]) == [alone[1]]
        assert fresh.counters.reused == (0 if m.model.recurrent else first_given(seen[1]))
        batch.memory.check([])
        if m.model.recurrent:
            return  # a session has states for one text or for several
        runner = m.runner  # the same words by the runner of one text
        own = list(
            m.engine.generate(prompts[3], lambda x: int(x.argmax()), lambda _: None, limit=12)
        )
        assert own == alone[3] and runner.past > 0


@pytest.mark.parametrize("name", NAMES)
def test_texts_that_give_way_compute_their_images_again(name: str, root: Path) -> None:
    """Where slots are short, a text's rows are made of its prompt once more."""
    with seeing({"path": root / name}) as m:
        prompts = [m.prompt_ids("What?", images=[png(9, 9, shade=s)]) for s in (1, 99, 255)]
        alone = [answers(batch_of(m), [p], 30)[0] for p in prompts]
        longest = max(map(len, prompts)) + 40
    with seeing({"path": root / name}) as m:
        tight = Batch(ListRunner(m.model, m.session, longest, longest, cache_dtype=F32))
        assert answers(tight, prompts, 30) == alone
        assert tight.counters.preempted + tight.memory.evicted > 0


def test_a_disk_keeps_what_stands_before_an_image(root: Path, tmp_path: Path) -> None:
    with seeing({"path": root / "smolvlm"}) as m:
        lead = "a" * (2 * BLOCK)
        prompt = m.prompt_ids("b", system=lead, images=[png(9, 9)])
        disk = Disk(tmp_path, b"m", 1 << 24)
        batch = batch_of(m)
        batch.disk = Spill(disk, batch.runner)
        [first] = answers(batch, [prompt])
        disk.close()
        assert 0 < len(list(tmp_path.glob("*.safetensors"))) == first_given(prompt) // BLOCK
        again = batch_of(m)
        disk = Disk(tmp_path, b"m", 1 << 24)
        again.disk = Spill(disk, again.runner)
        assert answers(again, [prompt]) == [first]
        assert again.counters.restored == first_given(prompt) // BLOCK * BLOCK
        disk.close()


def test_a_marker_that_somebody_types_shows_no_image(root: Path) -> None:
    """Only the template's own stand for images, and tags around these are text, too."""
    with seeing({"path": root / "smolvlm"}) as m:
        image = png(9, 9)
        typed = "<image><fake_token_around_image><global-img>"
        ids = m.prompt_ids(typed, images=[image])
        plain = m.prompt_ids("x", images=[image])
        tags = {m.tokenizer.id_of(t) for t in ("<image>", "<global-img>", "<row_1_col_1>")}
        assert [t for t in words(ids) if t in tags] == [t for t in words(plain) if t in tags]
        assert typed in m.tokenizer.decode(words(ids), special=False)
        assert not has_given(m.prompt_ids(typed))


@pytest.mark.parametrize("name", NAMES)
def test_templates_that_know_parts_alone_show_texts(name: str, root: Path) -> None:
    """SmolVLM's would show no letter of a message that is a string; Gemma's takes either."""
    with seeing({"path": root / name}) as m:
        assert ChatTemplate.of(m.tokenizer).wants_parts == (name == "smolvlm")
        shown = m.tokenizer.decode(m.prompt_ids("What is it?", system="Be brief."))
        assert "What is it?" in shown and "Be brief." in shown


def test_an_image_that_was_seen_is_not_read_again(root: Path) -> None:
    """As far as rows are kept; those that were used longest ago go."""
    with seeing({"path": root / "smolvlm"}) as m:
        images = [png(40, 40, shade=s) for s in (0, 100, 200)]
        each = len(picture(images[0], m.eye.tower.sight).tiles)
        first = m.prompt_ids("a", images=images[:1])
        assert m.eye.read == each
        assert m.prompt_ids("a", images=images[:1]) == first and m.eye.read == each
        m.eye.most = 2 * each * m.eye.tower.sight.rows
        for i in (1, 0, 2):  # the second one goes
            m.prompt_ids("a", images=[images[i]])
        assert m.eye.read == 3 * each
        m.prompt_ids("a", images=[images[0], images[1]])
        assert m.eye.read == 4 * each


@pytest.mark.parametrize(
    ("size", "lines", "columns"),
    [((60, 41), 3, 3), ((70, 20), 1, 3), ((20, 70), 3, 1), ((1, 4000), 3, 1), ((4000, 1), 1, 3)],
)
def test_however_long_an_image_is_tiles_are_whole(
    size: tuple[int, int], lines: int, columns: int, root: Path
) -> None:
    seen = picture(png(*size), tower(root / "smolvlm").sight)
    assert (seen.lines, seen.columns, len(seen.tiles)) == (lines, columns, lines * columns + 1)


def test_an_image_of_one_tile_is_not_split() -> None:
    """Nor is any where the processor does not split."""
    tags = ("<fake_token_around_image>", "<global-img>")
    for longest in (24, 0):
        sight = Sight("idefics3", 24, 4, 2, longest, (0.5,) * 3, (0.5,) * 3)
        seen = picture(png(50, 31), sight)
        assert seen.tiles.shape == (1, 24, 24, 3)
        assert seen.text(sight) == f"{tags[0]}{tags[1]}{'<image>' * 9}{tags[0]}"


def test_files_are_read_as_cameras_write_them(root: Path) -> None:
    """Turned as the file says, of whatever mode, and of several frames the first."""
    sight, out = tower(root / "smolvlm").sight, io.BytesIO()
    left = Image.new("RGB", (40, 20))
    left.paste((255, 0, 0), (0, 0, 20, 20))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    left.save(out, "JPEG", exif=exif, quality=95)
    whole = picture(out.getvalue(), sight).tiles[-1].astype(int)
    assert whole[:8, :, 0].mean() > 200 and whole[-8:, :, 0].mean() < 50  # it lies above now
    for mode in ("L", "P", "RGBA", "1", "CMYK", "I;16"):
        kind = "TIFF" if mode == "CMYK" else "PNG"
        out = io.BytesIO()
        Image.new(mode, (9, 9)).save(out, kind)
        if kind == "PNG":
            assert picture(out.getvalue(), sight).tiles.shape[1:] == (24, 24, 3)
        else:
            with pytest.raises(InputError, match="no image"):
                picture(out.getvalue(), sight)


def test_what_is_no_image_is_refused(root: Path) -> None:
    """Before anything of it is decoded where it is too large."""
    sight = tower(root / "smolvlm").sight
    for data in (b"", b"GIF89a", b"no image at all", png(60, 60)[:50], b"\x89PNG\r\n\x1a\n" * 9):
        with pytest.raises(InputError, match=r"no image \(PNG, JPEG, WEBP, GIF, BMP\)"):
            picture(data, sight)
    side = int(MOST_PIXELS**0.5) + 1
    with pytest.raises(InputError, match=f"{side} x {side} pixels: at most {MOST_PIXELS}"):
        picture(png(side, side, "1", 0), sight)


def test_who_cannot_see_says_so(root: Path, tmp_path: Path) -> None:
    """A model without a tower, a pair that is none, a file of something else."""
    small = small_model(tmp_path / "small.gguf")
    with seeing({"path": small}) as m, pytest.raises(InputError, match="reads text only"):
        m.prompt_ids("a", images=[png(9, 9)])
    mmproj = root / "smolvlm-mmproj.gguf"
    wrong = small_model(tmp_path / "other.gguf")
    with (
        seeing({"path": wrong, "mmproj": mmproj}) as m,
        pytest.raises(InputError, match="has no token '<image>'"),
    ):
        m.prompt_ids("a", images=[png(9, 9)])
    with pytest.raises(ModelError, match="holds a model \\(llama\\), and no tower"):
        load(root / "smolvlm", mmproj=root / "smolvlm.gguf")
    c = open_checkpoint(mmproj)
    write_gguf(tmp_path / "p.gguf", {**c.metadata, "clip.projector_type": "internvl"},
               list(c.tensors.values()))  # fmt: skip
    with pytest.raises(ModelError, match="of kind 'internvl'; known: 'idefics3'"):
        load(root / "smolvlm", mmproj=tmp_path / "p.gguf")
    with seeing({"path": root / "smolvlm"}, ctx_size=40) as m:
        with pytest.raises(InputError, match="1 images make 90 tokens, but the context holds 40"):
            m.prompt_ids("a", images=[png(30, 30)])
        assert m.eye.read == 0
        with pytest.raises(InputError, match="images are part of a chat"):
            m.prompt_ids("a", chat=False, images=[png(9, 9)])
        with pytest.raises(InputError, match="2 images, of which the chat template shows 1"):
            m.chat_ids([{"role": "user", "content": [{"type": "image"}]}], [png(9, 9)] * 2)


def test_a_tower_of_another_width_is_refused(root: Path, tmp_path: Path) -> None:
    c = open_checkpoint(root / "smolvlm-mmproj.gguf")
    tensors = dict(c.tensors)
    fc = tensors["mm.model.fc.weight"]
    half = fc.data[: fc.shape[0] // 2]
    tensors["mm.model.fc.weight"] = dataclasses.replace(fc, shape=half.shape, storage=half)
    write_gguf(tmp_path / "p.gguf", c.metadata, list(tensors.values()))
    with (
        seeing({"path": root / "smolvlm.gguf", "mmproj": tmp_path / "p.gguf"}) as m,
        pytest.raises(ModelError, match="makes rows of 32 numbers, but smolvlm takes 64"),
    ):
        m.prompt_ids("a", images=[png(9, 9)])


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("config.json", {"scale_factor": 5}, "of which 5 on a side become one row"),
    ("config.json", {"scale_factor": 3}, "for 9 patches"),
    ("config.json", {"vision_config": {"hidden_act": "relu"}}, "hidden_act 'relu'"),
    ("config.json", {"vision_config": {"num_attention_heads": 5}}, "5 heads of 32 numbers"),
    ("config.json", {"vision_config": {"num_hidden_layers": 1}}, "2 layers in the files, 1 in"),
    ("config.json", {"vision_config": {"num_hidden_layers": 3}}, "no tensor 'blk.2"),
    ("config.json", {"vision_config": {"patch_size": 12}}, "no tower of patches"),
    ("preprocessor_config.json", {"max_image_size": {"longest_edge": 48}}, "tiles of 48 pixels"),
    ("preprocessor_config.json", {"image_std": [0.5, 0, 0.5]}, "pixels with mean"),
    ("preprocessor_config.json", {"image_mean": [0.5]}, "pixels with mean"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "change", "match"), WRONG)
def test_a_tower_that_does_not_fit_together_is_refused(
    file: str, change: dict[str, Any], match: str, root: Path, tmp_path: Path
) -> None:
    """When an image is shown; text is answered as before."""
    folder = tmp_path / "m"
    shutil.copytree(root / "smolvlm", folder)
    told = json.loads((folder / file).read_text())
    for key, value in change.items():
        told[key] = {**told[key], **value} if isinstance(value, dict) else value
    (folder / file).write_text(json.dumps(told))
    with seeing({"path": folder}) as m:
        assert m.prompt_ids("a")
        with pytest.raises(ModelError, match=match):
            m.prompt_ids("a", images=[png(9, 9)])


def test_processors_of_newer_folders_are_read(root: Path, tmp_path: Path) -> None:
    """One file, in which the image processor's config is a part; without one the defaults hold."""
    folder = tmp_path / "m"
    shutil.copytree(root / "smolvlm", folder)
    own = tower(folder).sight
    old = folder / "preprocessor_config.json"
    whole = {"image_seq_len": 9, "image_processor": json.loads(old.read_text())}
    old.unlink()
    (folder / "processor_config.json").write_text(json.dumps(whole))
    assert tower(folder).sight == own
    whole["image_processor"]["do_image_splitting"] = False
    (folder / "processor_config.json").write_text(json.dumps(whole))
    assert tower(folder).sight == dataclasses.replace(own, longest=0)
    (folder / "processor_config.json").unlink()
    half = (0.5, 0.5, 0.5)
    assert tower(folder).sight == Sight("idefics3", 24, 4, 2, 96, half, half)


def test_a_processors_template_is_the_one(root: Path, tmp_path: Path) -> None:
    """As folders of earlier years have it: the tokenizer's own may know no images."""
    folder = tmp_path / "m"
    shutil.copytree(root / "smolvlm", folder)
    config = folder / "tokenizer_config.json"
    told = json.loads(config.read_text())
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": told["chat_template"]}))
    config.write_text(json.dumps({**told, "chat_template": "{{ messages[0].content }}"}))
    with seeing({"path": root / "smolvlm"}) as m, seeing({"path": folder}) as same:
        image = png(9, 9)
        assert same.prompt_ids("a", images=[image]) == m.prompt_ids("a", images=[image])
        assert same.prompt_ids("a") == m.prompt_ids("a")


def test_early_files_call_feed_forwards_otherwise(root: Path, tmp_path: Path) -> None:
    c = open_checkpoint(root / "smolvlm-mmproj.gguf")
    swap = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
    turned = []
    for name, t in c.tensors.items():
        part = name.split(".")[3] if name.startswith("v.blk.") else ""
        turned.append(dataclasses.replace(t, name=name.replace(part, swap.get(part, part))))
    write_gguf(tmp_path / "p.gguf", c.metadata, turned)
    old = open_mmproj(tmp_path / "p.gguf", open_checkpoint(tmp_path / "p.gguf"))
    tiles = said("smolvlm")["tiles"][:1]
    own = rows_of(tower(root / "smolvlm"), tiles, exact=True)
    assert np.abs(rows_of(old, tiles, exact=True) - own).max() < 1e-4 * np.ptp(own)


@pytest.mark.parametrize("name", NAMES)
def test_llama_cpp_reads_the_pair(name: str, root: Path) -> None:
    """And says the same of an image of one colour, which resizing leaves as it is; behind a text,
    since its template takes what stands for an image for one, and SmolVLM's writes a space before;
    and without the empty lines that transformers has around an image of Gemma 3."""
    xllamacpp = pytest.importorskip("xllamacpp")
    lines, columns = tiles_of(name)[0].shape[:2] if name in QWEN else (72, 72)  # as it will be
    flat = png(columns, lines, shade=(200, 30, 90))
    params = xllamacpp.CommonParams()
    params.model.path = str(root / f"{name}.gguf")
    params.mmproj.path, params.mmproj_use_gpu = str(root / f"{name}-mmproj.gguf"), False
    params.n_parallel, params.warmup, params.use_jinja = 1, False, True
    params.n_ctx = params.n_batch = params.n_ubatch = 512
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    url = f"data:image/png;base64,{base64.b64encode(flat).decode()}"
    image = {"type": "image_url", "image_url": {"url": url}}
    said_there = xllamacpp.Server(params).handle_chat_completions({
        "messages": [{"role": "user", "content": [{"type": "text", "text": "What?"}, image]}],
        "max_tokens": 24, "temperature": 0, "logprobs": True, "top_logprobs": 5,
    })  # fmt: skip
    told = said_there["choices"][0]["logprobs"]["content"]
    with seeing(ways(root, name)[1]) as m:
        content = [{"type": "text", "text": "What?"}, {"type": "image"}]
        ids = m.chat_ids([{"role": "user", "content": content}], [flat])
        ids = [i for i in ids if name != "gemma3" or i != 256]
        assert said_there["usage"]["prompt_tokens"] == len(ids)
        logits, own = m.runner.text(ids).logits[-1], list[dict[int, float]]()
        for _ in range(24):
            chances = logits - np.logaddexp.reduce(logits)
            best = np.argsort(-chances)[:5].tolist()
            own.append({t: float(chances[t]) for t in best})
            logits = m.runner.text(best[:1]).logits[-1]
    assert len(told) >= 3  # it tells of tokens that are whole letters alone
    for there in told:
        best = {t["id"]: t["logprob"] for t in there["top_logprobs"][:3]}
        near = [o for o in own if max(o, key=o.__getitem__) == there["id"]]
        assert any(all(abs(best[t] - o.get(t, 0.0)) < 0.05 for t in best) for o in near)


@pytest.mark.parametrize("name", ["smolvlm", "qwen2_5_vl", "qwen3_vl"])
def test_commands_show_images(name: str, root: Path, tmp_path: Path) -> None:
    """`generate` from either form, `convert` to the pair, Python's door: one answer."""
    folder, image = root / name, tmp_path / "a.png"
    image.write_bytes(png(30, 20))
    how = ["generate", "--temp", "0", "-n", "8", "-t", "1", "--exact", "--json", "--image", image]
    status, told, _ = ggraph_here(*how, "-m", folder, "What?")
    assert status == 0
    said_by = json.loads(told)
    pair = tmp_path / "m.gguf", tmp_path / "p.gguf"
    status, _, noted = ggraph_here("convert", folder, "-o", pair[0], "--type", "f32")
    assert status == 0 and "--mmproj names its file" in noted
    status, written, _ = ggraph_here(
        "convert", folder, "-o", pair[0], "--mmproj", pair[1], "--type", "f32"
    )
    assert status == 0 and written.count("f32") == 2
    status, told, _ = ggraph_here(*how, "-m", pair[0], "--mmproj", pair[1], "What?")
    again = json.loads(told)
    assert (again["text"], again["prompt_tokens"]) == (said_by["text"], said_by["prompt_tokens"])
    with Chat(folder, threads=1, exact=True) as chat:
        for shown in (image, str(image), image.read_bytes()):
            text = "".join(chat.answer("What?", images=[shown], temp=0, limit=8))
            assert text == said_by["text"]
    assert "reads text only" in refused_here(*how, "-m", pair[0], "What?")
    assert "cannot read" in refused_here(*how, "-m", folder, "--image", tmp_path / "no", "What?")
    (tmp_path / "b").write_text("text")
    assert "no image" in refused_here(*how, "-m", folder, "--image", tmp_path / "b", "What?")
    small = small_model(tmp_path / "small.gguf")
    refused = refused_here("convert", small, "-o", tmp_path / "x.gguf", "--mmproj", tmp_path / "y")
    assert "a model with a tower" in refused
