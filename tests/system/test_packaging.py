"""Files for the installation: exact pins within the version ranges, and the targets of the Makefile."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import transformer

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = ["requirements.txt", "requirements/gpu.txt", "requirements/tpu.txt"]
OTHER_PINS = ["requirements/audit.txt", "requirements/docs.txt", "requirements/parity.txt"]


def pins(name: str) -> list[Requirement]:
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith(("#", "-r"))]
    return [Requirement(line) for line in lines]


def pinned(name: str, python: str) -> dict[str, str]:
    """Return {distribution: version} for one Python version on Linux."""
    environment = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    chosen = {}
    for pin in pins(name):
        if pin.marker is None or pin.marker.evaluate(environment | {"platform_machine": "x86_64"}):
            assert canonicalize_name(pin.name) not in chosen, f"{pin.name} is pinned twice for Python {python}"
            chosen[canonicalize_name(pin.name)] = str(pin.specifier).removeprefix("==")
    return chosen


def ranges(extra: str) -> list[Requirement]:
    """Return the requirements of an extra in pyproject.toml, with the extras of this project resolved."""
    found = []
    for text in PROJECT["optional-dependencies"][extra]:
        requirement = Requirement(text)
        if requirement.name == PROJECT["name"]:
            found += [inner for name in requirement.extras for inner in ranges(name)]
        else:
            found.append(requirement)
    return found


@pytest.mark.parametrize("name", [*PINS, *OTHER_PINS])
def test_every_requirement_is_exact(name):
    for pin in pins(name):
        assert re.fullmatch(r"==[0-9][\w.]*", str(pin.specifier)), f"{name}: {pin}"


PYTHONS = ["3.11", "3.12", "3.13", "3.14"]


@pytest.mark.parametrize("python", PYTHONS)
def test_pins_are_within_the_ranges(python):
    chosen = pinned("requirements.txt", python)
    for requirement in [*map(Requirement, PROJECT["dependencies"]), *ranges("test")]:
        version = chosen.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} is not pinned: run `make pins`"
        assert requirement.specifier.contains(version), f"{requirement} does not allow the pin {version}"


def test_every_supported_python_has_pins():
    assert PROJECT["requires-python"] == f">={PYTHONS[0]},<3.{int(PYTHONS[-1].partition('.')[2]) + 1}"


@pytest.mark.parametrize("python", PYTHONS[1:])
def test_a_newer_python_gets_the_newer_jax(python):
    """JAX's newest releases do not support Python 3.11, which must not hold back the others."""
    for name in ("jax", "jaxlib", "flax", "numpy"):
        assert Version(pinned("requirements.txt", python)[name]) > Version(pinned("requirements.txt", "3.11")[name])


def test_pins_of_the_site_are_within_the_ranges():
    chosen = pinned("requirements/docs.txt", "3.11")
    for requirement in ranges("docs"):
        assert requirement.specifier.contains(chosen[canonicalize_name(requirement.name)]), requirement


def test_neither_tensorflow_nor_torch_is_installed():
    assert not {"tensorflow", "tensorflow-cpu", "torch"} & pinned("requirements.txt", "3.11").keys()


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize(("name", "extra", "needs"), [("gpu", "cuda12", "jax-cuda12-plugin"), ("tpu", "tpu", "libtpu")])
def test_an_accelerator_extends_the_same_jax(name, extra, needs, python):
    assert "-r ../requirements.txt" in (ROOT / f"requirements/{name}.txt").read_text().splitlines()
    chosen = pinned(f"requirements/{name}.txt", python)
    assert all(pin.extras == {extra} for pin in pins(f"requirements/{name}.txt") if pin.name == "jax")
    assert chosen["jax"] == pinned("requirements.txt", python)["jax"]
    assert needs in chosen


SCRIPTS = ["Makefile", ".ci/run", "scripts/setup", "scripts/install", "scripts/pins"]


@pytest.mark.parametrize("name", [*PINS, *OTHER_PINS, *SCRIPTS])
def test_no_file_names_a_package_index(name):
    """No file names a package index, so that users can choose a mirror, a proxy or a folder of wheels."""
    assert not re.search(r"://|--(extra-)?index-url|--find-links|--trusted-host|pypi", (ROOT / name).read_text())


