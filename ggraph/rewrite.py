"""Graph -> Graph: what can be made smaller before anything is placed. Floor 6.

Each rule is a function from graph to graph and keeps every output's value.
"""

from collections.abc import Callable, Sequence

from ggraph.device import DeviceSpec
from ggraph.graph import Graph
from ggraph.tensor import Attrs, Kind, Tensor

Rule = Callable[[Graph], Graph]


def merge_duplicates(graph: Graph) -> Graph:
    """Compute equal results once: same op, same sources, same attributes.

    `y = a + b; z = a + b` becomes one node. Results that overwrite a state, and outputs, stay.
    """
    first: dict[tuple[object, ...], Tensor] = {}
    heir: dict[str, Tensor] = {}
    for t in graph:
        if t.is_leaf:
            continue
        sources = tuple(heir.get(s.name, s).name for s in t.sources)
        kept = first.setdefault((t.op, sources, _frozen(t.attrs), t.shape, t.dtype), t)
        if kept is not t and not t.is_output and t.overwritten is None:
            heir[t.name] = kept
    return graph.replace(heir) if heir else graph


def _frozen(attrs: Attrs) -> tuple[tuple[str, object], ...]:
    return tuple(sorted(attrs.items()))


def drop_identities(graph: Graph) -> Graph:
    """Remove steps that change nothing: `scale` by 1 plus 0, `cont` of contiguous, `cast` to self.

    Only a step whose source is a computed value goes; a copy of a leaf may be wanted as a copy.
    """
    heir: dict[str, Tensor] = {}
    for t in graph:
        if not t.is_output and _is_identity(t):
            source = t.sources[0]
            heir[t.name] = heir.get(source.name, source)
    return graph.replace(heir) if heir else graph


def _is_identity(t: Tensor) -> bool:
    if t.op == "scale":
        return t.attrs["scale"] == 1.0 and t.attrs["bias"] == 0.0 and _is_computed(t.sources[0])
    if t.op not in ("cont", "cast"):
        return False
    source = t.sources[0]
    same = source.dtype is t.dtype and source.shape == t.shape and source.strides == t.strides
    return same and _is_computed(source)


def _is_computed(t: Tensor) -> bool:
    root = t.root
    return root.kind is Kind.COMPUTED and root.overwritten is None


RULES: tuple[Rule, ...] = (merge_duplicates, drop_identities)


def rewrite(graph: Graph, devices: Sequence[DeviceSpec]) -> Graph:
    """Apply every rule in order; fusions are made only where all `devices` know the fused op."""
    for rule in RULES:
        graph = rule(graph)
    return graph
