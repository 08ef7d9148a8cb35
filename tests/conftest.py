"""Hypothesis profiles: dev (default), ci (derandomised, in .ci/run), deep (by hand); what every
test needs."""

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from ggraph.tensor import OPS

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile("dev", max_examples=40, deadline=None, suppress_health_check=_SLOW)
settings.register_profile(
    "ci", max_examples=40, deadline=None, derandomize=True, suppress_health_check=_SLOW
)
settings.register_profile("deep", max_examples=20_000, deadline=None, suppress_health_check=_SLOW)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

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
