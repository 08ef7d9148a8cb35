"""The speed sections of `gpu_check.py`: ceilings, models of real shapes, the host's share."""

import importlib.util
import time
from collections.abc import Callable
from typing import Any

import gpu_models
import numpy as np
from gpu_correct import Found, greedy, opened

from ggraph import Options, Session, dtypes
from ggraph.backends.cuda import CudaBackend, Driver, Events, cuda_spec
from ggraph.backends.protocol import Memory
from ggraph.decode.draft.eagle import EagleDrafter
from ggraph.decode.draft.runner import DraftRunner
from ggraph.decode.engine import Engine
from ggraph.decode.policy import Fixed
from ggraph.decode.runner import Runner
from ggraph.decode.speculation import Speculation
from ggraph.plan import Buffer
from ggraph.tensor import Array, Tensor


class Seeded(CudaBackend):
    """Fills a weight from a shorter piece on the device, so that random models cost no transfer."""

    def load(self, buffer: Buffer, tensor: Tensor, raw: Array) -> Memory:
        """As ever, or `raw` over and over where it is shorter than the weight."""
        flat = np.ascontiguousarray(raw).reshape(-1).view(np.uint8)
        if flat.nbytes == tensor.nbytes:
            return super().load(buffer, tensor, raw)
        memory = self.allocate(buffer)
        self.write(memory, 0, flat)
        begin, done = memory.handle.address, flat.nbytes
        while done < tensor.nbytes:  # twice as many bytes each time
            count = min(done, tensor.nbytes - done)
            self.driver.copy(begin + done, begin, count, self.stream(-1))
            done += count
        self.driver.synchronise(stream=self.stream(-1))
        return memory


class Watched:
    """A driver that counts the seconds in which the host waits for it."""

    def __init__(self, driver: Driver) -> None:
        self.driver, self.waited = driver, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.driver, name)

    def synchronise(self, stream: int | None = None, event: int | None = None) -> None:
        """The driver's own, timed."""
        begun = time.perf_counter()
        self.driver.synchronise(stream=stream, event=event)
        self.waited += time.perf_counter() - begun


def random_session(driver: Driver, streams: int = 1) -> Session:
    """The GPU alone, with weights by seed."""
    gpu = Seeded(cuda_spec("cuda0", driver), driver, True, Events())
    return Session({"cuda0": gpu}, Options(streams=streams))


def seconds_of(
    work: Callable[[], Any],
    wait: Callable[[], Any],
    least: float = 0.3,
    watched: Watched | None = None,
) -> tuple[float, float]:
    """Seconds per call and, of those, seconds in which `watched` waited: the best of three batches
    of at least `least` seconds, after three calls that load and capture."""
    for _ in range(3):
        work()
    wait()
    begun = time.perf_counter()
    work()
    wait()
    calls = max(2, int(least / max(time.perf_counter() - begun, 1e-6)))
    best = (float("inf"), 0.0)
    for _ in range(3):
        begun, before = time.perf_counter(), watched.waited if watched else 0.0
        for _ in range(calls):
            work()
        wait()
        waited = watched.waited - before if watched else 0.0
        best = min(best, ((time.perf_counter() - begun) / calls, waited / calls))
    return best


