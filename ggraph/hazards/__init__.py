"""The corpus of published races, each with a bad plan, a fixed plan and the verdict.

    from ggraph.hazards import HAZARDS, find, run_hazard
    report = run_hazard(find("01H"))

`docs/hazards.md` is generated from it. A row of the catalogue may have several forms; `UNEXPRESSED`
says which rows have none, and why.
"""

from ggraph.errors import InputError
from ggraph.hazards import (
    h01_eagle3,
    h02_fork_join,
    h03_qk_norm,
    h04_linear_attention,
    h05_empty_split,
    h06_shared_inputs,
    h07_cache_rows,
    h08_ubatches,
    h09_pinned_root,
    h10_lost_write,
    h11_pipeline_slot,
    h12_next_batch,
    h13_blocking_get,
    h14_early_event,
    h15_host_vector,
    h16_workspace,
    h21_two_graphs,
    h22_all_reduce,
    h24_pinned_staging,
    h25_lazy_stream,
    h26_record_stream,
    h27_plan_stream,
    h28_diamond,
    h29_tied_operand,
    h30_donation,
    h31_levels,
    h32_upload,
    h33_inside_kernel,
)
from ggraph.hazards.corpus import Expected, Hazard, Recipe, plan_of
from ggraph.hazards.page import hazard_html
from ggraph.hazards.report import Corruption, HazardReport, Price
from ggraph.hazards.run import run_hazard, timelines

__all__ = [
    "HAZARDS",
    "UNEXPRESSED",
    "Corruption",
    "Expected",
    "Hazard",
    "HazardReport",
    "Price",
    "Recipe",
    "find",
    "hazard_html",
    "plan_of",
    "run_hazard",
    "timelines",
]

HAZARDS: tuple[Hazard, ...] = (
    *h01_eagle3.HAZARDS,
    *h02_fork_join.HAZARDS,
    *h03_qk_norm.HAZARDS,
    *h04_linear_attention.HAZARDS,
    *h05_empty_split.HAZARDS,
    *h06_shared_inputs.HAZARDS,
    *h07_cache_rows.HAZARDS,
    *h08_ubatches.HAZARDS,
    *h09_pinned_root.HAZARDS,
    *h10_lost_write.HAZARDS,
    *h11_pipeline_slot.HAZARDS,
    *h12_next_batch.HAZARDS,
    *h13_blocking_get.HAZARDS,
    *h14_early_event.HAZARDS,
    *h15_host_vector.HAZARDS,
    *h16_workspace.HAZARDS,
    *h21_two_graphs.HAZARDS,
    *h22_all_reduce.HAZARDS,
    *h24_pinned_staging.HAZARDS,
    *h25_lazy_stream.HAZARDS,
    *h26_record_stream.HAZARDS,
    *h27_plan_stream.HAZARDS,
    *h28_diamond.HAZARDS,
    *h29_tied_operand.HAZARDS,
    *h30_donation.HAZARDS,
    *h31_levels.HAZARDS,
    *h32_upload.HAZARDS,
    *h33_inside_kernel.HAZARDS,
)

UNEXPRESSED: dict[int, str] = {
    17: "llama.cpp #19768: a fused kernel writes over an operand that its own threads still read. "
    "The simulator runs a kernel as one step, so nothing can be seen to corrupt; `verify` refuses "
    "such a plan as an alias that the op does not allow.",
    18: "llama.cpp #16577: a fusion took the wrong operand. The plan is sound, its graph is wrong.",
    19: "llama.cpp #24305: a kernel's steps tear its in-place operand. That is the op's promise "
    "(`inplace_ok`), which tests/ops holds every op to.",
    20: "llama.cpp #16679, #17884: the planner freed an unaligned tail. The allocator here has no "
    "operand that is larger than the result in its place, so no schedule brings the fault about.",
    23: "ik_llama.cpp #1105: results vary with more than two GPUs; its cause was never found.",
}


def find(name: str) -> Hazard:
    """The hazard called `name`: "01H", "1h", "7". InputError for none, or for several."""
    wanted = name.strip().upper().zfill(2) if name.strip().isdigit() else name.strip().upper()
    hits = [h for h in HAZARDS if h.id.lstrip("0") == wanted.lstrip("0")]
    if len(hits) == 1:
        return hits[0]
    forms = [h.id for h in HAZARDS if wanted and h.id.startswith(wanted.zfill(2))]
    known = ", ".join(forms or [h.id for h in HAZARDS])
    raise InputError(f"no hazard {name!r}; known: {known}")