def test_the_version_is_defined_once():
    assert "version" in PROJECT["dynamic"]  # pyproject.toml reads `transformer.__version__`
    assert f"## [{transformer.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_license_text_is_complete():
    """The license equals apache.org/licenses/LICENSE-2.0.txt, byte for byte."""
    digest = hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest()
    assert digest == "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"


# Tests of the Makefile use a fake Python that records its arguments instead of running them.

FAKE_PYTHON = """#!/bin/sh
case "$*" in
  "-c import venv, ensurepip"*) [ ! -e '{log}.no-venv' ]; exit ;;
  *realpath*) echo "$0"; exit ;;
  "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
  "-m pip install "*) [ ! -e '{log}.no-network' ] || {{ echo 'pip: no network' >&2; exit 1; }} ;;
  "-m mkdocs "*) ;;
  "-m transformer.cli._devices") echo 'device: 1 x fake' ;;
  *--present) cat '{log}.present'; exit ;;
  *) exec '{python}' "$@" ;;
esac
echo "$*" >> '{log}'
"""


class Checkout:
    """A copy of the files that `make setup` needs, with a fake Python."""

    def __init__(self, folder: Path):
        self.path = folder / "a checkout"
        self.log = folder / "log"
        self.python = folder / "bin" / "python3"
        self.python.parent.mkdir()
        self.python.write_text(FAKE_PYTHON.format(log=self.log, python=sys.executable))
        self.python.chmod(0o755)
        self.log.with_name("log.present").write_text("cpu\n")
        self.path.mkdir()
        for name in ["Makefile", "scripts/setup", "scripts/install", *PINS, "requirements/docs.txt"]:
            (self.path / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, self.path / name)

    def make(
        self, *words: str, path: str | None = None, home: Path | None = None, uv: str = ""
    ) -> subprocess.CompletedProcess:
        """Run make as a user does, without the variables of a make that may be running this test, and without uv."""
        ours = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "VENV", "PYTHON", "ACCELERATOR", "ARGS", "WORKDIR")
        environment = {name: value for name, value in os.environ.items() if name not in ours} | {"UV": uv}
        if path is not None:
            environment["PATH"] = path
        if home is not None:
            environment["HOME"] = str(home)
        words = words if path is not None else (*words, f"PYTHON={self.python}")
        program = [shutil.which("make"), "--no-print-directory", *words]
        return subprocess.run(program, cwd=self.path, env=environment, capture_output=True, text=True, check=False)

    def done(self) -> list[str]:
        """Return the calls of the fake Python since the last call of this method."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return [re.sub(r" --(disable-pip-version-check|quiet)", "", line) for line in lines]


@pytest.fixture
def checkout(tmp_path) -> Checkout:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    return Checkout(tmp_path)


REQUIREMENTS, DEVICES = "-m pip install -r requirements.txt", "-m transformer.cli._devices"
PACKAGE = "-m pip install --no-deps --editable ."
INSTALLATION = ["-m venv .venv", REQUIREMENTS, PACKAGE, DEVICES]


def test_setup_installs_once(checkout):
    first = checkout.make("setup")
    assert first.returncode == 0, first.stderr
    assert first.stdout.splitlines()[-1] == "device: 1 x fake"
    assert checkout.done() == INSTALLATION
    second = checkout.make("setup")
    assert (second.returncode, second.stdout, checkout.done()) == (0, "", [])


FAKE_UV = """#!/bin/sh
echo "uv $*" >> '{log}'
[ ! -e '{log}.no-uv' ]
"""


def test_uv_installs_if_it_can(checkout):
    """If uv fails, pip installs, because it has a configuration of its own. PIP_ARGS are for pip."""
    uv = checkout.python.with_name("uv")
    uv.write_text(FAKE_UV.format(log=checkout.log))
    uv.chmod(0o755)
    by_uv = "uv pip install --python .venv/bin/python -r requirements.txt"
    checkout.make("setup", uv=str(uv))
    package = by_uv.replace("-r requirements.txt", "--no-deps --editable .")
    assert checkout.done() == ["-m venv .venv", by_uv, package, DEVICES]
    checkout.make("docs", "PIP_ARGS=--pre --no-cache", uv=str(uv))
    assert "-m pip install --pre --no-cache -r requirements/docs.txt" in checkout.done()
    shutil.rmtree(checkout.path / ".venv")
    checkout.log.with_name("log.no-uv").touch()
    assert checkout.make("setup", uv=str(uv)).returncode == 0
    assert checkout.done() == ["-m venv .venv", by_uv, REQUIREMENTS, package, PACKAGE, DEVICES]


def test_setup_follows_the_contents_of_the_requirements(checkout):
    checkout.make("setup")
    checkout.done()
    os.utime(checkout.path / "requirements.txt", (0, 0))
    checkout.make("setup")
    assert checkout.done() == []
    with (checkout.path / "requirements.txt").open("a") as file:
        file.write("wonder==1.0\n")
    checkout.make("setup")
    assert checkout.done() == [REQUIREMENTS, DEVICES], "the package itself is installed already"


def test_setup_installs_the_package_of_a_moved_checkout_again(checkout):
    checkout.make("setup")
    checkout.done()
    checkout.path = checkout.path.rename(checkout.path.with_name("moved"))
    checkout.make("setup")
    assert checkout.done() == [PACKAGE, DEVICES]
    checkout.make("setup")
    assert checkout.done() == []


@pytest.mark.slow
def test_the_environment_runs_the_package_from_any_folder(checkout, tmp_path):
    """With a real Python and pip, and without the requirements: --help and --version don't need them."""
    for name in ("transformer", "configs"):
        shutil.copytree(ROOT / name, checkout.path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout.path)
    (checkout.path / "requirements.txt").write_text("# none\n")
    checkout.python = sys.executable
    done = checkout.make("setup", "ACCELERATOR=cpu")
    assert done.returncode == 0, done.stderr
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    bin_ = checkout.path / ".venv" / "bin"
    for command in ([bin_ / "python", "-m", "transformer"], [bin_ / "transformer-zoo"]):
        shown = subprocess.run([*command, "--help"], cwd=elsewhere, capture_output=True, text=True, check=False)
        assert shown.returncode == 0, shown.stderr
        assert "train a recipe, or resume its run" in shown.stdout
    again = checkout.make("setup", "ACCELERATOR=cpu")
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")


