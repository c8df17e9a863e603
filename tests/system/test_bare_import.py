"""Importing the package requires only jax, flax, numpy and jaxtyping, and none of the dependencies of training."""

import os
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import transformer

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Run with the extra `zoo` in addition: save a model in the format of GPT-2, and load it again.
OPENING = """
import jax
import transformer
from transformer import CausalLM, TransformerConfig

gpt2 = {"position": transformer.LearnedOptions(max_length=5), "norm.epsilon": 1e-5, "embedding.scale": False}
gpt2 |= {"feed_forward.activation": "gelu_tanh"}
config = TransformerConfig(vocab_size=7, d_model=6, num_heads=2, num_layers=1, **gpt2)
params = jax.jit(CausalLM(config).init)(jax.random.key(0), jax.numpy.zeros((1, 1), int))["params"]
transformer.save(CausalLM(config), params, "saved")
again = transformer.load("saved")[1]
print(jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), params, again)))
"""

# Run with only the base dependencies: every public name can be imported, and attention works.
PROGRAM = """
import jax
import transformer
from transformer import Mask, MultiHeadAttention

for name in transformer.__all__:
    if name != "load":  # reads training runs, and needs the dependencies of training
        getattr(transformer, name)
attention = MultiHeadAttention(num_heads=3, head_dim=5)
x = jax.numpy.ones((2, 7, 11))

@jax.jit
def run(x):
    return attention.apply(attention.init(jax.random.key(0), x), x, mask=Mask.causal())

y, cache = run(x)
print(y.shape, cache)
"""

# Hide the modules that a bare environment does not have.
HIDING = """
import sys
from importlib.machinery import PathFinder

class BareFinder(PathFinder):
    hidden = set({hidden!r})

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in cls.hidden else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = BareFinder
"""


def base_dependencies() -> list[str]:
    return PROJECT["dependencies"]


def closure(requirements: list[str]) -> set[str]:
    """Return the distributions that pip would install for these requirements in this environment."""
    found, waiting = set(), [(Requirement(text), "") for text in requirements]
    while waiting:
        requirement, extra = waiting.pop()
        name = canonicalize_name(requirement.name)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        wanted = {(name, ""), *((name, wanted_extra) for wanted_extra in requirement.extras)} - found
        found |= wanted
        for _, next_extra in wanted:
            waiting += [(Requirement(text), next_extra) for text in metadata.requires(name) or []]
    return {name for name, _ in found}


def foreign_modules() -> set[str]:
    """Return the top-level modules of this environment that a bare environment does not have."""
    allowed = closure(base_dependencies()) | {canonicalize_name(PROJECT["name"])}
    return {
        module
        for module, distributions in metadata.packages_distributions().items()
        if not {canonicalize_name(name) for name in distributions} & allowed
    }


def run(python: str, program: str, folder: Path, **environment: str) -> subprocess.CompletedProcess:
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
    return subprocess.run(
        [python, "-c", program],
        cwd=folder,
        env=inherited | {"JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_base_dependencies_are_these_four():
    assert {Requirement(text).name for text in base_dependencies()} == {"jax", "flax", "numpy", "jaxtyping"}


def test_import_needs_only_the_base_dependencies(tmp_path):
    foreign = foreign_modules()
    assert {"grain", "tensorflow_datasets", "tyro", "tokenizers", "matplotlib", "num2words", "beartype"} <= foreign
    assert not {"jax", "jaxlib", "flax", "numpy", "jaxtyping", "optax"} & foreign
    program = HIDING.format(hidden=sorted(foreign)) + PROGRAM
    done = run(sys.executable, program, tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "(2, 7, 11) None\n"


def test_every_public_name_is_found():
    homes = {"load": transformer.inference, "save": transformer.inference}
    for room in (transformer.config, transformer.nn):
        homes |= dict.fromkeys(room.__all__, room)
    assert sorted(homes) == transformer.__all__
    assert all(getattr(transformer, name) is getattr(room, name) for name, room in homes.items())
    assert set(transformer.__all__) <= set(dir(transformer))
    with pytest.raises(AttributeError, match=r"'transformer'.*'CausalML'"):
        transformer.CausalML  # noqa: B018


def test_a_program_restarts_before_importing_jax():
    done = run(sys.executable, "import train, transformer.__main__, sys; print('jax' in sys.modules)", ROOT)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.slow
def test_pretrained_weights_need_only_the_zoo_extra(tmp_path):
    extra = {Requirement(text).name for text in PROJECT["optional-dependencies"]["zoo"]}
    assert extra == {"huggingface_hub", "tokenizers"}
    allowed = {canonicalize_name(name) for name in closure(extra)}
    modules = metadata.packages_distributions()
    hidden = [name for name in foreign_modules() if not {canonicalize_name(d) for d in modules[name]} & allowed]
    assert {"grain", "tyro", "safetensors", "tensorflow_datasets"} <= set(hidden)
    done = run(sys.executable, HIDING.format(hidden=sorted(hidden)) + OPENING, tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n"


def test_hidden_packages_are_not_found(tmp_path):
    done = run(sys.executable, HIDING.format(hidden=["grain"]) + "import grain.python", tmp_path)
    assert done.returncode == 1
    assert "ModuleNotFoundError: No module named 'grain'" in done.stderr


@pytest.mark.slow
def test_installed_package_works_in_a_bare_environment(tmp_path):
    """A wheel of this project works in a new environment that contains nothing else. Needs network access."""
    python = str(tmp_path / "bare" / "bin" / "python")
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "bare")], check=True)
    # Build from a copy, because a build leaves files behind.
    source = tmp_path / "source"
    for name in ("transformer", "configs"):
        shutil.copytree(ROOT / name, source / name)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    install = [str(ROOT / "scripts" / "install"), python, "-c", str(ROOT / "requirements.txt"), str(source)]
    subprocess.run(install, check=True)
    # Exactly the dependencies in pyproject.toml are installed.
    code = "from importlib.metadata import distributions; print(*{d.name for d in distributions()})"
    installed = {canonicalize_name(name) for name in run(python, code, tmp_path).stdout.split()}
    assert installed - {"pip", "setuptools"} == closure(base_dependencies()) | {canonicalize_name(PROJECT["name"])}
    done = run(python, PROGRAM, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "(2, 7, 11) None\n"
