"""Everything that needs a GPU, in one command: correctness, races, identity, speed.

    python scripts/gpu_check.py [--device cuda0] [--quick] [--only ops,races] [--model FOLDER]

Needs NumPy, CuPy (with NVRTC) and this repository; nothing is installed and nothing fetched. With
numba the CPU backend stands beside the GPU, as it does for users; without it the GPU runs alone.
Writes bench/results/gpu-NAME-DATE.json (`--out` for another place) and ends with status 1 if a
check failed. Speeds are of random models with real shapes (see gpu_models.py).
"""

import argparse
import datetime
import importlib.util
import json
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a clone need not be installed

import gpu_models

from ggraph import Graph, Session, dtypes, input, ops, weight
from ggraph.backends import open_backend
from ggraph.backends.cuda import CudaBackend, Driver, Events, cuda_spec, open_driver
from ggraph.backends.cuda.lower import RULES, accepts
from ggraph.backends.protocol import Launch, Ref
from ggraph.decode.eagle import DraftRunner, EagleDrafter, TreeShape
from ggraph.decode.engine import Engine
from ggraph.decode.length import Fixed
from ggraph.decode.runner import Runner
from ggraph.decode.speculate import Speculator
from ggraph.hazards import HAZARDS
from ggraph.hazards.gpu import run_on_gpu
from ggraph.ops import examples
from ggraph.ops.evaluate import evaluate, read, reference, to_logical, to_storage
from ggraph.plan import Actor, Buffer, Command, Do
from models.heads import open_head
from models.registry import open_model

TINY = ROOT / "tests" / "golden" / "tiny"
MODELS = ("llama_tied", "llama3_rope_scaled", "qwen2_bias", "qwen3_qknorm", "qwen3_moe",
          "mistral_sliding")  # fmt: skip
F32_BAR, QUANTISED_BAR = 1e-3, 2e-2  # of the logits' spread
Found = dict[str, Any]


def opened(driver: Driver, graphs: bool = True) -> CudaBackend:
    """A backend with events of its own."""
    return CudaBackend(cuda_spec("cuda0", driver), driver, graphs, Events())


def session(driver: Driver, graphs: bool = True) -> Session:
    """The GPU, and the CPU behind it where its kernels can be compiled."""
    backends: dict[str, Any] = {"cuda0": opened(driver, graphs)}
    if importlib.util.find_spec("numba") is not None:
        backends["cpu"] = open_backend("cpu", threads=2)
    return Session(backends)


# --- correctness ---------------------------------------------------------------------------------


def check_ops(driver: Driver, quick: bool) -> Found:
    """Every example of every op with a kernel, against the op's NumPy reference."""
    wrong, count = [], 0
    for spec, i, example in examples.every():
        y = examples.build(spec, example)
        if spec.name not in RULES or not accepts(y) or not y.size:
            continue
        count += 1
        error = _op_error(driver, y, examples.feeds(spec, example, i))
        if not error <= example.tolerance:
            wrong.append(f"{spec.name} {i}: {error:.2e}")
    return {"ok": not wrong, "examples": count, "wrong": wrong}


def _op_error(driver: Driver, y: Any, given: dict[str, Any]) -> float:
    """Largest difference over the largest magnitude."""
    backend = opened(driver)
    held = {}
    for s in y.sources:
        held[s.name] = backend.allocate(Buffer(s.name, "cuda0", s.nbytes, 256))
        raw = np.frombuffer(to_storage(given[s.name], s).tobytes(), np.uint8)
        backend.write(held[s.name], 0, raw)
    target = backend.allocate(Buffer("y", "cuda0", y.nbytes, 256))
    if y.overwritten is not None:
        target = held[y.overwritten.name]
    refs = tuple(Ref(s, held[s.name], 0) for s in y.sources)
    launch = Launch(Command(Do.LAUNCH, Actor("cuda0"), "y", "y"), Ref(y, target, 0), refs)
    backend.submit(0, backend.lower([launch]))
    backend.synchronise()
    got = read(y, backend.read(target, 0, y.nbytes)).astype(np.float64)
    copies = [given[s.name].copy() for s in y.sources]
    wanted = to_logical(to_storage(reference(y, copies), y), y).astype(np.float64)
    for memory in {id(m): m for m in (*held.values(), target)}.values():
        backend.free(memory)
    finite = np.isfinite(wanted)
    if not np.array_equal(got[~finite], wanted[~finite], equal_nan=True):
        return float("inf")
    span = float(np.abs(wanted[finite]).max(initial=1e-30))
    return float(np.abs(got - wanted)[finite].max(initial=0)) / span


