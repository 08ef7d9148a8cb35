"""Graph -> Graph: what can be made smaller before anything is placed.

Rules are of two kinds: those that keep every bit of every output, and those that approximate. A
rule that lets a tensor be read later, or under another name, leaves alone what is overwritten: its
readers come first.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ggraph.device import DeviceSpec
from ggraph.graph import Graph
from ggraph.ops.fused import FEW_ROWS
from ggraph.ops.fusing import FUSIONS, gated
from ggraph.ops.glu import UNITS
from ggraph.ops.in_8_bits import quantise_activations
from ggraph.ops.joined import Around, chains
from ggraph.ops.several import alike, joined, views
from ggraph.tensor import Kind, Tensor, apply, frozen


@dataclass(frozen=True)
class Known:
    """Fused ops that every device knows, where tensors are wanted, what has kernels everywhere."""

    fused: frozenset[str]
    homes: Mapping[str, str]
    runs: Callable[[Tensor], bool]


@dataclass(frozen=True)
class Rule:
    """One rewrite: from the graph and what is known of the devices to a graph.

    Most rules keep every bit of every output. One that does not approximates; what it makes are ops
    whose record says what they round, and the plan's certificate names them.
    """

    name: str
    change: Callable[[Graph, "Known"], Graph]
    keeps_bits: bool = True


def _changing(graph: Graph) -> frozenset[str]:
    """Names of the values that an op overwrites: who reads them must do so before."""
    return frozenset(
        t.overwritten.root.name for t in graph.overwriting if t.overwritten is not None
    )


def merge_duplicates(graph: Graph, homes: Mapping[str, str] | None = None) -> Graph:
    """Compute equal results once: same op, same sources, same attributes.

    `y = a + b; z = a + b` becomes one node. Results that overwrite a state or are overwritten, and
    outputs, stay, and so do those that are wanted on different devices (`homes`, by name).
    """
    homes = homes or {}
    first: dict[tuple[object, ...], Tensor] = {}
    heir: dict[str, Tensor] = {}
    changing = _changing(graph)
    for t in graph:
        if t.spec is None or t.name in changing:
            continue
        names = [s.name for s in t.sources]
        sources = tuple([heir[n].name if n in heir else n for n in names])
        key = (t.op, sources, frozen(t.attrs), t.shape, t.dtype, homes.get(t.name))
        kept = first.setdefault(key, t)
        if kept is not t and not t.is_output and t.overwritten is None:
            heir[t.name] = kept
    return graph.replace(heir) if heir else graph


def drop_identities(graph: Graph) -> Graph:
    """Remove steps that change nothing, strides included: `scale` by 1, `cont`, `cast` to self.

    Only a step whose source is a computed value goes; a copy of a leaf may be wanted as a copy, and
    so is one of a value that is overwritten.
    """
    heir: dict[str, Tensor] = {}
    changing = _changing(graph)
    for t in graph:
        if _is_identity(t) and not t.is_output and changing.isdisjoint(_roots(t)):
            source = t.sources[0]
            heir[t.name] = heir.get(source.name, source)
    return graph.replace(heir) if heir else graph


def copy_windows(graph: Graph, known: Known) -> Graph:
    """Copy what has gaps for those readers that only have kernels for what has none; readers of one
    window share a copy."""
    copies, heirs = dict[str, Tensor](), dict[str, Tensor]()

    def whole(s: Tensor) -> Tensor:
        if s.is_contiguous:
            return s
        if s.name not in copies:
            copies[s.name] = apply("cont", s, name=f"{s.name}@whole")
        return copies[s.name]

    for t in graph.nodes:
        if all(s.is_contiguous for s in t.sources) or known.runs(t):
            continue
        sources = [whole(s) for s in t.sources]
        heir = apply(t.op, *sources, name=t.name, **t.attrs)
        copied = [new for new, old in zip(sources, t.sources, strict=True) if new is not old]
        if all(map(known.runs, [heir, *copied])):
            heirs[t.name] = heir
    return graph.replace(heirs) if heirs else graph


def _roots(t: Tensor) -> list[str]:
    """Names of the values that `t` shows or is, and that it reads."""
    return [(s if s.view_src is None else s.view_src).name for s in (t, *t.sources)]


def _is_identity(t: Tensor) -> bool:
    op = t.op
    by_1 = op == "scale" and t.attrs["scale"] == 1.0 and t.attrs["bias"] == 0.0
    if not by_1 and op not in ("cont", "cast"):
        return False
    source = t.sources[0]
    same = source.dtype is t.dtype and source.shape == t.shape and source.strides == t.strides
    return same and _is_computed(source)


def _is_computed(t: Tensor) -> bool:
    root = t.root
    return root.kind is Kind.COMPUTED and root.overwritten is None


def _hidden(graph: Graph) -> dict[str, list[Tensor]]:
    """The readers of each computed tensor that nobody else may want, by its name, where they may
    read its sources in its place."""
    users, changing = graph.users(), _changing(graph)
    kept = {t.name for t in (*graph.outputs, *graph.overwriting)}
    return {
        t.name: users[t.name]
        for t in graph.nodes
        if t.name not in kept and changing.isdisjoint(_roots(t))
    }


def _lonely(hidden: Mapping[str, Sequence[Tensor]]) -> frozenset[str]:
    """Names of those with exactly one reader."""
    return frozenset(n for n, users in hidden.items() if len(users) == 1)


def fuse(graph: Graph, known: Known) -> Graph:
    """Replace chains by fused ops that every device has a kernel for; an intermediate result must
    have no other use.

    A gated unit of two products of the same rows takes them in, `swiglu(mul_mat(w, x), mul_mat(up,
    x))` -> `mul_mat_gated(w, x, up)`, for few rows, or for any where it may become 8 bits, too.
    """
    lonely = _lonely(_hidden(graph))
    many = "mul_mat_gated_quantise" in known.fused
    units = _gated(graph, known, lonely)
    heirs = {n: t for n, t in units.items() if many or prod(t.shape[:-1]) <= FEW_ROWS}
    for t in graph.nodes:
        fused, make = FUSIONS.get(t.op, ("", None))
        heir = make(t, lonely) if make is not None and fused in known.fused else None
        if heir is not None and known.runs(heir):
            heirs[t.name] = heir
    return graph.replace(heirs) if heirs else graph


def _gated(graph: Graph, known: Known, lonely: frozenset[str]) -> dict[str, Tensor]:
    """What takes gated units and their products in, of any number of rows, by the units' names."""
    if "mul_mat_gated" not in known.fused:
        return {}
    made = ((t.name, gated(t, lonely)) for t in graph.nodes if t.op in UNITS)
    return {name: heir for name, heir in made if heir is not None and known.runs(heir)}


