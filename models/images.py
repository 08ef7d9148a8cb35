"""Images for a tower: files to tiles, and what stands for them in a prompt.

Source: Laurencon et al. 2024 (arXiv 2408.12637), section 3; transformers' `Idefics3ImageProcessor`,
whose pixels these are to the bit (Pillow resizes there, too), and `Idefics3Processor`.
"""

import io
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ggraph import Array, InputError
from ggraph.lazy import lazy

from .tower import CHANNELS, GEMMA3, IDEFICS3, QWEN2, QWEN3, QWEN25, Sight

if TYPE_CHECKING:
    from PIL import Image, ImageOps
else:
    Image, ImageOps = lazy("PIL.Image"), lazy("PIL.ImageOps")

# How a template of each kind writes an image, and the token that stands for one of its rows
MARKS = {
    IDEFICS3: ("<image>", "<image>"), GEMMA3: ("<start_of_image>", "<image_soft_token>"),
    **dict.fromkeys((QWEN2, QWEN25, QWEN3), ("<|image_pad|>",) * 2),
}  # fmt: skip
_AROUND, _WHOLE, _END = "<fake_token_around_image>", "<global-img>", "<end_of_image>"
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # whose decoders may see what strangers send
MOST_PIXELS = 1 << 26  # 67 million, 200 MB once decoded: beyond what a camera's picture has
_SLIMMEST = 200  # how often its shorter side an image may be long, where any shape is kept
_LONGEST = 4096  # pixels of a side, whatever a config says; of transformers' processor


@dataclass(frozen=True, eq=False)
class Picture:
    """An image as `tiles` u8 [N, H, W, 3]: the parts that it is split into, `lines` of as many
    `columns`, or none, and behind them all of it."""

    tiles: Array
    lines: int = 0
    columns: int = 0

    def rows(self, sight: Sight) -> int:
        """How many rows it becomes."""
        return len(self.tiles) * math.prod(sight.grid(self.tiles[0]))

    def text(self, sight: Sight) -> str:
        """What stands for it in a prompt."""
        begin, row = MARKS[sight.kind]
        tile = row * math.prod(sight.grid(self.tiles[0]))
        if sight.most:
            return tile
        if sight.kind == GEMMA3:
            return f"\n\n{begin}{tile}{_END}\n\n"
        parts = "".join(
            "".join(f"{_AROUND}<row_{y + 1}_col_{x + 1}>{tile}" for x in range(self.columns)) + "\n"
            for y in range(self.lines)
        )
        return f"{parts}\n" * bool(parts) + f"{_AROUND}{_WHOLE}{tile}{_AROUND}"


def read_images(given: Sequence[str | Path | bytes]) -> list[bytes]:
    """Images' files; what is in one may be given itself. InputError where one cannot be read."""
    found = list[bytes]()
    for image in given:
        try:
            found.append(image if isinstance(image, bytes) else Path(image).read_bytes())
        except OSError as error:
            raise InputError(f"cannot read {image!s}: {error.strerror or error}") from None
    return found


def picture(data: bytes, sight: Sight) -> Picture:
    """An image's file as a tower sees it. InputError for what is none, or is too large."""
    size = sight.size
    image = _opened(data)
    if sight.most:
        sides = _in_rows(image.width, image.height, sight)
        return Picture(_tiles([image.resize(sides, Image.Resampling.BICUBIC)]))
    if sight.kind == GEMMA3:
        return Picture(_tiles([image.resize((size, size), Image.Resampling.BILINEAR)]))
    if not sight.longest:
        return Picture(_tiles([_resized(image, size, size)]))
    image = _resized(image, *_scaled(image.width, image.height, sight.longest))
    image = _resized(image, *_in_tiles(image.width, image.height, size))
    lines, columns = image.height // size, image.width // size
    if lines * columns == 1:
        return Picture(_tiles([image]))
    corners = [(x * size, y * size) for y in range(lines) for x in range(columns)]
    parts = [image.crop((x, y, x + size, y + size)) for x, y in corners]
    return Picture(_tiles([*parts, _resized(image, size, size)]), lines, columns)


def _opened(data: bytes) -> "Image.Image":
    """The pixels of a file, the right way up. InputError as for `picture`; nothing is decoded of
    one that is too large."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # asked here
            image = Image.open(io.BytesIO(data), formats=FORMATS)
        if image.width * image.height > MOST_PIXELS:
            raise InputError(
                f"an image of {image.width} x {image.height} pixels: at most {MOST_PIXELS} are read"
            )
        return ImageOps.exif_transpose(image).convert("RGB")
    except ImportError:
        raise InputError("images need Pillow: pip install pillow") from None
    except (Image.DecompressionBombError, OSError, ValueError, SyntaxError) as error:
        said = " ".join(str(error).split())[:200]
        raise InputError(f"no image ({', '.join(FORMATS)}): {said}") from None


def _scaled(width: int, height: int, longest: int) -> tuple[int, int]:
    """Its longer side is to have so many pixels, the other an even number."""
    aspect = width / height
    if width >= height:
        width, height = longest, int(longest / aspect)
        height += height % 2
    else:
        width, height = int(longest * aspect), longest
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    if max(width, height) <= _LONGEST:
        return width, height
    aspect = width / height
    if width >= height:
        return _LONGEST, max(1, int(_LONGEST / aspect))
    return max(1, int(_LONGEST * aspect)), _LONGEST


def _in_tiles(width: int, height: int, size: int) -> tuple[int, int]:
    """Sides that are whole tiles; the shorter one's number follows from the longer side's."""
    aspect = width / height
    if width >= height:
        width = math.ceil(width / size) * size
        height = max(1, math.ceil(int(width / aspect) / size)) * size
    else:
        height = math.ceil(height / size) * size
        width = max(1, math.ceil(int(height * aspect) / size)) * size
    return width, height


def _in_rows(width: int, height: int, sight: Sight) -> tuple[int, int]:
    """Sides that are whole rows, and of as many pixels as there may be; about as long as they were.
    InputError for images that are much longer than wide."""
    step, sides = sight.size, (width, height)
    if max(sides) > _SLIMMEST * min(sides):
        raise InputError(
            f"an image of {width} x {height} pixels: at most {_SLIMMEST} times as long as wide"
        )
    near = [round(side / step) * step for side in sides]
    if math.prod(near) > sight.most:
        over = math.sqrt(width * height / sight.most)
        near = [max(step, math.floor(side / over / step) * step) for side in sides]
    elif math.prod(near) < sight.fewest:
        under = math.sqrt(sight.fewest / (width * height))
        near = [math.ceil(side * under / step) * step for side in sides]
    return near[0], near[1]


def _resized(image: "Image.Image", width: int, height: int) -> "Image.Image":
    return image.resize((width, height), Image.Resampling.LANCZOS)


def _tiles(images: list["Image.Image"]) -> Array:
    found = np.stack([np.asarray(i, np.uint8) for i in images])
    return found.reshape(*found.shape[:3], CHANNELS)