def check_invariance(driver: Driver, quick: bool) -> Found:
    """1 to 32 rows of every weight type: a row's bits do not depend on the others."""
    wrong = []
    rng = np.random.default_rng(0)
    names = ("bf16", "q4_k", "q8_0") if quick else [t.name for t in dtypes.ALL if t.is_block]
    for name in (*names, "f16", "f32"):
        dtype = dtypes.dtype(name)
        n = 13 if quick else 515
        raw = np.resize(gpu_models.tile(dtype), dtype.row_bytes(1024) * n)
        x = rng.standard_normal((32, 1024)).astype(np.float32)
        whole = _product(driver, dtype, raw, x)
        for m in (1, 2, 3, 4, 5, 6, 7, 8, 9, 31):
            if not np.array_equal(_product(driver, dtype, raw, x[:m]), whole[:m]):
                wrong.append(f"{name}, {m} rows")
    return {"ok": not wrong, "wrong": wrong}


def _product(driver: Driver, dtype: Any, raw: Any, x: Any) -> Any:
    """x [m, 1024] times a stored weight [n, 1024]."""
    s = session(driver)
    n = raw.size // dtype.row_bytes(1024)
    y = ops.mul_mat(weight("w", (n, 1024), dtype), input("x", x.shape), name="y")
    s.prepare("k", lambda: Graph.of({"y": y}), lambda t: raw)
    found = s.run("k", {"x": x})["y"]
    s.close()
    return found


def check_races(driver: Driver, quick: bool) -> Found:
    """The corpus on real streams: bad plans corrupt, fixed plans do not."""
    times = 5 if quick else 100
    reports = [run_on_gpu(h, driver, times) for h in HAZARDS]
    return {
        "ok": all(r.fixed_wrong == 0 and (r.bad_wrong or times) >= 0.95 * times for r in reports),
        "times": times,
        "reports": [r.to_json() for r in reports],
    }


def check_logits(driver: Driver, quick: bool) -> Found:
    """Tiny models against vectors made with transformers: prompt, then token by token."""
    errors = {}
    for name in MODELS[:1] if quick else MODELS:
        expected = np.load(TINY / name / "expected.npz")
        ids = expected["ids"].tolist()[: 22 if quick else None]
        s = session(driver)
        runner = Runner(open_model(TINY / name), s, 64, cache_dtype=dtypes.F32)
        parts = [runner.text(p, every=True).logits for p in (ids[:20], *([i] for i in ids[20:]))]
        s.close()
        errors[name] = spread_error(np.concatenate(parts), expected["logits"][: len(ids)])
    return {"ok": max(errors.values()) < F32_BAR, "bar": F32_BAR, "errors": errors}


def spread_error(got: Any, expected: Any) -> float:
    """Largest difference over the spread of a row."""
    spread = expected.max(-1, keepdims=True) - expected.min(-1, keepdims=True)
    return float((np.abs(got - expected) / spread).max())


def check_model(driver: Driver, path: Path) -> Found:
    """A real checkpoint's logits against the float32 meaning of the same graph in NumPy."""
    m = open_model(path)
    ids = [(i * 7919 + 13) % min(m.vocab_size, 40000) for i in range(6)]
    s = session(driver)
    runner = Runner(m, s, 64, cache_dtype=dtypes.F32)
    got = runner.text(ids, every=True).logits
    shape = runner.shape(len(ids), len(ids), len(ids))
    s.close()
    graph = m.build(shape)
    feeds = {t.name: to_logical(m.weight(t), t) for t in graph if t.kind.value == "weight"}
    rows, reach = shape.rows, len(ids)
    mask = np.full((rows, shape.context), -np.inf, np.float32)
    for i in range(rows):
        mask[i, : min(i, reach - 1) + 1] = 0
    padded = [*ids, *[0] * (rows - reach)]
    feeds |= {
        "tokens": np.array(padded, np.int32), "positions": np.arange(rows, dtype=np.int32),
        "slots": np.arange(rows, dtype=np.int64), "mask": mask,
        "length": np.array([rows], np.int32), "wanted": np.arange(shape.wanted, dtype=np.int32),
    }  # fmt: skip
    wanted = evaluate(graph, feeds)["logits"][:reach]
    error = spread_error(got, wanted)
    kinds = {t.dtype for t in m.catalogue.values()}
    bar = QUANTISED_BAR if any(k.is_block for k in kinds) else F32_BAR
    return {"ok": error < bar, "bar": bar, "error": error, "model": m.name}


