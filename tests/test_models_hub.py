"""`-hf USER/REPO[:TYPE]` against a hub of the test's own: what is chosen, kept, and refused."""

import json
import threading
from collections.abc import Iterator
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants as constants
import pytest
from cli_kit import ggraph
from embedding_kit import pooled
from hf_folders import chatting
from small_model import small_model

from ggraph import InputError
from ggraph.formats import open_checkpoint
from models.cli.common import ServedModel, model_path
from models.pooling import pooling_of
from models.registry import open_model
from models.run.hub import _tower, fetch_hub, fetch_tower

COMMIT = "c" * 40


class Hub(ThreadingHTTPServer):
    """The few answers of the hub that a download needs. `status` is given to whoever asks for what
    is not there, `cut` is how much of every file arrives."""

    daemon_threads = True

    def __init__(self, repos: dict[str, Path]) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.repos, self.status, self.cut = repos, 404, 1.0
        self.sent: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        about = parts[:2] == ["api", "models"]
        repo = "/".join(parts[2:4] if about else parts[:2])
        folder = self.server.repos.get(repo)
        if folder is not None and about:
            self._say(200, described(repo, folder))
        elif folder is not None and folder.joinpath(*parts[4:]).is_file():
            self._say(200, folder.joinpath(*parts[4:]).read_bytes(), {"X-Repo-Commit": COMMIT})
        else:
            self._say(self.server.status, b"{}")

    def _say(self, status: int, body: bytes, more: dict[str, str] | None = None) -> None:
        self.send_response(status)
        tag = {"ETag": f'"{sha1(body).hexdigest()}"', "Content-Length": str(len(body))}
        for key, value in {**tag, **(more or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.server.sent.append(self.path)
            self.wfile.write(body[: int(len(body) * self.server.cut)])

    def log_message(self, format: str, *args: Any) -> None:
        pass


def described(repo: str, folder: Path) -> bytes:
    """What the hub says of a repository."""
    files = [f for f in sorted(folder.rglob("*")) if f.is_file()]
    siblings = [
        {"rfilename": f.relative_to(folder).as_posix(), "size": f.stat().st_size} for f in files
    ]
    return json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode()


@pytest.fixture(scope="module")
def repos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Repositories: types side by side, one type alone, a folder of safetensors, parts, nothing."""
    root = tmp_path_factory.mktemp("repos")
    small = small_model(root / "small.gguf").read_bytes()
    names = {
        "a/types": ("m.Q4_0.gguf", "m.q4_k_m.gguf", "sub/m-Q8_0.gguf", "mmproj-m.Q4_K_M.gguf"),
        "a/alone": ("m-F16.gguf", "README.md"),
        "a/parts": ("m-Q4_K_M-00001-of-00002.gguf", "m-Q4_K_M-00002-of-00002.gguf"),
        "a/mixed": (
            "m-BF16.gguf",
            "m-F16.gguf",
            "m-Q4_K_M-00001-of-00002.gguf",
            "m-Q4_K_M-00002-of-00002.gguf",
            "m-UD-Q2_K_XL.gguf",
        ),
        "a/both": ("m-Q4_K_M-00001-of-00002.gguf", "m-Q4_K_M.gguf"),
        "a/sees": ("m-Q4_K_M.gguf", "mmproj-BF16.gguf", "mmproj-F16.gguf", "mmproj-m-Q8_0.gguf"),
        "a/nothing": ("README.md",),
    }
    for repo, files in names.items():
        for f in files:
            (root / repo / f).parent.mkdir(parents=True, exist_ok=True)
            own = small + f.encode() * ("-of-" in f)  # what is equal is kept once
            (root / repo / f).write_bytes(own if f.endswith(".gguf") else b"# words")
    folder = chatting(root / "a" / "folder")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.onnx").write_bytes(b"not wanted")
    return {r: root / r for r in (*names, "a/folder")}


@pytest.fixture
def hub(repos: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that runs, and the client's cache in a folder of the test's own."""
    with Hub(repos) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield server
        server.shutdown()


def silent(text: str) -> None:
    """Nobody hears what is fetched."""


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("a/types", "m.q4_k_m.gguf"),
        ("a/types:Q4_K_M", "m.q4_k_m.gguf"),
        ("a/types:q4_0", "m.Q4_0.gguf"),
        ("a/types:Q8_0", "sub/m-Q8_0.gguf"),
        ("a/alone", "m-F16.gguf"),
        ("a/mixed:Q2_K_XL", "m-UD-Q2_K_XL.gguf"),
        ("a/mixed:f16", "m-F16.gguf"),
        ("a/mixed:bf16", "m-BF16.gguf"),
        ("a/both", "m-Q4_K_M.gguf"),
    ],
)
def test_a_type_names_a_file(hub: Hub, repos: dict[str, Path], name: str, file: str) -> None:
    said: list[str] = []
    path = fetch_hub(name, said.append)
    assert path.as_posix().endswith(file)
    assert path.read_bytes() == (repos[name.partition(":")[0]] / file).read_bytes()
    assert said == [f"fetching {file} ({path.stat().st_size / 1e6:.0f} MB)"]
    asked = [p for p in hub.sent if "resolve" in p]
    assert len(asked) == 1, "only the file that is wanted"
    assert fetch_hub(name, said.append) == path and len(said) == 1, "nothing is fetched twice"
    assert [p for p in hub.sent if "resolve" in p] == asked, "once"


