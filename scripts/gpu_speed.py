"""The speed sections of `gpu_check.py`: ceilings, models of real shapes, the host's share."""

import importlib.util
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import gpu_models
import numpy as np
from gpu_correct import Found, opened

from ggraph import Options, Session, dtypes
from ggraph.backends.cuda import CudaBackend, Driver, Events, cuda_spec
from ggraph.backends.cuda.blas import MOST_GUESSES
from ggraph.backends.cuda.driver import Product
from ggraph.backends.cuda.matmul import WORK_SPACE
from ggraph.decode.acceptance import only
from ggraph.decode.draft.eagle import EagleDrafter, TreeShape
from ggraph.decode.draft.runner import DraftRunner
from ggraph.decode.engine import Engine
from ggraph.decode.policy import Fixed
from ggraph.decode.runner import Runner
from ggraph.decode.speculation import Speculation
from ggraph.errors import BackendError
from models.config import DecoderConfig

PASTS = (64, 2048)  # tokens before those that are timed
CONTEXT, PROMPT = 2304, 512
PLENTY = 1 << 29  # bytes of weights that take turns: ten times an H100's L2 cache
BATCHES, LEAST = 7, 0.15  # batches of a timing, and seconds of each


class Watched:
    """A driver that counts the seconds in which the host waits for it, and those in which it
    launches graphs. One whose kernels do not reach the host copies what is small as the rest."""

    def __init__(self, driver: Driver, reaches_host: bool = True) -> None:
        self.driver, self.waited, self.launching = driver, 0.0, 0.0
        self.reaches_host = reaches_host and driver.reaches_host

    def __getattr__(self, name: str) -> Any:
        return getattr(self.driver, name)

    def launch_graph(self, graph: Any, stream: int) -> None:
        """The driver's own, timed."""
        begun = time.perf_counter()
        self.driver.launch_graph(graph, stream)
        self.launching += time.perf_counter() - begun

    def synchronise(self, stream: int | None = None, event: int | None = None) -> None:
        """The driver's own, timed."""
        begun = time.perf_counter()
        self.driver.synchronise(stream=stream, event=event)
        self.waited += time.perf_counter() - begun


class Idle:
    """What is not watched."""

    waited = launching = 0.0


def random_session(driver: Driver, streams: int = 1) -> Session:
    """The GPU alone, with weights by seed."""
    gpu = CudaBackend(cuda_spec("cuda0", driver), driver, True, Events())
    return Session({"cuda0": gpu}, Options(streams=streams))


@dataclass(frozen=True)
class Timing:
    """Seconds per call: the median of the batches, the least and the most; and the median's seconds
    in which the host waited for the device, and launched graphs."""

    median: float
    least: float
    most: float
    waited: float
    launching: float

    @property
    def host_us(self) -> float:
        """Microseconds in which the host did not wait."""
        return 1e6 * (self.median - self.waited)

    def to_json(self, name: str) -> Found:
        """As numbers of a section."""
        return {f"{name}_s": self.median, f"{name}_s_range": [self.least, self.most]}


