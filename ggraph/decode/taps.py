"""The taps of a model's rows: states beside its caches, by slot, where a head's plan reads them.

A step writes the taps of its rows to the slots of its keys and values. What is moved with those
stays the text's, and slot p holds the taps of the text's row p as long as the text is so long. A
head in the same session gathers rows by their slots, four bytes each; whoever runs elsewhere has
the rows themselves brought to the host.

Legend: T token rows, R slots, G width of the target, A taps that a head reads.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ggraph import ops
from ggraph.decode.model import CausalModel
from ggraph.dtype import F32, I32, I64
from ggraph.graph import Graph
from ggraph.session import Session
from ggraph.tensor import Array, Tensor, input, state

OUTPUT = "layer_input."  # what a model's step calls a tap


def tap(model: CausalModel, layer: int, slots: int) -> Tensor:
    """The state f32 [R, G] of the inputs of a layer."""
    return state(f"{model.name}.taps.{layer}", (slots, model.width), F32)


def keeping(step: Graph, model: CausalModel, slots: int) -> Graph:
    """A model's step whose taps go to their states in place of the host."""
    taps = [t for t in step.outputs if t.name.startswith(OUTPUT)]
    if not taps:
        return step
    at = input("slots", taps[0].shape[:1], I64)
    kept = [ops.set_rows(tap(model, int(t.name.removeprefix(OUTPUT)), slots), t, at) for t in taps]
    outputs = {t.name: t for t in step.outputs if t not in taps}
    also = [t for t in step.updates.values() if not t.is_leaf]
    return Graph.of(outputs, also=[*also, *kept], name=step.name)


def gathering(step: Graph, taps: Sequence[Tensor]) -> Graph:
    """A head's step of true rows whose `features` are gathered: from these states side by side, by
    the slots `tapped` i32 [T, 1]."""
    rows = step["features"].shape[0]
    at = input("tapped", (rows, 1), I32).reshape(rows)
    found = [ops.get_rows(t, at) for t in taps]
    return step.replace({"features": found[0] if len(found) == 1 else ops.concat(found, axis=-1)})


@dataclass(frozen=True, eq=False)
class Taps(Mapping[int, Array]):
    """The taps f32 [T, G] of rows in `slots`, by layer. They stay in their states until they are
    asked for: a later step writes over what did not become text."""

    session: Session
    model: CausalModel
    layers: tuple[int, ...]
    slots: Sequence[int]

    def __getitem__(self, layer: int) -> Array:
        if layer not in self.layers:
            raise KeyError(layer)
        raw = self.session.read_rows(f"{self.model.name}.taps.{layer}", self.slots)
        return raw.view(np.float32)

    def __iter__(self) -> Iterator[int]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)


def side_by_side(taps: Mapping[int, Array], layers: Sequence[int]) -> Array:
    """Features f32 [T, A*G]: one tap beside the other."""
    known = {layer: taps[layer] for layer in set(layers)}
    return np.concatenate([known[layer] for layer in layers], axis=-1)
