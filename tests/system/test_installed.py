"""The result of `pip install`: the command `transformer-zoo`, recipes inside the package, no need for a checkout.

The default tests use a copy of the package with the file layout of the wheel. Slow tests build the source distribution,
build the wheel from it, and repeat the same tests with the wheel; they need network access.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from training_recipes import xla_flags

import transformer
from transformer.cli._allocator import KEEP, VARIABLE
from transformer.config import _invocation as invocation

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ENTRY = PYPROJECT["project"]["scripts"]["transformer-zoo"]

# The script that pip generates for an entry point.
SCRIPT = """#!{python}
import sys
from {module} import {function}
if __name__ == '__main__':
    sys.exit({function}())
"""


@dataclass(frozen=True)
class Installed:
    """The package and its command in a folder as created by `pip install --target`, and an empty folder."""

    target: Path
    empty: Path

    def environment(self, **variables: str) -> dict[str, str]:
        path = f"{self.target / 'bin'}{os.pathsep}{os.environ['PATH']}"
        ours = {"PYTHONPATH": str(self.target), "PATH": path, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
        return {name: value for name, value in os.environ.items() if name != VARIABLE} | ours | variables

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess:
        environment = self.environment(**variables)
        return subprocess.run(command, cwd=self.empty, env=environment, capture_output=True, text=True, check=False)


def copied(folder: Path) -> Path:
    """Copy the package with the file layout of the wheel, and write the console script."""
    target = folder / "target"
    shutil.copytree(ROOT / "transformer", target / "transformer", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "configs", target / "transformer" / "recipes", ignore=shutil.ignore_patterns("__pycache__"))
    module, function = ENTRY.split(":")
    script = target / "bin" / "transformer-zoo"
    script.parent.mkdir()
    script.write_text(SCRIPT.format(python=sys.executable, module=module, function=function))
    script.chmod(0o755)
    return target


def files_of_the_checkout() -> list[str]:
    """Return the files that git tracks, and the new files that it does not ignore."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("this is not a git clone, so the list of files is unknown")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in names if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory) -> tuple[Path, Path]:
    """A source distribution built from a clean copy of the checkout, and a wheel built from it."""
    folder = tmp_path_factory.mktemp("distributions")
    source = folder / "source"
    for name in files_of_the_checkout():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    subprocess.run([sys.executable, "-m", "venv", str(folder / "tools")], check=True)
    python = str(folder / "tools" / "bin" / "python")
    pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    tools = [*PYPROJECT["build-system"]["requires"], "twine"]
    subprocess.run([str(ROOT / "scripts" / "install"), python, *tools], check=True)
    build = "from setuptools import build_meta; build_meta.build_sdist('../dist')"
    subprocess.run([python, "-c", build], cwd=source, check=True, capture_output=True)
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    # What a build needs is installed already.
    wheel = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder / "dist"), str(sdist)]
    subprocess.run(wheel, check=True)
    (wheel,) = (folder / "dist").glob("*.whl")
    checked = [python, "-m", "twine", "check", "--strict", str(sdist), str(wheel)]
    done = subprocess.run(checked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return sdist, wheel


@pytest.fixture(scope="module", params=["copied", pytest.param("wheel", marks=pytest.mark.slow)])
def installed(request, tmp_path_factory) -> Installed:
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "empty").mkdir()
    if request.param == "copied":
        return Installed(copied(folder), folder / "empty")
    _, wheel = request.getfixturevalue("distributions")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(folder / "target"), str(wheel)], check=True)
    return Installed(folder / "target", folder / "empty")


def test_the_command_prints_versions(installed):
    done = installed.run("transformer-zoo", "--version")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == [f"transformer-zoo {transformer.__version__}", f"python {platform.python_version()}"]
    assert [line.split()[0] for line in lines[2:]] == ["jax", "jaxlib", "flax"]


def test_recipes_are_listed_from_any_folder(installed):
    done = installed.run("transformer-zoo", "train", "--list")
    assert done.returncode == 0, done.stderr
    listed = {line.split()[0] for line in done.stdout.splitlines()}
    assert listed == {path.stem for path in (ROOT / "configs").glob("*.py")}


def test_a_bundled_recipe_resolves_to_the_installed_file(installed):
    """The recipe is the installed file, not that of a checkout that can also be imported."""
    code = "from transformer.config._recipe_files import find_recipe; print(find_recipe('configs/number_words.py'))"
    done = installed.run(sys.executable, "-c", code)
    assert done.stdout.strip() == str(installed.target / "transformer" / "recipes" / "number_words.py"), done.stderr
    installed_text = Path(done.stdout.strip()).read_text()
    assert installed_text == (ROOT / "configs" / "number_words.py").read_text()


@pytest.mark.parametrize("words", ["--version", "--help", "train --list", "train --help", "train number_word", "trian"])
def test_commands_without_computation_do_not_import_jax(installed, words):
    code = f"import sys; from transformer.__main__ import main; main({words.split()}); print('jax' in sys.modules)"
    done = installed.run(sys.executable, "-c", code)
    assert done.stdout.splitlines()[-1] == "False", done.stderr


def test_messages_name_the_invoked_command(installed):
    done = installed.run("transformer-zoo", "train")
    assert done.returncode == 2
    assert done.stderr.endswith("got nothing. Try: transformer-zoo train number_words, or --list.\n")
    done = installed.run("transformer-zoo", "generat")
    assert done.stderr.endswith("transformer-zoo --help explains them.\n")
    done = installed.run("transformer-zoo", "devices", "--help")
    assert done.stdout.startswith("usage: transformer-zoo devices "), done.stderr
    done = installed.run(sys.executable, "-m", "transformer", "train")
    assert "Try: python -m transformer train number_words" in done.stderr


