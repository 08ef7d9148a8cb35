"""Train a draft head on a machine with a GPU, within a time limit.

    python scripts/gpu_head.py --out OUT [--minutes 9] [--model MODEL] [--prompts FILE]
                               [--exclude FILE] [--state OUT/head.pt] [--draft-vocab 8192] ...

Needs PyTorch with CUDA (on the CPU it works, slowly). For a share of the time the target writes
prompts of its own and answers them, with the answers to `--prompts` among them; the rest of the
time is training. Writes OUT/head (SafeAILab's layout), OUT/head.pt (to go on from, with another
--seed for other texts), OUT/training.jsonl, and OUT/result.json with what was done on which device.
The default model must be there already or come through pip: see `models/run/fetch.py`.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone need not be installed

from ggraph.text.chat import ChatTemplate
from ggraph.text.tokenizer import Tokenizer
from models.heads.layouts import default_taps
from models.registry import open_model
from models.run.fetch import fetch_default
from models.train.export import export_folder
from models.train.online import OnlineOptions, OnlineTraining
from models.train.parts import Target, TrainOptions
from models.train.prompts import Turn, read_prompts, without
from models.train.target import Writing


def asked() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--exclude", type=Path, action="append", default=[])
    parser.add_argument("--state", type=Path)
    parser.add_argument("--draft-vocab", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--batch-tokens", type=int, default=16384)
    parser.add_argument("--texts-share", type=float, default=0.35)
    parser.add_argument("--wave", type=int, default=2048)
    parser.add_argument("--length", type=int, default=384)
    parser.add_argument("--feedback-norm", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def training(given: argparse.Namespace) -> OnlineTraining:
    """The training that was asked for, with its prompts as token ids."""
    model = open_model(given.model or fetch_default())
    tokenizer = Tokenizer.from_gguf(model.checkpoint.metadata)
    how = Writing(Turn.of(tokenizer), sorted(tokenizer.eos_ids), given.length)
    options = TrainOptions(
        draft_vocab=given.draft_vocab, steps=given.steps, rate=given.rate, seed=given.seed,
        batch_tokens=given.batch_tokens, feedback_norm=given.feedback_norm,
    )  # fmt: skip
    online = OnlineOptions(
        60 * given.minutes, given.texts_share, given.wave,
        own_share=0.75 if given.prompts is not None else 1.0,
    )  # fmt: skip
    taps = default_taps(model.layer_count)
    return OnlineTraining(
        Target.of(model), taps, how, options, online, given.out, lambda e: print(e, flush=True)
    )


def prompts_of(given: argparse.Namespace, t: OnlineTraining) -> list[list[int]]:
    """Token ids of the prompts in the file, without excluded and overlong ones."""
    if given.prompts is None:
        return []
    texts = without(
        read_prompts(given.prompts), [p for f in given.exclude for p in read_prompts(f)]
    )
    tokenizer = Tokenizer.from_gguf(t.target.model.checkpoint.metadata)
    template = ChatTemplate.of(tokenizer)
    found = []
    for text in texts:
        rendered = template.render([{"role": "user", "content": text}])
        found.append(tokenizer.encode(rendered, special=True, bos=False))
    return [ids for ids in found if len(ids) <= given.length * 3 // 4]


def main() -> None:
    """Write texts, train, export."""
    given = asked()
    begun = time.time()
    t = training(given)
    tokens = t.write(prompts_of(given, t))
    state = torch.load(given.state, weights_only=True) if given.state is not None else None
    net, ids = t.learn(state)
    export_folder(net.cpu(), t.target.model, t.taps, ids, given.out / "head")
    torch.save(net.state_dict(), given.out / "head.pt")
    last = json.loads((given.out / "training.jsonl").read_text().splitlines()[-1])
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    result = {
        "device": device, "texts": len(t.texts), "text_tokens": tokens, "last": last,
        "minutes": round((time.time() - begun) / 60, 2), "date": time.strftime("%Y-%m-%d"),
        "arguments": {k: str(v) for k, v in vars(given).items()},
    }  # fmt: skip
    (given.out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
