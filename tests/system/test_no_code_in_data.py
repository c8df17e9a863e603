"""Data is never executed: the code has no pickle, eval or shell calls, except for the listed ones with a reason."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Modules that execute data as code. numpy, torch and yaml are checked by their calls.
MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "code",
    "codeop",
    "runpy",
}
# Calls, by the last two parts of their name. `compile` is the builtin function; those of re and jax are harmless.
CALLS = {
    *("eval", "exec", "compile", "__import__"),
    *("os.system", "os.popen", "os.execv", "os.execvp", "os.spawnl", "os.spawnv", "os.startfile", "pty.spawn"),
    *("subprocess.getoutput", "subprocess.getstatusoutput", "asyncio.create_subprocess_shell"),
    *("torch.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "types.FunctionType", "types.CodeType"),
    *("loader.exec_module", "util.spec_from_file_location", "importlib.import_module", "ctypes.CDLL"),
    *("tempfile.mktemp", "shutil.unpack_archive"),
}
# Arguments by name, with their allowed values.
ARGUMENTS = {"shell": (False,), "allow_pickle": (False,), "trust_remote_code": (False,), "weights_only": (True,)}

ALLOWED = {
    **{
        (
            f"transformer/{file}.py",
            "importlib.import_module",
        ): "imports a file of this package, with a name from a fixed list"
        for file in ("__init__", "config/_lazy", "cli/_commands")
    },
    (
        "transformer/training/_overrides.py",
        "util.spec_from_file_location",
    ): "a recipe is Python code of the user",
    (
        "transformer/training/metrics/_trackers.py",
        "importlib.import_module",
    ): "imports the package of a tracker, with a name from a fixed list",
    ("transformer/training/_overrides.py", "loader.exec_module"): "a recipe is Python code of the user",
    **dict.fromkeys(
        (
            ("transformer/training/tasks/_rewards.py", "util.spec_from_file_location"),
            ("transformer/training/tasks/_rewards.py", "loader.exec_module"),
            ("transformer/training/tasks/_rewards.py", "importlib.import_module"),
        ),
        "rewards are Python code of the user; `evaluate run` runs those that a workdir names only with --trust-rewards",
    ),
    (
        "examples/elsewhere/compare.py",
        "importlib.import_module",
    ): "runs a patched copy of a project that the user passes",
    ("transformer/config/_limited.py", "pickle"): "writes messages to a process that it started; answers are JSON",
    ("transformer/config/_limited_worker.py", "pickle"): "reads the messages of the process that started it",
    ("transformer/config/_limited_worker.py", "runpy"): "runs a file of this package, which the parent process names",
    ("reliability/monitored.py", "runpy"): "runs train.py as a script",
    ("reliability/monitored.py", "ctypes.CDLL"): "opens the C library, which the process has already loaded",
}
"""exceptions: findings that are allowed, with the reason"""


def files() -> list[Path]:
    """Return the files of the package, benchmarks and examples. Tests and notebooks process no untrusted data."""
    folders = ("transformer", "benchmarks", "reliability", "configs", "examples", "docs")
    return [*sorted(ROOT.glob("*.py")), *(path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))]


def called(node: ast.expr) -> str:
    """Return the last two parts of a dotted name: "os.system", "eval"."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{called(node.value).rpartition('.')[2]}.{node.attr}"
    return ""


def faults(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of everything that can execute data as code."""
    names: dict[str, str] = {}
    nodes = list(ast.walk(ast.parse(source)))
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            for alias in node.names:
                whole = f"{module}.{alias.name}" if module else alias.name
                names[alias.asname or alias.name] = whole
                if whole.partition(".")[0] in MODULES:
                    yield node.lineno, whole
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        name = called(node.func)
        first, _, rest = name.partition(".")
        name = ".".join([*names.get(first, first).split("."), *([rest] if rest else [])][-2:])
        if name in CALLS:
            yield node.lineno, name
        for argument in node.keywords:
            if argument.arg in ARGUMENTS:
                value = argument.value
                if not isinstance(value, ast.Constant) or value.value not in ARGUMENTS[argument.arg]:
                    yield node.lineno, f"{argument.arg}="


def test_no_code_executes_data():
    found = {
        (str(path.relative_to(ROOT)), name): f"{path.relative_to(ROOT)}, line {line}: {name}"
        for path in files()
        for line, name in faults(path.read_text(encoding="utf-8"))
    }
    assert not [text for key, text in found.items() if key not in ALLOWED]
    assert not ALLOWED.keys() - found.keys(), "these exceptions are no longer needed"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import pickle", "pickle"),
        ("def late():\n    from joblib import load", "joblib.load"),
        ("import cloudpickle as data", "cloudpickle"),
        ("eval(text)", "eval"),
        ("import os\nos.system(words)", "os.system"),
        ("from os import system\nsystem(words)", "os.system"),
        ("import os as system\nsystem.popen(words)", "os.popen"),
        ("import subprocess\nsubprocess.run(words, shell=True)", "shell="),
        ("import subprocess\nsubprocess.run(words, shell=flag)", "shell="),
        ("import numpy as np\nnp.load(path, allow_pickle=True)", "allow_pickle="),
        ("import torch\ntorch.load(path)", "torch.load"),
        ("import yaml\nyaml.load(text)", "yaml.load"),
        ("spec.loader.exec_module(module)", "loader.exec_module"),
    ],
)
def test_each_way_to_execute_data_is_detected(source, name):
    assert [found for _, found in faults(source)] == [name]


@pytest.mark.parametrize(
    "source",
    [
        "import re\nre.compile(text)",
        "jax.jit(f).lower(x).compile()",
        "model.eval()",
        "import numpy as np\nnp.load(path, allow_pickle=False)",
        "import subprocess\nsubprocess.run(['ls', path])",
        "import json\njson.load(file)",
        "self.input(x)",
    ],
)
def test_harmless_similar_code_is_not_reported(source):
    assert list(faults(source)) == []
