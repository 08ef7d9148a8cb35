"""Images of Qwen's vision models: tiles of any size, windows, and rows with three positions.

What all kinds of towers have in common is in test_images.py.
"""

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from encoder_kit import TOLERANCE
from golden_kit import TOLERANCE as LOGITS
from image_kit import QWEN, made, said, seeing, spread_error, talk_of, tiles_of
from safetensors.numpy import load_file, save_file
from test_images import png, rows_of, tower

from ggraph.decode.given import PLACES, Given, Stillness, given_feeds, is_still, on_grid, words
from ggraph.errors import InputError, ModelError
from ggraph.formats import open_checkpoint
from ggraph.formats.gguf import write_gguf
from ggraph.serving.text import Plain, Request, begun
from ggraph.tensor import Kind
from models.images import picture
from models.registry import open_model
from models.rotation import AXES
from models.run.convert import tower_to_gguf
from models.run.eye import Eye
from models.run.load import open_session
from models.tower_files import open_mmproj
from models.tower_qwen import QwenTower, corners, places, windows
from models.tower_qwen_files import MOST_ROWS

SAMPLE = ("qwen2_5_vl", "qwen3_vl")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders, and GGUF files of them."""
    return made(tmp_path_factory.mktemp("qwen"))


@pytest.mark.parametrize("name", QWEN)
def test_tiles_and_patches_are_those_of_the_processor(name: str, root: Path) -> None:
    """To the bit; a patch's numbers, too."""
    sight, expected = tower(root / name).sight, said(name)
    tiles = [picture(data, sight).tiles for data in talk_of(name)[1]]
    assert all(np.array_equal(t, [own]) for t, own in zip(tiles, tiles_of(name), strict=True))
    few = sight.patches(tiles[0][0])[: len(expected["pixels"])]
    assert np.array_equal(few, expected["pixels"].reshape(few.shape))
    for (tile,), grid in zip(tiles, expected["grid"], strict=True):
        at = places(sight, tile)
        assert len(at) == grid.prod() and {tuple(p) for p in at} == set(np.ndindex(*grid))
        patches, side = sight.patches(tile), sight.patch
        normal = (tile / 255 - sight.mean) / sight.std
        for patch, (y, x) in zip(patches, at * side, strict=True):
            own = normal[y : y + side, x : x + side].transpose(2, 0, 1)
            assert np.abs(patch - own.ravel()).max() < 1e-5
        assert at[: sight.merge**2].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]


@pytest.mark.parametrize("name", SAMPLE)
def test_images_become_as_large_as_the_processor_makes_them(name: str, root: Path) -> None:
    sight = tower(root / name).sight
    for width, height, *wanted in said(name)["sizes"].tolist():
        tile = picture(png(width, height), sight).tiles[0]
        assert [tile.shape[1], tile.shape[0]] == wanted
    for sides in ((201, 1), (1, 300)):
        with pytest.raises(InputError, match=f"{sides[0]} x {sides[1]} pixels: at most 200 times"):
            picture(png(*sides), sight)


@pytest.mark.parametrize("name", QWEN)
def test_positions_are_those_of_transformers(name: str, root: Path) -> None:
    """However a conversation is cut: each piece goes on where the one before has come to."""
    expected = said(name)["places"]
    with seeing({"path": root / name}) as m:
        ids = m.chat_ids(*talk_of(name))
    for most in (len(ids), 16, 7, 1):
        still, found = Stillness(), list[np.ndarray]()
        for first in range(0, len(ids), most):
            part = ids[first : first + most]
            at = np.array(still.positions(part, range(first, first + len(part)), first), np.int32)
            given = any(isinstance(t, Given) for t in part)
            feeds = given_feeds(part, at, len(part)) if given else dict.fromkeys(PLACES, at)
            found.append(np.stack([feeds[p] for p in PLACES]))
        assert np.array_equal(np.concatenate(found, 1), expected)
    text = begun(Request(ids, Plain(lambda _: 0)), 0, 4, None)  # type: ignore[arg-type]
    alone = [i for i, t in enumerate(ids) if not isinstance(t, Given)]
    assert [i - text.lag(i) for i in alone] == expected[0, alone].tolist()


