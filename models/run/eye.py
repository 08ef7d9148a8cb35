"""What reads a prompt's images: a tower in a session of its own, and what it has seen lately.

Its session is its own so that a server's requests have their images read while others' answers go
on. Rows are kept, since each turn of a conversation shows its images again.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from ggraph import Array, InputError, Session
from ggraph.decode.given import Given, given_rows, on_grid
from ggraph.text.tokenizer import Tokenizer

from ..images import MARKS, Picture, picture
from ..tower import Tower


class Eye:
    """Reads images by a tower. It keeps the rows of the latest, `most` at most: as many as the
    decoder's cache has slots, since who is not in that is read again anyway."""

    def __init__(
        self,
        tower: Tower,
        tokenizer: Tokenizer,
        open_session: Callable[[], Session],
        most: int,
    ) -> None:
        self.tower, self.tokenizer, self.most = tower, tokenizer, most
        self.read = 0  # tiles
        self._open = open_session
        self._session: Session | None = None  # opened with the first image
        self._planned: list[int] = []  # for how many patches: the latest one
        self._seen: OrderedDict[bytes, list[Given]] = OrderedDict()
        self._lock = threading.Lock()
        self.marker, row = MARKS[tower.sight.kind]
        found = tokenizer.id_of(row)
        if found is None:
            raise InputError(f"{tower.name} and this model do not fit: it has no token {row!r}")
        self.token = found

    def ids(
        self, text: str, seam: str, images: Sequence[bytes], most: int, *, read: bool = True
    ) -> list[int]:
        """Token ids of a rendered chat template with images' files in it, rows in the place of
        theirs. Where these are more than `most` nobody can use them, and no image is read, as where
        only their number is asked for. InputError for what is no image, or is too large, for images
        that have more rows than that, and where the template does not show each once."""
        parts = text.split(self.marker)
        if len(parts) != len(images) + 1:
            raise InputError(
                f"{len(images)} images, of which the chat template shows {len(parts) - 1}"
            )
        sight, seen = self.tower.sight, list[Picture]()
        for data in images:
            with self._lock:  # one at a time is decoded, which may take 200 MB
                seen.append(picture(data, sight))
            if (count := sum(p.rows(sight) for p in seen)) > most:
                raise InputError(
                    f"{len(seen)} images make {count} tokens, but the context holds {most} (-c "
                    "sets another)"
                )
        whole = "".join(p + s.text(sight) for p, s in zip(parts, seen, strict=False)) + parts[-1]
        ids = self.tokenizer.encode_sewn(whole, seam, most)
        if len(ids) > most or not read:
            return ids
        given = iter([r for p in seen for r in self._rows(p)])
        return [next(given) if i == self.token else i for i in ids]

    def _rows(self, seen: Picture) -> list[Given]:
        """An image's rows, tile by tile."""
        name = hashlib.sha256(f"{seen.tiles.shape}".encode() + seen.tiles.tobytes()).digest()
        with self._lock:
            found = self._seen.pop(name, None)
            if found is None:
                sight, found = self.tower.sight, []
                for tile in seen.tiles:
                    rows = self._tile(tile)
                    if sight.most:
                        found += on_grid(rows, self.token, sight.grid(tile)[1])
                    else:
                        found += given_rows(rows, self.token, together=sight.together)
            self._seen[name] = found
            while sum(map(len, self._seen.values())) > self.most and len(self._seen) > 1:
                self._seen.popitem(last=False)
        return found

    def _tile(self, tile: Array) -> Array:
        """f32 [N, E] of a tile u8 [H, W, 3]."""
        tower = self.tower
        if self._session is None:
            self._session = self._open()
            self._session.expect(tower.catalogue.values())
        count = tower.sight.count(tile)
        if count not in self._session:
            for other in self._planned:  # whose memory may be hundreds of MB
                self._session.forget(other)
            self._planned.clear()
            self._session.prepare(count, partial(tower.build, count), tower.weight)
            self._planned.append(count)
        self.read += 1
        rows: Array = np.array(self._session.run(count, tower.feeds(tile))["rows"])
        return rows

    def close(self) -> None:
        """Give devices and memory back."""
        with self._lock:
            if self._session is not None:
                self._session.close()
