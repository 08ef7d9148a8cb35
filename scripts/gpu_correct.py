"""The correctness sections of `gpu_check.py`: each takes a driver and gives a dict with "ok"."""

import importlib.util
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_models
import numpy as np

from ggraph import Graph, Options, Session, dtypes, input, ops, weight
from ggraph.backends import open_backend
from ggraph.backends.cuda import CudaBackend, Driver, Events, cuda_spec, kernels
from ggraph.decode.draft.eagle import EagleDrafter, TreeShape
from ggraph.decode.draft.runner import DraftRunner
from ggraph.decode.engine import Engine
from ggraph.decode.policy import Fixed
from ggraph.decode.runner import Runner
from ggraph.decode.sampler import Sampler, SamplerConfig
from ggraph.decode.speculation import Speculation
from ggraph.hazards import HAZARDS
from ggraph.hazards.gpu import run_on_gpu
from ggraph.ops.evaluate import evaluate, to_logical
from ggraph.plan import Do
from models.heads.layouts import open_head
from models.registry import Model, open_model

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "tests" / "golden" / "tiny"
F32_BAR, QUANTISED_BAR = 1e-3, 2e-2  # of the logits' spread
COMPILERS = 16  # threads that compile kernels side by side
Found = dict[str, Any]


def opened(driver: Driver, graphs: bool = True) -> CudaBackend:
    """A backend with events of its own."""
    return CudaBackend(cuda_spec("cuda0", driver), driver, graphs, Events())


def session(driver: Driver, graphs: bool = True) -> Session:
    """The GPU alone: everything here has kernels."""
    return Session({"cuda0": opened(driver, graphs)})


def check_compile(driver: Driver, quick: bool) -> Found:
    """Every unit for this GPU, side by side, into the cache: later sections wait for none."""
    units = kernels.units()[:4] if quick else kernels.units()
    arch = driver.arch if driver.arch.startswith("sm_") else "sm_90"
    wrong = []

    def build(unit: kernels.Unit) -> None:
        try:
            kernels.code(unit, arch)
        except Exception as error:
            wrong.append(f"{unit}: {error}")

    with ThreadPoolExecutor(COMPILERS) as pool:
        list(pool.map(build, units))
    count = sum(len(kernels.signatures(u.source)) for u in units)
    return {"ok": not wrong, "arch": arch, "units": len(units), "kernels": count, "wrong": wrong}


def check_invariance(driver: Driver, quick: bool) -> Found:
    """1 to 64 rows of every weight type: a row's bits do not depend on the others."""
    wrong = []
    rng = np.random.default_rng(0)
    names = ("bf16", "q4_k", "q8_0") if quick else [t.name for t in dtypes.ALL if t.is_block]
    for name in (*names, "f16", "f32"):
        dtype = dtypes.dtype(name)
        n = 13 if quick else 515
        raw = np.resize(gpu_models.tile(dtype), dtype.row_bytes(1024) * n)
        x = rng.standard_normal((64, 1024)).astype(np.float32)
        whole = _product(driver, dtype, raw, x)
        for m in (1, 2, 3, 4, 5, 6, 7, 8, 9, 31, 32, 33, 63):
            if _product(driver, dtype, raw, x[:m]).tobytes() != whole[:m].tobytes():
                wrong.append(f"{name}, {m} rows")
    return {"ok": not wrong, "wrong": wrong}


def _product(driver: Driver, dtype: Any, raw: Any, x: Any) -> Any:
    """x [m, 1024] times a stored weight [n, 1024]."""
    s = session(driver)
    n = raw.size // dtype.row_bytes(1024)
    y = ops.mul_mat(weight("w", (n, 1024), dtype), input("x", x.shape), name="y")
    s.prepare("k", Graph.of({"y": y}), {"w": raw.view(dtype.np).reshape(n, -1)})
    found = s.run("k", {"x": x})["y"]
    s.close()
    return found