def test_what_is_behind_a_place_in_the_cache_is_forgotten_when_it_is_written() -> None:
    """And not before: who comes back to a text that is there finds it as it was."""
    still, image = Stillness(), on_grid(np.ones((6, 2)), 7, 2)
    assert [is_still(t) for t in image] == [False] * 3 + [True] * 3
    assert list(still.positions([1, *image, 2], range(8), 0)) == [0, 1, 2, 3, 4, 4, 4, 4]
    assert list(still.positions([5], [8], 8)) == [5] and list(still.positions([5], [8], 8)) == [5]
    assert list(still.positions([3, 4], [9, 10], 9)) == [6, 7]
    assert list(still.positions([3], [5], 5)) == [4]  # where the image's fifth row was
    assert list(still.positions([3, 4], [6, 7], 6)) == [5, 6]
    plain = range(3, 9)
    assert Stillness().positions([1] * 6, plain, 3) is plain  # texts have no work of it


def test_rows_of_another_grid_are_others() -> None:
    """A row's number says where it stands, and where what follows does."""
    row = np.ones((12, 4), np.float32)
    grids = {columns: on_grid(row, 7, columns) for columns in (2, 3, 4, 6, 12)}
    assert len({tuple(g) for g in grids.values()}) == len(grids)
    assert len(set(grids[3])) == 12 and grids[3] == on_grid(row.copy(), 7, 3)
    assert grids[2][0] == grids[3][0] != Given(row[0], 8, turn=(0, 1, 0))
    assert Given(row[0], 7) == grids[2][0] and Given(row[0], 7, still=True) != grids[2][0]


@pytest.mark.parametrize("name", SAMPLE)
def test_a_text_goes_on_behind_images_as_if_it_were_read_at_once(name: str, root: Path) -> None:
    """Token by token, after other texts, and from within an image: to the bit."""
    talk, images = talk_of(name)
    with seeing({"path": root / name}) as m:
        runner, rest = m.runner, [70, 71, 72, 73, 74, 75]
        ids, plain = m.chat_ids(talk, images), [9] * len(m.chat_ids(talk, images))
        whole = runner.text([*ids, *rest], every=True).logits
        runner.past = 0
        without = runner.text([*plain, *rest], every=True).logits

        def follows(text: list[int], wanted: np.ndarray) -> None:
            runner.past = 0
            runner.text(text)
            for i, token in enumerate(rest):
                found = runner.follow(token).logits[-1]
                assert np.array_equal(found, wanted[len(text) + i])

        for _ in range(2):
            follows(ids, whole)  # what is made ahead is that of the text before
            follows(plain, without)
        runner.past = 0
        runner.text([*ids, *rest])
        for kept in (20, len(ids) + 2, len(ids) - 3, 9):
            runner.past = kept
            found = runner.text([*ids, *rest][kept:], every=True).logits
            assert np.array_equal(found, whole[kept:])


@pytest.mark.parametrize("name", QWEN)
def test_steps_of_texts_are_the_plain_ones(name: str, root: Path) -> None:
    """Only a step with an image's rows in it has three rotations, and more inputs."""
    model, plain = open_model(root / name), open_model(root / name)
    plain = dataclasses.replace(
        plain, catalogue={n: t for n, t in plain.catalogue.items() if n not in AXES}
    )
    with seeing({"path": root / name}) as m:
        shapes = [m.runner.shape(rows, 1, 64) for rows in (1, 8)]
        given = m.runner.shape(8, 1, 64, given=True)
    for shape in shapes:
        assert str(model.build(shape)) == str(plain.build(shape))
    inputs, turned = (
        {t.name for t in model.build(given).leaves(kind)} for kind in (Kind.INPUT, Kind.WEIGHT)
    )
    assert {*PLACES, "given", "which"} <= inputs and set(AXES) <= turned
    ropes = [sum(t.op == "rope" for t in model.build(s)) for s in (shapes[1], given)]
    assert ropes[1] == 3 * ropes[0] > 0


@pytest.mark.parametrize("name", QWEN)
def test_alike_positions_turn_as_one(name: str, root: Path) -> None:
    """To the bit: a text beside an image's rows is what it is alone."""
    with seeing({"path": root / name}) as m:
        text = m.prompt_ids("What is it?")
        alone = m.runner.text(text, every=True).logits
        image = on_grid(np.zeros((4, m.model.given_width)), m.eye.token, 2)
        m.runner.past = 0
        beside = m.runner.text([*text, *image], every=True).logits
        assert np.array_equal(beside[: len(text)], alone)