def test_a_missing_package_error_names_the_extra(installed):
    """Without a checkout, the error message suggests to install an extra of the package."""
    code = "import sys; sys.modules['tyro'] = None; from transformer.__main__ import main; sys.exit(main(['score']))"
    done = installed.run(sys.executable, "-c", code)
    assert done.returncode == 1
    assert done.stderr.endswith("Install the dependencies of this command: pip install 'transformer-zoo[train]'.\n")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's allocator needs the restart")
def test_the_command_restarts_once_with_the_same_arguments(installed):
    """A restart replaces the process: the output of `sitecustomize` appears twice, with the same process id."""
    (installed.empty / "sitecustomize.py").write_text(
        f"import os, sys\nprint(os.getpid(), sys.orig_argv[2:], os.environ.get({VARIABLE!r}), flush=True)\n"
    )
    path = f"{installed.empty}{os.pathsep}{installed.target}"
    done = installed.run("transformer-zoo", "no such", "--debug", PYTHONPATH=path)
    first, second = [line.split(" ", 1) for line in done.stdout.splitlines()]
    assert first == [second[0], "['no such', '--debug'] None"]
    assert second[1] == f"['no such', '--debug'] {KEEP}"
    assert "error: unknown command 'no such'" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("installed", ["wheel"], indirect=True)  # the copied package is a stand-in for it
def test_a_recipe_trains_from_an_empty_folder(installed):
    tiny = ["--model.d-model", "8", "--model.num-layers", "1", "--model.num-heads", "2", "--data.max-digits", "2"]
    command = ["transformer-zoo", "train", "number_words", "--fast", "--workdir", "a run", *tiny]
    done = installed.run(*command, XLA_FLAGS=xla_flags(1))
    assert done.returncode == 0, done.stderr
    assert "transformer-zoo generate 'a run' --prompt " in done.stdout
    again = installed.run(*command, XLA_FLAGS=xla_flags(1))
    assert "transformer-zoo train number_words --fast --workdir 'a run' --model" in again.stdout, again.stderr
    assert "--training.steps 8" in again.stdout


@pytest.mark.slow
def test_the_source_distribution_has_every_file(distributions):
    """The tests can run from the source distribution. A missing file must be added to MANIFEST.in."""
    with tarfile.open(distributions[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if archive.getmember(name).isfile()}
    made = {"PKG-INFO", "setup.cfg"}
    assert {name for name in names if not name.startswith("transformer_zoo.egg-info/")} - made == {
        *files_of_the_checkout()
    }


@pytest.mark.slow
def test_the_wheel_contains_only_the_package(distributions):
    ours = {name for name in files_of_the_checkout() if name.startswith("transformer/")}
    recipes = {f"transformer/recipes/{path.name}" for path in (ROOT / "configs").glob("*.py")}
    with zipfile.ZipFile(distributions[1]) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        description = archive.read(metadata).decode().partition("\n\n")[2]
        assert archive.read(metadata.replace("METADATA", "licenses/LICENSE")) == (ROOT / "LICENSE").read_bytes()
    assert names == ours | recipes
    assert {"transformer/py.typed", "transformer/viz/report_page.js"} <= names
    # A package index shows only this page, so it must not link to files of the repository.
    text = re.sub(r"^```.*?^```$", "", description, flags=re.MULTILINE | re.DOTALL)
    assert text.startswith("# Transformer Zoo\n")
    assert not re.findall(r"\]\((?!https?:|#)", text)
    assert "```bash\n" in description


@pytest.mark.slow
def test_an_editable_installation_uses_the_checkout(tmp_path):
    """Recipes are read from configs/, so edited and new recipes work without another installation."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "env")], check=True)
    python = str(tmp_path / "env" / "bin" / "python")
    source = tmp_path / "source"
    for name in ("transformer", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--no-deps", "--editable", str(source)], check=True)
    (source / "configs" / "new.py").write_text('"""A recipe that was added later."""\n')
    command = [str(tmp_path / "env" / "bin" / "transformer-zoo"), "train", "--list"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert re.search(r"^new +A recipe that was added later\.$", done.stdout, re.MULTILINE), done.stderr
    assert not (source / "transformer" / "recipes").exists()


class TestProgram:
    """The program name in printed commands depends on the program that was called."""

    @pytest.fixture
    def called(self, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(invocation, "python", lambda: "python")

        def program(argv0, verb, path="/nowhere"):
            monkeypatch.setattr(sys, "argv", [str(argv0)])
            monkeypatch.setenv("PATH", str(path))
            return invocation.program(verb)

        return program

    def test_distinguishes_the_module_from_another_program(self, called):
        assert called("/x/transformer/__main__.py", "train") == "python -m transformer train"
        assert called("/x/ipykernel_launcher.py", "generate") == "python -m transformer generate"
        assert called("", "") == "python -m transformer"

    def test_the_training_script_runs(self, called, tmp_path):
        assert called("train.py", "train") == "python train.py"
        assert called(tmp_path / "my zoo" / "train.py", "train") == "python 'my zoo/train.py'"
        assert called("train.py", "generate") == "python -m transformer generate"

    def test_the_console_script_runs(self, called, tmp_path):
        folder = tmp_path / "an env" / "bin"
        folder.mkdir(parents=True)
        script = folder / "transformer-zoo"
        script.touch(mode=0o755)
        assert called(script, "train", path=folder) == "transformer-zoo train"
        assert called(script, "", path=folder) == "transformer-zoo"
        assert called(script, "train") == "'an env/bin/transformer-zoo' train"
        assert called("/x/bin/transformer-zoo", "train", path=folder) == "/x/bin/transformer-zoo train"
