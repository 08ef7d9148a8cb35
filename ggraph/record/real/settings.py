"""The configurations in which llama.cpp is recorded: what is split, how, and what is done with it.

Names in braces in the arguments are paths of `Files`, the version, and a server's port. Prompts are
split into micro-batches of 16 tokens and graphs are not reused in `prompt-*`, so that a prompt of
125 tokens is pipelined as one of more than 2,048 is by default.
"""

import json
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from ggraph.record.real.mutants import NEW, OLD

ASK = "The capital of France is"
LONG = "The quick brown fox jumps over the lazy dog. " * 12 + ASK
BOTH = (NEW, OLD)


@dataclass(frozen=True)
class Setting:
    """One configuration. `repeat`: the command is run so often, and the last run counts.

    `serve`: what to do with a server at a port, which is then asked to end.
    """

    name: str
    what: str
    arguments: str
    program: str = "completion"
    devices: int = 1
    contract: str = "cuda"
    environment: Mapping[str, str] = field(default_factory=dict)
    versions: tuple[str, ...] = BOTH
    prompt: str = ASK
    repeat: int = 1
    serve: Callable[[int], None] | None = None
    unplayed: str = ""  # why it cannot run on played devices, if so


def _post(port: int, path: str, body: object) -> str:
    data = json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    with urllib.request.urlopen(request, timeout=600) as answer:
        text: str = answer.read().decode()
    return text