def seconds_of(
    work: Callable[[], Any],
    wait: Callable[[], Any],
    quick: bool = False,
    watched: Watched | None = None,
    least: float = LEAST,
) -> Timing:
    """Batches of at least so many seconds, after calls that load and capture."""
    for _ in range(1 if quick else 3):
        work()
    wait()
    begun = time.perf_counter()
    work()
    wait()
    once = max(time.perf_counter() - begun, 1e-6)
    calls = 1 if quick else max(1, int(least / once))
    found, w = [], watched or Idle()
    for _ in range(1 if quick else BATCHES):
        begun, before = time.perf_counter(), (w.waited, w.launching)
        for _ in range(calls):
            work()
        wait()
        spent = time.perf_counter() - begun, w.waited - before[0], w.launching - before[1]
        found.append([seconds / calls for seconds in spent])
    found.sort()
    median, waited, launching = found[len(found) // 2]
    return Timing(median, found[0][0], found[-1][0], waited, launching)


def measure_ceilings(driver: Driver, quick: bool) -> Found:
    """Copy bandwidth (bytes read and written) and the rate of bf16 products."""
    backend = opened(driver)
    stream, size = backend.stream(0), 1 << (24 if quick else 31)
    a, b = driver.allocate(size), driver.allocate(size)
    copied = seconds_of(lambda: driver.copy(a, b, size, stream), driver.synchronise, quick)
    n = 256 if quick else 8192
    values = np.resize(gpu_models.tile(dtypes.BF16), 2 * n * n)  # zeros would be multiplied faster
    for address in (a, b):
        driver.copy(address, values.ctypes.data, values.nbytes, stream)
    driver.synchronise()
    space = driver.allocate(WORK_SPACE)
    made = Product(a, b, b + size // 2, n, n, n, n, "bf16", 0, space, WORK_SPACE)
    step = driver.product(made)
    product = seconds_of(lambda: step(stream), driver.synchronise, quick)
    for address in (a, b, space):
        driver.free(address)
    return {"ok": True, "copy_bytes_per_s": 2 * size / copied.median,
            "bf16_flops": 2 * n**3 / product.median, **copied.to_json("copy"),
            **product.to_json("product")}  # fmt: skip


def prompt_products(c: DecoderConfig) -> dict[str, tuple[int, int]]:
    """Outputs and columns of a layer's products; K is V's, gate is up's. The last two are what Q, K
    and V would be as one, and gate and up."""
    e, f = c.hidden_size, c.intermediate_size
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    return {"q": (q, e), "k": (kv, e), "output": (e, q), "gate": (f, e), "down": (e, f),
            "q_k_v": (q + 2 * kv, e), "gate_up": (2 * f, e)}  # fmt: skip


def measure_algorithms(driver: Driver, quick: bool) -> Found:
    """The products of a prompt's layer by each algorithm that the library knows, its first beside
    the fastest; and what joined weights would bring."""
    shapes = prompt_products(gpu_models.TINY if quick else gpu_models.LLAMA_8B)
    rows, size = (65, 1 << 18) if quick else (PROMPT, PLENTY)
    room, x, y = (driver.allocate(n) for n in (size, size, size))
    space, stream = driver.allocate(WORK_SPACE), opened(driver).stream(0)
    values = np.resize(gpu_models.tile(dtypes.BF16), size)
    for address in (room, x):
        driver.copy(address, values.ctypes.data, size, stream)
    driver.synchronise()
    by_rank = {}
    for name, (n, k) in shapes.items():
        made = Product(room, x, y, n, rows, k, n, "bf16", 0, space, WORK_SPACE)
        by_rank[name] = _seconds_by_rank(driver, made, size, stream, quick)
    for address in (room, x, y, space):
        driver.free(address)
    first = {name: seconds[0] for name, seconds in by_rank.items()}
    best = {name: min(seconds.values()) for name, seconds in by_rank.items()}
    flops = {name: 2 * rows * n * k for name, (n, k) in shapes.items()}
    return {
        "ok": True, "rows": rows, "seconds_by_rank": by_rank,
        "best_over_first": _layer(best) / _layer(first),
        "flops_per_s": _layer(flops) / _layer(first),
        "q_k_v_over_apart": first["q_k_v"] / (first["q"] + 2 * first["k"]),
        "gate_up_over_apart": first["gate_up"] / (2 * first["gate"]),
    }  # fmt: skip


def _layer(of: Mapping[str, float]) -> float:
    """The sum over a layer's seven products."""
    return of["q"] + 2 * of["k"] + of["output"] + 2 * of["gate"] + of["down"]


def _seconds_by_rank(
    driver: Driver, p: Product, size: int, stream: int, quick: bool
) -> dict[int, float]:
    """Seconds of a product by each algorithm that runs; 0 is the library's own choice. Weights lie
    side by side in `size` bytes and take turns, as a model's layers do, so that no cache holds
    them; a turn is one graph, which costs the host nothing for each."""
    each, found = 2 * p.n * p.k, {}
    places = range(p.w, p.w + size - each + 1, each)
    for rank in range(MOST_GUESSES):
        try:
            steps = [driver.product(replace(p, w=w), rank) for w in places]
            steps[0](stream)  # also loads it, and tells whether it runs at all
            driver.synchronise()
        except BackendError:
            if not rank:
                raise
            continue
        driver.begin_capture(stream)
        for step in steps:
            step(stream)
        graph = driver.end_capture(stream)
        turn = seconds_of(partial(driver.launch_graph, graph, stream), driver.synchronise, quick)
        found[rank] = turn.median / len(steps)
    return found


def measure_shape(driver: Driver, name: str, kind: str, quick: bool) -> Found:
    """One shape in one weight type: 1, 8 and 60 rows behind texts of PASTS tokens, a prompt, and
    EAGLE rounds of a chain and of a tree, on as many streams as decode fastest."""
    ceilings = measure_ceilings(driver, quick)
    dtype = dtypes.dtype("q4_0" if quick and kind == "q4_k" else kind)  # tiny rows are shorter
    target = gpu_models.model(name, gpu_models.SHAPES[name], dtype)
    head = gpu_models.head(target, dtype)
    watched = Watched(driver)
    pasts, context, large = ((8,), 64, 20) if quick else (PASTS, CONTEXT, 60)
    places = pasts[0], context
    by_streams = {n: _decode(watched, target, places, n, quick) for n in (1, 3)}
    streams = min(by_streams, key=lambda n: by_streams[n].median)
    copied = _decode(Watched(driver, reaches_host=False), target, places, streams, quick)
    s = random_session(watched, streams)
    runner = Runner(target, s, context)
    runner.picks = 1  # as greedy text is decoded
    found: Found = {
        "ok": True, "shape": name, "weights": kind, "streams": streams,
        "decode_s_by_streams": {n: t.median for n, t in by_streams.items()},
        "decode_host_us_by_streams": {n: t.host_us for n, t in by_streams.items()},
        "decode_s_copied": copied.median, "decode_host_us_copied": copied.host_us,
        "ceilings": ceilings,
    }  # fmt: skip
    floor = gpu_models.weight_bytes(target) / ceilings["copy_bytes_per_s"]
    for past in pasts:
        one = step_seconds(runner, 1, past, quick, watched)
        found |= one.to_json(f"rows1_{past}")
        found[f"share_of_floor_{past}"] = floor / one.median
        for rows in (8, large):
            many = step_seconds(runner, rows, past, quick, watched)
            found |= many.to_json(f"rows{rows}_{past}")
            found[f"rows{rows}_over_1_{past}"] = many.median / one.median
        if past == pasts[0]:
            found["decode_host_us"] = one.host_us
            found["decode_launch_us"] = 1e6 * one.launching
    prompt = step_seconds(runner, 16 if quick else PROMPT, 0, quick, watched)
    flops = 2 * gpu_models.products(target, 16 if quick else PROMPT)
    found |= prompt.to_json("prompt")
    found["prompt_share_of_matmul"] = flops / prompt.median / ceilings["bf16_flops"]
    tapped = Runner(target, s, context, taps=head.taps)
    tapped.picks = 1
    trees = TreeShape(8, 2, 3) if quick else TreeShape(60, 6, 10)
    same = True
    for what, tree, length in (("eagle", None, 4), ("tree", trees, trees.total_tokens - 1)):
        drafter = EagleDrafter(DraftRunner(head, s, context, target=tapped), tree=tree)
        drafts = Speculation([drafter], Fixed(length))
        seconds, alike = _round_seconds(tapped, drafts, 8 if quick else 40)
        found[f"{what}_round_s"], same = seconds, same and alike
        found[f"{what}_round_over_decode"] = seconds / found[f"rows1_{pasts[0]}_s"]
    found["ok"] = found["same_text"] = same
    s.close()
    return found


def step_seconds(runner: Runner, rows: int, past: int, quick: bool, watched: Watched) -> Timing:
    """A step of so many rows behind `past` tokens; a token for each but for a prompt's."""
    ids = [(i * 31 + 7) % 100 for i in range(rows)]
    every = 1 < rows <= 64 and past > 0

    def step() -> None:
        runner.past = past
        runner.text(ids, every=every)

    return seconds_of(step, lambda: None, quick, watched)


def _decode(
    driver: Watched, target: Any, places: tuple[int, int], streams: int, quick: bool
) -> Timing:
    """A step of one row on so many streams, behind so many tokens in a cache of so many."""
    s, (past, context) = random_session(driver, streams), places
    runner = Runner(target, s, context)
    runner.picks = 1
    found = step_seconds(runner, 1, past, quick, driver)
    s.close()
    return found


def _round_seconds(runner: Runner, drafting: Speculation, limit: int) -> tuple[float, bool]:
    """Seconds of draft, verify and sample; and whether the text is that of plain decoding."""
    engine = Engine(runner, ())
    texts = []
    for drafts in (None, drafting, drafting):  # the first generation makes the plans
        engine.reset()
        prompt, ignore = [1, 2, 3, 4], lambda token: None
        tokens = engine.generate(prompt, only, ignore, limit=limit, drafts=drafts)
        texts.append(list(tokens))
    stats = engine.statistics
    return stats.decode_seconds / max(stats.rounds, 1), texts[0] == texts[1] == texts[2]


def measure_torch(driver: Driver, quick: bool) -> Found:
    """SmolLM2's shape, bf16, one row: this backend against transformers on the same GPU."""
    if (
        importlib.util.find_spec("torch") is None
        or importlib.util.find_spec("transformers") is None
    ):
        return {"ok": True, "skipped": "torch and transformers are not installed"}
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    c = gpu_models.SMOLLM2
    config = LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_hidden_layers, num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads, max_position_embeddings=2048,
    )  # fmt: skip
    theirs = LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
    ids = torch.arange(1, 17, device="cuda")[None]
    new = 16 if quick else 128

    def generate() -> None:
        theirs.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False)

    with torch.inference_mode():
        theirs_s = seconds_of(generate, torch.cuda.synchronize, quick)
    s = random_session(driver)
    runner = Runner(gpu_models.model("SmolLM2-135M", c, dtypes.BF16), s, 2048)
    runner.picks = 1
    engine = Engine(runner, ())

    def ours() -> None:
        engine.reset()
        for _ in engine.generate(list(range(1, 17)), only, lambda token: None, limit=new):
            pass

    ours_s = seconds_of(ours, lambda: None, quick)
    s.close()
    return {"ok": True, "tokens": new, "times_faster": theirs_s.median / ours_s.median,
            **ours_s.to_json("ours"), **theirs_s.to_json("torch")}  # fmt: skip
