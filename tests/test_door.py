"""A function behind the door is called as Python would call it."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggraph import InputError
from ggraph.door import checked
from ggraph.dtype import DType
from ggraph.errors import ShapeError


def none() -> tuple[Any, ...]:
    return ()


def by_either(a: int, b: float = 2.0, c: int = 3) -> tuple[Any, ...]:
    return a, b, c


def by_place_alone(a: int, b: int, /, c: int = 3) -> tuple[Any, ...]:
    return a, b, c


def by_name_too(a: int, *, b: int, c: int = 3) -> tuple[Any, ...]:
    return a, b, c


def many(a: int, *b: int, c: int = 3) -> tuple[Any, ...]:
    return a, b, c


def named(a: int, /, b: int = 2, **c: int) -> tuple[Any, ...]:
    return a, b, c


FUNCTIONS = (none, by_either, by_place_alone, by_name_too, many, named)


@given(
    st.sampled_from(FUNCTIONS),
    st.lists(st.integers(0, 9), max_size=4),
    st.dictionaries(st.sampled_from("abcd"), st.integers(0, 9)),
)
def test_arguments_reach_the_parameters_that_python_would_give_them_to(
    function: Callable[..., Any], args: list[int], kwargs: dict[str, int]
) -> None:
    """Or a TypeError says of which function; the second time as the first."""
    behind = checked(function)
    for _ in range(2):
        try:
            expected = function(*args, **kwargs)
        except TypeError:
            with pytest.raises(TypeError, match=rf"^{function.__name__}\("):
                behind(*args, **kwargs)
        else:
            assert behind(*args, **kwargs) == expected


@pytest.mark.parametrize(
    ("args", "kwargs", "told"),
    [(("x",), {}, "a='x'"), ((1, "x"), {}, "b='x'"), ((1,), {"c": 0.5}, "c=0.5"),
     ((), {"a": None}, "a=None"), ((1, 2.0, True), {}, "c=True")],
)  # fmt: skip
def test_whichever_way_it_came_a_wrong_value_is_named(
    args: tuple[Any, ...], kwargs: dict[str, Any], told: str
) -> None:
    with pytest.raises(InputError, match=rf"^by_either: {told}: expected"):
        checked(by_either)(*args, **kwargs)


def test_a_type_of_odd_parts_is_refused_where_it_is_made() -> None:
    """Tensors are not asked for theirs again."""
    with pytest.raises(ShapeError, match=r"^DType.block_bytes: expected a whole number, got 'x'"):
        DType("own", 99, 1, "x", None)  # type: ignore[arg-type]  # that is the question