@pytest.mark.parametrize("grid", [(2, 2), (8, 8), (10, 6), (6, 18), (16, 10), (2, 20)])
def test_windows_are_squares_from_the_corner(grid: tuple[int, int], root: Path) -> None:
    sight = tower(root / "qwen2_5_vl").sight
    at = places(sight, np.zeros((grid[0] * 14, grid[1] * 14, 3), np.uint8))
    found = windows(at, 8)
    for own, listed in zip(at, found, strict=True):
        seen = [i for i, other in enumerate(at) if np.array_equal(other // 8, own // 8)]
        assert listed[: len(seen)].tolist() == seen and set(listed[len(seen) :]) <= {-1}


@pytest.mark.parametrize("grid", [(2, 2), (6, 6), (4, 10), (14, 2)])
def test_learned_positions_lie_between_those_of_a_square(grid: tuple[int, int]) -> None:
    """Whose corners are the image's: it is as a linear function says where that is one."""
    side, (lines, columns) = 6, grid
    table = np.add.outer(3.0 * np.arange(side), np.arange(side)).ravel()
    at = np.array(list(np.ndindex(*grid)), np.int32)
    found = corners(at, lines, columns, side)
    got = sum(found[f"part.{i}"][:, 0] * table[found[f"corner.{i}"]] for i in range(4))
    place = at * (side - 1) / (np.array(grid) - 1)
    assert np.abs(got - place @ [3.0, 1.0]).max() < 1e-4


def test_an_eye_keeps_the_plan_of_the_latest_size(root: Path) -> None:
    """Each has memory of its own, and there are as many as images have sizes."""
    with seeing({"path": root / "qwen2_5_vl"}) as m, open_session(threads=1) as session:
        eye = Eye(m.eye.tower, m.tokenizer, lambda: session, 512)
        counts, sides = list[int](), [(140, 84), (84, 56), (84, 140), (56, 84), (140, 84)]
        for i, size in enumerate(sides):
            data = png(*size, shade=i)
            eye.ids(f"a{eye.marker}b", "", [data], 512)
            counts.append(eye.tower.sight.count(picture(data, eye.tower.sight).tiles[0]))
            assert [c for c in set(counts) if c in session] == counts[-1:]
        assert counts == [60, 24, 60, 24, 60] and eye.read == session.plans_made == 5
        eye.ids(f"a{eye.marker}b", "", [png(84, 140, shade=9)], 512)
        assert eye.read == 6 and session.plans_made == 5


def changed_mmproj(path: Path, out: Path, drop: tuple[str, ...], **more: Any) -> Path:
    c = open_checkpoint(path)
    told = {k: v for k, v in c.metadata.items() if not k.endswith(drop)}
    write_gguf(out, {**told, **more}, list(c.tensors.values()))
    return out


@pytest.mark.parametrize("name", QWEN)
def test_files_that_say_less_are_read(name: str, root: Path, tmp_path: Path) -> None:
    """As llama.cpp's converter wrote them: without bounds of pixels or a window's size, the kind
    under another key; queries, keys and values together, or apart."""
    file = root / f"{name}-mmproj.gguf"
    own = open_mmproj(file, open_checkpoint(file))
    kind = own.sight.kind
    less = ("_pixels", "window_size", "merge_size", "clip.projector_type")
    path = changed_mmproj(file, tmp_path / "p.gguf", less, **{"clip.vision.projector_type": kind})
    c = open_checkpoint(path)
    fused = sum(".attn_qkv." in n for n in c.tensors)
    assert (fused > 0) == (kind == "qwen3vl_merger")  # as llama.cpp reads them alone
    found = open_mmproj(path, c)
    fewest = 65536 if fused else 3136
    most = MOST_ROWS * own.sight.size**2
    assert found.sight == dataclasses.replace(own.sight, fewest=fewest, most=most)
    tile = tiles_of(name)[0]
    assert np.array_equal(rows_of(found, [tile]), rows_of(own, [tile]))
    if fused:
        return
    tensors = dict(c.tensors)
    for lead in ("v.blk.0", "v.blk.1"):
        for end in ("weight", "bias"):
            parts = [tensors.pop(f"{lead}.attn_{role}.{end}") for role in "qkv"]
            data, title = np.concatenate([p.data for p in parts]), f"{lead}.attn_qkv.{end}"
            tensors[title] = dataclasses.replace(
                parts[0], name=title, shape=data.shape, storage=data
            )
    write_gguf(path, c.metadata, list(tensors.values()))
    again = open_mmproj(path, open_checkpoint(path))
    assert np.array_equal(rows_of(again, [tile]), rows_of(own, [tile]))


@pytest.mark.parametrize("name", SAMPLE)
def test_packed_towers_make_rows_that_point_the_same_way(
    name: str, root: Path, tmp_path: Path
) -> None:
    t = tower(root / name)
    tower_to_gguf(t, tmp_path / "p.gguf", "q8_0")
    c = open_checkpoint(tmp_path / "p.gguf")
    kinds = {n: x.dtype.name for n, x in c.tensors.items()}
    added = [n for n in kinds if n.endswith((".bias", "position_embd.weight")) or "ln" in n]
    assert {kinds[n] for n in added} == {"f32"} and kinds["v.blk.0.ffn_up.weight"] == "q8_0"
    assert {kinds[f"v.patch_embd.weight{end}"] for end in ("", ".1")} == {"f16"}
    tiles = tiles_of(name)
    a, b = rows_of(t, tiles, exact=True), rows_of(open_mmproj(tmp_path / "p.gguf", c), tiles)
    cosine = (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
    assert cosine.min() > 0.998


def test_no_image_is_larger_than_a_context_can_hold(root: Path, tmp_path: Path) -> None:
    """Whatever a processor's config allows, in either form of it."""
    folder = tmp_path / "m"
    shutil.copytree(root / "qwen2_5_vl", folder)
    path = folder / "preprocessor_config.json"
    told = json.loads(path.read_text())
    del told["size"]
    for bounds in ({"min_pixels": 3136, "max_pixels": 12845056}, {}):
        path.write_text(json.dumps({**told, **bounds}))
        sight = tower(folder).sight
        assert (sight.fewest, sight.most) == (3136, MOST_ROWS * 28 * 28)
    tile = picture(png(4000, 3000), sight).tiles[0]
    assert 0.9 * MOST_ROWS < math.prod(sight.grid(tile)) <= MOST_ROWS
    path.unlink()
    sight = tower(folder).sight
    assert sight.mean == (0.48145466, 0.4578275, 0.40821073)


WRONG: list[tuple[str, str, dict[str, Any], str]] = [
    ("qwen2_5_vl", "config.json", {"hidden_act": "gelu"}, "hidden_act 'gelu'; known: silu"),
    ("qwen2_vl", "config.json", {"hidden_act": "silu"}, "hidden_act 'silu'; known: quick_gelu"),
    ("qwen2_5_vl", "config.json", {"num_heads": 5}, "5 heads of 32 numbers"),
    ("qwen2_5_vl", "config.json", {"num_heads": 16}, "heads of 2 numbers do not turn"),
    ("qwen2_5_vl", "config.json", {"depth": 1}, "2 layers in the files, 1 in"),
    ("qwen2_5_vl", "config.json", {"depth": 3}, "no tensor 'blk.2"),
    ("qwen2_5_vl", "config.json", {"temporal_patch_size": 1}, "patches of 1 images"),
    ("qwen2_5_vl", "config.json", {"in_channels": 4}, "with 4 channels"),
    ("qwen2_5_vl", "config.json", {"window_size": 14}, "windows of 0 patches"),
    ("qwen2_5_vl", "config.json", {"fullatt_block_indexes": "x"}, "is no list of integers"),
    ("qwen2_5_vl", "config.json", {"spatial_merge_size": 3}, r"\(14, 2\) patches of images"),
    ("qwen2_vl", "config.json", {"mlp_ratio": 3}, r"expected \[96, 32\]"),
    ("qwen3_vl", "config.json", {"deepstack_visual_indexes": [1, 0]}, "128"),
    ("qwen3_vl", "preprocessor_config.json", {"patch_size": 14}, r"\(14, 2\) patches of images"),
    ("qwen3_vl", "preprocessor_config.json", {"merge_size": 4}, r"\(8, 4\) patches of images"),
    ("qwen3_vl", "preprocessor_config.json", {"min_pixels": 9999}, "images of 9999 to 5120 pixels"),
    ("qwen3_vl", "preprocessor_config.json", {"max_pixels": 100}, "images of 1024 to 100 pixels"),
    ("qwen3_vl", "preprocessor_config.json", {"image_std": [0.5, 0, 0.5]}, "pixels with mean"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "file", "change", "match"), WRONG)
def test_a_tower_that_does_not_fit_together_is_refused(
    name: str, file: str, change: dict[str, Any], match: str, root: Path, tmp_path: Path
) -> None:
    """When an image is shown; text is answered as before."""
    folder = tmp_path / "m"
    shutil.copytree(root / name, folder)
    told = json.loads((folder / file).read_text())
    (told["vision_config"] if file == "config.json" else told).update(change)
    (folder / file).write_text(json.dumps(told))
    with seeing({"path": folder}) as m:
        assert m.prompt_ids("a")
        with pytest.raises(ModelError, match=match):
            m.runner.text(m.prompt_ids("a", images=[png(40, 40)]))


ROPES: list[tuple[dict[str, Any], str]] = [
    ({"mrope_section": [2, 2, 2]}, "does not say by which pairs"),
    ({"mrope_section": [4, 4]}, "does not say by which pairs"),
    ({"mrope_section": []}, "does not say by which pairs"),  # that of 128 numbers is meant
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
     "images, and a rotation that is scaled"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "match"), ROPES)
def test_a_text_part_that_does_not_say_how_images_turn_is_refused(
    change: dict[str, Any], match: str, root: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "m"
    shutil.copytree(root / "qwen2_5_vl", folder)
    told = json.loads((folder / "config.json").read_text())
    told["text_config"]["rope_parameters"].update(change)
    (folder / "config.json").write_text(json.dumps(told))
    with seeing({"path": folder}) as m:
        assert np.isfinite(m.runner.text(m.prompt_ids("a")).logits).all()
        m.runner.past = 0
        with pytest.raises(ModelError, match=match):
            m.runner.text(m.prompt_ids("a", images=[png(40, 40)]))


def test_towers_and_texts_that_do_not_belong_together_say_so(root: Path, tmp_path: Path) -> None:
    """A text part that leaves what is added to its layers out, or turns by one position."""
    c = open_checkpoint(root / "qwen3_vl.gguf")
    told = {k: v for k, v in c.metadata.items() if not k.endswith("deepstack_layers")}
    write_gguf(tmp_path / "m.gguf", told, list(c.tensors.values()))
    how = {"path": tmp_path / "m.gguf", "mmproj": root / "qwen3_vl-mmproj.gguf"}
    with seeing(how) as m, pytest.raises(ModelError, match="rows of 128 numbers, but m takes 64"):
        m.prompt_ids("a", images=[png(40, 40)])
    c = open_checkpoint(root / "qwen2_vl.gguf")
    older = {
        k.replace("qwen2vl.", "qwen2."): v
        for k, v in c.metadata.items() if not k.endswith("dimension_sections")
    }  # fmt: skip
    older["general.architecture"] = "qwen2"
    write_gguf(tmp_path / "m.gguf", older, list(c.tensors.values()))
    how["mmproj"] = root / "qwen2_vl-mmproj.gguf"
    with seeing(how) as m, pytest.raises(ModelError, match="does not say by which pairs"):
        m.prompt_ids("a", images=[png(40, 40)])


def test_a_file_says_how_images_turn(root: Path) -> None:
    """With the names that llama.cpp asks for."""
    for name, lead, sections, deeper in (
        ("qwen2_5_vl", "qwen2vl", [2, 3, 3, 0], None), ("qwen2_vl", "qwen2vl", [2, 3, 3, 0], None),
        ("qwen3_vl", "qwen3vl", [3, 3, 2, 0], 1), ("qwen3_vl_moe", "qwen3vlmoe", [3, 3, 2, 0], 2),
        ("qwen3_5", "qwen35", [3, 3, 2, 0], None),
    ):  # fmt: skip
        told = open_checkpoint(root / f"{name}.gguf").metadata
        assert told["general.architecture"] == lead
        assert told[f"{lead}.rope.dimension_sections"].tolist() == sections
        assert told.get(f"{lead}.n_deepstack_layers") == deeper
    towers = {n: open_checkpoint(root / f"{n}-mmproj.gguf").metadata for n in QWEN}
    assert towers["qwen2_5_vl"]["clip.vision.n_wa_pattern"] == 2
    kinds = {n: towers[n]["clip.projector_type"] for n in QWEN}
    units = {n: [u for u in ("silu", "gelu") if towers[n].get(f"clip.use_{u}")] for n in QWEN}
    assert {(kinds[n], *units[n]) for n in QWEN} == {
        ("qwen2.5vl_merger", "silu"), ("qwen2vl_merger",), ("qwen3vl_merger", "gelu")
    }  # fmt: skip


def test_a_tower_whose_layers_all_see_everything_says_so(root: Path, tmp_path: Path) -> None:
    """llama.cpp asks files of this kind for the period of full layers."""
    folder = tmp_path / "m"
    shutil.copytree(root / "qwen2_5_vl", folder)
    told = json.loads((folder / "config.json").read_text())
    told["vision_config"]["fullatt_block_indexes"] = [0, 1]
    (folder / "config.json").write_text(json.dumps(told))
    t = tower(folder)
    tower_to_gguf(t, tmp_path / "p.gguf", "f32")
    c = open_checkpoint(tmp_path / "p.gguf")
    assert c.metadata["clip.vision.n_wa_pattern"] == 1
    tiles = tiles_of("qwen2_5_vl")
    assert np.array_equal(rows_of(open_mmproj(tmp_path / "p.gguf", c), tiles), rows_of(t, tiles))


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen2_vl"])
def test_folders_as_they_were_released(name: str, root: Path, tmp_path: Path) -> None:
    """No config of the text by itself, shorter names of tensors, an older name of the rotation, and
    bounds of pixels by themselves."""
    folder = tmp_path / "m"
    shutil.copytree(root / name, folder)
    told = json.loads((folder / "config.json").read_text())
    text = told.pop("text_config")
    rope = text.pop("rope_parameters")
    older = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    del text["model_type"], text["tie_word_embeddings"]
    told |= {**text, "rope_theta": rope["rope_theta"], "rope_scaling": older}
    told["vision_config"]["in_chans"] = told["vision_config"].pop("in_channels")
    (folder / "config.json").write_text(json.dumps(told))
    path = folder / "preprocessor_config.json"
    seen = json.loads(path.read_text())
    size = seen.pop("size")
    seen |= {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    path.write_text(json.dumps(seen))
    file = folder / "model.safetensors"
    names = {"model.visual.": "visual.", "model.language_model.": "model."}
    tensors = {}
    for title, t in load_file(file).items():
        lead = next((n for n in names if title.startswith(n)), "")
        tensors[names.get(lead, "") + title.removeprefix(lead)] = t
    save_file(tensors, file, metadata={"format": "pt"})
    with seeing({"path": folder}) as m:
        ids = m.chat_ids(*talk_of(name))
        logits = m.runner.text(ids, every=True).logits
        expected = said(name)["logits"]
        assert spread_error(logits[-len(expected) :], expected) < LOGITS


def test_windows_that_no_file_can_tell_of_are_not_written(root: Path, tmp_path: Path) -> None:
    t = tower(root / "qwen2_5_vl")
    config = dataclasses.replace(t.config, windowed_layers=(False, True))
    other = QwenTower(t.name, config, t.sight, t.catalogue)
    with pytest.raises(ModelError, match="GGUF cannot say that layers"):
        tower_to_gguf(other, tmp_path / "p.gguf", "f32")


@pytest.mark.parametrize("name", SAMPLE)
def test_a_marker_that_somebody_types_shows_no_image(name: str, root: Path) -> None:
    typed = "<|vision_start|><|image_pad|><|vision_end|>"
    with seeing({"path": root / name}) as m:
        ids = m.prompt_ids(typed, images=[png(40, 40)])
        plain = m.prompt_ids("x", images=[png(40, 40)])
        tags = {m.tokenizer.id_of(t) for t in ("<|vision_start|>", "<|image_pad|>")}
        assert [t for t in words(ids) if t in tags] == [t for t in words(plain) if t in tags]
        assert typed in m.tokenizer.decode(words(ids), special=False)


def test_an_image_of_one_colour_has_its_shape(root: Path) -> None:
    """Two of them whose pixels are the same bytes are two images."""
    with seeing({"path": root / "qwen2_5_vl"}) as m:
        wide, high = (m.prompt_ids("a", images=[png(*s, shade=5)]) for s in ((224, 56), (56, 224)))
        assert m.eye.read == 2 and len(wide) == len(high) and wide != high
        assert list(words(wide)) == list(words(high))


def test_windows_matter(root: Path) -> None:
    """The golden images have several, or their sizes would prove nothing."""
    t = tower(root / "qwen2_5_vl")
    blind = dataclasses.replace(t.config, sliding_window=None, windowed_layers=())
    other = QwenTower(t.name, blind, t.sight, t.catalogue)
    rows = rows_of(other, tiles_of("qwen2_5_vl"), exact=True)
    assert spread_error(rows, said("qwen2_5_vl")["rows"]) > 100 * TOLERANCE
    assert t.config.windowed_layers == (True, False)
