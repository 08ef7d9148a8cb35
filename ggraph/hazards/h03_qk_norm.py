"""What write-against-write validation of a fork/join region overlooks."""

from ggraph.hazards.corpus import Expected, Hazard, Recipe
from ggraph.hazards.h02_fork_join import STREAMS, region
from ggraph.hazards.parts import GPU

INTERLEAVED = ("attn_norm", "q", "k", "v", "q.norm.rms", "k.norm.rms", "q.norm", "k.norm")

HAZARDS = (
    Hazard(
        "03",
        3,
        "Interleaved QKV branches: the Q norm is put on the fork's output",
        ("own finding on llama.cpp #16991", "hook: llama.cpp #27301"),
        "With the branches interleaved before memory is laid out, no two branches write the same "
        "bytes, and upstream's check passes. But the fork's output is dead in list order after "
        "the last product is enqueued, so the Q branch's norm gets its bytes while the products "
        "of K and V, on other streams, still read them.",
        region,
        (GPU,),
        Recipe(on_stream=STREAMS, streams=3, listed=INTERLEAVED),
        "the fork's output lives until all branches have read it",
        Recipe("ggml", on_stream=STREAMS, streams=3, listed=INTERLEAVED),
        Expected("race", "k", "q.norm.rms"),
    ),
)
