"""Masks that are made on the device: the bits of those from the host, of fewer bytes."""

from pathlib import Path

import numpy as np
import pytest
from cuda_host import HostDriver, need_compiler
from cuda_kit import over

from ggraph import Options
from ggraph.backends import open_backend
from ggraph.decode.draft.tree import Draft
from ggraph.decode.engine import verification_rows
from ggraph.decode.runner import Runner
from ggraph.dtype import F32
from ggraph.plan import Do
from ggraph.session import Session
from ggraph.tensor import Array, Kind
from models.registry import open_model
from models.run.load import open_session

TINY = Path(__file__).parent / "golden" / "tiny"
PARENTS = [-1, -1, 0, 0, 1, 2, 4, 4, 3, 8]


def session_on(device: str) -> Session:
    if device == "cuda":
        return Session({"cuda0": over(HostDriver())})
    if device == "sim":
        return Session({"sim0": open_backend("sim0")}, Options(streams=2))
    return open_session(threads=1, exact=True)


def logits(device: str, name: str, spreads: bool) -> tuple[list[Array], dict[str, int]]:
    """Of a prompt, a tree, its path and a chain; and the bytes that a tree's step is given."""
    session = session_on(device)
    runner = Runner(open_model(TINY / name), session, 300, cache_dtype=F32)
    assert runner.spreads == (device == "cuda"), "only where plans are replayed"
    runner.spreads = spreads
    found = [runner.text([5 + 7 * i % 200 for i in range(20)], every=True).logits]
    tree = Draft(tuple(range(30, 30 + len(PARENTS))), tuple(PARENTS))
    rows = verification_rows(9, tree, runner.past)
    found.append(runner.step(rows, range(len(rows.tokens))).logits)
    runner.keep([0, 1, 4, 9])
    chain = verification_rows(4, Draft.chain([8, 9, 10]), runner.past)
    found.append(runner.step(chain, range(4)).logits)
    found.append(runner.text([11]).logits)
    plan = runner.plan(runner.shape(len(rows.tokens), 2, 40)).plan
    sizes = {t.name: t.nbytes for t in plan.graph.leaves(Kind.INPUT)}
    if device == "cuda":
        assert {c.actor.device for c in plan.schedule if c.do is Do.LAUNCH} == {"cuda0"}
    session.close()
    return found, sizes


@need_compiler
@pytest.mark.parametrize("name", ["llama_tied", "mistral_sliding"])
@pytest.mark.parametrize("device", ["cpu", "sim", "cuda"])
def test_a_mask_made_of_columns_gives_the_same_bits(device: str, name: str) -> None:
    whole, given = logits(device, name, False)
    made, few = logits(device, name, True)
    assert [a.tobytes() for a in made] == [a.tobytes() for a in whole]
    assert all(np.isfinite(a).all() for a in made)
    assert few.get("window_mask") == given.get("window_mask")
    if name == "llama_tied":
        assert given["mask"] == 12 * 256 * 4 and "mask" not in few
        assert (few["columns"], few["column"]) == (14 * 12 * 4, 256 * 4)


def test_a_tree_of_60_is_given_a_thirtieth_of_its_mask() -> None:
    """The sizes of docs/cuda.md: 64 rows that see 4,096 slots. One row is given its mask."""
    session = open_session(threads=1)
    runner = Runner(open_model(TINY / "llama_tied"), session, 3500)
    runner.spreads = True
    found = []
    for rows in (61, 6, 1):
        plan = runner.plan(runner.shape(rows, rows, 2100)).plan
        sizes = {t.name: t.nbytes for t in plan.graph.leaves(Kind.INPUT)}
        found.append(sum(sizes.get(n, 0) for n in ("mask", "columns", "column")))
    assert found == [66 * 64 * 4 + 4096 * 4, 8 * 6 * 4 + 4096 * 4, 4096 * 4]
    session.close()
