"""Have transformers say what it makes of images: scripts/golden_images.py FOLDER ..

Needs torch, transformers (5.24 made what is stored) and Pillow in an environment of their own, and
nothing of ggraph. Of each folder of tests/golden/images it takes the config, the tokenizer, the
image processor's config, and talk.json, a conversation with names of image files in it, and writes
beside them

- shapes.json: the tensors, which `tests/ruled_weights.py` makes;
- expected.npz: `ids` i32 [L], the conversation; `tiles` u8 [N, S, S, 3], all images' tiles in
  order, before pixels are normalised; of the first FEW `pixels` f32 [FEW, 3, S, S] and the tower's
  `rows` f32 [FEW, n, E]; `logits` f32 [LAST, V] of the last tokens.

Of Qwen's models, whose tiles are of any size: `tiles` u8 [n, 3], the pixels of one tile behind the
other's; `grid` i32 [N, 2], their patches' lines and columns; `pixels` f32 [FEW, 3, S, S] of the
first patches; `rows` f32 [n, E] of all tiles, with what more layers of the decoder take; `places`
i32 [3, L], the conversation's positions; and `sizes` i32 [n, 4], width and height of images, and of
the tiles that they become.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import numpy as np
import torch
import transformers
from golden_vectors import model_class, shapes_of
from PIL import Image
from ruled_weights import EXPECTED, SHAPES, write
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)

FEW, LAST = 2, 8


def processor_of(golden: Path, config: Any) -> Any:
    """What makes a model's inputs of a conversation: tokens of text and tiles of images."""
    tokenizer, vision = transformers.AutoTokenizer.from_pretrained(golden), config.vision_config
    template = {"chat_template": tokenizer.chat_template}
    if config.model_type == "gemma3":
        seen, count = Gemma3ImageProcessorPil.from_pretrained(golden), config.mm_tokens_per_image
        return transformers.Gemma3Processor(seen, tokenizer, image_seq_length=count, **template)
    count = (vision.image_size // vision.patch_size // config.scale_factor) ** 2
    seen = Idefics3ImageProcessorPil.from_pretrained(golden)
    return transformers.Idefics3Processor(seen, tokenizer, count, **template)


def inputs_of(golden: Path, config: Any) -> Any:
    """The conversation with its images, as the model reads them, and the images' tiles."""
    processor = processor_of(golden, config)
    talk = json.loads((golden / "talk.json").read_text())
    files = [p["image"] for m in talk for p in m["content"] if p["type"] == "image"]
    text = processor.apply_chat_template(talk, add_generation_prompt=True)
    opened = [Image.open(golden / f).convert("RGB") for f in files]
    given = processor(text=text, images=opened, return_tensors="pt", add_special_tokens=False)
    raw = processor.image_processor(
        opened, do_rescale=False, do_normalize=False, return_tensors="pt"
    )
    return given, raw["pixel_values"].flatten(0, -4)


def qwen_inputs(golden: Path, config: Any) -> tuple[dict[str, Any], Any]:
    """The same of Qwen's, whose processor also needs what reads videos: as many tokens for each
    image as it has rows."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(golden)
    seen = Qwen2VLImageProcessorPil.from_pretrained(golden)
    talk = json.loads((golden / "talk.json").read_text())
    files = [p["image"] for m in talk for p in m["content"] if p["type"] == "image"]
    opened = [Image.open(golden / f).convert("RGB") for f in files]
    given = seen(opened, return_tensors="pt")
    pad = tokenizer.convert_ids_to_tokens(config.image_token_id)
    first, *rest = tokenizer.apply_chat_template(
        talk, add_generation_prompt=True, tokenize=False
    ).split(pad)
    counts = (given["image_grid_thw"].prod(1) // seen.merge_size**2).tolist()
    whole = first + "".join(pad * n + part for n, part in zip(counts, rest, strict=True))
    ids = tokenizer(whole, return_tensors="pt", add_special_tokens=False)["input_ids"]
    kinds = (ids == config.image_token_id).int()
    raw = seen(opened, do_rescale=False, do_normalize=False, return_tensors="pt")["pixel_values"]
    return {**given, "input_ids": ids, "mm_token_type_ids": kinds}, raw


def pixels_of(patches: np.ndarray, grid: np.ndarray, merge: int) -> np.ndarray:
    """u8 [n, 3]: the pixels of patches [T, 3 * 2 * S * S], tile by tile, line by line."""
    size, at, found = int((patches.shape[1] // 6) ** 0.5), 0, []
    for lines, columns in grid:
        own = patches[at : at + lines * columns]
        at += lines * columns
        shape = (lines // merge, columns // merge, merge, merge, 3, 2, size, size)
        cut = own.reshape(shape)[:, :, :, :, :, 0].transpose(0, 2, 5, 1, 3, 6, 4)
        found.append(cut.reshape(-1, 3))
    return np.concatenate(found).astype(np.uint8)


def sizes_of(golden: Path) -> np.ndarray:
    """i32 [n, 4]: images of several sizes, and the tiles that they become."""
    seen = Qwen2VLImageProcessorPil.from_pretrained(golden)
    factor, bounds = (
        seen.patch_size * seen.merge_size,
        (seen.size.shortest_edge, seen.size.longest_edge),
    )
    sides = (1, 2, 13, 14, 15, 28, 42, 56, 70, 98, 99, 140, 200, 333, 1000)
    pairs = [(w, h) for w in sides for h in sides if max(w, h) <= 200 * min(w, h)]
    made = [smart_resize(h, w, factor, *bounds) for w, h in pairs]
    found = [(w, h, x, y) for (w, h), (y, x) in zip(pairs, made, strict=True)]
    return np.array(found, np.int32)


def qwen_expected(golden: Path, folder: Path) -> dict[str, np.ndarray]:
    """What one of Qwen's models in `folder` makes of the conversation."""
    model = model_class(golden).from_pretrained(folder, dtype=torch.float32).eval()
    given, raw = qwen_inputs(golden, model.config)
    grid = given["image_grid_thw"].numpy()[:, 1:].astype(np.int32)
    with torch.no_grad():
        logits = model(**given).logits[0, -LAST:]
        seen = model.model.get_image_features(given["pixel_values"], given["image_grid_thw"])
        told = {n: given[n] for n in ("input_ids", "mm_token_type_ids", "image_grid_thw")}
        places = model.model.get_rope_index(**told)[0][:, 0]
    parts = [seen.pooler_output, *(getattr(seen, "deepstack_features", None) or [])]
    rows = torch.cat([torch.cat(list(part)) for part in parts], dim=-1)  # a part by images
    size = model.config.vision_config.patch_size
    few = given["pixel_values"][:FEW].reshape(FEW, 3, 2, size, size)[:, :, 0]
    return {
        "ids": given["input_ids"][0].numpy().astype(np.int32),
        "tiles": pixels_of(raw.numpy(), grid, model.config.vision_config.spatial_merge_size),
        "grid": grid, "pixels": few.numpy(), "rows": rows.numpy(), "logits": logits.numpy(),
        "places": places.numpy().astype(np.int32), "sizes": sizes_of(golden),
    }  # fmt: skip


def expected(golden: Path, folder: Path) -> dict[str, np.ndarray]:
    """What the model in `folder` makes of the conversation."""
    model = model_class(golden).from_pretrained(folder, dtype=torch.float32).eval()
    given, tiles = inputs_of(golden, model.config)
    with torch.no_grad():
        logits = model(**given).logits[0, -LAST:]
        if "pixel_attention_mask" in given:
            masks = {"pixel_attention_mask": given["pixel_attention_mask"][:, :FEW]}
            seen = model.model.get_image_features(given["pixel_values"][:, :FEW], **masks)
        else:
            seen = model.model.get_image_features(given["pixel_values"][:FEW])
        seen = seen.pooler_output
    return {
        "ids": given["input_ids"][0].numpy().astype(np.int32),
        "tiles": tiles.numpy().transpose(0, 2, 3, 1).astype(np.uint8),
        "pixels": given["pixel_values"].flatten(0, -4)[:FEW].numpy(),
        "rows": torch.stack(list(seen)).numpy(),
        "logits": logits.numpy(),
    }


def main() -> None:
    """Each folder that is named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    for golden in parser.parse_args().folders:
        (golden / SHAPES).write_text(json.dumps(shapes_of(golden), indent=0) + "\n")
        with tempfile.TemporaryDirectory() as made:
            made_of = qwen_expected if golden.name.startswith("qwen") else expected
            found = made_of(golden, write(golden, Path(made) / "hf"))
        np.savez_compressed(golden / EXPECTED, allow_pickle=False, **found)
        print(golden, {k: v.shape for k, v in found.items()})


if __name__ == "__main__":
    main()
