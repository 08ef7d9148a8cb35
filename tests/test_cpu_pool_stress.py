"""The pool under stress in small, and Ctrl-C in the middle of decoding."""

import importlib
import os
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from small_model import small_model

from ggraph.decode.sampler import Sampler, SamplerConfig
from models.run.load import Loaded, load

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and timers")
@pytest.mark.parametrize("seed", [1, 2])
def test_random_programs_with_forks_signals_and_callers(seed: int) -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    stress = importlib.import_module("stress_pool")
    with np.errstate(all="ignore"):
        done = stress.stress(120, seed)
    assert done["programs"] >= 120
    assert done["from two threads"] > 0


def decode(m: Loaded, limit: int, interrupt_at: int | None = None) -> list[int]:
    """Greedy tokens of a fixed prompt. A second thread sends SIGINT once `interrupt_at` are there,
    and this one decodes on until it arrives."""
    s, tokens = Sampler(SamplerConfig(temp=0), m.model.vocab_size), list[int]()
    m.engine.reset()
    due = threading.Event()

    def send() -> None:
        due.wait()
        os.kill(os.getpid(), signal.SIGINT)

    sender = threading.Thread(target=send)
    if interrupt_at is not None:
        sender.start()
    try:
        for token in m.engine.generate([65, 66, 67], s.sample, s.accept, limit=limit):
            tokens.append(token)
            if len(tokens) == interrupt_at:
                due.set()
    finally:
        due.set()
        if sender.ident is not None:
            sender.join()
    return tokens


@pytest.mark.skipif(os.name == "nt", reason="signals differ on Windows")
@pytest.mark.parametrize("threads", [1, 2])
def test_ctrl_c_during_decode_leaves_a_usable_session(tmp_path: Path, threads: int) -> None:
    # A shell may start the tests with interrupts ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    m = load(small_model(tmp_path / "small.gguf"), threads=threads, ctx_size=512)
    m.engine.ends = frozenset()
    want = decode(m, 60)
    assert len(want) == 60
    interrupted = 0
    for at in range(1, 25):
        try:
            decode(m, 400, at)
        except KeyboardInterrupt:
            interrupted += 1
        assert decode(m, 60) == want, f"after an interrupt at token {at}"
    signal.signal(signal.SIGINT, before)
    assert interrupted == 24
    m.close()
