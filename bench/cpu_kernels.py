"""Speed of the CPU kernels, and of a whole SmolLM2-135M step made of them with random weights.

    python bench/cpu_kernels.py kernels          GMAC/s and GB/s of each packed layout
    python bench/cpu_kernels.py step             ms of a step for 1, 5 and 128 rows
    python bench/cpu_kernels.py step --peer FILE the same against llama.cpp on a GGUF, alternating

The step runs the instructions that a lowered plan would run; nothing of the graph is needed.
Medians of alternating runs; on a shared machine trust the ratios, not the figures.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ggraph import dtype as dt
from ggraph import env
from ggraph.backends.cpu import attention, cache, elementwise, matmul, pack, quantise  # noqa: F401
from ggraph.backends.cpu.jit import host_jit
from ggraph.backends.cpu.pages import GUARD
from ggraph.backends.cpu.pool import Pool
from ggraph.backends.cpu.program import Assembler, Flat
from ggraph.backends.cpu.tiles import FloatLayout, activation_bytes, layout_of, packed_bytes
from ggraph.dtype import DType
from ggraph.tensor import Array

HIDDEN, FFN, HEADS, KV, HD, LAYERS, VOCAB = 576, 1536, 9, 3, 64, 30, 49152
SLAB = 1 << 27


@dataclass
class Weight:
    """A packed matrix [n, k]."""

    dtype: DType
    n: int
    k: int
    data: Array


def random_weight(pool: Pool, dtype: DType, n: int, k: int) -> Weight:
    """Random codes with scales of 0.01, packed by the pool."""
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (n, dtype.row_bytes(k)), dtype=np.uint8)
    if dtype.is_block:
        blocks = raw.reshape(-1, dtype.block_bytes)
        blocks[:, :4] = np.array([0.01, -0.05], np.float16).view(np.uint8)
        if dtype is dt.Q6_K:
            blocks[:, -2:] = np.array([0.001], np.float16).view(np.uint8)
    else:
        raw = np.full((n, k), 0.01, dtype.np).view(np.uint8)
    out = np.zeros(packed_bytes(dtype, n, k) + GUARD, np.uint8)
    asm = Assembler(pool.jit)
    asm.add(f"pack_{dtype.name}", raw=raw, out=out, n=n, k=k, row_bytes=raw.strides[0])
    pool.run(asm.freeze())
    return Weight(dtype, n, k, out)


def add_matmul(
    asm: Assembler, w: Weight, x: Array, y: Array, *, add: Array | None = None, barrier: bool = True
) -> None:
    """y = x . w^T (+ add)."""
    asm.add(
        "matmul_" + layout_of(w.dtype).name, barrier=barrier, w=w.data, x=x, y=y, n=w.n, k=w.k,
        m=len(y), xs=x.strides[0], ys=y.strides[0], add=0 if add is None else add,
        adds=0 if add is None else add.strides[0],
    )  # fmt: skip


def timed(action: Callable[[], None], repeats: int) -> float:
    """Median seconds of one call."""
    action()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def bench_kernels(pool: Pool, types: list[str]) -> None:
    """One table: rows at once against GMAC/s and GB/s of packed weights."""
    n, k = 1536 * 16, HIDDEN
    print(f"{'type':6} " + "".join(f"{m:>6} rows" + " " * 9 for m in (1, 2, 4, 5, 8, 64)))
    for name in types:
        w = random_weight(pool, dt.dtype(name), n, k if dt.dtype(name).block < 256 else 512)
        cells = []
        for m in (1, 2, 4, 5, 8, 64):
            x = np.zeros((m, activation_bytes(w.k)), np.uint8)
            if isinstance(layout_of(w.dtype), FloatLayout):
                x = np.zeros((m, w.k * 4), np.uint8)
            asm = Assembler(pool.jit)
            add_matmul(asm, w, x, np.zeros((m, n), np.float32))
            program = asm.freeze()
            seconds = timed(lambda program=program: pool.run(program), 9)
            macs, gb = n * w.k * m / seconds / 1e9, w.data.nbytes / seconds / 1e9
            cells.append(f"{macs:5.0f} GMAC {gb:5.1f} GB")
        print(f"{name:6} " + " ".join(cells), flush=True)


@dataclass
class Layer:
    """Packed weights and norms of one layer."""

    q: Weight
    k: Weight
    v: Weight
    o: Weight
    gate: Weight
    up: Weight
    down: Weight
    norms: tuple[Array, Array]
    keys: Array
    values: Array


def make_layers(pool: Pool, context: int) -> list[Layer]:
    """30 layers of Q4_1 with an F16 cache."""

    def w(n: int, k: int) -> Weight:
        return random_weight(pool, dt.Q4_1, n, k)

    def norm() -> Array:
        return np.ones(HIDDEN, np.float32)

    return [
        Layer(
            w(HIDDEN, HIDDEN), w(KV * HD, HIDDEN), w(KV * HD, HIDDEN), w(HIDDEN, HIDDEN),
            w(FFN, HIDDEN), w(FFN, HIDDEN), w(HIDDEN, FFN), (norm(), norm()),
            np.zeros((context, KV, HD), np.float16), np.zeros((context, KV, HD), np.float16),
        )
        for _ in range(LAYERS)
    ]  # fmt: skip


class Step:
    """Buffers and program of one step of m rows over `context` cached positions."""

    def __init__(self, pool: Pool, layers: list[Layer], head: Weight, m: int, context: int) -> None:
        f32 = np.float32
        self.m, self.context, self.head, self.layers = m, context, head, layers
        self.ids = np.arange(m, dtype=np.int32)
        self.x, self.hidden = np.zeros((m, HIDDEN), f32), np.zeros((m, HIDDEN), f32)
        self.xq = np.zeros((m, activation_bytes(HIDDEN)), np.uint8)
        self.fq = np.zeros((m, activation_bytes(FFN)), np.uint8)
        self.q, self.out = np.zeros((m, HEADS * HD), f32), np.zeros((m, HEADS * HD), f32)
        self.k, self.v = np.zeros((m, KV * HD), f32), np.zeros((m, KV * HD), f32)
        self.gate, self.up = np.zeros((m, FFN), f32), np.zeros((m, FFN), f32)
        self.logits = np.zeros((m if m <= 8 else 1, VOCAB), f32)
        self.pos = np.arange(context - m, context, dtype=np.int32)
        self.index = self.pos.astype(np.int64)
        self.freqs = 1e5 ** (-np.arange(0, HD, 2) / HD)
        shown = np.arange(context)[None] <= self.index[:, None]
        self.mask = np.where(shown, 0, -np.inf).astype(f32)
        self.part = np.zeros(attention.scratch_bytes(m, HEADS, HD, context), np.uint8)
        self.program = self._assemble(Assembler(pool.jit))

    def _assemble(self, asm: Assembler) -> Flat:
        asm.add(
            "rows_" + layout_of(self.head.dtype).name, w=self.head.data, ids=self.ids, y=self.x,
            n=VOCAB, k=HIDDEN, m=self.m, ys=self.x.strides[0],
        )  # fmt: skip
        for layer in self.layers:
            self._attention(asm, layer)
            self._feed_forward(asm, layer)
        last = self.xq[-len(self.logits) :]
        self._norm(asm, np.ones(HIDDEN, np.float32))
        add_matmul(asm, self.head, last, self.logits)
        return asm.freeze()

    def _norm(self, asm: Assembler, weight: Array) -> None:
        asm.add(
            "rms_norm_quantise", x=self.x, w=weight, out=self.xq, m=self.m, n=HIDDEN,
            xs=self.x.strides[0], os=self.xq.strides[0], eps=1e-5,
        )  # fmt: skip

    def _quantise(self, asm: Assembler, x: Array, out: Array) -> None:
        asm.add(
            "quantise", x=x, out=out, m=self.m, k=x.shape[1], xs=x.strides[0], os=out.strides[0]
        )

    def _rope(
        self, asm: Assembler, kind: str, x: Array, y: Array, heads: int, index: Array | int
    ) -> None:
        cached = isinstance(index, np.ndarray)
        asm.add(
            "rope_" + kind, barrier=False, x=x, y=y, pos=self.pos, index=index, freqs=self.freqs,
            factors=0, m=self.m, heads=heads, hd=HD, nr=HD, halves=0, xs=x.strides[0], xh=HD * 4,
            ys=y.strides[0], yh=HD * (2 if cached else 4), limit=self.context,
            mscale=1.0,
        )  # fmt: skip

    def _attention(self, asm: Assembler, layer: Layer) -> None:
        self._norm(asm, layer.norms[0])
        for w, y in ((layer.q, self.q), (layer.k, self.k), (layer.v, self.v)):
            add_matmul(asm, w, self.xq, y, barrier=w is layer.v)
        self._rope(asm, "f32", self.q, self.q, HEADS, 0)
        self._rope(asm, "f16", self.k, layer.keys, KV, self.index)
        asm.add(
            "set_rows_f16", x=self.v, y=layer.values, index=self.index, m=self.m, n=KV * HD,
            xs=self.v.strides[0], ys=layer.values.strides[0], limit=self.context,
        )  # fmt: skip
        names = ["attend_chunks_f16", "merge_chunks"] if self.m <= 8 else ["attention_f16"]
        for name in names:
            asm.add(
                name, q=self.q, k=layer.keys, v=layer.values, mask=self.mask, y=self.out, m=self.m,
                heads=HEADS, kv_heads=KV, hd=HD, n=self.context, qs=self.q.strides[0],
                ks=layer.keys.strides[0], kh=HD * 2, vs=layer.values.strides[0], vh=HD * 2,
                ms=self.mask.strides[0], ys=self.out.strides[0], part=self.part, scale=HD**-0.5,
            )  # fmt: skip
        self._quantise(asm, self.out, self.xq)
        add_matmul(asm, layer.o, self.xq, self.x, add=self.x)

    def _feed_forward(self, asm: Assembler, layer: Layer) -> None:
        self._norm(asm, layer.norms[1])
        add_matmul(asm, layer.gate, self.xq, self.gate, barrier=False)
        add_matmul(asm, layer.up, self.xq, self.up)
        asm.add(
            "silu_mul_quantise", a=self.gate, b=self.up, out=self.fq, m=self.m, n=FFN,
            bs=self.up.strides[0], os=self.fq.strides[0], **{"as": self.gate.strides[0]},
        )  # fmt: skip
        add_matmul(asm, layer.down, self.fq, self.x, add=self.x)


def profile(pool: Pool, step: Step) -> None:
    """Share of each kernel: every instruction run alone, sums per name."""
    total: dict[str, float] = {}
    for i, name in enumerate(step.program.names):
        alone = Flat(step.program.code[i : i + 1].copy(), (name,), step.program.kept)
        total[name] = total.get(name, 0.0) + timed(lambda alone=alone: pool.run(alone), 3)
    for name, seconds in sorted(total.items(), key=lambda item: -item[1]):
        print(f"    {name:20} {seconds * 1e3:8.3f} ms")


class Peer:
    """llama.cpp through xllamacpp on a GGUF: its own timings of decode and prompt."""

    def __init__(self, path: str, threads: int) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = path
        params.n_ctx = 2048
        params.cpuparams.n_threads = threads
        params.cpuparams_batch.n_threads = threads
        params.warmup = False
        self.server = xllamacpp.Server(params)

    def rates(self, prompt_words: int = 128, tokens: int = 32) -> tuple[float, float]:
        """(prompt tokens per second, decoded tokens per second) of one request."""
        reply = self.server.handle_completions(
            {
                "prompt": " the" * prompt_words, "max_tokens": tokens, "temperature": 0,
                "cache_prompt": False, "ignore_eos": True,
            }
        )  # fmt: skip
        timings = reply["timings"]
        return timings["prompt_per_second"], timings["predicted_per_second"]


def bench_step(pool: Pool, peer: Peer | None, *, rounds: int, detail: bool) -> None:
    """ms per step for several row counts and contexts, with ratios where a peer is given."""
    layers = make_layers(pool, 1024)
    head = random_weight(pool, dt.Q8_0, VOCAB, HIDDEN)
    cases = [(1, 64), (1, 1024), (5, 64), (5, 1024), (128, 128), (512, 512)]
    steps = [Step(pool, layers, head, m, context) for m, context in cases]
    ours: list[list[float]] = [[] for _ in steps]
    theirs: list[tuple[float, float]] = []
    for _ in range(rounds):
        for times, step in zip(ours, steps, strict=True):
            times.append(timed(lambda step=step: pool.run(step.program), 20 if step.m < 9 else 2))
        if peer:
            theirs.append(peer.rates())
    decode = statistics.median(d for _, d in theirs) if theirs else float("nan")
    prompt = statistics.median(p for p, _ in theirs) if theirs else float("nan")
    print(f"llama.cpp: decode {decode:.0f} tokens/s, prompt of 128 {prompt:.0f} tokens/s")
    for times, step in zip(ours, steps, strict=True):
        seconds = statistics.median(times)
        rate = step.m / seconds
        against = prompt if step.m > 8 else decode
        print(
            f"rows {step.m:4} context {step.context:5}: {seconds * 1e3:8.2f} ms "
            f"{rate:8.0f} rows/s  {rate / against:5.2f}x",
            flush=True,
        )
        if detail:
            profile(pool, step)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("kernels", "step"))
    parser.add_argument("--threads", type=int, default=env.thread_count())
    parser.add_argument("--types", default="q4_1,q4_0,q5_0,q5_1,q8_0,q4_k,q6_k,f16,f32")
    parser.add_argument("--peer", help="a GGUF file for llama.cpp (needs xllamacpp)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    start = time.perf_counter()
    pool = Pool(given.threads, host_jit())
    if given.what == "kernels":
        bench_kernels(pool, given.types.split(","))
        return
    peer = Peer(given.peer, given.threads) if given.peer else None
    bench_step(pool, peer, rounds=given.rounds, detail=given.profile)
    seconds = time.perf_counter() - start
    print(f"compiled now: {len(pool.jit.compiled)} kernels; all in {seconds:.1f} s")


if __name__ == "__main__":
    main()
