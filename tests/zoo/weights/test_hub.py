"""Downloads from the hub, and their errors, each of which is one line with a solution."""

import os
import sys
from types import SimpleNamespace

import pytest

import transformer
from transformer.zoo.weights._files import WeightsError
from transformer.zoo.weights._hub import fetch

huggingface_hub = pytest.importorskip("huggingface_hub")
errors = pytest.importorskip("huggingface_hub.errors")


@pytest.fixture
def snapshot(monkeypatch, tmp_path):
    """Replace the download: return a directory with the files of `files`, or raise `error`."""
    fake = SimpleNamespace(files=["config.json", "model.safetensors"], error=None, asked=None)

    def download(name, **arguments):
        fake.asked = (name, arguments)
        if fake.error:
            raise fake.error
        for file in fake.files:
            (tmp_path / file).touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return fake


def http(kind: type[Exception], status: int) -> Exception:
    response = SimpleNamespace(headers={}, status_code=status, request=None)
    return kind(f"{status}\nmore lines", response=response)


def test_a_directory_is_used_directly(tmp_path, snapshot, monkeypatch):
    assert fetch(tmp_path) == tmp_path
    (tmp_path / "gpt2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert fetch("gpt2").samefile(tmp_path / "gpt2")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fetch("~/gpt2") == tmp_path / "gpt2"
    (tmp_path / "file").touch()
    with pytest.raises(WeightsError, match="file is a file: expected a directory"):
        fetch("file")
    with pytest.raises(WeightsError, match=r"gpt2.*'abc'"):
        fetch("gpt2", "abc")
    assert snapshot.asked is None


def test_a_model_is_downloaded_without_pickle_files(tmp_path, snapshot):
    from huggingface_hub.utils import filter_repo_objects

    assert fetch("org/some-model_1.5", "main") == tmp_path
    name, arguments = snapshot.asked
    assert (name, arguments["revision"]) == ("org/some-model_1.5", "main")
    opened = ["config.json", "1_Pooling/config.json", "model.safetensors", "model-00001-of-00002.safetensors"]
    others = [
        "pytorch_model.bin",
        "original/model.pth",
        "consolidated.safetensors",
        "a.gguf",
        "modeling.py",
        "a/b.safetensors",
    ]
    kept = filter_repo_objects(opened + others, allow_patterns=arguments["allow_patterns"])
    assert list(kept) == opened


@pytest.mark.parametrize(
    "name", ["./gpt2", "/no/such/place", "a/b/c", "../x", "a\\b", "x/..", "org/na me", "-x", "a--b/c", "gpt2/", "é"]
)
def test_an_invalid_model_name_is_reported_as_a_missing_directory(name, snapshot, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no directory .*is not a valid id on the Hugging Face hub"):
        fetch(name)
    assert snapshot.asked is None


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (http(errors.GatedRepoError, 403), r"https://huggingface.co/org/name"),
        (
            http(errors.RepositoryNotFoundError, 401),
            r"org/name",
        ),
        (http(errors.RevisionNotFoundError, 404), r"org/name.*'v9'"),
        (
            errors.LocalEntryNotFoundError("x"),
            r"`hf.*org/name --local-dir org-name`",
        ),
        (
            http(errors.HfHubHTTPError, 500),
            r"HfHubHTTPError.*500",
        ),
        (OSError(28, "No space left on device"), r"could not be downloaded .* No space left on device"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_download_errors_are_one_line(snapshot, error, message):
    snapshot.error = error
    with pytest.raises(WeightsError, match=message) as caught:
        fetch("org/name", "v9")
    assert "\n" not in str(caught.value)


def test_reports_a_model_without_safetensors(snapshot):
    snapshot.files = ["config.json"]
    with pytest.raises(WeightsError, match=r"gpt2.*model\.safetensors"):
        fetch("gpt2")


def test_reports_a_missing_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(WeightsError, match="huggingface_hub"):
        fetch("gpt2")


def test_reports_a_missing_network(monkeypatch, tmp_path):
    """The real library in offline mode, with an empty cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", os.fspath(tmp_path))
    with pytest.raises(WeightsError, match="the hub can't be reached"):
        fetch("gpt2")


def test_an_unknown_name_is_one_error_that_suggests_the_nearest(monkeypatch):
    def unreachable(*args, **options):
        raise errors.LocalEntryNotFoundError("no network")

    errors = pytest.importorskip("huggingface_hub").errors
    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(WeightsError, match="'gpt2'") as raised:
        transformer.load("gtp2")
    assert raised.value.__suppress_context__