def check_identity(driver: Driver, quick: bool) -> Found:
    """Greedy text with the EAGLE-3 head, chain and tree, is that of plain decoding."""
    prompts = [[5, 17, 200, 33], [1, 2, 3, 4, 5, 6], [300, 8], [99] * 12][: 1 if quick else 4]
    limit = 6 if quick else 100
    target = open_model(TINY / "llama_tied")
    head = open_head(TINY / "eagle3_for_llama_tied", target)
    differing = []
    for prompt in prompts:
        plain = _text(driver, target, None, prompt, limit, None, 0)
        for title, tree, length in (("chain", None, 4), ("tree", TreeShape(16, 3, 4), 15)):
            if _text(driver, target, head, prompt, limit, tree, length) != plain:
                differing.append(f"{title}, prompt of {len(prompt)}")
    return {"ok": not differing, "texts": 3 * len(prompts), "differing": differing}


def _text(
    driver: Driver, target: Any, head: Any, prompt: list[int], limit: int, tree: Any, length: int
) -> list[int]:
    s = session(driver)
    taps = tuple(dict.fromkeys(head.taps)) if head is not None else ()
    engine = Engine(Runner(target, s, 256, taps=taps), ())
    decoder: Any = engine
    if head is not None:
        drafter = EagleDrafter(DraftRunner(head, s, 256), tree=tree)
        decoder = Speculator(engine, [drafter], Fixed(length))
    found = list(decoder.generate(prompt, _greedy, lambda token: None, limit=limit))
    s.close()
    return found


def _greedy(logits: Any) -> int:
    return int(logits.argmax())


# --- speed ---------------------------------------------------------------------------------------


def seconds_of(work: Callable[[], Any], wait: Callable[[], Any], least: float = 0.3) -> float:
    """Seconds per call, the best of three batches of at least `least` seconds."""
    work()
    wait()
    begun = time.perf_counter()
    work()
    wait()
    calls = max(2, int(least / max(time.perf_counter() - begun, 1e-6)))
    best = float("inf")
    for _ in range(3):
        begun = time.perf_counter()
        for _ in range(calls):
            work()
        wait()
        best = min(best, (time.perf_counter() - begun) / calls)
    return best


