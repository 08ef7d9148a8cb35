"""Layers that a model's own file holds for drafting: found in both forms, lossless, and as told."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from cli_kit import ggraph, ggraph_here
from hf_folders import byte_level
from mtp_kit import EXPERTS, GLM, LARGE, NEXT, QWEN, TINY2, with_draft_layer
from safetensors.numpy import load_file, save_file
from small_model import small_model

from ggraph.decode.draft.eagle import EagleDrafter, TreeShape
from ggraph.decode.draft.head import DraftShape
from ggraph.decode.draft.runner import DraftRunner
from ggraph.decode.engine import Engine
from ggraph.decode.policy import Fixed
from ggraph.decode.runner import Runner
from ggraph.decode.sampler import Sampler, SamplerConfig
from ggraph.decode.speculation import Speculation
from ggraph.dtype import F32
from ggraph.errors import ModelError
from models.cli.draft import DraftFlags
from models.heads.layouts import open_head
from models.registry import open_model
from models.run.convert import model_to_gguf
from models.run.drafting import DraftOptions
from models.run.generation import Drafting, Generation
from models.run.load import load, open_session
from models.run.shipped import head_for

PROMPTS = [np.random.default_rng(seed).integers(3, 320, 12).tolist() for seed in range(3)]
TREE = TreeShape(16, 4, 4)
GREEDY, SEEDED = SamplerConfig(temp=0.0), SamplerConfig(temp=0.9, seed=7)


class Made:
    """A model in a file, with its own layer as the drafter."""

    def __init__(self, path: Path) -> None:
        self.model = open_model(path)
        self.head = open_head(path, self.model)
        self.session = open_session(threads=1, exact=True)
        self.runner = Runner(self.model, self.session, 256, cache_dtype=F32, taps=self.head.taps)
        self.engine = Engine(self.runner, ends=())

    def text(
        self, prompt: list[int], config: SamplerConfig, most: int, tree: TreeShape | None = None
    ) -> list[int]:
        self.engine.reset()
        s = Sampler(config, self.model.vocab_size)
        s.accept_all(prompt)
        runner = DraftRunner(self.head, self.session, 256, cache_dtype=F32, target=self.runner)
        drafter = EagleDrafter(runner, tree=tree, name="mtp")
        drafts = Speculation((drafter,) if most else (), Fixed(most))
        return list(self.engine.generate(prompt, s.sample, s.accept, limit=32, drafts=drafts))


@pytest.fixture(scope="module", params=[QWEN, EXPERTS, GLM, LARGE])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_draft_layer(request.param, tmp_path_factory.mktemp("mtp") / request.param)


def test_drafts_change_no_token_in_chains_and_trees(folder: Path) -> None:
    lossless(folder)


def lossless(folder: Path) -> None:
    """Texts with drafts are those without, and drafts are kept."""
    made, kept = Made(folder), 0
    for prompt in PROMPTS[:2]:
        for config in (GREEDY, SEEDED):
            plain = made.text(prompt, config, 0)
            for most, tree in ((3, None), (TREE.total_tokens - 1, TREE)):
                assert made.text(prompt, config, most, tree) == plain
                kept += made.engine.statistics.accepted
    made.session.close()
    assert kept > 20, "the layer was made to be right now and again"


def test_a_gguf_that_we_wrote_drafts_the_same(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.gguf"
    model_to_gguf(open_model(folder), out, "f32")
    found = []
    for path in (folder, out):
        made = Made(path)
        texts = [made.text(p, GREEDY, 3) for p in PROMPTS[:2]]
        found.append((texts, made.engine.statistics.accepted, made.engine.statistics.drafted))
        made.session.close()
    assert found[0] == found[1]


def test_qwen_3_next_drafts_from_its_folder_alone(tmp_path: Path) -> None:
    """Its config does not tell of the layer, and llama.cpp knows no file with one."""
    path, out = with_draft_layer(NEXT, tmp_path / "hf"), tmp_path / "model.gguf"
    lossless(path)
    model_to_gguf(open_model(path), out, "f32")
    assert head_for(path) == path and head_for(out) is None
    assert open_model(out).config.num_nextn_predict_layers == 0


def test_a_layer_without_its_norm_is_named(tmp_path: Path) -> None:
    path = with_draft_layer(QWEN, tmp_path / "hf")
    tensors = load_file(path / "model.safetensors")
    del tensors["mtp.pre_fc_norm_hidden.weight"]
    save_file(tensors, path / "model.safetensors")
    model = open_model(path)
    with pytest.raises(ModelError, match=r"no tensor 'blk\.6\.nextn\.hnorm\.weight'"):
        open_head(path, model)


def test_a_misshapen_projection_is_named(tmp_path: Path) -> None:
    path = with_draft_layer(QWEN, tmp_path / "hf")
    tensors = load_file(path / "model.safetensors")
    tensors["mtp.fc.weight"] = tensors["mtp.fc.weight"][:, :64].copy()
    save_file(tensors, path / "model.safetensors")
    head = open_head(path, open_model(path))
    with pytest.raises(ModelError, match=r"nextn\.eh_proj\.weight': expected \[64, 128\]"):
        head.build(DraftShape(1, 64, 1, 65, fed_back=False))


def test_a_model_is_no_head_of_its_own_to_convert(tmp_path: Path) -> None:
    path = with_draft_layer(QWEN, tmp_path / "hf")
    byte_level([]).save(str(path / "tokenizer.json"))
    status, _, err = ggraph_here("convert", path, "--target", path, "-o", tmp_path / "out.gguf")
    assert status == 2 and "leave --target out" in err and len(err.splitlines()) == 1


def test_a_model_without_such_layers_says_so() -> None:
    model = open_model(TINY2 / QWEN)
    with pytest.raises(ModelError, match="no layers that draft"):
        open_head(TINY2 / QWEN, model)


def test_they_draft_by_default_where_the_file_has_them(tmp_path: Path) -> None:
    path = with_draft_layer(QWEN, tmp_path / "hf")
    flags = DraftFlags()
    assert head_for(path) == path == flags.head_of(path)
    assert flags.drafting(path, True, path).options.names == ("suffix", "mtp")
    assert DraftFlags(tree="8,2,3").drafting(path, True, path).options.names == ("mtp",)
    assert DraftFlags(draft="mtp").head_of(path) == path
    assert head_for(TINY2 / QWEN) is None


def test_layers_that_nobody_can_draft_with_are_not_asked_to(tmp_path: Path) -> None:
    """K-EXAONE's: whoever does not name them does without."""
    folder = tmp_path / "hf"
    shutil.copytree(TINY2 / "exaone_moe", folder)
    held = load_file(folder / "model.safetensors")
    width = len(held["model.norm.weight"])
    save_file({**held, "mtp.fc.weight": np.zeros((width, 2 * width), np.float32)},
              folder / "model.safetensors")  # fmt: skip
    assert open_model(folder).layer_count and head_for(folder) is None


def test_commands_that_draft_by_default_do_with_them(tmp_path: Path) -> None:
    path = small_model(tmp_path / "m.gguf", source=with_draft_layer(QWEN, tmp_path / "hf"))
    asked = ("-m", path, "-t", "1", "-n", "8", "--temp", "0")
    for command, prompt in (("chat", []), ("eagle3", ["Hello"])):
        status, out, err = ggraph(command, *asked, *prompt, stdin="Hello\n/stats\n")
        assert status == 0 and out.strip() and "acceptance length" in err, err


def test_a_loaded_model_drafts_with_them(tmp_path: Path) -> None:
    hf = with_draft_layer(QWEN, tmp_path / "hf")
    path = small_model(tmp_path / "m.gguf", source=hf, dtype="f32")
    m = load(path, head=path, threads=1, exact=True, ctx_size=128)
    run = Generation(m, PROMPTS[0], GREEDY, 24)
    plain = "".join(run.run(None))
    drafting = Drafting(DraftOptions(("mtp",), 3, fixed=True))
    assert "".join(run.run(drafting)) == plain
    assert run.speculation is not None and run.speculation.drafted > 10
    m.close()
