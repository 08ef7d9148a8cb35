"""Have transformers say what it makes of images: scripts/golden_images.py FOLDER ..

Needs torch, transformers (5.24 made what is stored) and Pillow in an environment of their own, and
nothing of ggraph. Of each folder of tests/golden/images it takes the config, the tokenizer, the
image processor's config, and talk.json, a conversation with names of image files in it, and writes
beside them

- shapes.json: the tensors, which `tests/ruled_weights.py` makes;
- expected.npz: `ids` i32 [L], the conversation; `tiles` u8 [N, S, S, 3], all images' tiles in
  order, before pixels are normalised; of the first FEW `pixels` f32 [FEW, 3, S, S] and the tower's
  `rows` f32 [FEW, n, E]; `logits` f32 [LAST, V] of the last tokens.
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
            found = expected(golden, write(golden, Path(made) / "hf"))
        np.savez_compressed(golden / EXPECTED, allow_pickle=False, **found)
        print(golden, {k: v.shape for k, v in found.items()})


if __name__ == "__main__":
    main()