def check_races(driver: Driver, quick: bool, times: int) -> Found:
    """The corpus on real streams: bad plans corrupt, fixed plans do not."""
    times = 5 if quick else times
    hazards = HAZARDS[:2] if quick else HAZARDS
    reports = [run_on_gpu(h, driver, times) for h in hazards]
    bad = [r.bad_wrong / times for r in reports if r.bad_wrong is not None]
    fixed = sum(r.fixed_wrong for r in reports)
    return {"ok": not fixed and min(bad) >= 0.95, "times": times, "plans": len(reports),
            "bad_share": min(bad), "fixed_wrong": fixed,
            "reports": [r.to_json() for r in reports]}  # fmt: skip


def check_draw(driver: Driver, quick: bool) -> Found:
    """Tokens drawn on the device are those of the host's sampler for the same numbers, also where
    they fall on an edge of its law."""
    rows, size = (4, 500) if quick else (64, 128256)
    rng, sampler = np.random.default_rng(0), Sampler(SamplerConfig(seed=1), size)
    logits = (rng.standard_normal((rows, size)) * 3).astype(np.float32)
    edges = [np.cumsum(sampler.probabilities(row)) for row in logits]
    places = input("logits", (rows, size)), input("numbers", (rows,), dtypes.F64)
    graph = Graph.of({"token": ops.draw(*places, name="token")})
    s = session(driver)
    s.prepare("k", graph)
    different = []
    for turn in range(3):
        numbers = rng.random(rows)
        if turn:
            numbers = np.array(
                [e[np.searchsorted(e, u)] for e, u in zip(edges, numbers, strict=True)]
            )
        given = {"logits": logits, "numbers": np.minimum(numbers, 1 - 2.0**-53)}
        wanted = evaluate(graph, given)["token"]
        different.append(int((s.run("k", given)["token"] != wanted).sum()))
    s.close()
    return {"ok": not any(different), "rows": rows, "different": different}


def check_split(driver: Driver, quick: bool) -> Found:
    """Half of a model's layers on the GPU and half on the CPU, by ordinary splits."""
    if importlib.util.find_spec("llvmlite") is None:
        return {"ok": True, "skipped": "llvmlite, which the CPU backend needs, is not installed"}
    expected = np.load(TINY / "llama_tied" / "expected.npz")
    backends = {"cuda0": opened(driver), "cpu": open_backend("cpu", threads=2, exact=True)}
    s = Session(backends, Options(layers={"cuda0": 3}))
    runner = Runner(open_model(TINY / "llama_tied"), s, 64, cache_dtype=dtypes.F32)
    got = [runner.text(expected["ids"][i : i + 4].tolist(), every=True).logits for i in (0, 4, 8)]
    key = (runner.model.name, runner.shape(4, 4, 12))
    schedule = s.plan(key).plan.schedule
    where = sorted({c.actor.device for c in schedule if c.do is Do.LAUNCH})
    s.close()
    error = spread_error(np.concatenate(got), expected["logits"][:12])
    return {"ok": error < F32_BAR and where == ["cpu", "cuda0"], "error": error, "devices": where}


def spread_error(got: Any, expected: Any) -> float:
    """Largest difference over the spread of a row."""
    spread = expected.max(-1, keepdims=True) - expected.min(-1, keepdims=True)
    return float((np.abs(got - expected) / spread).max())


