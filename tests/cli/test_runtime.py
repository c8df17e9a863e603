"""Tests of the checks at the start of a notebook; each problem is reported in one line with its remedy."""

import errno
import json
import os
import subprocess
import sys
import types
from importlib import metadata

import jax
import pytest
from packaging.requirements import Requirement

from transformer.cli import runtime
from transformer.cli.runtime import RuntimeProblem
from transformer.config import ConfigError
from transformer.config._recipe_files import find_recipe
from transformer.training._recipe import load_recipe
from transformer.training.metrics._writer import read_metrics
from transformer.training.workdir._lock import WorkdirInUseError

NOWHERE = {"PATH": ""}  # no nvidia-smi


def versions(**changes):
    """Return the installed versions: new enough, except for the given packages."""
    return (dict.fromkeys(("jax", "jaxlib", "numpy", "flax"), "99.0") | changes).get


@pytest.fixture(autouse=True)
def undemanding_jax(monkeypatch):
    """Replace the requirements of JAX, because `versions` are invented."""
    monkeypatch.setattr(runtime, "_required_by_jax", lambda: [Requirement("jaxlib>=0.5"), Requirement("ml_dtypes")])


def module(version):
    return types.SimpleNamespace(__version__=version)


def test_the_check_imports_only_the_standard_library():
    script = "import sys; sys.path.insert(0, sys.argv[1]); import transformer.cli.runtime as r; print(r._PROJECT)"
    command = [sys.executable, "-I", "-S", "-c", script, str(runtime._SOURCE)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "transformer-zoo\n"


def test_this_environment_meets_the_requirements():
    runtime.check_versions()


def test_reports_the_requirements_of_the_installed_jax(monkeypatch):
    monkeypatch.undo()
    names = {requirement.name for requirement in runtime._required_by_jax()}
    assert {"jaxlib", "numpy"} <= names
    assert "libtpu" not in names
    runtime.check_versions()


@pytest.mark.parametrize("name", ["jax", "jaxlib", "numpy", "flax"])
def test_a_package_replaced_after_its_import_needs_a_restart(name):
    message = rf"^{name} 98.0 is loaded, but 99.0 is installed.*Runtime > Restart session\), then Run all\.$"
    with pytest.raises(RuntimeProblem, match=message):
        runtime.check_versions({name: module("98.0")}, versions())
    runtime.check_versions({name: module("99.0")}, versions())


@pytest.mark.parametrize(("name", "version"), [("jax", "0.7.1"), ("jax", "0.4.30"), ("numpy", "1.26.4")])
def test_reports_an_old_python(name, version, monkeypatch):
    monkeypatch.setattr(runtime, "_requirements", lambda: [Requirement("jax>=0.7.2"), Requirement("numpy>=2.0")])
    message = (
        rf"^{name} {version} is incompatible with transformer-zoo, which needs {name}>=.*latest runtime version.*%pip"
    )
    with pytest.raises(RuntimeProblem, match=message):
        runtime.check_versions({}, versions(**{name: version}), NOWHERE)
    runtime.check_versions({}, versions(jax="0.7.2", numpy="2.0.0"), NOWHERE)


def test_reports_a_jaxlib_of_a_different_release(monkeypatch):
    monkeypatch.setattr(runtime, "_required_by_jax", lambda: [Requirement("jaxlib<=99.0,>=99.0")])
    runtime.check_versions({}, versions(), NOWHERE)
    with pytest.raises(
        RuntimeProblem, match=r"^jaxlib 98\.0 is incompatible with jax 99\.0, which needs jaxlib.*\. Choose"
    ):
        runtime.check_versions({}, versions(jaxlib="98.0"), NOWHERE)


def test_names_the_package_for_an_accelerator(monkeypatch):
    monkeypatch.setattr(runtime, "accelerator_present", lambda environment: "tpu")
    with pytest.raises(RuntimeProblem, match=r'%pip.*"jax\[tpu\]"'):
        runtime.check_versions({}, versions(jax="0.1"))


def test_requirements_match_pyproject():
    names = [requirement.name for requirement in runtime._requirements()]
    assert names == ["jax", "flax", "jaxtyping", "numpy"]
    names = {requirement.name for requirement in runtime._requirements("train", "zoo")}
    assert {"jax", "grain", "matplotlib", "tyro", "orbax-checkpoint", "huggingface_hub"} <= names
    assert not {"pytest", "transformer-zoo"} & names


def test_requirements_of_an_installed_package(tmp_path, monkeypatch):
    lines = ["Metadata-Version: 2.4", "Name: transformer-zoo", "Version: 1", "Provides-Extra: data"]
    lines += ["Provides-Extra: train", "Requires-Dist: jax>=0.7.2", 'Requires-Dist: grain>=0.2; extra == "data"']
    lines += ['Requires-Dist: transformer-zoo[data]; extra == "train"', "Requires-Dist: tyro>=1; extra == 'train'"]
    (tmp_path / "transformer_zoo-1.dist-info").mkdir()
    (tmp_path / "transformer_zoo-1.dist-info" / "METADATA").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(runtime, "_SOURCE", tmp_path)  # no checkout
    monkeypatch.syspath_prepend(tmp_path)
    assert [str(one) for one in runtime._requirements("train")] == ["jax>=0.7.2", "grain>=0.2", "tyro>=1"]


def test_missing_and_outdated_packages_are_listed_for_installation(monkeypatch):
    lines = {"": ["jax>=0.7.2", "numpy>=2.0"], "train": ["tyro>=1.0", "optax>=0.2.8"]}
    monkeypatch.setattr(runtime, "_groups", lambda: lines)
    assert runtime.missing("train", installed=versions(optax="0.2.7")) == ["tyro>=1.0", "optax>=0.2.8"]
    assert runtime.missing("train", installed=versions(optax="0.2.8", tyro="1.0.17")) == []


def test_devices_are_printed(capsys):
    runtime.check_devices(environment=NOWHERE)
    assert len(capsys.readouterr().out.splitlines()) == 8


def test_reports_an_accelerator_unused_by_jax(monkeypatch, capsys):
    monkeypatch.setattr(runtime, "accelerator_present", lambda root, environment: "gpu")
    with pytest.raises(RuntimeProblem, match=r"^This is a GPU runtime, but JAX uses the CPU\. JAX .* no CUDA plugin"):
        runtime.check_devices(environment=NOWHERE)
    with pytest.raises(RuntimeProblem, match="This is a GPU runtime"):
        runtime.check_devices(environment=NOWHERE | {"JAX_PLATFORMS": "cuda,cpu"})
    runtime.check_devices(environment=NOWHERE | {"JAX_PLATFORMS": "cpu"})  # intended by the user


def test_reports_a_tpu_runtime_without_a_tpu(tmp_path):
    environment = NOWHERE | {"TPU_ACCELERATOR_TYPE": "v5litepod-1", "JAX_PLATFORMS": "tpu,cpu"}
    with pytest.raises(RuntimeProblem, match=r"^This is a TPU runtime, but JAX uses the CPU\. .* not installed"):
        runtime.check_devices(tmp_path, environment)


def test_reports_a_jax_that_fails_to_start(monkeypatch):
    def refuse():
        raise RuntimeError("Unable to initialize backend 'tpu': ABORTED: the TPU is in use\nby process 3.")

    monkeypatch.setattr("jax.devices", refuse)
    monkeypatch.setattr(runtime, "accelerator_present", lambda root, environment: "tpu")
    monkeypatch.setattr(runtime, "_libtpu_difference", lambda installed: None)
    with pytest.raises(RuntimeProblem, match=r"^JAX cannot start: .*in use\. Another process may use it: restart"):
        runtime.check_devices(environment=NOWHERE)


def test_reports_a_libtpu_of_a_different_release(monkeypatch):
    monkeypatch.setattr(metadata, "requires", lambda name: ['libtpu==0.0.23; extra == "tpu"', "numpy"])
    assert runtime._libtpu_difference({"libtpu": "0.0.23"}.get) is None
    difference = runtime._libtpu_difference({"libtpu": "0.0.21.1"}.get)
    assert (
        difference
        == f"libtpu 0.0.21.1 is not the version that jax {jax.__version__} was released with (libtpu==0.0.23)"
    )
    assert '%pip install "libtpu==0.0.23" and restart' in runtime._remedy("tpu", {"libtpu": "0.0.21.1"}.get)
    assert "Another process may use it" in runtime._remedy("tpu", {"libtpu": "0.0.23"}.get)


def test_finds_the_libtpu_requirement_of_the_installed_jax():
    assert runtime._libtpu_difference({"libtpu": "0.0.1"}.get).endswith(")")
    assert runtime._libtpu_of_jax().startswith("==0.0.")


@pytest.mark.parametrize(
    ("plugins", "words"),
    [
        ({}, r'CUDA.*%pip.*"jax\[cuda12\]=='),
        ({"jax-cuda12-plugin": "98.0"}, r'jax-cuda12-plugin 98\.0.*%pip.*"jax\[cuda12\]=='),
        ({"jax-cuda13-plugin": "99.0"}, "Another process may use it"),
    ],
)
def test_suggests_a_fix_for_an_unused_gpu(plugins, words):
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(runtime._remedy("gpu", versions(**plugins)))


@pytest.fixture
def colab(monkeypatch):
    """A simulated module of Colab, whose mount succeeds unless the test replaces it."""
    fake = types.ModuleType("google.colab")
    fake.drive = types.SimpleNamespace(mount=lambda path: os.makedirs(os.path.join(path, "MyDrive")))
    monkeypatch.setitem(sys.modules, "google.colab", fake)
    return fake.drive


def test_runs_are_stored_on_google_drive_in_colab(colab, tmp_path):
    folder = runtime.storage(str(tmp_path / "drive"), room=1)
    assert folder == tmp_path / "drive" / "MyDrive" / "transformer-zoo"
    assert list(folder.iterdir()) == []  # the check leaves no file
    assert runtime.storage("", local=tmp_path / "runs", room=1) == tmp_path / "runs"


def test_runs_are_stored_in_a_local_folder_outside_colab(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "google.colab", None)
    monkeypatch.chdir(tmp_path)
    assert runtime.storage("/content/drive", room=1) == tmp_path / "runs"


def test_kaggle_uses_a_local_folder_even_with_the_colab_module(colab, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    assert runtime.storage("/content/drive", room=1) == tmp_path / "runs"


def test_reports_a_drive_that_is_not_mounted(colab, tmp_path):
    colab.mount = lambda path: None
    with pytest.raises(RuntimeProblem, match=r"^Google Drive is not mounted: .* no folder MyDrive\. .*DRIVE = \"\""):
        runtime.storage(str(tmp_path))

    def refused(path):
        raise ValueError("mount failed: invalid oauth code")

    colab.mount = refused
    with pytest.raises(RuntimeProblem, match=r"^Google Drive is not mounted \(mount failed: .*\)\. Run all again"):
        runtime.storage(str(tmp_path))


def test_reports_a_full_drive(tmp_path, monkeypatch):
    with pytest.raises(RuntimeProblem, match=r"\d+ MiB.*\d+ MiB"):
        runtime.storage("", local=tmp_path, room=2**62)

    def full(self, content):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(RuntimeProblem, match=r"Disk quota exceeded\. Free some space.*empty the trash"):
        runtime.storage("", local=tmp_path, room=1)


def test_reports_a_read_only_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeProblem, match="file/runs"):
        runtime.storage("", local=tmp_path / "file" / "runs", room=1)


def test_a_problem_is_shown_without_a_traceback():
    assert RuntimeProblem("do this")._render_traceback_() == ["do this"]


def caught(action):
    try:
        action()
    except Exception as error:
        return error, error.__traceback__
    raise AssertionError("nothing was raised")


def test_known_errors_get_an_explanation():

    def in_use():
        raise WorkdirInUseError("in use")

    assert runtime._is_explained(*caught(lambda: find_recipe("nothing")))
    assert runtime._is_explained(*caught(in_use))
    assert runtime._is_explained(*caught(lambda: load_recipe("/nowhere")))
    assert runtime._is_explained(*caught(lambda: read_metrics("/nowhere")))
    assert not runtime._is_explained(*caught(lambda: json.loads("{")))  # raised by the user's own cell
    assert not runtime._is_explained(*caught(lambda: os.stat("/nowhere")))
    assert not runtime._is_explained(*caught(lambda: runtime._requirements(3)))  # a bug in the package


def test_the_shell_shows_one_line_or_the_traceback():
    shown = []
    shell = types.SimpleNamespace(
        _showtraceback=lambda kind, error, lines: shown.append(lines),
        showtraceback=lambda triple, tb_offset: shown.append(triple[1]),
        set_custom_exc=lambda kinds, handler: setattr(shell, "handler", handler),
    )
    runtime.one_line_errors(shell)
    error = ConfigError("there is no recipe 'x'.")
    shell.handler(shell, ConfigError, error, None)
    fault = TypeError("a fault")
    shell.handler(shell, TypeError, fault, None)
    assert shown == [["error: there is no recipe 'x'.  (%tb shows the traceback)"], fault]
    assert sys.last_value is error
