"""Text from a model, in three lines of Python:

    from ggraph_models.api import Chat

    with Chat() as chat:
        for piece in chat.answer("Write one sentence about the sea.", temp=0):
            print(piece, end="")

The same in a clone and where the wheel is installed. What stands behind it (drafters, statistics,
sessions) is `ggraph_models.run`.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from ggraph.decode.sampler import SamplerConfig
from ggraph.door import checked

from .images import read_images
from .run.fetch import fetch_default
from .run.generation import Generation
from .run.load import load


class Chat:
    """A model that answers. `path` is a GGUF file or a Hugging Face folder; without one it is
    SmolLM2-135M-Instruct, fetched once (98 MB). `options` are those of `run.load.load`: threads,
    ctx_size, devices, mmproj. Close it, or use it in a `with`.

    Raises FormatError, ModelError, InputError or BackendError.
    """

    def __init__(self, path: str | Path | None = None, **options: Any) -> None:
        self.loaded = load(fetch_default() if path is None else path, **options)

    @checked
    def answer(
        self,
        prompt: str,
        *,
        system: str | None = None,
        chat: bool = True,
        limit: int = 256,
        stop: Sequence[str] = (),
        images: Sequence[str | Path | bytes] = (),
        **sampling: Any,
    ) -> Iterator[str]:
        """The answer, piece by piece: at most `limit` tokens, ended before any text of `stop`.

        `chat` off goes on with the prompt as it is. `images` are files, or what is in them, which
        the model is shown before the prompt, if it can see. `sampling` are the fields of
        `SamplerConfig`: temp, top_k, top_p, min_p, repeat_penalty, seed. InputError for bad values
        and for what is no image, at once; and for an answer that is to go on when another was
        begun: a `Chat` gives one at a time.
        """
        shown = read_images(images)
        ids = self.loaded.prompt_ids(prompt, chat=chat, system=system, images=shown)
        return Generation(self.loaded, ids, SamplerConfig(**sampling), limit, stop).run(None)

    def close(self) -> None:
        """Give threads and memory back."""
        self.loaded.close()

    def __enter__(self) -> "Chat":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
