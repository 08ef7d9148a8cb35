"""The largest of many scores equal a full sort's, ties, infinities and NaNs included."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from ggraph import Array
from ggraph.decode.draft.eagle import top

NUMBERS = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, -np.inf, np.inf, np.nan]) | st.floats(
    width=32
)
SCORES = arrays(np.float32, array_shapes(min_dims=1, max_dims=1, max_side=40), elements=NUMBERS)


@given(SCORES, st.integers(1, 45))
def test_the_largest_are_those_of_a_full_sort(scores: Array, count: int) -> None:
    negated = np.where(np.isnan(scores), np.inf, -scores)
    assert top(scores, count).tolist() == np.argsort(negated, kind="stable")[:count].tolist()


def test_a_wide_row_with_few_values_keeps_the_lowest_indices() -> None:
    scores = np.zeros(8192, np.float32)
    scores[5000] = 1
    assert top(scores, 4).tolist() == [5000, 0, 1, 2]
