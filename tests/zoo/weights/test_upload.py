"""`push`: the requests that a stand-in of the hub gets, the model card, and errors of one line."""

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from transformer.zoo.weights._files import WeightsError
from transformer.zoo.weights._upload import model_card, push

huggingface_hub = pytest.importorskip("huggingface_hub")
save_file = pytest.importorskip("safetensors.numpy").save_file

ROOT = Path(__file__).resolve().parents[3]
REPO = "/api/models/me/tiny"


class Hub(ThreadingHTTPServer):
    """The part of the hub's HTTP interface that uploads use. Weights are uploaded as LFS objects, like on the hub."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.files, self.objects, self.created, self.messages, self.validated = {}, {}, [], [], []
        self.status = 200
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def answer(self, status=200, values=None, **headers):
        content = json.dumps(values or {}).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def body(self):
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_HEAD(self):
        name = self.path.partition("/resolve/main/")[2]
        if name in self.server.files:
            return self.answer(X_Repo_Commit="0" * 40, ETag='"1"')
        return self.answer(404, X_Error_Code="EntryNotFound")

    def do_GET(self):
        self.answer(404, X_Error_Code="EntryNotFound")

    def do_PUT(self):
        self.server.objects[self.path.rpartition("/")[2]] = self.body()
        self.answer()

    def do_POST(self):
        hub, body = self.server, self.body()
        if hub.status != 200 or self.headers.get("Authorization") != "Bearer hf_secret":
            return self.answer(hub.status if hub.status != 200 else 401, {"error": "no access\nfor you"})
        path = self.path.partition("?")[0]
        if path == "/api/repos/create":
            hub.created.append(json.loads(body))
            return self.answer(values={"url": f"{hub.address}/me/tiny", "name": "me/tiny"})
        if path == "/api/validate-yaml":
            hub.validated.append(json.loads(body)["content"])
            return self.answer(values={"errors": [], "warnings": []})
        if path == f"{REPO}/preupload/main":
            files = [
                {"path": one["path"], "uploadMode": "lfs" if one["path"].endswith(".safetensors") else "regular"}
                for one in json.loads(body)["files"]
            ]
            return self.answer(values={"files": [{**one, "shouldIgnore": False} for one in files]})
        if path == "/me/tiny.git/info/lfs/objects/batch":
            objects = [
                {**one, "actions": {"upload": {"href": f"{hub.address}/lfs/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            return self.answer(values={"transfer": "basic", "objects": objects})
        if path == f"{REPO}/commit/main":
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "header":
                    hub.messages.append(value["summary"])
                elif line["key"] == "file":
                    hub.files[value["path"]] = base64.b64decode(value["content"])
                else:
                    hub.files[value["path"]] = hub.objects[value["oid"]]
            values = {"commitOid": "0" * 40, "commitUrl": f"{hub.address}/me/tiny/commit/0", "success": True}
            return self.answer(values=values)
        return self.answer(404, {"error": f"no {path}"})


@pytest.fixture
def hub():
    server = Hub()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def exported(tmp_path):
    """A directory as `convert` writes it, with other files that must not be uploaded."""
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}))
    (folder / "tokenizer.json").write_text("{}")
    save_file({"a": np.zeros((3, 5), np.float32), "b": np.ones(7, np.float32)}, str(folder / "model.safetensors"))
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / ".env").write_text("SECRET=1")
    (folder / "checkpoints").mkdir()
    return folder


def command(directory, *words, hub=None, token="hf_secret"):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_HOME": str(directory.parent / "home"), "HF_HUB_DISABLE_XET": "1", "JAX_PLATFORMS": "cpu"}
    environment |= {} if hub is None else {"HF_ENDPOINT": hub.address}
    environment |= {} if token is None else {"HF_TOKEN": token}
    call = [sys.executable, "-m", "transformer", "push", str(directory), "--repo", "me/tiny", *words]
    return subprocess.run(call, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=120)


def test_the_files_of_a_model_are_uploaded_with_a_card(hub, exported):
    done = command(exported, "--private", "--license", "mit", "--json", hub=hub)
    assert done.returncode == 0, done.stderr
    names = ["config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(hub.files) == ["README.md", *names], "no pickle, no hidden file"
    for name in names:
        assert hub.files[name] == (exported / name).read_bytes()
    assert list(hub.objects) == [hashlib.sha256(hub.files["model.safetensors"]).hexdigest()]
    assert (hub.created[0]["name"], hub.created[0]["organization"]) == ("tiny", "me")
    assert hub.created[0].get("private") or hub.created[0].get("visibility") == "private"
    assert hub.messages == ["Upload model"]
    values = json.loads(done.stdout)
    assert values["address"] == f"{hub.address}/me/tiny/commit/0"
    assert values["bytes"] == sum(map(len, hub.files.values()))
    card = hub.files["README.md"].decode()
    assert 'license: "mit"' in card
    assert hub.validated == [card]
    assert not (exported / "README.md").exists()


@pytest.fixture
def upload(hub, exported, monkeypatch):
    """Call `push` in this process, with the stand-in and a token."""

    def call(token="hf_secret", **options):
        real = huggingface_hub.HfApi
        with monkeypatch.context() as patch:
            patch.setattr(huggingface_hub, "get_token", lambda: token)
            patch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
            patch.setattr(huggingface_hub, "HfApi", lambda: real(endpoint=hub.address, token=token))
            return push(exported, "me/tiny", **options)

    return call


def test_an_existing_hub_card_is_kept_and_a_local_card_uploaded(hub, exported, upload):
    hub.files["README.md"] = b"mine"
    assert "README.md" not in upload().files
    assert hub.files["README.md"] == b"mine"
    (exported / "README.md").write_text("# new")
    assert upload(message="second").address == f"{hub.address}/me/tiny/commit/0"
    assert hub.files["README.md"] == b"# new"
    assert hub.messages[-1] == "second"


@pytest.mark.parametrize(
    ("token", "status", "message"),
    [
        (None, 200, r"^no token for the hub was found\. Log in with `hf auth login`, or set HF_TOKEN\.$"),
        ("hf_wrong", 200, r"^the hub does not accept the token\. Log in again with `hf auth login`"),
        ("hf_secret", 403, r"^the token may not write to me/tiny\. Use a token with write access to it"),
        ("hf_secret", 500, r"^me/tiny could not be uploaded: HfHubHTTPError, .* Try again"),
    ],
)
def test_upload_errors_are_one_line(token, status, message, hub, upload):
    hub.status = status
    with pytest.raises(WeightsError, match=message) as caught:
        upload(token=token)
    assert "\n" not in str(caught.value)
    assert not hub.files


def test_rejects_an_upload_offline(hub, upload, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(WeightsError, match=r"^HF_HUB_OFFLINE is set, so that nothing can be uploaded\. Unset it"):
        upload()
    assert not hub.files


@pytest.mark.parametrize("repository", ["tiny", "", "a/b/c", "me/../x", "me/a--b", "me/a b"])
def test_an_invalid_name_is_an_error(repository, exported):
    with pytest.raises(WeightsError, match=r"--repo.*USER/NAME"):
        push(exported, repository)


def test_only_an_exported_model_is_uploaded(tmp_path, exported):
    with pytest.raises(WeightsError, match=r"directory .* not found"):
        push(tmp_path / "none", "me/tiny")
    (tmp_path / "recipe.json").write_text("{}")
    with pytest.raises(WeightsError, match=r"`convert.*OUT`"):
        push(tmp_path, "me/tiny")
    (tmp_path / "secret.txt").write_text("secret")
    (exported / "notes.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(WeightsError, match=r"notes\.txt"):
        push(exported, "me/tiny")


def test_the_card_describes_the_model(exported, tmp_path):
    card = model_card(exported, "me/tiny")
    assert card.startswith('---\nlibrary_name: "transformers"\npipeline_tag: "text-generation"\ntags: ["jax"')
    assert "# tiny\n\nGPT2LMHeadModel with 22 parameters." in card
    assert 'transformer.open("me/tiny")' in card
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"r": 4, "base_model_name_or_path": "gpt2"}))
    card = model_card(adapter, "me/tiny-lora")
    assert 'library_name: "peft"' in card
    assert 'base_model: "gpt2"' in card
    assert "A LoRA adapter of rank 4" in card
