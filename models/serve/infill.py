"""POST /infill: what stands in a gap, as editors ask llama-server for it."""

from collections.abc import Callable

from .gaps import fitted
from .native import Native, NativeAsked
from .native_fields import InfillRequest


class Infill(Native):
    """Answers in the form of `/infill`."""

    def prepared(self, body: InfillRequest) -> Callable[[], NativeAsked]:
        """As `Generation.chat`."""
        service = self.generation.service
        service.check_room(1, body)
        gap = fitted(service.m.tokenizer, body, service.context)
        service.text_ids(gap.ids, "prompt")
        wanted = self.wanted(body)
        wanted.stem, wanted.best = gap.stem, body.temperature is None
        return self.begin([gap.ids], body, wanted, cut=gap.cut)