def test_an_interrupted_installation_is_repeated(checkout):
    fault = checkout.log.with_name("log.no-network")
    fault.touch()
    failed = checkout.make("setup")
    assert failed.returncode != 0
    assert "pip: no network" in failed.stderr
    fault.unlink()
    checkout.done()
    assert checkout.make("setup").returncode == 0
    assert checkout.done() == INSTALLATION[1:]


def test_an_available_accelerator_is_used(checkout):
    checkout.log.with_name("log.present").write_text("tpu\n")
    checkout.make("setup")
    assert "-m pip install -r requirements/tpu.txt" in checkout.done()
    checkout.make("setup", "ACCELERATOR=cpu")
    assert checkout.done() == INSTALLATION, "another accelerator means a new environment"


def test_an_unknown_accelerator_is_an_error(checkout):
    failed = checkout.make("setup", "ACCELERATOR=npu")
    assert failed.returncode != 0
    assert "error: ACCELERATOR must be auto, cpu, gpu or tpu, got 'npu'." in failed.stderr
    assert checkout.done() == []


def shell_tools(folder: Path) -> Path:
    """Return a folder for PATH with the programs that `make setup` needs, but no Python."""
    tools = folder / "tools"
    tools.mkdir()
    for tool in ("sh", "cat", "cksum", "rm", "mkdir", "head", "dirname"):
        (tools / tool).symlink_to(shutil.which(tool))
    return tools


def test_a_missing_python_is_a_clear_error(checkout, tmp_path):
    tools = shell_tools(tmp_path)
    failed = checkout.make("setup", path=str(tools), home=tmp_path)
    assert failed.returncode != 0
    assert "error: no Python 3.11 to 3.14 found. Install one, or pass its path: make PYTHON=" in failed.stderr


