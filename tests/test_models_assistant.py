"""Gemma 4's assistant: its logits are transformers', its drafts change no text.

The golden folder is a random assistant of 4 layers for the golden Gemma 4, in float16; expected are
chains of four greedy tokens behind texts of several lengths, by transformers 5.23 in float32 (whose
check of shared layers refuses assistants, and was left out).
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cli_kit import ggraph_here, refused_here
from golden_kit import TOLERANCE, spread_error
from head_loop import hidden
from identity_kit import NEW, assisted, calm_pair
from safetensors.numpy import load_file, save_file
from small_model import small_model

from ggraph.decode.draft.eagle import EagleDrafter, TreeShape
from ggraph.decode.draft.hidden import NEXT_ROW, ROOT_ROW
from ggraph.decode.draft.shared import SharedRunner
from ggraph.decode.rows import Rows
from ggraph.decode.runner import Runner
from ggraph.dtype import F32
from ggraph.errors import ModelError
from models.heads.assistant import AssistantHead
from models.heads.layouts import open_head
from models.registry import open_model
from models.run.convert import assistant_to_gguf
from models.run.load import open_session

GOLDEN = Path(__file__).parent / "golden"
TARGET, ASSISTANT = GOLDEN / "tiny2" / "gemma4_text", GOLDEN / "gemma4_assistant"
MODEL = open_model(TARGET)
Q = "model.layers.0.self_attn.q_proj.weight"
LENGTHS = (5, 15, 16, 17, 30, 47)  # the window is 16


@pytest.fixture(scope="module", params=["folder", "gguf"])
def assistant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden folder, and a GGUF file that we wrote of it."""
    if request.param == "folder":
        return ASSISTANT
    out, head = tmp_path_factory.mktemp("assistant") / "assistant.gguf", open_head(ASSISTANT, MODEL)
    assert isinstance(head, AssistantHead)
    assistant_to_gguf(head, out, "f16")
    return out


@pytest.mark.parametrize("length", LENGTHS)
def test_a_chain_has_the_golden_logits(assistant: Path, length: int) -> None:
    expected = np.load(ASSISTANT / "expected.npz")
    session, head = open_session(threads=1, exact=True), open_head(assistant, MODEL)
    target = Runner(MODEL, session, 96, cache_dtype=F32, taps=head.taps)
    ids = expected["ids"].tolist()
    taps = target.text(ids[:length]).taps[MODEL.layer_count]
    assert spread_error(taps[-1:], expected[f"feature.{length}"][None]) < TOLERANCE
    runner = SharedRunner(head, target)
    token, behind = ids[length], np.array([[length - 1]], np.int32)  # the slot of its taps
    for i, (logits, expected_hidden) in enumerate(
        zip(expected[f"logits.{length}"], expected[f"hidden.{length}"], strict=True)
    ):
        said = runner.step(Rows([token], [0], [0]), [0], behind, fed_back=i > 0)
        assert spread_error(said, logits[None]) < TOLERANCE, i
        left, behind = hidden(runner, min(i, 1), 1), ROOT_ROW if i == 0 else NEXT_ROW
        assert spread_error(left, expected_hidden[None]) < TOLERANCE, i
        token = int(said[0].argmax())
    session.close()


