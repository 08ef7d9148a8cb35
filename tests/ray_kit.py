"""A Ray of this machine, for tests and scripts."""

import contextlib

import ray

ATTEMPTS = 5


def start_ray() -> None:
    """Begin one. Its raylet gives helper processes half a minute, which a busy machine exceeds."""
    for left in reversed(range(ATTEMPTS)):
        try:
            ray.init(include_dashboard=False, num_cpus=4, log_to_driver=False)
            return
        except Exception:  # Ray has no class of its own for this
            with contextlib.suppress(Exception):
                ray.shutdown()
            if not left:
                raise