def join_products(graph: Graph, known: Known) -> Graph:
    """Products of the same few rows with weights of one type become views of one `mul_mats`, which
    runs where the first of them would: it needs nothing that they make."""
    if "mul_mats" not in known.fused:
        return graph
    heirs: dict[str, Tensor] = {}
    for products in alike(graph.nodes, _hidden(graph), known.homes):
        made = joined(products)
        heirs |= views(made, products) if known.runs(made) else {}
    return graph.replace(heirs) if heirs else graph


def fuse_chains(graph: Graph, known: Known) -> Graph:
    """Ops of elements and reductions become one with those that alone read them, but for units that
    few rows would gate: many must have their bits."""
    if "chain" not in known.fused:
        return graph
    order = {t.name: i for i, t in enumerate(graph.tensors)}
    hidden = _hidden(graph)
    apart = frozenset(_gated(graph, known, _lonely(hidden)))
    made = chains(graph.nodes, Around(hidden, order, known.runs, apart))
    return graph.replace(made) if made else graph


RULES: tuple[Rule, ...] = (
    Rule("merge_duplicates", lambda graph, known: merge_duplicates(graph, known.homes)),
    Rule("drop_identities", lambda graph, known: drop_identities(graph)),
    Rule("copy_windows", copy_windows),
    Rule("fuse", fuse),
    Rule(
        "quantise_activations",
        lambda graph, known: quantise_activations(graph, known.fused, known.runs),
        keeps_bits=False,
    ),
    Rule("join_products", join_products),
    Rule("fuse_chains", fuse_chains),
)


def rewrite(
    graph: Graph,
    devices: Sequence[DeviceSpec],
    *,
    exact: bool = False,
    homes: Mapping[str, str] | None = None,
) -> Graph:
    """Apply every rule in order, with the fused ops that all `devices` know; `exact` leaves out the
    rules that approximate. `homes` are devices on which tensors are wanted, by name."""
    fused = frozenset.intersection(*(d.fused for d in devices)) if devices else frozenset()
    known = Known(
        fused, homes or {}, lambda t: all(d.supports(t) and d.compiled(t) for d in devices)
    )
    for rule in RULES:
        if rule.keeps_bits or not exact:
            graph = rule.change(graph, known)
    return graph