@pytest.mark.parametrize("name", ["a/parts", "a/parts:q4_k_m", "a/mixed", "a/mixed:Q4_K_M"])
def test_all_parts_of_a_file_are_fetched(hub: Hub, repos: dict[str, Path], name: str) -> None:
    said: list[str] = []
    path = fetch_hub(name, said.append)
    repo = repos[name.partition(":")[0]]
    parts = [f"m-Q4_K_M-0000{i}-of-00002.gguf" for i in (1, 2)]
    assert [p.rpartition("/")[2] for p in hub.sent if "resolve" in p] == parts
    assert path.name == parts[0]
    whole = sum((repo / p).stat().st_size for p in parts)
    assert said == [f"fetching {parts[0]} ({whole / 1e6:.0f} MB)"]
    assert [(path.parent / p).read_bytes() for p in parts] == [
        (repo / p).read_bytes() for p in parts
    ]


def test_a_folder_of_safetensors_is_fetched_whole(hub: Hub, repos: dict[str, Path]) -> None:
    path = fetch_hub("a/folder", silent)
    own = {f.name for f in repos["a/folder"].iterdir() if f.is_file()} - {"expected.npz"}
    assert {f.name for f in path.iterdir()} == own and "model.safetensors" in own
    assert open_model(path).vocab_size > 0


def test_how_a_folder_pools_is_fetched(hub: Hub, repos: dict[str, Path]) -> None:
    """It is not at the top."""
    pooled(repos["a/folder"], {"pooling_mode": "lasttoken"}, "Normalize")
    path = fetch_hub("a/folder", silent)
    assert pooling_of(open_checkpoint(path)) == "last"
    assert not (path / "onnx").exists()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("model", "expected USER/REPO or USER/REPO:TYPE"),
        ("a/b/c", "expected USER/REPO or USER/REPO:TYPE"),
        ("a/types:", "expected USER/REPO or USER/REPO:TYPE"),
        ("../types", "expected USER/REPO or USER/REPO:TYPE"),
        ("a/types:Q5_K_M", "no file of that type; there are m.Q4_0.gguf, m.q4_k_m.gguf"),
        ("a/folder:Q4_0", "has not a GGUF file of type Q4_0"),
        ("a/nothing", "has not a GGUF file or a config.json"),
        ("a/mixed:K_XL2", "no file of that type"),
        ("a/unknown", "does not give it out (status 404)"),
    ],
)
def test_what_the_hub_has_not_is_one_line(hub: Hub, name: str, says: str) -> None:
    with pytest.raises(InputError) as refused:
        fetch_hub(name, silent)
    assert says in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("status", [401, 403, 429, 500])
