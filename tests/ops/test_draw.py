"""`ops.draw` against the host's sampler: the same tokens for the same uniform numbers."""

import numpy as np
import pytest
from cuda_host import HostDriver, need_compiler

from ggraph import Graph, Session, ops
from ggraph.backends.cuda import CudaBackend, Events, cuda_spec
from ggraph.decode.sampler import Sampler, SamplerConfig
from ggraph.errors import ShapeError
from ggraph.ops.evaluate import evaluate
from ggraph.plan import Do
from ggraph.tensor import Array, Tensor, input

T, V = 40, 300
CONFIGS = [
    SamplerConfig(seed=1),
    SamplerConfig(temp=1.5, top_k=V, top_p=1.0, min_p=0.0, seed=2),
    SamplerConfig(temp=0.3, top_k=7, top_p=0.6, min_p=0.0, seed=3),
    SamplerConfig(temp=2.0, top_k=100, top_p=1.0, min_p=0.2, seed=4),
    SamplerConfig(temp=1.0, top_k=5, top_p=0.0, min_p=1.0, seed=5),
    SamplerConfig(temp=0.0, seed=6),
]


def drawn(config: SamplerConfig) -> Tensor:
    logits, uniform = input("logits", (T, V)), input("uniform", (T, 1))
    return ops.draw(
        logits, uniform, temp=config.temp, best=config.top_k, top_p=config.top_p,
        min_p=config.min_p, name="token",
    )  # fmt: skip


def feeds(config: SamplerConfig) -> tuple[dict[str, Array], list[int]]:
    """Logits and the sampler's own numbers, and what the sampler makes of them."""
    logits = (np.random.default_rng(config.seed).standard_normal((T, V)) * 3).astype(np.float32)
    sampler = Sampler(config, V)
    numbers, tokens = [], []
    for row in logits:
        numbers.append(sampler.clone().uniform())
        tokens.append(sampler.sample(row))
    uniform = np.array(numbers, np.float32).reshape(T, 1)
    return {"logits": logits, "uniform": uniform}, tokens


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"temp {c.temp}, top_k {c.top_k}")
def test_tokens_are_the_samplers(config: SamplerConfig) -> None:
    given, tokens = feeds(config)
    graph = Graph.of({"token": drawn(config)})
    if config.greedy:
        del given["uniform"]
    assert evaluate(graph, given)["token"].tolist() == tokens


@need_compiler
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"temp {c.temp}, top_k {c.top_k}")
def test_tokens_are_drawn_on_the_gpu(config: SamplerConfig) -> None:
    """Every command is the GPU's, and only tokens come back."""
    driver = HostDriver()
    session = Session({"cuda0": CudaBackend(cuda_spec("cuda0", driver), driver, True, Events())})
    given, tokens = feeds(config)
    if config.greedy:
        del given["uniform"]
    graph = Graph.of({"token": drawn(config)})
    plan = session.prepare("k", lambda: graph, lambda t: np.zeros(0)).plan
    work = [c for c in plan.schedule if c.do in (Do.LAUNCH, Do.COPY)]
    assert {c.actor.device for c in work} == {"cuda0"}
    for _ in range(3):
        assert session.run("k", given)["token"].tolist() == tokens
    session.close()


def test_a_number_of_one_or_more_still_gives_a_candidate() -> None:
    logits = np.zeros((1, V), np.float32)
    logits[0, [3, 9]] = 20.0
    graph = Graph.of(
        {"token": ops.draw(input("logits", (1, V)), input("uniform", (1, 1)), name="token")}
    )
    for u, token in ((0.0, 3), (0.49, 3), (0.51, 9), (1.0, 9)):
        given = {"logits": logits, "uniform": np.full((1, 1), u, np.float32)}
        assert evaluate(graph, given)["token"].tolist() == [token]


def test_what_cannot_be_drawn_from_is_refused() -> None:
    with pytest.raises(ShapeError, match="expected 2 axes, got 1"):
        ops.draw(input("logits", (5,)), input("uniform", (1, 1)))
    with pytest.raises(ShapeError, match="k=0"):
        ops.draw(input("logits", (2, 5)), input("uniform", (2, 1)), best=0)
