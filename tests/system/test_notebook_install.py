"""How the notebooks find and install the project, and the one-line errors if that fails."""

import importlib
import pathlib
import re
import shutil
import subprocess
import sys
import types

import pytest
from nbformat.v4 import new_code_cell
from notebook_parts import ROOT, TRAINING, code_of, read, stopped, until

ADDRESS = "https://example.org/zoo"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory of the notebook."""
    folder = tmp_path / "content"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


class Machine:
    """A simulated machine with JAX but without this project. Calls of git and pip are recorded, or fail."""

    def __init__(self, monkeypatch, *, failing="", output=""):
        self.failing, self.output, self.calls, self.constraints = failing, output, [], []
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        found = {"jax": "0.10.1", "jaxlib": "0.10.1", "libtpu": "0.0.40", "numpy": "2.0.2", "flax": "0.11.0"}
        distributions = [types.SimpleNamespace(name=name, version=version) for name, version in found.items()]
        monkeypatch.setattr("importlib.metadata.distributions", lambda: distributions)
        monkeypatch.setattr(subprocess, "run", self.run)
        monkeypatch.setattr(sys, "path", [*sys.path])

    def run(self, command, **_):
        self.calls.append(command)
        if "-c" in command:
            self.constraints = pathlib.Path(command[command.index("-c") + 1]).read_text().splitlines()
        if command[0] == "git" and not self.failing:
            checkout(pathlib.Path(command[-1]))
        fails = self.failing and self.failing in command
        return types.SimpleNamespace(returncode=int(bool(fails)), stdout=self.output if fails else "", stderr="")


def checkout(folder):
    """Create the file by which the notebook recognizes a checkout."""
    (folder / "transformer" / "cli").mkdir(parents=True)
    shutil.copy(ROOT / "transformer" / "cli" / "runtime.py", folder / "transformer" / "cli")


def install(address=""):
    namespace = {}
    exec(code_of(read(TRAINING), "setup"), namespace)
    namespace["REPOSITORY"] = address
    exec(code_of(read(TRAINING), "install"), namespace)
    return namespace


def test_importable_packages_are_not_installed(folder, monkeypatch):
    machine = Machine(monkeypatch)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    install(ADDRESS)
    assert machine.calls == []
    assert list(folder.iterdir()) == []


def test_a_checkout_around_the_notebook_is_used(folder, monkeypatch):
    machine = Machine(monkeypatch)
    checkout(folder / "clone")
    (folder / "clone" / "notebooks").mkdir()
    monkeypatch.chdir(folder / "clone" / "notebooks")
    install(ADDRESS)
    assert machine.calls == []
    assert sys.path[0] == str(folder / "clone")


def test_the_repository_is_cloned_once(folder, monkeypatch):
    machine = Machine(monkeypatch)
    install(ADDRESS)
    assert machine.calls == [("git", "clone", "--depth", "1", ADDRESS, "transformer-zoo")]
    assert sys.path[0] == str(folder / "transformer-zoo")
    install(ADDRESS)  # Run all a second time
    assert len(machine.calls) == 1


def test_installing_from_the_index_keeps_the_preinstalled_jax(folder, monkeypatch, capsys):
    machine = Machine(monkeypatch)
    install()
    ((python, *words),) = machine.calls
    assert python == sys.executable
    assert words[:4] == ["-m", "pip", "install", "-c"]
    assert words[5:] == ["transformer-zoo[train,zoo]"]
    assert machine.constraints == ["jax==0.10.1", "jaxlib==0.10.1", "libtpu==0.0.40", "numpy==2.0.2"]
    assert capsys.readouterr().out == "installing transformer-zoo[train,zoo]\n"
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("address", "failing", "output", "words"),
    [
        (
            ADDRESS,
            "git",
            "fatal: no access",
            r"git clone .* failed: fatal: no access\. Check the network, then",
        ),
        (
            "",
            "pip",
            "Looking\nERROR: No match.\nbye",
            r"ERROR",
        ),
        (
            "",
            "pip",
            "no reason\nat all",
            r"failed: at all\. Open this notebook from a clone of its",
        ),
    ],
)
def test_a_failed_installation_is_a_one_line_error(folder, monkeypatch, address, failing, output, words):
    Machine(monkeypatch, failing=failing, output=output)
    with pytest.raises(Exception, match=words) as caught:
        install(address)
    assert caught.value._render_traceback_() == [str(caught.value)]
    assert "\n" not in str(caught.value)


def test_missing_packages_are_installed_and_checked_again(monkeypatch):
    runtime = importlib.import_module("transformer.cli.runtime")
    installed, checks = [], []
    monkeypatch.setattr(runtime, "missing", lambda *extras: [f"tyro>=1.0 for {extras}"])
    monkeypatch.setattr(runtime, "check_versions", lambda: checks.append(len(installed)))
    monkeypatch.setattr(runtime, "one_line_errors", lambda: None)
    namespace = {"pip": lambda *packages: installed.append(packages), "importlib": importlib}
    exec(code_of(read(TRAINING), "versions"), namespace)
    assert installed == [("tyro>=1.0 for ('train', 'zoo')",)]
    assert checks == [0, 1]


def claim(folder, name, version):
    """Write metadata of a package with this version, which is found before the real metadata."""
    (folder / f"{name}-{version}.dist-info").mkdir(parents=True)
    (folder / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")


def test_reports_a_jax_upgrade_that_needs_a_restart(tmp_path, folder):
    """After `%pip install -U jax` in a session that has imported JAX, loaded and installed versions differ."""
    claim(tmp_path / "modules", "jax", "99.0")
    notebook = until(read(TRAINING), "versions")
    notebook.cells.insert(0, new_code_cell("import jax", id="before"))
    name, lines = stopped(notebook, tmp_path, folder)
    assert name == "versions"
    (line,) = lines
    assert re.fullmatch(
        r"jax \S+ is loaded, but 99\.0 is installed and takes effect only after a restart: restart the session "
        r"\(Runtime > Restart session\), then Run all\.",
        line,
    )


def test_reports_an_old_jax(tmp_path, folder):
    claim(tmp_path / "modules", "jax", "0.4.30")
    name, (line,) = stopped(until(read(TRAINING), "versions"), tmp_path, folder)
    assert name == "versions"
    assert line.startswith("jax 0.4.30 is incompatible with transformer-zoo, which needs jax>=")
    assert line.endswith("then Run all.")


@pytest.mark.slow
def test_later_errors_are_one_line_each(tmp_path, folder):
    """A misspelled recipe gives one line; an error in a cell of the reader keeps its traceback."""
    notebook = until(read(TRAINING), "recipe")
    notebook.cells = [cell for cell in notebook.cells if cell.id != "devices"]  # JAX does not have to start
    (parameters,) = [cell for cell in notebook.cells if cell.id == "parameters"]
    parameters.source = parameters.source.replace('"number_words"', '"number_wrods"')
    name, (line,) = stopped(notebook, tmp_path, folder)
    assert name == "recipe"
    assert re.match(r"error: there is no recipe 'number_wrods'\..*number_words.*%tb shows the traceback", line)
    notebook = until(read(TRAINING), "versions")
    notebook.cells.append(new_code_cell("missing_name", id="own"))
    name, lines = stopped(notebook, tmp_path, folder)
    assert name == "own"
    assert len("\n".join(lines).splitlines()) > 3
