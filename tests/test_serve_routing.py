"""Which replica a request goes to."""

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from models.serve.routing import BLOCK, Routes, Wish, blocks_of, kept_in, prompt_text, wish_of

NAMES = ("a", "b", "c")
IDLE = dict.fromkeys(NAMES, 0)


def routes(room: int = 100, slack: int = 2) -> Routes:
    return Routes(room, slack, random.Random(1))


def wish(
    text: str, *belongs: str, needs: str = "", name: str = "", avoid: tuple[str, ...] = ()
) -> Wish:
    return Wish(blocks_of(text), needs, belongs, name, frozenset(avoid))


LONG = "".join(chr(65 + i % 26) * 40 for i in range(40))


def test_the_longest_beginning_wins_and_of_equals_who_has_less_to_do() -> None:
    r = routes()
    r.went(wish(LONG), "a")
    r.went(wish(LONG[: 4 * BLOCK]), "b")
    assert r.choose(wish(LONG), IDLE)[0] == "a"
    assert r.choose(wish(LONG[: 3 * BLOCK]), {"a": 1, "b": 0, "c": 0})[0] == "b"
    unread = [r.choose(wish("x" + LONG), {"a": 1, "b": 1, "c": 0})[0] for _ in range(20)]
    assert {*unread} == {*NAMES}, "two are drawn"


def test_a_replica_that_is_ahead_is_passed_over() -> None:
    r = routes(slack=2)
    r.went(wish(LONG), "a")
    r.went(wish(LONG[: 4 * BLOCK]), "b")
    assert r.choose(wish(LONG), {"a": 2, "b": 0, "c": 0})[0] == "a"
    assert r.choose(wish(LONG), {"a": 3, "b": 1, "c": 0})[0] == "b"
    assert r.choose(wish(LONG), {"a": 9, "b": 9, "c": 0})[0] == "c"


def test_a_replica_that_failed_comes_only_where_there_is_no_other() -> None:
    r = routes()
    r.went(wish(LONG), "a")
    assert "a" not in r.choose(wish(LONG, avoid=("a",)), IDLE)
    assert set(r.choose(wish(LONG, avoid=NAMES), IDLE)) == set(NAMES)


def test_sessions_and_responses_stay_where_they_were() -> None:
    r = routes()
    r.went(wish("", "ann", name="resp_1"), "c")
    assert r.choose(wish("", "ann"), IDLE)[0] == "c"
    busy = {"a": 0, "b": 0, "c": 99}
    assert r.choose(wish("", "ann"), busy)[0] != "c"
    assert r.choose(wish("", needs="resp_1"), busy)[0] == "c"


def test_without_a_beginning_two_are_drawn_and_the_better_one_taken() -> None:
    loads = {str(i): i for i in range(10)}
    r = routes()
    first = Counter(r.choose(wish(""), loads)[0] for _ in range(2000))
    assert first["0"] > first["4"] > first["8"] and first["9"] == 0
    assert abs(first["0"] / 2000 - 0.2) < 0.04  # 1 - (9 * 8) / (10 * 9)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12), st.sampled_from(NAMES))))
def test_depths_are_those_of_what_went_there(history: list[tuple[int, int, str]]) -> None:
    r, sent = routes(10**6), list[tuple[str, str]]()
    for stem, blocks, name in history:
        text = (str(stem) + LONG)[: blocks * BLOCK]
        r.went(wish(text), name)
        sent.append((text, name))
    for stem in range(4):
        asked = (str(stem) + LONG)[: 8 * BLOCK]
        expected = {
            n: max((_common(asked, t) // BLOCK for t, m in sent if m == n), default=0)
            for n in NAMES
        }
        found = r.depths(blocks_of(asked), set(NAMES))
        assert found == {n: d for n, d in expected.items() if d}


def _common(a: str, b: str) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def test_ends_are_forgotten_before_beginnings_and_the_gone_altogether() -> None:
    r = routes(room=5)
    r.went(wish(LONG[: 4 * BLOCK]), "a")
    r.went(wish("z" * 3 * BLOCK), "a")
    assert r.depths(blocks_of(LONG), {"a"}) == {"a": 2}
    assert r.depths(blocks_of("z" * 3 * BLOCK), {"a"}) == {"a": 3}
    r.keep(["b"])
    assert not r.depths(blocks_of(LONG), {"a"}) and not r._holders


def test_a_prompts_letters_come_in_the_order_of_templates() -> None:
    chat = {
        "messages": [
            {"role": "system", "content": "S"},
            {"role": "user", "content": [{"type": "text", "text": "U"}]},
        ],
        "tools": [1],
    }
    assert prompt_text(chat) == "[1]\nsystem\nS\nuser\nU"
    assert prompt_text({"prompt": [1, 2]}) == "1 2"
    assert prompt_text({"instructions": "I", "input": "X"}) == "I\nX"
    w = wish_of({"previous_response_id": "resp_1", "user": "ann"}, "s", "resp_2", ["a"])
    assert (w.belongs, w.name, w.avoid) == (("s", "ann"), "resp_2", {"a"})
    assert w.needs == "resp_1"
    named = [{"role": "user"}, {"type": "item_reference", "id": "fc_1_0"}, {"type": "message"}]
    assert wish_of({"input": named}, "", "").needs == "resp_1"
    assert wish_of({"input": [{"type": "item_reference"}]}, "", "").needs == ""


def test_a_kept_response_is_found_in_every_address_of_its_own() -> None:
    for behind in ("", "/input_items", "/input_items?limit=3", "/cancel", "?include=a/b"):
        assert kept_in(f"/v1/responses/resp_1{behind}") == "resp_1"
    assert {kept_in(p) for p in ("/v1/responses", "/v1/responses/", "/v1/models/m")} == {""}
