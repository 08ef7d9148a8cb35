"""ggraph: a tensor-graph runtime that proves its memory plans before it runs them.

    from ggraph import Graph, Session, input, ops, weight

This is the whole public face; the rooms behind it are described in docs/.
"""

from ggraph import dtype as dtypes
from ggraph import formats, ops
from ggraph.backends import open_backend
from ggraph.device import DeviceSpec
from ggraph.env import cache_dir
from ggraph.errors import GgraphError, InputError, ModelError
from ggraph.explain import Explanation, explain
from ggraph.extend import register_op
from ggraph.face import scope
from ggraph.graph import Graph
from ggraph.pipeline import Options, make_plan
from ggraph.plan import Plan, VerifiedPlan
from ggraph.session import Session
from ggraph.tensor import Array, Tensor, input, state, weight
from ggraph.verify import verify
from ggraph.view import show

__version__ = "0.1.0"

__all__ = [
    "Array",
    "DeviceSpec",
    "Explanation",
    "GgraphError",
    "Graph",
    "InputError",
    "ModelError",
    "Options",
    "Plan",
    "Session",
    "Tensor",
    "VerifiedPlan",
    "cache_dir",
    "dtypes",
    "explain",
    "formats",
    "input",
    "make_plan",
    "open_backend",
    "ops",
    "register_op",
    "scope",
    "show",
    "state",
    "verify",
    "weight",
]