def measure_ceilings(driver: Driver, quick: bool) -> Found:
    """Copy bandwidth (bytes read and written) and the rate of bf16 products."""
    backend = opened(driver)
    stream, size = backend.stream(0), 1 << (24 if quick else 31)
    a, b = driver.allocate(size), driver.allocate(size)
    copied = seconds_of(lambda: driver.copy(a, b, size, stream), driver.synchronise)
    n = 256 if quick else 8192
    shape = (n, n, n)
    values = np.resize(gpu_models.tile(dtypes.BF16), 2 * n * n)  # zeros would be multiplied faster
    for address in (a, b):
        driver.copy(address, values.ctypes.data, values.nbytes, stream)
    driver.synchronise()
    rate = seconds_of(
        lambda: driver.product(a, b, b + size // 2, shape, n, "bf16", False, stream),
        driver.synchronise,
    )
    driver.free(a)
    driver.free(b)
    return {"ok": True, "copy_bytes_per_s": 2 * size / copied, "bf16_flops": 2 * n**3 / rate}


def measure_shape(driver: Driver, name: str, kind: str, quick: bool, ceilings: Found) -> Found:
    """One shape in one weight type: decoding, verification, prompt, EAGLE round."""
    dtype = dtypes.dtype(kind)
    target = gpu_models.model(name, gpu_models.SHAPES[name], dtype)
    head = gpu_models.head(target, dtype)
    s = session(driver)
    context = 128 if quick else 2048
    runner = Runner(target, s, context, taps=head.taps)
    prompt = [(i * 31) % 1000 for i in range(16 if quick else 512)]
    found: Found = {"ok": True, "weights": kind}
    for title, ids in (("decode", [7]), ("verify8", list(range(8))), ("prompt", prompt)):

        def step(ids: list[int] = ids, every: bool = title == "verify8") -> None:
            runner.past = 0
            runner.text(ids, every=every)

        found[f"{title}_s"] = seconds_of(step, lambda: None)
    floor = gpu_models.weight_bytes(target) / ceilings["copy_bytes_per_s"]
    flops = 2 * gpu_models.weight_count(target) * len(prompt)
    found["decode_share_of_floor"] = floor / found["decode_s"]
    found["verify8_over_decode"] = found["verify8_s"] / found["decode_s"]
    found["prompt_share_of_matmul"] = flops / found["prompt_s"] / ceilings["bf16_flops"]
    runner.past = 0
    found["eagle_round_over_decode"] = (
        _round_seconds(s, runner, head, context, 8 if quick else 40) / found["decode_s"]
    )
    s.close()
    return found


def _round_seconds(s: Session, runner: Runner, head: Any, context: int, limit: int) -> float:
    """Seconds of draft 4, verify and sample."""
    engine = Engine(runner, ())
    spec = Speculator(engine, [EagleDrafter(DraftRunner(head, s, context))], Fixed(4))
    for _ in range(2):  # the first generation makes the plans
        engine.reset()
        for _ in spec.generate([1, 2, 3, 4], _greedy, lambda token: None, limit=limit):
            pass
    stats = engine.statistics
    return stats.decode_seconds / max(stats.steps, 1)


def measure_host(driver: Driver, quick: bool) -> Found:
    """Wall time of a replayed step of a tiny model: an upper bound of the host's share."""
    s = session(driver)
    runner = Runner(gpu_models.model("tiny", gpu_models.TINY, dtypes.BF16), s, 64)

    def step() -> None:
        runner.past = 0
        runner.text([7])

    seconds = seconds_of(step, lambda: None)
    s.close()
    return {"ok": True, "step_us": 1e6 * seconds}


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
        torch_s = seconds_of(generate, torch.cuda.synchronize) / new
    s = session(driver)
    runner = Runner(gpu_models.model("SmolLM2-135M", c, dtypes.BF16), s, 2048)

    def step() -> None:
        runner.past = 16
        runner.text([7])

    ours_s = seconds_of(step, lambda: None)
    s.close()
    return {"ok": True, "ours_s": ours_s, "torch_s": torch_s, "times_faster": torch_s / ours_s}


# --- all of it -----------------------------------------------------------------------------------

CHECKS: dict[str, Callable[[Driver, bool], Found]] = {
    "ops": check_ops,
    "invariance": check_invariance,
    "logits": check_logits,
    "identity": check_identity,
    "races": check_races,
    "ceilings": measure_ceilings,
    "host": measure_host,
    "torch": measure_torch,
}


def run_all(driver: Driver, names: Sequence[str], quick: bool, path: Path | None) -> Found:
    """Every section by name; one that raises is a failed section, and the others go on."""
    found: Found = {}
    work = {n: lambda f=f: f(driver, quick) for n, f in CHECKS.items() if n in names}
    if path is not None:
        work["model"] = lambda: check_model(driver, path)
    if "speed" in names:
        shapes = ("tiny",) if quick else ("Llama-3.1-8B", "Qwen3-8B")
        for name in shapes:
            for kind in ("bf16", "q4_k"):
                work[f"{name} {kind}"] = lambda n=name, k=kind: measure_shape(
                    driver, n, k, quick, found["ceilings"]
                )
    for title, section in work.items():
        begun = time.perf_counter()
        try:
            found[title] = section()
        except Exception as error:
            traceback.print_exc()
            found[title] = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        found[title]["seconds"] = round(time.perf_counter() - begun, 1)
        print(f"{title:<20} {'ok' if found[title]['ok'] else 'FAILED'}  {_short(found[title])}")
    return found


def _short(section: Found) -> str:
    """The section's numbers on one line."""
    shown = {k: v for k, v in section.items() if k not in ("ok", "reports") and v != []}
    parts = [f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in shown.items()]
    return ", ".join(parts)[:400]


def main(given: Sequence[str] | None = None) -> int:
    """Run the sections, print a line each, write the JSON. Status 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cuda0")
    parser.add_argument("--quick", action="store_true", help="small sizes, few repetitions")
    parser.add_argument("--only", default=",".join([*CHECKS, "speed"]), help="sections, by comma")
    parser.add_argument("--model", type=Path, help="a real checkpoint, for its logits")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(given)
    driver = open_driver(asked.device)
    found = run_all(driver, asked.only.split(","), asked.quick, asked.model)
    today = datetime.date.today().isoformat()
    plain = re.sub(r"\W+", "-", driver.name.lower()).strip("-")
    out = asked.out or ROOT / "bench" / "results" / f"gpu-{plain}-{today}.json"
    record = {"device": driver.name, "arch": driver.arch, "date": today, "sections": found}
    out.write_text(json.dumps(record, indent=1) + "\n")
    print(out)
    return 0 if all(s["ok"] for s in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
