"""A head written by ggraph must load and run in llama.cpp: a random EAGLE-3 head for SmolLM2.

    python scripts/check_llama_head.py [--out FOLDER]

Needs `pip install xllamacpp`; fetches the default model when it is not in the cache. Prints the
draft statistics of llama.cpp's reply; a random head is accepted by chance only.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import xllamacpp
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone need not be installed

from models.convert import head_to_gguf
from models.fetch import fetch_default
from models.heads import open_head
from models.registry import open_model

WIDTH, FFN, HEADS, KV, DIM, DRAFT = 576, 1536, 9, 3, 64, 8192


def random_head(folder: Path) -> Path:
    """A SafeAILab folder with random weights of the right shapes."""
    rng = np.random.default_rng(0)

    def matrix(n: int, k: int) -> np.ndarray:
        return (rng.standard_normal((n, k)) / np.sqrt(k)).astype(np.float16)

    shapes = {
        "self_attn.q_proj": (HEADS * DIM, 2 * WIDTH),
        "self_attn.k_proj": (KV * DIM, 2 * WIDTH),
        "self_attn.v_proj": (KV * DIM, 2 * WIDTH),
        "self_attn.o_proj": (WIDTH, HEADS * DIM),
        "mlp.gate_proj": (FFN, WIDTH),
        "mlp.up_proj": (FFN, WIDTH),
        "mlp.down_proj": (WIDTH, FFN),
    }
    tensors = {f"midlayer.{n}.weight": matrix(*s) for n, s in shapes.items()}
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        tensors[f"midlayer.{name}.weight"] = np.ones(WIDTH, np.float16)
    tensors |= {
        "fc.weight": matrix(WIDTH, 3 * WIDTH),
        "norm.weight": np.ones(WIDTH, np.float16),
        "lm_head.weight": matrix(DRAFT, WIDTH),
        "d2t": np.zeros(DRAFT, np.int64),
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": WIDTH, "rms_norm_eps": 1e-5,
        "intermediate_size": FFN, "num_attention_heads": HEADS, "num_key_value_heads": KV,
        "num_hidden_layers": 1, "vocab_size": 49152, "draft_vocab_size": DRAFT,
        "max_position_embeddings": 2048,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def run(model: Path, head: Path) -> dict:
    """One request through llama.cpp with the head as drafter."""
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.warmup = str(model), 1024, False
    params.cpuparams.n_threads = 1
    params.speculative.types = [
        xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3
    ]
    params.speculative.draft.mparams.path = str(head)
    params.speculative.draft.n_max = 4
    server = xllamacpp.Server(params)
    return server.handle_chat_completions(
        {"messages": [{"role": "user", "content": "Count to ten."}], "max_tokens": 32,
         "temperature": 0}
    )  # fmt: skip


def main() -> None:
    """Make the head, write it, run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    folder = given.out or Path(tempfile.mkdtemp())
    model = fetch_default()
    target = open_model(model)
    out = folder / "head.gguf"
    head_to_gguf(open_head(random_head(folder / "head"), target), target, out, "f16")
    print("wrote", out, out.stat().st_size, "bytes")
    reply = run(model, out)
    print(reply["choices"][0]["message"]["content"])
    print(json.dumps(reply["timings"], indent=1))


if __name__ == "__main__":
    main()