def measure_ceilings(driver: Driver, quick: bool) -> Found:
    """Copy bandwidth (bytes read and written) and the rate of bf16 products."""
    backend = opened(driver)
    stream, size = backend.stream(0), 1 << (24 if quick else 31)
    a, b = driver.allocate(size), driver.allocate(size)
    copied, _ = seconds_of(lambda: driver.copy(a, b, size, stream), driver.synchronise)
    n = 256 if quick else 8192
    shape = (n, n, n)
    values = np.resize(gpu_models.tile(dtypes.BF16), 2 * n * n)  # zeros would be multiplied faster
    for address in (a, b):
        driver.copy(address, values.ctypes.data, values.nbytes, stream)
    driver.synchronise()
    rate, _ = seconds_of(
        lambda: driver.product(a, b, b + size // 2, shape, n, "bf16", False, stream),
        driver.synchronise,
    )
    driver.free(a)
    driver.free(b)
    return {"ok": True, "copy_bytes_per_s": 2 * size / copied, "bf16_flops": 2 * n**3 / rate}


def measure_shape(driver: Driver, name: str, kind: str, quick: bool, ceilings: Found) -> Found:
    """One shape in one weight type: decoding, verification, prompt, EAGLE round, on as many
    streams as decode fastest."""
    dtype = dtypes.dtype(kind)
    target = gpu_models.model(name, gpu_models.SHAPES[name], dtype)
    head = gpu_models.head(target, dtype)
    watched = Watched(driver)
    context = 128 if quick else 2048
    by_streams = {n: _decode_seconds(watched, target, context, n) for n in (1, 3)}
    streams = min(by_streams, key=lambda n: by_streams[n])
    s = random_session(watched, streams)
    runner = Runner(target, s, context)
    prompt = [(i * 31) % 1000 for i in range(16 if quick else 512)]
    found: Found = {
        "ok": True,
        "weights": kind,
        "streams": streams,
        "decode_s_by_streams": by_streams,
    }
    for title, ids in (("decode", [7]), ("verify8", list(range(8))), ("prompt", prompt)):

        def step(ids: list[int] = ids, every: bool = title == "verify8") -> None:
            runner.past = 0
            runner.text(ids, every=every)

        seconds, waited = seconds_of(step, lambda: None, watched=watched)
        found |= {f"{title}_s": seconds, f"{title}_host_us": 1e6 * (seconds - waited)}
    floor = gpu_models.weight_bytes(target) / ceilings["copy_bytes_per_s"]
    flops = 2 * gpu_models.products(target, len(prompt))
    found["decode_share_of_floor"] = floor / found["decode_s"]
    found["verify8_over_decode"] = found["verify8_s"] / found["decode_s"]
    found["prompt_share_of_matmul"] = flops / found["prompt_s"] / ceilings["bf16_flops"]
    tapped = Runner(target, s, context, taps=head.taps)
    found["eagle_round_s"], same = _round_seconds(s, tapped, head, context, 8 if quick else 40)
    found["eagle_round_over_decode"] = found["eagle_round_s"] / found["decode_s"]
    found["ok"] = found["same_text"] = same
    s.close()
    return found


def _decode_seconds(driver: Any, target: Any, context: int, streams: int) -> float:
    """Seconds of a step of one row on so many streams."""
    s = random_session(driver, streams)
    runner = Runner(target, s, context)

    def step() -> None:
        runner.past = 0
        runner.text([7])

    seconds, _ = seconds_of(step, lambda: None)
    s.close()
    return seconds


def _round_seconds(
    s: Session, runner: Runner, head: Any, context: int, limit: int
) -> tuple[float, bool]:
    """Seconds of draft 4, verify and sample; and whether the text is that of plain decoding."""
    engine = Engine(runner, ())
    chains = Speculation([EagleDrafter(DraftRunner(head, s, context))], Fixed(4))
    texts = []
    for drafts in (None, chains, chains):  # the first generation makes the plans
        engine.reset()
        prompt, ignore = [1, 2, 3, 4], lambda token: None
        tokens = engine.generate(prompt, greedy, ignore, limit=limit, drafts=drafts)
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
        torch_s = seconds_of(generate, torch.cuda.synchronize)[0] / new
    s = random_session(driver)
    runner = Runner(gpu_models.model("SmolLM2-135M", c, dtypes.BF16), s, 2048)

    engine = Engine(runner, ())

    def ours() -> None:
        engine.reset()
        for _ in engine.generate(list(range(1, 17)), greedy, lambda token: None, limit=new):
            pass

    ours_s = seconds_of(ours, lambda: None)[0] / new
    s.close()
    return {"ok": True, "ours_s": ours_s, "torch_s": torch_s, "times_faster": torch_s / ours_s}