def test_a_hub_that_refuses_is_one_line(hub: Hub, status: int) -> None:
    hub.status = status
    with pytest.raises(InputError, match=str(status)) as refused:
        fetch_hub("a/unknown", silent)
    assert "\n" not in str(refused.value)


def test_what_was_fetched_serves_without_the_hub(hub: Hub) -> None:
    one, folder = fetch_hub("a/types:Q4_0", silent), fetch_hub("a/folder", silent)
    hub.shutdown()
    hub.server_close()
    assert fetch_hub("a/types:Q4_0", silent) == one
    assert fetch_hub("a/types", silent) == one, "the one type that is there"
    assert fetch_hub("a/folder", silent) == folder
    for name in ("a/types:Q8_0", "a/alone"):
        with pytest.raises(InputError, match=f"-hf {name}: ") as refused:
            fetch_hub(name, silent)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("repo", "file"),
    [("a/sees", "mmproj-m-Q8_0.gguf"), ("a/types", "mmproj-m.Q4_K_M.gguf"), ("a/alone", None)],
)
def test_a_tower_is_fetched_where_images_are_shown(hub: Hub, repo: str, file: str | None) -> None:
    """Once, and it is there without the hub; no tower is where there is none."""
    said: list[str] = []
    path = fetch_tower(repo, said.append)
    assert (None if path is None else path.name) == file and len(said) == (file is not None)
    assert fetch_tower(repo, said.append) == path and len(said) == (file is not None)
    assert ServedModel(hf_repo=repo).seeing().mmproj == path
    given = ServedModel(hf_repo=repo, mmproj=Path("own.gguf"))
    assert given.seeing() is given and ServedModel(model=Path("m")).seeing().mmproj is None
    fetch_hub(repo, silent)
    hub.shutdown()
    hub.server_close()
    assert fetch_tower(repo, said.append) == path
    with pytest.raises(InputError, match="-hf a/other: "):
        fetch_tower("a/other", silent)


def test_the_best_type_of_a_tower_is_taken() -> None:
    names = ["mmproj-m-BF16.gguf", "mmproj-m-F16.gguf", "m-Q8_0.gguf"]
    assert _tower(names) == names[1] and _tower(names[:1]) == names[0] and _tower(names[2:]) is None


def test_a_file_that_arrives_in_part_is_not_used(hub: Hub) -> None:
    hub.cut = 0.5
    with pytest.raises(InputError, match="-hf a/alone: ") as refused:
        fetch_hub("a/alone", silent)
    assert "\n" not in str(refused.value)
    hub.cut = 1.0
    assert fetch_hub("a/alone", silent).is_file()


def test_one_model_at_a_time() -> None:
    with pytest.raises(InputError, match="expected one model"):
        model_path(Path("m.gguf"), "a/model")


def test_a_command_answers_from_the_hub(hub: Hub, repos: dict[str, Path], tmp_path: Path) -> None:
    asked = ("generate", "-n", "4", "--temp", "0", "--json", "-p", "Hello")
    env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    status, out, err = ggraph(*asked, "-hf", "a/types:q8_0", env=env)
    assert status == 0 and "fetching sub/m-Q8_0.gguf" in err, err
    own = ggraph(*asked, "-m", repos["a/types"] / "sub" / "m-Q8_0.gguf")
    assert json.loads(out)["text"] == json.loads(own[1])["text"]
    offline = {**env, "HF_HUB_OFFLINE": "1"}
    body = {"prompt": "Hello", "max_tokens": 4}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "in").write_text(json.dumps(line))
    job = ("batch", str(tmp_path / "in"), str(tmp_path / "out"), "--json")
    assert json.loads(ggraph(*job, "-hf", "a/types:Q8_0", env=offline)[1])["now"] == 1
    again = ggraph(*asked, "-hf", "a/types:Q8_0", env=offline)
    assert json.loads(again[1])["text"] == json.loads(out)["text"]
    status, out, err = ggraph(*asked, "-hf", "a/alone", env=offline)
    assert status == 2 and not out and len(err.splitlines()) == 1, err
