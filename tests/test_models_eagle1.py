"""EAGLE-1 heads against a float64 loop, and byte identity with them, chain and tree."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from head_loop import LLAMA3, hidden, llama3_by_hand, rotated
from safetensors.numpy import save_file

from ggraph.decode.draft.eagle import EagleDrafter, TreeShape
from ggraph.decode.draft.lookup import PromptLookup
from ggraph.decode.draft.model import ModelDrafter
from ggraph.decode.draft.runner import DraftRunner
from ggraph.decode.draft.tree import Draft
from ggraph.decode.engine import Engine
from ggraph.decode.policy import Adaptive, Fixed
from ggraph.decode.rows import Rows
from ggraph.decode.runner import Runner
from ggraph.decode.sampler import Sampler, SamplerConfig
from ggraph.decode.speculation import Speculation
from ggraph.dtype import F32
from ggraph.errors import InputError, ModelError
from ggraph.session import Session
from models.heads.eagle1 import FirstHead
from models.heads.layouts import open_head
from models.registry import Model, open_model
from models.run.load import open_session

TINY = Path(__file__).parent / "golden" / "tiny"
WIDTH, FFN, HEADS, KV, DIM = 64, 96, 4, 2, 16
IDS = np.load(TINY / "llama_tied" / "expected.npz")["ids"].tolist()


@pytest.fixture(scope="module")
def target() -> Model:
    return open_model(TINY / "llama_tied")


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(4)
    shapes = {
        "fc.weight": (WIDTH, 2 * WIDTH),
        "layers.0.self_attn.q_proj.weight": (HEADS * DIM, WIDTH),
        "layers.0.self_attn.k_proj.weight": (KV * DIM, WIDTH),
        "layers.0.self_attn.v_proj.weight": (KV * DIM, WIDTH),
        "layers.0.self_attn.o_proj.weight": (WIDTH, HEADS * DIM),
        "layers.0.mlp.gate_proj.weight": (FFN, WIDTH),
        "layers.0.mlp.up_proj.weight": (FFN, WIDTH),
        "layers.0.mlp.down_proj.weight": (WIDTH, FFN),
    }
    made = {n: (rng.standard_normal(s) * 0.2).astype(np.float32) for n, s in shapes.items()}
    made["fc.bias"] = (rng.standard_normal(WIDTH) * 0.1).astype(np.float32)
    made["layers.0.post_attention_layernorm.weight"] = np.ones(WIDTH, np.float32)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return first_head(tmp_path_factory.mktemp("eagle1"))


def first_head(path: Path) -> Path:
    """A random head for the golden Llama, in this folder."""
    save_file(weights(), path / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": WIDTH, "intermediate_size": FFN,
        "num_attention_heads": HEADS, "num_key_value_heads": KV, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512, "vocab_size": 320, "num_hidden_layers": 1,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    return path


def by_hand(
    table: np.ndarray, tokens: list[int], features: np.ndarray, turns: list[float] | None
) -> np.ndarray:
    """The head in float64, one position and one head at a time."""
    w = {n: v.astype(np.float64) for n, v in weights().items()}
    layer = {n.removeprefix("layers.0."): v for n, v in w.items()}
    xs, keys, values, out = [], [], [], []
    for p, token in enumerate(tokens):
        x = w["fc.weight"] @ np.concatenate([table[token], features[p]]) + w["fc.bias"]
        q = (layer["self_attn.q_proj.weight"] @ x).reshape(HEADS, DIM)
        k = (layer["self_attn.k_proj.weight"] @ x).reshape(KV, DIM)
        keys.append([rotated(h, p, turns) for h in k])
        values.append((layer["self_attn.v_proj.weight"] @ x).reshape(KV, DIM))
        mixed = []
        for h in range(HEADS):
            query, group = rotated(q[h], p, turns), h // (HEADS // KV)
            scores = np.array([query @ keys[j][group] for j in range(p + 1)]) / np.sqrt(DIM)
            share = np.exp(scores - scores.max())
            share /= share.sum()
            mixed.append(sum(s * values[j][group] for j, s in enumerate(share)))
        h1 = x + layer["self_attn.o_proj.weight"] @ np.concatenate(mixed)
        n = h1 / np.sqrt((h1**2).mean() + 1e-6)
        gate = layer["mlp.gate_proj.weight"] @ n
        act = gate / (1 + np.exp(-gate)) * (layer["mlp.up_proj.weight"] @ n)
        out.append(h1 + layer["mlp.down_proj.weight"] @ act)
        xs.append(x)
    return np.array(out)


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "llama3"])
def test_the_head_equals_a_float64_loop(
    folder: Path, target: Model, scaled: bool, tmp_path: Path
) -> None:
    """One for Llama 3.1 turns as its target."""
    if scaled:
        shutil.copytree(folder, tmp_path / "scaled")
        folder = tmp_path / "scaled"
        config = json.loads((folder / "config.json").read_text())
        config |= {"rope_theta": 500.0, "rope_scaling": LLAMA3}
        (folder / "config.json").write_text(json.dumps(config))
    head = open_head(folder, target)
    assert isinstance(head, FirstHead)
    assert head.taps == (6,)
    session = open_session(threads=1, exact=True)
    runner = Runner(target, session, 64, cache_dtype=F32, taps=(6,))
    features = runner.text(IDS, every=True).taps[6]
    table = target.catalogue["token_embd.weight"].float32().astype(np.float64)
    turns = llama3_by_hand() if scaled else None
    expected = by_hand(table, IDS[1:], features[:-1].astype(np.float64), turns)
    drafter = DraftRunner(head, session, 64, cache_dtype=F32)
    count = len(IDS) - 1
    rows = Rows(IDS[1:], range(count), range(count))
    logits = drafter.step(rows, range(count), features[:-1], fed_back=False)
    assert np.abs(hidden(drafter, 0, count) - expected).max() < 1e-4 * np.abs(expected).max()
    assert np.abs(logits - expected @ table.T).max() < 1e-4 * np.abs(expected @ table.T).max()
    session.close()


def texts(m: Model, drafter: object, temp: float, limit: int, context: int = 96) -> list[int]:
    session = open_session(threads=1, exact=True)
    runner = Runner(m, session, context, cache_dtype=F32, taps=(6,))
    engine = Engine(runner, ())
    s = Sampler(SamplerConfig(temp=temp, seed=3, repeat_penalty=1.2), m.vocab_size)
    if drafter is None:
        out = list(engine.generate(IDS[:10], s.sample, s.accept, limit=limit))
    else:
        made = drafter(session, runner)  # type: ignore[operator]
        drafts = Speculation(made, Fixed(4))
        out = list(engine.generate(IDS[:10], s.sample, s.accept, limit=limit, drafts=drafts))
    session.close()
    return out


@pytest.mark.parametrize("temp", [0.0, 0.9])
def test_text_is_the_same_with_penalties_and_seeds(
    folder: Path, target: Model, temp: float
) -> None:
    head = open_head(folder, target)

    def chain(session: Session, target: Runner) -> list[object]:
        return [EagleDrafter(DraftRunner(head, session, 96, cache_dtype=F32, target=target))]

    def tree(session: Session, target: Runner) -> list[object]:
        runner = DraftRunner(head, session, 96, cache_dtype=F32, target=target)
        return [PromptLookup(), EagleDrafter(runner, tree=TreeShape(8, 2, 3))]

    def staged(session: Session, _: Runner) -> list[object]:
        runner = Runner(target.beside("apart."), session, 96, cache_dtype=F32)
        return [ModelDrafter(runner, inner=PromptLookup(least=1))]

    plain = texts(target, None, temp, 50)
    for made in (chain, tree, staged):
        assert texts(target, made, temp, 50) == plain, made.__name__


def test_the_same_model_as_drafter_is_always_right(target: Model) -> None:
    session = open_session(threads=1, exact=True)
    engine = Engine(Runner(target, session, 96, cache_dtype=F32), ())
    drafter = ModelDrafter(Runner(target.beside("apart."), session, 96, cache_dtype=F32))
    drafts, pick = Speculation([drafter], Fixed(4)), lambda x: int(x.argmax())
    out = list(engine.generate(IDS[:10], pick, _ignore, limit=41, drafts=drafts))
    assert len(out) == 41
    assert engine.statistics.acceptance_length == 5.0
    assert engine.statistics.accepted_at == [8, 8, 8, 8]
    session.close()


def test_a_context_that_ends_mid_draft(target: Model) -> None:
    plain = texts(target, None, 0.0, -1, context=24)
    assert len(plain) == 24 - 10 + 1
    for length in (1, 3, 7):
        session = open_session(threads=1, exact=True)
        engine = Engine(Runner(target, session, 24, cache_dtype=F32), ())
        s = Sampler(SamplerConfig(temp=0.0, seed=3, repeat_penalty=1.2), target.vocab_size)
        drafts = Speculation([PromptLookup(least=1)], Fixed(length))
        assert list(engine.generate(IDS[:10], s.sample, s.accept, drafts=drafts)) == plain
        assert engine.statistics.stopped_by == "context"
        session.close()


def test_end_of_text_inside_a_draft(target: Model) -> None:
    full = texts(target, None, 0.0, 30)
    end = full[12]
    session = open_session(threads=1, exact=True)
    expected = full[: full.index(end) + 1]
    truth = IDS[:10] + full

    class Oracle:
        name, taps = "oracle", ()

        def begin(self, first: int) -> None:
            self.count = 1

        def observe(self, tokens: list[int], features: object) -> None:
            self.count += len(tokens)

        def propose(self, limit: int) -> object:
            return Draft.chain(truth[self.count : self.count + limit])

    engine = Engine(Runner(target, session, 96, cache_dtype=F32), (end,))
    s = Sampler(SamplerConfig(temp=0.0, seed=3, repeat_penalty=1.2), target.vocab_size)
    s.accept_all([])
    drafts = Speculation([Oracle()], Fixed(6))  # type: ignore[list-item]
    got = list(engine.generate(IDS[:10], s.sample, s.accept, limit=30, drafts=drafts))
    assert got == expected
    assert engine.statistics.stopped_by == "end of text"
    session.close()


def test_prompts_longer_than_a_batch_and_empty_ones(target: Model) -> None:
    session = open_session(threads=1, exact=True)
    long = (IDS * 3)[:90]
    one = Engine(Runner(target, session, 96, cache_dtype=F32), ())
    cut = Engine(Runner(target, session, 96, batch=32, cache_dtype=F32), ())
    pick = lambda x: int(x.argmax())  # noqa: E731
    drafts = Speculation([PromptLookup()], Adaptive())
    found = list(cut.generate(long, pick, _ignore, drafts=drafts))
    assert found == list(one.generate(long, pick, _ignore))
    with pytest.raises(InputError, match="prompt is empty"):
        list(cut.generate([], pick, _ignore, drafts=drafts))
    with pytest.raises(InputError, match="has 97 tokens"):
        list(cut.generate((IDS * 3)[:97], pick, _ignore, drafts=drafts))
    session.close()


def test_plans_for_drafts_are_made_behind_the_first_token(target: Model) -> None:
    session = open_session(threads=1, exact=True)
    engine = Engine(Runner(target, session, 96, cache_dtype=F32), ())
    drafts = Speculation([PromptLookup(least=1)], Fixed(5), longest=5)
    pick = lambda x: int(x.argmax())  # noqa: E731
    text = engine.generate(IDS[:10], pick, _ignore, limit=30, drafts=drafts)
    next(text)
    assert session.plans_made == 1, "the first token waits for the prompt's plan alone"
    next(text)
    made = session.plans_made
    assert made == 1 + 6, "one row, and as many more as are drafted"
    assert len(list(text)) == 28
    assert session.plans_made == made, "no round waits for a plan"
    session.close()


def _ignore(token: int) -> None:
    """A sampler without memory."""


def test_a_head_of_another_width_is_refused(folder: Path, tmp_path: Path) -> None:
    parts = weights()
    parts["fc.weight"] = np.zeros((32, 64), np.float32)
    save_file(parts, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ModelError, match="32 wide"):
        open_head(tmp_path, open_model(TINY / "llama_tied"))
