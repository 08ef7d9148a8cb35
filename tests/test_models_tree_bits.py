"""A draft tree's rows have the bits that the same tokens have as text, and leave the same cache.

Text that is equal token for token shows little: small models round alike by luck. Here every
logit is compared bit by bit, with 8-bit activations, whose roundings make any difference large.
"""

from pathlib import Path

import numpy as np
import pytest

from ggraph import Array
from ggraph.decode.rows import Rows
from ggraph.decode.runner import Runner
from ggraph.dtype import F16, F32, DType
from models.registry import open_model
from models.run.load import open_session

TINY = Path(__file__).parent / "golden" / "tiny"
TARGETS = ("llama_tied", "llama3_rope_scaled", "qwen2_bias", "qwen3_qknorm", "qwen3_moe",
           "mistral_sliding")  # fmt: skip
PARENTS = (-1, 0, 0, 0, 0, 1, 1, 2, 3, 5, 5, 6, 9, 9, 12, 12)  # of a tree's nodes
PATH = (0, 1, 5, 9, 12, 15)  # what is accepted of it
AFTER = 3  # tokens of text that follow


def as_text(r: Runner, tokens: list[int]) -> list[Array]:
    """Logits of tokens that are appended one by one."""
    return [r.text([t]).logits[0].copy() for t in tokens]


def as_tree(r: Runner, tokens: list[int], after: list[int]) -> list[Array]:
    """Logits along PATH of a tree of `tokens`, then of `after` as text behind what was kept."""
    count, base = len(PARENTS), r.past
    seen, depth = np.zeros((count, count), bool), [0] * count
    for node, parent in enumerate(PARENTS):
        if parent >= 0:
            seen[node], depth[node] = seen[parent], depth[parent] + 1
        seen[node, node] = True
    slots = range(base, base + count)
    rows = Rows(tokens, [base + d for d in depth], slots, base, seen)
    found = r.step(rows, range(count)).logits[list(PATH)].copy()
    r.keep(PATH)
    return [*found, *as_text(r, after)]


@pytest.mark.parametrize("cache", (F32, F16), ids=str)
@pytest.mark.parametrize("name", TARGETS)
def test_tree_rows_have_the_bits_of_text(name: str, cache: DType) -> None:
    model = open_model(TINY / name)
    r = Runner(model, open_session(threads=2), 224, cache_dtype=cache)
    draw = np.random.default_rng(5)
    for past in (3, 121, 7):  # 121: the tree lies across the end of a chunk of attention
        prompt, tree, after = (
            draw.integers(0, model.vocab_size, n).tolist() for n in (past, len(PARENTS), AFTER)
        )
        r.past = 0
        r.text(prompt)
        wanted = as_text(r, [*(tree[node] for node in PATH), *after])
        r.past = 0
        r.text(prompt)
        for i, (want, got) in enumerate(zip(wanted, as_tree(r, tree, after), strict=True)):
            assert np.array_equal(want, got), f"{past} tokens before; row {i} of the path"
