"""Hypothesis profiles: dev (default), ci (derandomised, in .ci/run), deep (by hand); what every
test needs."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from ggraph.tensor import OPS

if TYPE_CHECKING:
    from serve_kit import Server

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile("dev", max_examples=40, deadline=None, suppress_health_check=_SLOW)
settings.register_profile(
    "ci", max_examples=40, deadline=None, derandomize=True, suppress_health_check=_SLOW
)
settings.register_profile("deep", max_examples=20_000, deadline=None, suppress_health_check=_SLOW)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

# What a kit asserts is told with its values, too.
pytest.register_assert_rewrite(*(path.stem for path in Path(__file__).parent.glob("*_kit.py")))

# What is collected stays to the end. Python's search for cycles would walk through all of it again
# and again, half a second each: a twentieth of the tests' time.
gc.disable()


def pytest_collection_finish() -> None:
    """From here on cycles are looked for among what tests make."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def own_ops() -> Iterator[None]:
    """Ops that a test registers are gone after it: others walk over all that are registered."""
    before = set(OPS)
    yield
    for name in set(OPS) - before:
        del OPS[name]


# What many files read and none changes is made once. The kits are imported where one is asked for:
# they take a second.


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model."""
    from small_model import small_model

    return small_model(tmp_path_factory.mktemp("model") / "small.gguf")


@pytest.fixture(scope="session")
def learnable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose next token follows mostly from the last one."""
    from small_model import learnable_model

    return learnable_model(tmp_path_factory.mktemp("learnable"))


@pytest.fixture(scope="session")
def server(learnable: Path) -> "Iterator[Server]":
    """A server of it with the options that servers have by default."""
    from serve_kit import served

    with served(learnable) as running:
        yield running