def check_model(driver: Driver, pieces: Sequence[Path]) -> Found:
    """A real checkpoint, as it is stored and with its weights decoded to float32: logits against
    the float32 meaning of the same graph in NumPy. A file may come in pieces, in order."""
    with tempfile.TemporaryDirectory() as folder:
        path = pieces[0]
        if len(pieces) > 1:
            path = Path(folder) / "model.gguf"
            with path.open("wb") as whole:
                whole.writelines(piece.read_bytes() for piece in pieces)
        m = open_model(path)
        ids = [(i * 7919 + 13) % min(m.vocab_size, 40000) for i in range(6)]
        wanted = _meaning(driver, m, ids)
        kinds = {t.dtype for t in m.catalogue.values()}
        error = spread_error(_logits(driver, m, ids), wanted)
        exact = spread_error(_logits(driver, decoded(m), ids), wanted)
    bar = QUANTISED_BAR if any(k.is_block for k in kinds) else F32_BAR
    return {"ok": error < bar and exact < F32_BAR, "model": m.name, "bar": bar, "error": error,
            "f32_bar": F32_BAR, "error_f32": exact}  # fmt: skip


def decoded(m: Model) -> Model:
    """The same model with every weight in float32."""
    plain = {n: replace(t, dtype=dtypes.F32, storage=t.float32()) for n, t in m.catalogue.items()}
    return replace(m, name=f"{m.name} f32", catalogue=plain)


def _logits(driver: Driver, m: Model, ids: list[int]) -> Any:
    s = session(driver)
    found = Runner(m, s, 64, cache_dtype=dtypes.F32).text(ids, every=True).logits
    s.close()
    return found


def _meaning(driver: Driver, m: Model, ids: list[int]) -> Any:
    """Logits of all rows by the ops' NumPy references."""
    count = len(ids)  # a bucket of its own: no padding
    runner = Runner(m, session(driver), 64, cache_dtype=dtypes.F32)
    shape = runner.shape(count, count, count)
    graph = m.build(shape)
    feeds = {
        t.name: to_logical(np.asarray(m.weight(t)), t) for t in graph if t.kind.value == "weight"
    }
    mask = np.full((count, shape.context), -np.inf, np.float32)
    for i in range(count):
        mask[i, : i + 1] = 0
    order = np.arange(count)
    feeds |= {
        "tokens": np.array(ids, np.int32), "positions": order.astype(np.int32),
        "slots": order.astype(np.int64), "mask": mask, "length": np.array([count], np.int32),
        "wanted": order.astype(np.int32),
    }  # fmt: skip
    return evaluate(graph, feeds)["logits"]


def check_identity(driver: Driver, quick: bool) -> Found:
    """Greedy text with the EAGLE-3 head, chain and tree, is that of plain decoding."""
    prompts = [[5, 17, 200, 33], [1, 2, 3, 4, 5, 6], [300, 8], [99] * 12][: 1 if quick else 4]
    limit = 6 if quick else 100
    target = open_model(TINY / "llama_tied")
    head = open_head(TINY / "eagle3_for_llama_tied", target)
    differing = []
    for prompt in prompts:
        plain = _text(driver, target, None, prompt, limit, None, 0)
        trees = [("chain", None, 4), ("tree of 16", TreeShape(16, 3, 4), 15)]
        trees += [] if quick else [("tree of 60", TreeShape(60, 6, 10), 60)]
        for title, tree, length in trees:
            if _text(driver, target, head, prompt, limit, tree, length) != plain:
                differing.append(f"{title}, prompt of {len(prompt)}")
    return {"ok": not differing, "prompts": len(prompts), "differing": differing}


def _text(
    driver: Driver, target: Any, head: Any, prompt: list[int], limit: int, tree: Any, length: int
) -> list[int]:
    s = session(driver)
    taps = tuple(dict.fromkeys(head.taps)) if head is not None else ()
    runner = Runner(target, s, 256, taps=taps)
    engine = Engine(runner, ())
    drafts = None
    if head is not None:
        drafter = EagleDrafter(DraftRunner(head, s, 256, target=runner), tree=tree)
        drafts = Speculation([drafter], Fixed(length))
    ignore = lambda token: None  # noqa: E731
    found = list(engine.generate(prompt, greedy, ignore, limit=limit, drafts=drafts))
    s.close()
    return found


def greedy(logits: Any) -> int:
    """The best token."""
    return int(logits.argmax())