def test_an_old_python_is_a_clear_error(checkout):
    checkout.python.write_text("#!/bin/sh\n[ \"$1\" = --version ] && echo 'Python 3.9.1'\nexit 1\n")
    failed = checkout.make("setup")
    assert failed.returncode != 0
    assert f"error: PYTHON={checkout.python} must be a working Python 3.11 to 3.14, got: Python 3.9.1" in failed.stderr


def versioned_pythons(folder: Path, minors: list[int]) -> dict[int, Path]:
    """Write fake Pythons that only report their version, and print which one would create the environment."""
    made = {}
    for minor in minors:
        path = made[minor] = folder / f"python3.{minor}"
        path.write_text(
            "#!/bin/sh\n"
            f"case \"$*\" in *'!= (3, {minor})'*) exit 0 ;; *'!= (3, '*) exit 1 ;; "
            f"*'not (3, 11)'*) [ {minor} -ge 11 ] && [ {minor} -lt 15 ]; exit ;; "
            f"*'import venv'*) exit 0 ;; *--present*) echo cpu; exit ;; *split*) echo 3.{minor}.0; exit ;; "
            f"*realpath*) echo 'chosen 3.{minor}' >&2; echo python3.{minor}; exit ;; esac\nexit 1\n"
        )
        path.chmod(0o755)
    return made


@pytest.mark.parametrize(
    ("minors", "chosen"), [([11, 12, 13, 14], 13), ([11, 12], 12), ([11], 11), ([10, 14, 15], 14), ([9, 10, 15], None)]
)
def test_setup_takes_the_newest_tested_python(checkout, tmp_path, minors, chosen):
    tools = shell_tools(tmp_path)
    versioned_pythons(tools, minors)
    failed = checkout.make("setup", path=str(tools), home=tmp_path)
    assert failed.returncode != 0
    assert (f"chosen 3.{chosen}" if chosen else "error: no Python 3.11 to 3.14 found.") in failed.stderr


def test_setup_prefers_a_python_that_can_create_environments(checkout, tmp_path):
    tools = shell_tools(tmp_path)
    newest = versioned_pythons(tools, [12, 13])[13]
    newest.write_text(newest.read_text().replace("*'import venv'*) exit 0", "*'import venv'*) exit 1"))
    assert "chosen 3.12" in checkout.make("setup", path=str(tools), home=tmp_path).stderr
    (tools / "python3.12").unlink()
    assert "its modules venv and ensurepip are missing" in checkout.make("setup", path=str(tools), home=tmp_path).stderr


def test_a_python_without_venv_is_a_clear_error(checkout):
    checkout.log.with_name("log.no-venv").touch()
    failed = checkout.make("setup")
    assert failed.returncode != 0
    assert f"error: {checkout.python} cannot create virtual environments" in failed.stderr
    assert "sudo apt install python3-venv" in failed.stderr
    assert not (checkout.path / ".venv").exists()


def test_an_existing_user_environment_is_not_changed(checkout):
    own = checkout.path / ".venv" / "precious"
    own.parent.mkdir()
    own.touch()
    failed = checkout.make("setup")
    assert failed.returncode != 0
    assert "error: .venv was not created by this Makefile" in failed.stderr
    assert own.exists()


def test_docs_installs_once_into_a_separate_environment(checkout):
    built = ["-m mkdocs build --strict"]
    assert checkout.make("docs").returncode == 0
    own = ["-m venv .venv-docs", "-m pip install -r requirements/docs.txt"]
    assert checkout.done() == [*INSTALLATION, *own, *built]
    assert checkout.make("docs").returncode == 0
    assert checkout.done() == built
    (checkout.path / ".venv-docs" / "docs").unlink()  # the state after an interrupted installation
    assert checkout.make("docs").returncode == 0
    assert checkout.done() == [*own, *built]


def test_help_names_every_target(checkout):
    output = checkout.make().stdout
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in set(phony.group(1).split()) - {"help"}:
        assert f"make {target} " in output


def test_train_passes_recipe_workdir_and_arguments(checkout):
    output = checkout.make("-n", "train", "RECIPE=configs/shakespeare.py", "WORKDIR=my run", "ARGS=--training.steps 7")
    assert ".venv/bin/python train.py configs/shakespeare.py --workdir 'my run' --training.steps 7" in output.stdout