def wait_for(port: int, server: subprocess.Popen[bytes], seconds: float = 300.0) -> None:
    """Until the server at `port` has loaded its model. OSError if it ends before, or after
    `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError(f"no server at port {port} after {seconds:.0f} s")


def _ask(port: int, prompt: str, count: int = 8) -> str:
    body = {"prompt": prompt, "n_predict": count, "temperature": 0}
    return _post(port, "/completion", body)


def _eight(port: int) -> None:
    """Eight requests at once, of different lengths."""
    prompts = [("word " * (3 * i)) + ASK for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda prompt: _ask(port, prompt), prompts))


def _swap(port: int) -> None:
    """The adapter off, on and off again, while two requests are under way."""
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(_ask, port, ASK, 24) for _ in range(2)]
        for scale in (0.0, 1.0, 0.0):
            _post(port, "/lora-adapters", [{"id": 0, "scale": scale}])
            _ask(port, ASK, 2)
        for answer in asked:
            answer.result()


QUIET = "--no-warmup -no-cnv --temp 0 -t 2"
DRAFTS = "--spec-draft-ngl 99 -ngl 99 --temp 0 -t 2 -n 12 --spec-type"
REUSE_OFF = {"LLAMA_GRAPH_REUSE_DISABLE": "1"}
PIPELINE = f"{QUIET} -ngl 99 -n 4 -ub 16 -b 256"
SERVER = "--temp 0 -t 2 -ngl 99 --port {port} --no-warmup -np"


def _decode(name: str, what: str, extra: str, devices: int = 1, contract: str = "cuda") -> Setting:
    return Setting(name, what, f"{QUIET} -n 6 {extra}", devices=devices, contract=contract)


def _prompt(name: str, what: str, contract: str) -> Setting:
    return Setting(
        name,
        what,
        PIPELINE,
        devices=2,
        contract=contract,
        environment=REUSE_OFF,
        prompt=LONG,
    )


def _drafts(name: str, what: str, how: str, devices: int = 1) -> Setting:
    return Setting(
        name,
        what,
        f"{DRAFTS} {how}",
        "llama-speculative-simple",
        devices=devices,
        versions=(NEW,),
    )


def _tensor(name: str, what: str, contract: str) -> Setting:
    return replace(_decode(name, what, "-ngl 99 -sm tensor", 2, contract), versions=(NEW,))


SETTINGS = (
    _decode("one", "everything on one device", "-ngl 99"),
    _decode("two", "layers on two devices, pipelined", "-ngl 99", 2),
    _decode("two-no-peer", "the same without copies between devices", "-ngl 99", 2, "cuda-no-peer"),
    _decode("two-vulkan", "the same under Vulkan's contract", "-ngl 99", 2, "vulkan"),
    _decode("two-metal", "the same under Metal's contract", "-ngl 99", 2, "metal"),
    _decode("two-sycl", "the same under SYCL's contract", "-ngl 99", 2, "sycl"),
    _decode("two-rpc", "the same under RPC's contract", "-ngl 99", 2, "rpc"),
    _decode("partial-one", "20 layers on one device, the rest on the CPU", "-ngl 20"),
    _decode("partial-two", "20 layers on two devices, the rest on the CPU", "-ngl 20", 2),
    _decode("nkvo", "the cache in host memory", "-ngl 99 -nkvo"),
    _decode("experts-cpu", "experts on the CPU", "-m {experts} -ngl 99 --cpu-moe"),
    _decode("lora", "an adapter", "-ngl 99 --lora {adapter}", 2),
    Setting("warmup", "the run that warms up", f"{QUIET} -n 2 -ngl 99".replace("--no-warmup ", "")),
    _prompt("prompt-two", "a prompt of eight micro-batches, pipelined", "cuda"),
    _prompt("prompt-two-vulkan", "the same under Vulkan's contract", "vulkan"),
    _prompt("prompt-two-metal", "the same under Metal's contract", "metal"),
    Setting(
        "experts-offload",
        "a prompt whose experts are copied to the device, those that are used",
        f"{QUIET} -m {{experts}} -ngl 99 --cpu-moe -n 2",
        prompt=LONG,
    ),
    Setting(
        "shift",
        "the context is full and shifts",
        f"{QUIET} -ngl 99 -c 256 -n 80",
        devices=2,
        environment={"LLAMA_ARG_CONTEXT_SHIFT": "1"},  # what 0.3.16 does by itself
        prompt=LONG * 2,
    ),
    Setting(
        "session",
        "a session is saved, and restored in a second run",
        f"{QUIET} -ngl 99 -n 4 --prompt-cache {{folder}}/session-{{version}}.bin",
        repeat=2,
    ),
    Setting(
        "embedding",
        "embeddings, last token",
        "-ngl 99 -t 2 --pooling last --no-warmup",
        "llama-embedding",
    ),
    _drafts("eagle3", "EAGLE-3 drafts", "draft-eagle3 -md {head}"),
    _drafts("eagle3-two", "the same on two devices", "draft-eagle3 -md {head}", 2),
    _drafts("mtp", "drafts of a layer of a recurrent model itself (MTP)", "draft-mtp -m {mtp}"),
    _drafts("mtp-two", "the same on two devices", "draft-mtp -m {mtp}", 2),
    _drafts("dflash", "DFlash drafts, three tokens at once", "draft-dflash -md {dflash}"),
    _drafts("dflash-two", "the same on two devices", "draft-dflash -md {dflash}", 2),
    Setting(
        "server-8",
        "a server with eight slots and eight requests at once",
        f"{SERVER} 8 -c 2048",
        "llama-server",
        devices=2,
        versions=(NEW,),
        serve=_eight,
    ),
    Setting(
        "server-lora",
        "adapters swapped while requests run",
        f"{SERVER} 4 -c 2048 --lora {{adapter}}",
        "llama-server",
        versions=(NEW,),
        serve=_swap,
    ),
    replace(
        _decode("sm-row", "rows split over two devices", "-ngl 99 -sm row", 2),
        unplayed="CUDA splits rows inside its own product, behind the interface that is played",
    ),
    _tensor("sm-tensor", "tensors split over two devices", "cuda"),
    _tensor("sm-tensor-vulkan", "the same under Vulkan's contract", "vulkan"),
    _tensor("sm-tensor-metal", "the same under Metal's contract", "metal"),
)


def setting(name: str) -> Setting:
    """The configuration of that name."""
    return next(s for s in SETTINGS if s.name == name)
