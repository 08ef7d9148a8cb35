"""Many texts at once are the texts that decoding alone gives, whatever their neighbours."""

from pathlib import Path

import numpy as np
import pytest
from small_model import small_model

from ggraph import InputError
from ggraph.decode.lanes import Answered, Lanes, Request
from ggraph.decode.runner import Runner
from models.run.load import Loaded, load


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("lanes") / "small.gguf")


def best(logits: np.ndarray) -> int:
    return int(np.argmax(logits))


def answers(m: Loaded, lanes: int, prompts: list[list[int]], limit: int) -> dict[int, Answered]:
    runner = Runner(m.model, m.session, lanes * 128, taps=(0, 1, m.model.layer_count))
    found = Lanes(runner, lanes, 128, m.tokenizer.eos_ids).run(
        [Request(i, p, best) for i, p in enumerate(prompts)], limit
    )
    return {a.index: a for a in found}


def test_texts_do_not_depend_on_their_neighbours(path: Path) -> None:
    prompts = [[(7 * i + j) % 256 for j in range(3 + 5 * i)] for i in range(7)]
    with_many = answers(load(path, ctx_size=128), 4, prompts, 20)
    alone = load(path, ctx_size=128)
    for i, prompt in enumerate(prompts):
        alone.engine.reset()
        plain = list(alone.engine.generate(prompt, best, lambda _: None, limit=20))
        assert with_many[i].tokens[with_many[i].prompt_length :] == plain
    with_two = answers(load(path, ctx_size=128), 2, prompts, 20)
    for i, a in with_many.items():
        ours, theirs = (np.concatenate(x.features) for x in (a, with_two[i]))
        assert ours.shape == (len(a.tokens) - 1, 3 * alone.model.width)
        assert np.array_equal(ours, theirs)


def test_a_lane_ends_when_it_is_full(path: Path) -> None:
    found = answers(load(path, ctx_size=128), 2, [[5] * 120, [6] * 128, [7] * 3], 1000)
    assert sorted(found) == [0, 2]  # the second prompt leaves no room
    assert len(found[0].tokens) <= 128


def test_a_second_turn_needs_a_second_end(path: Path) -> None:
    m = load(path, ctx_size=128)
    end = min(m.tokenizer.eos_ids)
    script = iter([9, end, 8, 8, end, 3])
    request = Request(0, [1, 2], lambda _: next(script), turns=2)
    (text,) = Lanes(Runner(m.model, m.session, 128), 1, 128, m.tokenizer.eos_ids).run([request], 50)
    assert text.tokens == [1, 2, 9, end, 8, 8, end]


@pytest.mark.parametrize(("lanes", "length"), [(0, 128), (1, 100), (3, 128)])
def test_lanes_that_do_not_fit_are_refused(path: Path, lanes: int, length: int) -> None:
    m = load(path, ctx_size=128)
    with pytest.raises(InputError, match=f"{lanes} lanes of {length} slots"):
        Lanes(Runner(m.model, m.session, 256), lanes, length, m.tokenizer.eos_ids)
