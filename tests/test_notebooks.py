"""The notebooks: clean as committed, and run from top to bottom in a kernel of this very Python, without TensorFlow."""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import types

import nbformat
import pytest
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError
from nbformat.v4 import new_code_cell

ROOT = pathlib.Path(__file__).parent.parent
PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))
README = (ROOT / "README.md").read_text(encoding="utf-8")
LAUNCH = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]

# A run of few steps on few pairs, by the words that a reader has for it.
QUICK = ["--training.steps", "80", "--data.train-examples", "400", "--data.max-digits", "2", "--data.batch-size", "32"]
QUICK += ["--model.num-layers", "1", "--model.d-model", "32", "--model.d-ff", "64", "--optimizer.learning-rate", "1e-2"]
QUICK += ["--evaluation.every", "80", "--evaluation.translations", "3"]

every = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


def read(path):
    return nbformat.read(path, as_version=nbformat.NO_CONVERT)


def code_of(notebook, name):
    """The code of the cell with this id."""
    (cell,) = [cell for cell in notebook.cells if cell.id == name]
    assert cell.cell_type == "code"
    return cell.source


def with_parameters(notebook, **values):
    """The notebook with other values in its cell of parameters; each name must be set there, once."""
    (cell,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    for name, value in values.items():
        cell.source, times = re.subn(
            rf"^{name} = .*$", lambda _, n=name, v=value: f"{n} = {v!r}", cell.source, flags=re.M
        )
        assert times == 1, f"the cell of parameters sets {name} {times} times"
    return notebook


@pytest.fixture
def folder(tmp_path):
    """Where the notebook is run."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    return folder


@pytest.fixture
def execute(tmp_path, folder, monkeypatch):
    """Runs a notebook and then, in the same kernel, the lines of a check; returns what each cell put out.

    The kernel is this Python with this checkout, whatever kernels the machine knows.
    """
    spec = tmp_path / "kernels" / "here" / "kernel.json"
    spec.parent.mkdir(parents=True)
    environment = {
        "XLA_FLAGS": re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ["XLA_FLAGS"]).strip(),
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "modules"), str(ROOT)]),
        "TFDS_DATA_DIR": str(tmp_path / "tfds"),
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),  # each call of `train` compiles anew
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "TMPDIR": str(tmp_path),
    }
    spec.write_text(json.dumps({"argv": LAUNCH, "display_name": "here", "language": "python", "env": environment}))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))

    def run(notebook, check=""):
        notebook.cells.append(new_code_cell(f"assert 'tensorflow' not in sys.modules\n{check}", id="check"))
        specs = KernelSpecManager(kernel_dirs=[str(spec.parent.parent)], ensure_native_kernel=False)
        kernel = AsyncKernelManager(kernel_name="here", kernel_spec_manager=specs)
        place = {"metadata": {"path": str(folder)}}
        client = NotebookClient(notebook, km=kernel, kernel_name="here", timeout=600, resources=place)
        client.execute(cleanup_kc=True)
        return {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}

    return run


def printed(outputs):
    return "".join(output.get("text", "") for output in outputs)


def pictures(outputs):
    return sum("image/png" in output.get("data", {}) for output in outputs)


def test_both_are_there():
    assert {path.name for path in PATHS} == {"colab_tpu.ipynb", "sharding.ipynb"}


@every
def test_a_notebook_is_clean(path):
    """Valid, without results, with names for its cells, in the form in which nbformat writes: short diffs."""
    notebook = read(path)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert path.read_text(encoding="utf-8") == nbformat.writes(notebook) + "\n"
    for cell in notebook.cells:
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", cell.id), cell.id
        assert len(cell.source.splitlines()) <= 25, cell.id
        if cell.cell_type == "code":
            assert not cell.outputs, cell.id
            assert cell.execution_count is None, cell.id
            assert not re.search(r"import tensorflow\b|from tensorflow\b", cell.source), cell.id
            assert max(map(len, cell.source.splitlines())) <= 120, cell.id
    assert notebook.cells[0].source.startswith("# ")
    assert code_of(notebook, "parameters").startswith("REPOSITORY = ")


@every
def test_links_lead_to_files_and_the_readme_links_here(path):
    assert f"(notebooks/{path.name})" in README
    text = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (path.parent / target).exists(), target


COLAB = ROOT / "notebooks" / "colab_tpu.ipynb"
SHARDING = ROOT / "notebooks" / "sharding.ipynb"

# Of what was trained, and of what was trained after it: the losses of all steps, none twice, are in one file.
COLAB_CHECK = """
from transformer.viz.records import read_metrics

lines = read_metrics(workdir / "metrics.jsonl")
assert [line["step"] for line in lines if "train/loss" in line] == list(range(10, again.step + 1, 10)), lines
assert (again.step, again.steps) == (recipe.training.steps + MORE_STEPS, recipe.training.steps + MORE_STEPS)
assert summary.exact_match[""].rate >= 0.99, summary.exact_match
assert again.exact_match[""].rate >= 0.99, again.exact_match
"""


@pytest.mark.slow
def test_colab_trains_and_goes_on(execute, folder):
    """Few steps, enough for numbers of two digits; the lock that a lost machine left is in the way."""
    workdir = folder / "runs" / "number_words"
    workdir.mkdir(parents=True)
    (workdir / ".lock").write_text(json.dumps({"pid": os.getpid(), "host": "gone", "started": "boot a tick 1"}))
    notebook = with_parameters(read(COLAB), CHANGES=QUICK, MORE_STEPS=20, PROMPT="forty-two")
    out = execute(notebook, COLAB_CHECK)
    assert "nothing is installed" in printed(out["missing"])
    assert "1 x cpu" in printed(out["train"])
    assert "removing the lock of another machine" in printed(out["lock"])
    assert "a new run, to step 80" in printed(out["train"])
    assert "going on from step 80, to step 100" in printed(out["resume"])
    assert printed(out["generate"]) == printed(out["resumed"]) == "cuarenta y dos\n"
    assert [pictures(out[name]) for name in ("curves", "attention", "resumed")] == [1, 1, 1]
    assert "decoder_cross_layer1.png" in printed(out["attention"])


@pytest.mark.slow
def test_sharding_shows_what_it_promises(execute):
    check = """
assert count == 8
assert len(losses) == 5 and {len(found) for found in losses.values()} == {STEPS}
assert max(largest.values()) < 1e-5, largest
assert 0 < max(largest.values()), "all of them were computed in the same way"
assert difference < 1e-5, difference
assert kilobytes["fsdp x 8"] < 0.15 * kilobytes["data x 8"]
assert kilobytes["tensor x 4, data x 2"] < 0.3 * kilobytes["data x 8"]
assert kilobytes["pmap x 8"] == kilobytes["data x 8"] == kilobytes["one device"]
"""
    out = execute(with_parameters(read(SHARDING), STEPS=6), check)
    assert "Sizes must multiply to 8" in printed(out["misfit"])
    assert "going on from step 3, to step 6" in printed(out["second-half"])
    for name, parts, label in (("data", 1, "CPU 0,1,2,3,4,5,6,7"), ("fsdp", 8, "CPU 7"), ("tensor", 4, "CPU 3,7")):
        (shown,) = [output.data["text/html"] for output in out[f"{name}-picture"] if "data" in output]
        assert len(set(re.findall(r"background-color: (#\w+)", shown))) == parts, name
        assert label in shown


@pytest.mark.slow
def test_colab_as_it_is_with_a_disconnect(execute, tmp_path, folder):
    """The notebook unchanged but for the place of the Drive: its machine is taken away, and all cells are run again."""
    drive = tmp_path / "modules" / "google" / "colab" / "drive.py"
    drive.parent.mkdir(parents=True)
    (drive.parent / "__init__.py").touch()
    drive.write_text(
        "import pathlib\n\ndef mount(path):\n    (pathlib.Path(path) / 'MyDrive').mkdir(parents=True, exist_ok=True)"
    )
    place = str(folder / "drive")
    workdir = folder / "drive" / "MyDrive" / "transformer-zoo" / "number_words"

    def disconnect():
        while not (workdir / "checkpoints" / "100").exists():
            time.sleep(0.2)
        holder = json.loads((workdir / ".lock").read_text())
        os.kill(holder["pid"], signal.SIGKILL)
        (workdir / ".lock").write_text(json.dumps(holder | {"host": "gone"}))

    threading.Thread(target=disconnect, daemon=True).start()
    with pytest.raises(DeadKernelError):
        execute(with_parameters(read(COLAB), DRIVE=place))
    shutil.rmtree(tmp_path / "tfds")  # the machine's own disk is a new one
    out = execute(with_parameters(read(COLAB), DRIVE=place), COLAB_CHECK)
    assert "removing the lock of another machine" in printed(out["lock"])
    assert re.search(r"going on from step [12]00, to step 300", printed(out["train"]))
    assert "going on from step 300, to step 400" in printed(out["resume"])
    assert printed(out["generate"]) == printed(out["resumed"]) == "setecientos cuarenta y dos\n"


# What needs a network, or Colab: the cells themselves, with other people's parts made of paper.


class Machine:
    """A machine with a JAX of its own and without the Zoo, whose pip does as told or replaces JAX."""

    def __init__(self, monkeypatch, *, status=0, obedient=True):
        self.versions = {"jax": "0.10.1", "jaxlib": "0.10.1", "libtpu": "0.0.40", "numpy": "2.0.2", "flax": "0.11.0"}
        self.status, self.obedient, self.calls = status, obedient, []
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "transformer" else name)
        monkeypatch.setattr("importlib.metadata.distributions", self.distributions)
        monkeypatch.setattr(subprocess, "run", self.run)
        monkeypatch.setattr(sys, "path", [*sys.path])

    def distributions(self):
        return [types.SimpleNamespace(name=name, version=version) for name, version in self.versions.items()]

    def run(self, words, **_):
        self.calls.append(words)
        if words[0] == "git":
            pathlib.Path(words[-1]).mkdir()
            return types.SimpleNamespace(returncode=0)
        self.versions |= {"flax": "0.12.8"} | ({} if self.obedient else {"jax": "0.10.2"})
        return types.SimpleNamespace(returncode=self.status, stdout="jax==0.10.1 conflicts", stderr="error")


def install(path, folder, monkeypatch, repository="https://example.org/zoo"):
    monkeypatch.chdir(folder)
    namespace = {"REPOSITORY": repository}
    for name in ("missing", "install"):
        exec(code_of(read(path), name), namespace)


@every
def test_installing_keeps_the_machine_s_jax(path, folder, monkeypatch, capsys):
    machine = Machine(monkeypatch)
    install(path, folder, monkeypatch)
    clone, pip = machine.calls
    assert clone[:2] == ("git", "clone")
    assert clone[-2:] == ("https://example.org/zoo", "transformer-zoo")
    assert pip == (sys.executable, "-m", "pip", "install", "-c", "kept.txt", "./transformer-zoo[train]")
    kept = (folder / "kept.txt").read_text().splitlines()
    assert kept == ["jax==0.10.1", "jaxlib==0.10.1", "libtpu==0.0.40", "numpy==2.0.2"]
    assert sys.path[0] == str(folder / "transformer-zoo")
    assert "missing: transformer" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("machine", "repository", "words"),
    [
        ({}, "", "REPOSITORY is empty"),
        ({"status": 1}, "https://example.org/zoo", "jax==0.10.1 conflicts"),
        ({"obedient": False}, "https://example.org/zoo", "pip replaced {'jax': '0.10.1'}"),
    ],
)
def test_what_goes_wrong_with_installing_is_said(machine, repository, words, folder, monkeypatch):
    Machine(monkeypatch, **machine)
    with pytest.raises(AssertionError, match=re.escape(words)):
        install(COLAB, folder, monkeypatch, repository)


def test_what_can_be_imported_is_not_installed(folder, monkeypatch):
    machine = Machine(monkeypatch)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    install(COLAB, folder, monkeypatch, repository="")
    assert machine.calls == []
    assert list(folder.iterdir()) == []


def test_both_install_in_the_same_way():
    for name in ("missing", "install"):
        assert code_of(read(COLAB), name) == code_of(read(SHARDING), name)


def test_a_run_is_kept_on_the_drive_where_there_is_one(folder, monkeypatch):
    monkeypatch.chdir(folder)
    namespace = {"DRIVE": "/content/drive", "recipe": types.SimpleNamespace(name="mine"), "Path": pathlib.Path}
    monkeypatch.setitem(sys.modules, "google.colab", None)
    exec(code_of(read(COLAB), "drive"), namespace)
    assert namespace["workdir"] == folder / "runs" / "mine"
    mounted = []
    module = types.ModuleType("google.colab")
    module.drive = types.SimpleNamespace(mount=mounted.append)
    monkeypatch.setitem(sys.modules, "google.colab", module)
    exec(code_of(read(COLAB), "drive"), namespace)
    assert mounted == ["/content/drive"]
    assert namespace["workdir"] == pathlib.Path("/content/drive/MyDrive/transformer-zoo/mine")
