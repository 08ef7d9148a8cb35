"""Steps cut over 2, 4 and 8 devices have the bytes of the same step on one."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_kit import GOLDEN, NAMES, TOLERANCE, folder, spread_error
from safetensors.numpy import load_file, save_file
from test_models_options import ATTENDING, biased, biased_ernie
from typer.testing import CliRunner

from ggraph import ModelError, dtypes
from ggraph.backends.sim import InOrder, Machine, Random, SimBackend, SimHost, sim_spec
from ggraph.decode.model import StepShape
from ggraph.decode.runner import Runner
from ggraph.device import HOST
from ggraph.dtype import F32
from ggraph.formats.checkpoint import RawTensor
from ggraph.formats.quantise import quantize
from ggraph.pipeline import Options
from ggraph.plan import Do
from ggraph.session import Session
from models.cli.app import app
from models.families import FAMILIES
from models.registry import Model, open_model
from models.sharded import QK_NORM, ShardedModel, cut, qk_norm_of

TINY = Path(__file__).parent / "golden" / "tiny"
IDS = (3, 17, 5, 99, 250, 7, 31)
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "llama, shared keys": {"num_key_value_heads": 4},
    "qwen2": {"architecture": "qwen2"},
    "qwen3": {"architecture": "qwen3"},
    "qwen3moe": {"architecture": "qwen3moe", **EXPERTS},
    "mixtral": {"architecture": "mixtral", **EXPERTS},
    "quantised": {"hidden_size": 256, "intermediate_size": 256, "head_dim": 32},
}  # fmt: skip


@cache
def model(kind: str) -> Model:
    """A random model of two layers with eight heads."""
    base = open_model(TINY / "llama_tied")
    given = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": 8, "num_key_value_heads": 8, **KINDS[kind],
    }  # fmt: skip
    rope = replace(base.config.rope, n_rot=given["head_dim"])
    c = replace(base.config, **given, rope=rope)
    r, tensors = np.random.default_rng(5), dict[str, RawTensor]()

    def add(name: str, *shape: int) -> None:
        values = r.standard_normal(shape).astype(np.float32) / np.float32(shape[-1] ** 0.5)
        if len(shape) == 1:
            tensors[name] = RawTensor(name, F32, shape, values + np.float32(1))
        elif kind == "quantised":
            tensors[name] = RawTensor(name, dtypes.Q8_0, shape, quantize(values, dtypes.Q8_0))
        else:
            tensors[name] = RawTensor(name, F32, shape, values)

    e, d, f, m = c.hidden_size, c.head_dim, c.intermediate_size, c.moe_intermediate_size
    q, k, x = c.num_attention_heads * d, c.num_key_value_heads * d, c.num_experts
    add("token_embd.weight", c.vocab_size, e)
    add("output_norm.weight", e)
    for i in range(c.num_hidden_layers):
        blk = f"blk.{i}"
        for role, width in (("q", q), ("k", k), ("v", k)):
            add(f"{blk}.attn_{role}.weight", width, e)
            if kind == "qwen2":
                add(f"{blk}.attn_{role}.bias", width)
            if qk_norm_of(c.architecture) and role != "v":
                add(f"{blk}.attn_{role}_norm.weight", d)
        add(f"{blk}.attn_output.weight", e, q)
        add(f"{blk}.attn_norm.weight", e)
        add(f"{blk}.ffn_norm.weight", e)
        if x:
            add(f"{blk}.ffn_gate_inp.weight", x, e)
        for role in ("gate", "up", "down"):
            wide, end = (m, "_exps") if x else (f, "")
            size = (e, wide) if role == "down" else (wide, e)
            add(f"{blk}.ffn_{role}{end}.weight", *((x,) if x else ()), *size)
    return Model("random", c, tensors, base.checkpoint)


def class_of(name: str) -> str:
    """The class of a golden model."""
    return str(json.loads((GOLDEN / name / "config.json").read_text())["architectures"][0])


class World:
    """A session over simulated devices that all compute with the same reference kernels."""

    def __init__(self, whole: Model, count: int, streams: int = 1) -> None:
        self.machine = Machine()
        names = [f"sim{i}" for i in range(count)]
        backends = {n: SimBackend(sim_spec(n), self.machine) for n in names}
        self.model = ShardedModel.of(whole, names)
        options = Options(pins=self.model.sharding.pins, streams=streams)
        self.session = Session({**backends, HOST: SimHost(self.machine)}, options)
        self.runner = Runner(self.model, self.session, 24, cache_dtype=F32)

    def logits(self, seed: int | None) -> list[np.ndarray[Any, Any]]:
        """A prompt of five tokens, then two single ones, all rows, in the order of `seed`."""
        self.machine.order = InOrder() if seed is None else Random(seed)
        self.machine.timeline.clear()
        self.runner.past = 0
        parts = (IDS[:5], IDS[5:6], IDS[6:])
        return [self.runner.text(p, every=True).logits for p in parts]


@cache
def one(kind: str) -> list[np.ndarray[Any, Any]]:
    return World(model(kind), 1).logits(None)


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_more_devices_make_the_same_bytes_in_every_order_tried(kind: str, count: int) -> None:
    world = World(model(kind), count, streams=2)
    for seed in range(3):
        for found, wanted in zip(world.logits(seed), one(kind), strict=True):
            assert found.tobytes() == wanted.tobytes(), (kind, count, seed)
    used = {s.actor.device for s in world.machine.timeline}
    assert {f"sim{i}" for i in range(count)} <= used


@pytest.mark.parametrize("kind", KINDS)
def test_the_cut_step_means_what_the_whole_one_does(kind: str) -> None:
    """Sums run otherwise, so that the bits differ; the values do not."""
    whole = model(kind)
    machine = Machine()
    backends = {"sim0": SimBackend(sim_spec("sim0"), machine), HOST: SimHost(machine)}
    runner = Runner(whole, Session(backends), 24, cache_dtype=F32)
    for ids, found in zip((IDS[:5], IDS[5:6], IDS[6:]), one(kind), strict=True):
        np.testing.assert_allclose(found, runner.text(ids, every=True).logits, rtol=2e-4, atol=2e-5)


CUT = [
    name for name in NAMES
    if QK_NORM.keys() & {a.build for a in FAMILIES if class_of(name) in a.hf}
]  # fmt: skip


@pytest.mark.parametrize("name", CUT)
def test_every_family_that_is_cut_has_its_golden_vectors(name: str) -> None:
    expected = np.load(GOLDEN / name / "expected.npz")
    world = World(open_model(GOLDEN / name), 2)
    got = world.runner.text(expected["ids"].tolist()[:24], every=True).logits
    assert spread_error(got, expected["logits"][:24]) < TOLERANCE


@pytest.mark.parametrize("change", ["attention", "ernie"])
def test_biases_are_added_once(change: str, tmp_path: Path) -> None:
    """Those of matrices that are cut by columns, whose shares are summed, and of the logits."""
    name = {"attention": "tiny/llama_tied", "ernie": "tiny2/ernie4_5_moe"}[change]
    hf = folder(name, tmp_path / "hf", {"attention_bias": True, "use_bias": True})
    tensors, rng = load_file(hf / "model.safetensors"), np.random.default_rng(7)
    grown = biased_ernie(tensors, rng) if change == "ernie" else biased(tensors, rng, *ATTENDING)
    save_file(grown, hf / "model.safetensors")
    whole, machine = open_model(hf), Machine()
    backends = {"sim0": SimBackend(sim_spec("sim0"), machine), HOST: SimHost(machine)}
    runner = Runner(whole, Session(backends), 24, cache_dtype=F32)
    wanted = runner.text(list(IDS), every=True).logits
    got = World(whole, 2).runner.text(list(IDS), every=True).logits
    assert spread_error(got, wanted) < 2e-5


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_sums_over_devices_are_copies_in_the_plan(count: int) -> None:
    """Twice a layer each device gets a subtotal of every other one, and nothing else but x and the
    logits crosses."""
    whole = model("llama")
    world = World(whole, count)
    verified = world.runner.plan(world.runner.shape(1, 1, 1))
    copied = [c.reads[0].value for c in verified.plan.schedule.commands if c.do is Do.COPY]
    layers, chunks = whole.config.num_hidden_layers, world.model.sharding.chunks
    shares = [v for v in copied if re.search(r"\.sum\.|attn_output$|ffn_down$", v)]
    assert len(shares) == 2 * layers * count * (count - 1)
    logits = [v for v in copied if v.endswith(".logits")]
    assert len(logits) == chunks - chunks // count
    parts = [v for v in copied if re.match(r"[cd]\d+\.", v)]
    assert len(parts) == len(shares) + len(logits) + count - 1, "and x goes to all"


def test_what_cannot_be_cut_is_refused() -> None:
    whole = model("llama")
    for devices in ((), ("a", "b", "c"), tuple(map(str, range(16)))):
        with pytest.raises(ModelError, match="8 chunks"):
            ShardedModel.of(whole, devices)
    odd = replace(whole.config, num_attention_heads=6, num_key_value_heads=6)
    with pytest.raises(ModelError, match="6 heads"):
        ShardedModel.of(replace(whole, config=odd), ("a",), 8)
    with pytest.raises(ModelError, match="gemma2 cannot be cut"):
        other = replace(whole.config, architecture="gemma2")
        ShardedModel.of(replace(whole, config=other), ("a",))
    stored = RawTensor("w", dtypes.Q8_0, (4, 96), np.zeros((4, 102), np.uint8))
    with pytest.raises(ModelError, match="entries of axis 1"):
        cut(whole.config, stored, "blk.0.ffn_down.weight", 0, 8)


def test_parts_of_a_tensor_are_all_of_it() -> None:
    whole = model("quantised")
    sharding = ShardedModel.of(whole, ("a",)).sharding
    for name, stored in whole.catalogue.items():
        parts = [sharding.part_of(f"c{i}.{name}")[1] for i in range(8)]
        if parts[0].count:
            data = [p.of(stored.data) for p in parts]
            assert np.array_equal(np.concatenate(data, parts[0].axis), stored.data), name


def test_the_graph_has_the_inputs_and_outputs_of_a_step() -> None:
    shape = StepShape(1, 24, 1, 24, (), F32)
    graph = ShardedModel.of(model("llama"), ("a", "b")).build(shape)
    assert [o.name for o in graph.outputs] == ["logits"]
    assert len(graph.updates) == 2 * 2 * 8


def test_the_command_plans_a_cut_step() -> None:
    path, devices = str(TINY / "llama_tied"), "sim0,sim1,sim2,sim3"
    done = CliRunner().invoke(app, ["plan", path, "--device", devices, "--cut", "--json"])
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    used = {split["device"] for split in facts["splits"]}
    assert used == set(devices.split(",")) and facts["certificate"]
    more = CliRunner().invoke(app, ["plan", path, "--device", f"{devices},sim4", "--cut"])
    assert isinstance(more.exception, ModelError)
    assert "4 chunks, a power of two, on 5 devices" in str(more.exception)
    assert str(more.exception).startswith("of 4 heads ")  # what decides how many there are
