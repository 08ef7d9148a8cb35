"""The EAGLE-3 case: the true fault (H), the class it was taken for (P), one stream (S)."""

from functools import partial

from ggraph.hazards.corpus import Expected, Hazard, Recipe
from ggraph.hazards.eagle3 import decoder
from ggraph.hazards.faults import forgets_wait
from ggraph.hazards.parts import GPU

UPSTREAM = ("llama.cpp #18039", "llama.cpp 8fac4b1cc", "llama.cpp ac5667dcc")
SYNC = ("norm_e.rms", "norm_g.rms")  # the two nodes that upstream once flagged

H = Hazard(
    "01H",
    1,
    "EAGLE-3: the host reads draft logits before they are there",
    (*UPSTREAM, "llama.cpp acc31b1f8 (the class again)"),
    "Draft acceptance was low and varied from run to run. The two parallel RMS norms of the "
    "decoder were suspected and flagged for a forced synchronisation. The fault was elsewhere: the "
    "draft logits were copied to the host on a stream that nothing ordered after the one that "
    "computes them. In this plan the flag helps by accident: the split that it opens reaches to "
    "the logits, and the host's wait behind that split stands in for the missing one.",
    decoder,
    (GPU,),
    Recipe("ggml"),
    "the copy to the host waits for the product that makes the logits",
    Recipe("ggml", faults=(forgets_wait("after:logits"),)),
    Expected("race", "logits", "copy:logits@host"),
    {"upstream's forced synchronisation": Recipe("ggml", forced_sync=SYNC)},
    agreement=True,
)
P = Hazard(
    "01P",
    1,
    "EAGLE-3: two RMS norms on two streams, bytes reused in list order",
    UPSTREAM,
    "What was suspected, made real: the branches of the embedding and of the feature run on two "
    "streams, and each ends in a product. In list order the first norm is dead when the second "
    "one is placed, so the second norm gets its bytes while the first product may still read them.",
    partial(decoder, packed=True),
    (GPU,),
    Recipe(streams=2),
    "bytes pass on only after every access of the old tenant",
    Recipe("ggml", streams=2),
    Expected("race", "qkv.e", "norm_g.rms"),
    {"one stream": Recipe("ggml")},
    agreement=True,
)
S = Hazard(
    "01S",
    1,
    "EAGLE-3: on one stream list-order reuse is sound, and needs no forced synchronisation",
    UPSTREAM,
    "Upstream's own plan: one compute stream, bytes reused in list order, and a copy of the logits "
    "that waits for them. It verifies, so the flag that forced a split and a synchronisation was "
    "not needed for the norms; its price is shown beside it.",
    decoder,
    (GPU,),
    Recipe("ggml"),
    "none is needed",
    others={"upstream's forced synchronisation": Recipe("ggml", forced_sync=SYNC)},
    agreement=True,
)

HAZARDS = (H, P, S)