def drafter_behind(length: int, tree: TreeShape | None) -> tuple[EagleDrafter, list[int]]:
    """A drafter that was told of the golden text's first tokens, and the chain that it must say."""
    expected = np.load(ASSISTANT / "expected.npz")
    session = open_session(threads=1, exact=True)
    head, ids = open_head(ASSISTANT, MODEL), expected["ids"].tolist()
    target = Runner(MODEL, session, 96, cache_dtype=F32, taps=head.taps)
    drafter = EagleDrafter(SharedRunner(head, target), tree=tree, name="mtp")
    drafter.begin(ids[0])
    for stop in (length // 2, length):  # in two steps, as texts grow
        slots = np.arange(target.past, stop, dtype=np.int32)[:, None]
        target.text(ids[target.past : stop])
        drafter.observe(ids[stop - len(slots) + 1 : stop + 1], slots)
        said = drafter.propose(4)
    return drafter, [int(i) for i in expected[f"logits.{length}"].argmax(axis=1)] + list(
        said.tokens
    )


@pytest.mark.parametrize("length", LENGTHS)
def test_a_drafter_says_the_golden_chain(length: int) -> None:
    _, chains = drafter_behind(length, None)
    assert chains[:4] == chains[4:]


def test_a_tree_grows_around_the_golden_chain() -> None:
    drafter, chain = drafter_behind(30, TreeShape(53, 3, 4))
    draft = drafter.propose(52)
    assert len(draft) == 52
    at, deep = -1, 0
    for token in chain[:4]:
        children = [i for i, p in enumerate(draft.parents) if p == at]
        if not children:
            break  # others were likelier, and were followed
        assert draft.tokens[children[0]] == token, "the best child comes first"
        at, deep = children[0], deep + 1
    assert deep >= 2


def test_drafts_change_no_token(tmp_path: Path) -> None:
    """Behind a random assistant's drafts, and behind one's that is right now and again."""
    for drafter, found in assisted(TARGET, ASSISTANT):
        assert found.same == found.texts and found.kept > 0, (drafter, str(found))
    target, assistant = calm_pair(tmp_path)
    for drafter, found in assisted(target, assistant, helped=False):
        assert found.same == found.texts and 3 < found.kept < 2 * NEW - 3, (drafter, str(found))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("pre_projection.weight"), "no tensor 'nextn.pre_projection.weight'"),
        (
            lambda t: t.update({"pre_projection.weight": t["pre_projection.weight"][:, :64]}),
            "made for another model than gemma4_text",
        ),
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "no tensor 'blk.1.ffn_up.weight'"),
        (
            lambda t: t.update({Q: t[Q][:64]}),
            r"'blk.0.attn_q.weight': expected \[128, 32\], got \[64, 32\]",
        ),
        (
            lambda t: t.update({"model.layers.0.post_per_layer_input_norm.weight": t[Q][0]}),
            "no place for tensor 'blk.0.post_norm.weight' in this assistant",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(
    change: Callable[[dict[str, np.ndarray]], object], says: str, tmp_path: Path
) -> None:
    folder = tmp_path / "assistant"
    shutil.copytree(ASSISTANT, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({n: v.copy() for n, v in tensors.items()}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=says) as refused:
        open_head(folder, MODEL)
    assert "\n" not in str(refused.value)


def test_heads_that_cannot_share_the_targets_are_refused(tmp_path: Path) -> None:
    """Where the assistant is opened, and not by an op of its first step."""
    folder = tmp_path / "assistant"
    shutil.copytree(ASSISTANT, folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= {"num_attention_heads": 3, "num_key_value_heads": 1}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    for name, t in tensors.items():
        if name.endswith("q_proj.weight"):
            tensors[name] = t[: len(t) // 4 * 3].copy()
        elif name.endswith("o_proj.weight"):
            tensors[name] = t[:, : t.shape[1] // 4 * 3].copy()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match="3 heads, which cannot share the 2 key-value heads"):
        open_head(folder, MODEL)


def test_another_target_is_refused() -> None:
    with pytest.raises(ModelError, match="an assistant of Gemma 4, gemma3_text is none"):
        open_head(ASSISTANT, open_model(GOLDEN / "tiny2" / "gemma3_text"))


def test_commands_take_it_as_a_head(tmp_path: Path) -> None:
    hf, folder = calm_pair(tmp_path / "pair")
    model, out = small_model(tmp_path / "m.gguf", source=hf), tmp_path / "assistant.gguf"
    assert ggraph_here("convert", folder, "--target", model, "-o", out, "--type", "f16")[0] == 0
    asked = ("generate", "-m", model, "--no-chat", "--temp", "0", "-n", "24", "--json", "Hello")
    plain = json.loads(ggraph_here(*asked)[1])["text"]
    for more in (("--head", out, "--draft", "mtp"), ("--head", folder, "--tree", "16,3,4")):
        status, said, err = ggraph_here(*asked, "--compare", "--fixed", *more)
        assert status == 0, err
        facts = json.loads(said)
        assert facts["text"] == plain and facts["identical"] and facts["accepted"] > 5
    assert f"--head {out}" in refused_here(*asked, "-md", out)
    assert "no --device-draft" in refused_here(*asked, "--head", out, "--device-draft", "cpu")
    serve = ("serve", "-m", model, "--head", out, "--port", "0")
    assert "which a server cannot" in refused_here(*serve)
