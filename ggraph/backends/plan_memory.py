"""From a plan's values to bytes, for all who replay one."""

from collections.abc import Mapping
from dataclasses import dataclass

from ggraph.backends.protocol import Launch, Memory, Ref, Scratch
from ggraph.plan import Command, MemoryMap
from ggraph.tensor import Tensor


@dataclass(frozen=True, eq=False)
class PlanMemory:
    """Where a plan's values lie in each run, in memory that was allocated for its buffers."""

    map: MemoryMap
    buffers: Mapping[str, Memory]

    def at(self, value: str, run: int) -> tuple[Memory, int]:
        """The memory of a value in a run, and its offset there."""
        region = self.map.regions[value]
        return self.buffers[region.buffer], region.start(run)

    def launch(
        self, c: Command, t: Tensor, run: int, scratch: Mapping[str, Scratch] | None = None
    ) -> Launch:
        """The launch that computes `t` in a run."""
        sources = tuple(self._ref(s, run) for s in t.sources)
        return Launch(c, self._ref(t, run), sources, scratch or {})

    def _ref(self, t: Tensor, run: int) -> Ref:
        root = t if t.view_src is None else t.view_src
        memory, offset = self.at(root.name, run)
        return Ref(t, memory, offset + t.offset)
