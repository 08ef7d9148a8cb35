"""What every family must do beside its golden vectors: identity, chunking, states, bad files.

The text with drafts is the text without them, chains and trees, whatever a layer carries along; and
the bits of a row do not depend on how many rows are computed with it.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from identity_kit import CONFIGS, CONTEXT, Scripted, Target, adversaries

from ggraph.decode.draft.lookup import SuffixDrafter
from ggraph.decode.draft.tree import Draft
from ggraph.decode.model import StepShape
from ggraph.decode.rows import Rows
from ggraph.decode.runner import Runner
from ggraph.dtype import F32
from ggraph.errors import InputError
from models.run.load import open_session

TINY = Path(__file__).parent / "golden" / "tiny2"
NAMES = tuple(sorted(p.name for p in TINY.iterdir()))
RECURRENT = (
    "falcon_h1", "granite_hybrid", "granite_hybrid_moe", "lfm2", "lfm2_moe", "nemotron_h",
    "nemotron_h_moe", "qwen3_5", "qwen3_5_moe", "qwen3_next",
)  # fmt: skip


@pytest.fixture(scope="module", params=NAMES)
def family(request: pytest.FixtureRequest) -> Iterator[Target]:
    made = Target(TINY / request.param)
    yield made
    made.session.close()


def lengths() -> Iterator[tuple[str, int]]:
    """Of drafts: three for a family with states, two for others, of which one is 1 or 8 in turn."""
    for i, name in enumerate(NAMES):
        more = (1, 8) if name in RECURRENT else ((1, 8)[i % 2],)
        yield from ((name, length) for length in (3, *more))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("family", "length"), [*lengths()], indirect=["family"])
def test_no_draft_changes_a_token(family: Target, name: str, length: int) -> None:
    plain = family.plain[name]
    truth, vocabulary = family.prompt + plain, family.model.vocab_size
    for kind, guess in adversaries(truth, vocabulary, length).items():
        nodes = 4 * length if kind == "forked" else length
        assert family.text(name, [Scripted(guess)], nodes) == plain, kind
    assert family.text(name, [SuffixDrafter()], length) == plain


def test_no_random_tree_changes_a_token(family: Target) -> None:
    """Any tree over the truth and near misses, so that paths leave the first branch anywhere."""
    plain = family.plain["greedy"]
    truth, rng = family.prompt + plain, np.random.default_rng(3)

    def guess(text: list[int], limit: int) -> Draft:
        tokens, parents, depths = [], [], []
        for i in range(limit):
            parent = int(rng.integers(-1, i))
            depth = 0 if parent < 0 else depths[parent] + 1
            at = len(text) + depth
            right = truth[at] if at < len(truth) else 0
            tokens.append(right if rng.random() < 0.7 else int(rng.integers(0, 300)))
            parents.append(parent)
            depths.append(depth)
        return Draft(tuple(tokens), tuple(parents))

    for nodes in (4, 9, 20):
        assert family.text("greedy", [Scripted(guess)], nodes) == plain


def test_the_bits_do_not_depend_on_the_chunks(family: Target) -> None:
    """Steps of few rows are other plans than those of many (more than 64), and each of one row."""
    ids = family.prompt * 13
    found = []
    for batch in (512, 64, 65, 7, 1):
        runner = Runner(family.model, family.session, 160, batch=batch, cache_dtype=F32)
        found.append(runner.text(ids).logits.tobytes() + runner.text([5]).logits.tobytes())
    assert len(set(found)) == 1


def test_the_last_layer_is_computed_for_the_rows_that_are_read(family: Target) -> None:
    """It only remembers the others; with a tap behind it, it is computed for all."""
    model, last = family.model, family.model.layer_count - 1

    def rows(wanted: int, taps: tuple[int, ...] = ()) -> set[int]:
        step = model.build(StepShape(8, 32, wanted, 64, taps))
        parts = tuple(f"blk.{last}.{part}" for part in ("ffn", "attn_output", "ssm_out"))
        return {t.shape[0] for t in step if t.op != "weight" and t.name.startswith(parts)}

    assert [rows(n) for n in (1, 3, 8)] == [{1}, {3}, {8}]
    assert rows(3, (last,)) == {3} and rows(3, (last + 1,)) == {8}


def test_no_bit_depends_on_who_reads_the_other_rows(family: Target) -> None:
    ids, found = family.prompt * 7, []
    for every, taps in ((False, ()), (True, ()), (False, (family.model.layer_count,))):
        runner = Runner(family.model, family.session, CONTEXT, taps=taps, cache_dtype=F32)
        first = runner.text(ids, every=every).logits[-1]
        found.append(first.tobytes() + runner.text([5]).logits.tobytes())
    assert len(set(found)) == 1


@pytest.mark.parametrize("family", RECURRENT, indirect=True)
def test_a_state_goes_only_forwards(family: Target) -> None:
    runner = family.runner
    runner.past = 0
    runner.text(family.prompt)
    with pytest.raises(InputError, match="recurrent layers, whose state cannot go from 11"):
        runner.past = 5
    with pytest.raises(InputError, match="does not follow 11 tokens"):
        runner.step(Rows([1], [12], [12]), [0])
    runner.past = 0
    again = runner.text(family.prompt).logits
    fresh = Runner(family.model, open_session(threads=1, exact=True), CONTEXT, cache_dtype=F32)
    assert np.array_equal(again, fresh.text(family.prompt).logits)


@pytest.mark.parametrize("family", RECURRENT, indirect=True)
def test_steps_that_nobody_kept_leave_no_trace(family: Target) -> None:
    """Verified again, with other drafts, before anything is kept."""
    runner = family.runner
    runner.past = 0
    runner.text(family.prompt)
    chain = Rows([3, 4, 5, 6], range(11, 15), range(11, 15))
    first = runner.step(chain, range(4)).logits
    runner.step(Rows([9, 9], range(11, 13), range(11, 13)), [0, 1])
    second = runner.step(chain, range(4)).logits
    assert np.array_equal(first, second)
    runner.keep([0, 1])
    after = runner.text([7]).logits
    plain = Runner(family.model, open_session(threads=1, exact=True), CONTEXT, cache_dtype=F32)
    assert np.array_equal(after[-1], plain.text([*family.prompt, 3, 4, 7]).logits[-1])
