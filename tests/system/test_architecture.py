"""The table of layers is correct: imports go strictly downwards, files stay short, and no error is swallowed."""

import ast
import functools
import graphlib
import importlib
import itertools
import re
import statistics
import sys
import traceback
from collections.abc import Iterator, Sequence, Set
from pathlib import Path

import pytest
from docstring_members import members
from package_exports import exports, rooms
from package_layers import LAYERS

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "transformer"


# Packages that everything up to `generate` may import: using one module in another project must not require the
# dependencies of training.
CORE = {"jax", "flax", "numpy", "jaxtyping"}
# Files with the public names of a package, which are above all files that they export.
PUBLIC = ("__init__", "nn/__init__", "data/__init__")
# Optional packages, which only one file imports, inside a function.
OPTIONAL = {"nn/quantization": {"qwix"}}
CORE_UNITS = {unit for unit in LAYERS if unit.startswith("nn/")} | {"__init__", "nn/__init__", "config", "generate"}

# Maximum of the median length of a file in the package: half of the files fit on two screens. No limit per file.
LINES = 200


# Folders of tests/ that mirror no folder of the package: tests of other top-level folders, and of the whole system.
EXTRA_TESTS = {"benchmarks", "reliability", "system"}
# Folders of tests/ without tests: data for tests, and the programs that generate it.
TEST_DATA = {"fixtures", "golden"}

# Maximum size of a function in the package: it fits on a page and has few branches.
FUNCTION_LINES, FUNCTION_BRANCHES = 60, 15

# Nodes that count as branches: statements, expressions and loops that select a path of execution.
BRANCHES = (
    *(ast.If, ast.IfExp, ast.BoolOp, ast.match_case, ast.ExceptHandler),
    *(ast.For, ast.AsyncFor, ast.While, ast.comprehension),
)


@functools.cache
def python_files() -> list[Path]:
    """Return all Python files of the repository."""
    folders = ("transformer", "configs", "tests", "benchmarks", "reliability", "examples")
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [*files, *sorted(ROOT.glob("*.py"))]


@functools.cache
def parsed(source: str) -> tuple[list[tuple[int, int, str, str]], list[str]]:
    """Return the imports (line, level, module, name) and the swallowed errors of a source.

    Several tests check all files, and parsing them takes most of the time. `import a` has the level -1.
    """
    found, faults = [], []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, -1, alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [(node.lineno, node.level, node.module or "", alias.name) for alias in node.names]
        elif isinstance(node, ast.ExceptHandler):
            broad = node.type is None or (
                isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
            )
            idle = all(
                isinstance(statement, ast.Pass | ast.Continue)
                or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
                for statement in node.body
            )
            if broad and idle:
                faults.append(f"line {node.lineno}: an exception is swallowed")
    return found, faults


def imports(source: str, package: str = "") -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every import, including those inside functions; `from a import b` gives a.b."""
    for line, level, base, name in parsed(source)[0]:
        if level < 0:
            yield line, base
            continue
        if level:
            parts = package.split(".")
            base = ".".join([*parts[: len(parts) - level + 1], *([base] if base else [])])
        yield line, f"{base}.{name}"


def package_of(path: Path) -> str:
    """Return the package of a file: "transformer.nn.kernels" for transformer/nn/kernels/_blockwise.py."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts[:-1])


def unit_of(path: Path) -> str:
    """Return the row of the table of layers that a file of transformer/ belongs to."""
    return unit_named(path.relative_to(PACKAGE).with_suffix("").parts)


def unit_named(parts: Sequence[str]) -> str:
    """Return the row of ("nn", "kernels", "blockwise"): "nn/kernels". A file without a row belongs to its folder."""
    both = "/".join([parts[0], *(part.removeprefix("_") if part != "__init__" else part for part in parts[1:2])])
    return both if both in LAYERS or parts[0] not in LAYERS or both in PUBLIC else parts[0]


def layer_faults(unit: str, source: str, package: str = "transformer") -> list[str]:
    """Return the imports in a file of `unit` that do not go to a strictly lower level."""
    faults = []
    for line, name in imports(source, package):
        top, _, rest = name.partition(".")
        if top != "transformer":
            continue
        target = unit_named(rest.split("."))
        if target == unit:
            continue
        if target not in LAYERS:
            # transformer/__init__.py is above everything that it exports, and nn/__init__.py above all of nn. Only the
            # command line is above them.
            if unit not in ("cli", "__main__", "__init__"):
                faults.append(f"line {line}: imports {name} from the package itself; import from its file")
        elif unit not in PUBLIC and LAYERS[target] >= LAYERS[unit]:
            faults.append(f"line {line}: {unit} (level {LAYERS[unit]}) imports {target} (level {LAYERS[target]})")
    return faults


def core_faults(source: str, package: str = "transformer", optional: Set[str] = frozenset()) -> list[str]:
    """Return the imports of third-party packages that `import transformer` must not require, except `optional` ones."""
    found = ((line, name.partition(".")[0]) for line, name in imports(source, package))
    allowed = CORE | {"transformer"} | sys.stdlib_module_names | optional
    return [f"line {line}: imports {top}" for line, top in found if top not in allowed]


def swallowed_errors(source: str) -> list[str]:
    """Return the handlers of all exceptions, or of Exception, that do nothing."""
    return parsed(source)[1]


def function_sizes(source: str) -> dict[str, tuple[int, int]]:
    """Return {name: (lines, branches)} of all functions, including methods and nested functions.

    Of functions with equal names, the largest counts. Lines are the lines of code in the body, without signature,
    docstrings, comments and empty lines. Nested functions also count as part of the outer function. Branches are the
    nodes of type `BRANCHES` in the body.
    """
    text, found = source.splitlines(), {}
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        nodes = [node for statement in function.body for node in ast.walk(statement)]
        scopes = [function, *(node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef))]
        docstrings = [scope.body[0] for scope in scopes if ast.get_docstring(scope) is not None]
        code = _lines_of(function.body) - _lines_of(docstrings)
        code = {line for line in code if text[line - 1].strip() and not text[line - 1].lstrip().startswith("#")}
        size = len(code), sum(isinstance(node, BRANCHES) for node in nodes)
        found[function.name] = max(found.get(function.name, (0, 0)), size)
    return found


def _lines_of(statements: Sequence[ast.stmt]) -> set[int]:
    return {line for one in statements for line in range(one.lineno, one.end_lineno + 1)}


def report(faults: dict[Path, list[str]]) -> str:
    return "\n".join(f"{path.relative_to(ROOT)}: {fault}" for path, found in faults.items() for fault in found)


def test_every_file_has_a_level():
    """Every file is in the table of layers, and every row of the table has a file."""
    units = {unit_of(path) for path in PACKAGE.rglob("*.py")} - {*PUBLIC}
    assert units - LAYERS.keys() == set(), "add these to LAYERS and docs/architecture.md"
    assert LAYERS.keys() - units == set(), "remove these from LAYERS and docs/architecture.md"


def test_imports_only_lead_to_lower_levels():
    found = {
        path: layer_faults(unit_of(path), path.read_text(), package_of(path)) for path in sorted(PACKAGE.rglob("*.py"))
    }
    assert not report(found), report(found)


def test_imported_modules_exist():
    """Imported modules exist, also those of imports inside functions that no test may run."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in PACKAGE.rglob("*.py")}
    modules |= {name.removesuffix(".__init__") for name in modules}
    missing = {}
    for path in python_files():
        found = imports(path.read_text(), package_of(path))
        ours = [(line, name) for line, name in found if name.partition(".")[0] == "transformer"]
        missing[path] = [
            f"line {line}: imports {name}" for line, name in ours if not {name, name.rpartition(".")[0]} & modules
        ]
    assert not report(missing), report(missing)


def test_the_core_needs_four_packages():
    core = [path for path in sorted(PACKAGE.rglob("*.py")) if unit_of(path) in CORE_UNITS]
    found = {path: core_faults(path.read_text(), package_of(path), OPTIONAL.get(unit_of(path), set())) for path in core}
    assert not report(found), report(found)


@pytest.mark.parametrize(
    ("unit", "source"),
    [
        ("nn/masks", "from transformer.nn._attention import MultiHeadAttention"),
        ("nn/masks", "from transformer.nn.layers._layers import linear"),
        ("nn/masks", "from transformer import layers"),
        ("nn/masks", "from .layers import linear"),
        ("nn/masks", "from . import layers"),
        ("nn/masks", "def late():\n    import transformer.nn.layers._layers"),
        ("nn/masks", "import transformer"),
        ("training", "from transformer.zoo import ENTRIES"),
        ("zoo", "from transformer.training._recipe import Recipe"),
        ("data", "from transformer.zoo import ENTRIES"),
    ],
)
def test_an_upward_import_is_detected(unit, source):
    assert len(layer_faults(unit, source, "transformer.nn" if unit == "nn/masks" else "transformer")) == 1


@pytest.mark.parametrize(
    ("unit", "source", "package"),
    [
        ("nn/attention", "from transformer.nn._masks import Mask", "transformer.nn"),
        ("nn/attention", "from .masks import Mask\nfrom . import axes", "transformer.nn"),
        ("nn/kernels", "from transformer.nn.kernels._reference import attention", "transformer.nn.kernels"),
        ("nn/kernels", "from .reference import attention\nfrom ..masks import Mask", "transformer.nn.kernels"),
        ("cli", "import transformer\nfrom transformer import __version__", "transformer.cli"),
        ("__init__", "from transformer.nn.models import CausalLM", "transformer"),
    ],
)
def test_a_downward_import_is_allowed(unit, source, package):
    assert layer_faults(unit, source, package) == []


def test_a_training_dependency_in_the_core_is_detected():
    assert core_faults("import optax") == ["line 1: imports optax"]
    assert core_faults("def late():\n    from grain.python import x") == ["line 2: imports grain"]
    assert core_faults("import math\nimport flax.linen as nn\nfrom jax import numpy\nfrom . import axes") == []


def test_nothing_imports_the_entry_points():
    """train.py and the recipes are entry points; shared code belongs into the package. Recipes may import recipes."""
    for path in python_files():
        if "tests" not in path.parts:
            tops = {name.partition(".")[0] for _, name in imports(path.read_text(), package_of(path))}
            assert not tops & ({"train"} if path.parent.name == "configs" else {"train", "configs"}), path


def test_torch_and_tensorflow_stay_out():
    """Only tests and benchmarks compare with torch; nothing needs TensorFlow."""
    for path in python_files():
        tops = {name.partition(".")[0] for _, name in imports(path.read_text(), package_of(path))}
        assert "tensorflow" not in tops, path
        if not {"tests", "benchmarks"} & set(path.relative_to(ROOT).parts):
            assert not tops & {"torch", "transformers"}, path


def misplaced_tests(files: Sequence[str], rooms: set[str]) -> list[str]:
    """Return the test files, relative to tests/, in no folder of `rooms` ("nn", "nn/kernels") or EXTRA_TESTS."""
    return [file for file in files if file.rpartition("/")[0] not in rooms | EXTRA_TESTS]


def test_tests_mirror_the_package():
    """The folders of tests/ mirror the package: tests/nn/kernels/test_ring.py tests transformer/nn/kernels/."""
    rooms = {str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.rglob("__init__.py")} - {"."}
    tests = ROOT / "tests"
    assert misplaced_tests([str(path.relative_to(tests)) for path in sorted(tests.rglob("test_*.py"))], rooms) == []
    folders = {path.parent for path in tests.rglob("*.py")} - {tests}
    unknown = {path for path in folders if path.relative_to(tests).parts[0] not in TEST_DATA} - {
        tests / name for name in rooms | EXTRA_TESTS
    }
    assert not unknown, f"neither a folder of the package nor in EXTRA_TESTS: {unknown}"


def test_a_misplaced_test_is_detected():
    rooms = {"nn", "nn/kernels"}
    assert misplaced_tests(["nn/test_masks.py", "nn/kernels/test_ring.py", "system/test_docs.py"], rooms) == []
    for file in ("test_masks.py", "masks/test_masks.py", "nn/masks/test_masks.py", "fixtures/test_old.py"):
        assert misplaced_tests([file], rooms) == [file]


def hidden_exports(module: str, path: Path) -> set[str]:
    """Return the public names of a public file that it does not export."""
    names = {member.name for member in members(path.read_text(encoding="utf-8")) if "." not in member.name} - {"module"}
    return {f"{module}.{name}" for name in names - exports(path)}


def test_public_names_are_exported():
    """Names without an underscore, in files without an underscore, are in `__all__` of their package."""
    public = rooms()
    assert not set().union(*(hidden_exports(module, path) for module, path in public.items()))
    files = {module for module, path in public.items() if path.name != "__init__.py"}
    assert not {file for file in files if file.rpartition(".")[2] not in exports(public[file.rpartition(".")[0]])}
    assert all(exports(path) for path in public.values()), "each package defines its public names in __all__"


def test_exports_exist_and_match_their_package():
    for module in rooms():
        room = importlib.import_module(module)
        assert {name for name in room.__all__ if not hasattr(room, name)} == set(), module
        assert {*room.__all__} == exports(rooms()[module]), module
        assert {*room.__all__} <= {*dir(room)}, module


def test_an_unexported_public_name_is_detected(tmp_path):
    path = tmp_path / "masks.py"
    path.write_text(
        '__all__ = ["Mask"]\nSIZE, _HIDDEN = 1, 2\n\nclass Mask: ...\n\ndef as_matrix(mask): ...\ndef _cut(): ...\n'
    )
    assert hidden_exports("m", path) == {"m.SIZE", "m.as_matrix"}


def test_files_import_private_modules_directly():
    """Package files import from private files: an `__init__` would cause import cycles and import too much."""
    public = rooms()
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name not in ("__init__.py", "__main__.py"):
            ours = [(line, name.rpartition(".")) for line, name in imports(path.read_text(), package_of(path))]
            found[path] = [
                f"line {line}: imports {name} from {room}, which re-exports it from another file"
                for line, (room, _, name) in ours
                if room in public and name in exports(public[room]) and name not in defined(public[room])
            ]
    assert not report(found), report(found)


def defined(path: Path) -> set[str]:
    """Return the names that a file defines, and the public files in the same folder."""
    own = {member.name for member in members(path.read_text(encoding="utf-8"))}
    return own | {file.stem for file in path.parent.glob("*.py")}


def test_files_do_not_import_each_other_in_circles():
    """Imports inside of functions and for type checkers count too."""
    files = {module_of(path): path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"}
    graph = {
        name: {
            one
            for _, module in imports(path.read_text(), package_of(path))
            for one in (module, module.rpartition(".")[0])
            if one in files
        }
        for name, path in files.items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError with the circle


def test_most_files_are_short():
    lengths = [len(path.read_text().splitlines()) for path in sorted(PACKAGE.rglob("*.py"))]
    assert statistics.median(lengths) <= LINES


def test_no_function_is_larger_than_a_page():
    large = {
        f"{path.relative_to(PACKAGE)} {name}": f"{lines} lines, {branches} branches"
        for path in sorted(PACKAGE.rglob("*.py"))
        for name, (lines, branches) in function_sizes(path.read_text()).items()
        if lines > FUNCTION_LINES or branches > FUNCTION_BRANCHES
    }
    assert not large, "split these into functions with one task each"


def test_measures_the_size_of_a_function():
    """Docstrings, comments, empty lines and the signature do not count; nested functions do."""
    source = '''
def outer(
    a,
    b=[x for x in ()],
):
    """A docstring.

    More of it.
    """
    # a comment

    def inner():
        """Another one."""
        return 1 if a else 2

    try:
        return inner() and [
            y
            for y in b
        ]
    except ValueError:
        while a or b:
            a = b
    match a:
        case 1:
            pass
    for x in b:
        if x:
            pass
'''
    assert function_sizes(source) == {"outer": (16, 9), "inner": (1, 1)}


def test_no_error_is_swallowed():
    found = {path: swallowed_errors(path.read_text()) for path in python_files()}
    assert not report(found), report(found)


@pytest.mark.parametrize("handler", ["except:", "except Exception:", "except BaseException as error:"])
@pytest.mark.parametrize("body", ["pass", "...", "continue", "'a comment'"])
def test_a_swallowed_error_is_detected(handler, body):
    assert len(swallowed_errors(f"for i in x:\n  try:\n    f()\n  {handler}\n    {body}")) == 1


def documented(title: str) -> dict[str, int]:
    """Return the rows of a table in docs/architecture.md: {"axes": 0, "kernels": 2, ...}."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert section, f"docs/architecture.md has no section {title!r}"
    rows = re.findall(r"^\| `([\w/]+?)(?:\.py|/)` \| (\d+) \|", section.group(1), re.MULTILINE)
    return {name.replace("/_", "/"): int(level) for name, level in rows}


def test_the_documented_layer_table_is_current():
    assert documented("Layers") == LAYERS


def test_the_documented_packages_exist():
    """There are at most fifteen, so that a reader can get an overview."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text.partition("\n## Packages\n")[2].partition("\n## ")[0]
    rooms = re.findall(r"^\| `([\w.]+)/?` \|", section, re.MULTILINE)
    there = [path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"]
    assert sorted(rooms) == sorted(there)
    assert len(rooms) <= 15


WALK = re.compile(r"^[│├└ ]*([\w/.]+) +([\w.]+)  +\S", re.MULTILINE)
"""a line of a walk in docs/architecture.md: file or folder, function or class, text"""


def walks() -> list[list[tuple[str, str]]]:
    """Return the (file or folder, name) of each line of the walks of a batch and of a prompt."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    blocks = re.findall(r"^## Walk of [^\n]*\n.*?^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [WALK.findall(block) for block in blocks]


def documented_walk() -> list[str]:
    """Return the documented files from the step to the softmax."""
    files = [f"transformer/{file}" for file, _ in walks()[0]]
    first, last = (files.index(f"transformer/{file}") for file in ("training/_step.py", "nn/kernels/_reference.py"))
    return files[first : last + 1]


def names_in(source: str) -> set[str]:
    """Return the functions and classes that a file defines, methods also as Class.method."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    methods = [(node, one) for node in nodes if isinstance(node, ast.ClassDef) for one in node.body]
    names = {f"{node.name}.{one.name}" for node, one in methods if isinstance(one, ast.FunctionDef)}
    return names | {node.name for node in nodes}


def test_names_of_both_call_paths_are_defined_in_their_files():
    batch, prompt = walks()
    assert len(batch) > 15
    assert len(prompt) > 10
    missing = [
        (place, name)
        for place, name in [*batch, *prompt]
        if not any(name in names_in(path.read_text()) for path in python_files_of(PACKAGE / place))
    ]
    assert not missing, "correct the walks in docs/architecture.md"


def python_files_of(place: Path) -> list[Path]:
    """Return a file, or the files of a folder and its subfolders."""
    return [place] if place.suffix else sorted(place.rglob("*.py"))


def test_an_undefined_name_is_detected():
    assert names_in("class A:\n    def b(self): ...\ndef c(): ...") == {"A", "A.b", "b", "c"}
    assert WALK.findall("│ └ nn/_stacks.py    Decoder  layers\nno line\n") == [("nn/_stacks.py", "Decoder")]


def test_the_command_leads_to_the_step():
    walk = ["train.py", "transformer/cli/_train.py", "transformer/training/_loop.py", documented_walk()[0]]
    for here, there in itertools.pairwise(ROOT / name for name in walk):
        assert imports_directly(here, there), f"{here.relative_to(ROOT)} does not import {there.relative_to(ROOT)}"


@pytest.mark.parametrize("scan", [False, True])
def test_six_files_call_each_other_from_the_step_to_the_softmax(scan, tmp_path, monkeypatch):
    """The call stack of the first softmax of a training step consists of the documented files of the package."""
    stack = files_that_call_the_softmax(tmp_path, monkeypatch, scan)
    assert stack[: stack.index("transformer/training/_step.py")] == [
        "transformer/training/_loop.py",
        "transformer/training/_parallel.py",  # moves the batch to the devices, and compiles the step for them
    ]
    assert stack[stack.index("transformer/training/_step.py") :] == documented_walk()
    assert len(documented_walk()) == 6


class SoftmaxReached(BaseException):
    """Ends a run. It is not an Exception, so that no handler catches it."""


def files_that_call_the_softmax(folder: Path, monkeypatch: pytest.MonkeyPatch, scan: bool) -> list[str]:
    """Return the package files on the call stack when a training step computes a softmax, outermost first."""
    from training_recipes import text_recipe

    from transformer.nn.kernels import _reference as reference
    from transformer.training._loop import train

    softmax, stacks = reference.masked_softmax, []

    def recorded(*given):
        frames = [Path(frame.filename) for frame in traceback.extract_stack()]
        files = [str(path.relative_to(ROOT)) for path in frames if path.is_relative_to(PACKAGE)]
        if "transformer/training/_step.py" not in files:  # the parameters are being initialized
            return softmax(*given)
        stacks.append([file for file, _ in itertools.groupby(files)])
        raise SoftmaxReached

    monkeypatch.setattr(reference, "masked_softmax", recorded)
    recipe = text_recipe(folder, execution={"scan": scan})
    with pytest.raises(SoftmaxReached):
        train(recipe, folder / "run")
    return stacks[0]


def imports_directly(here: Path, there: Path) -> bool:
    """Return whether `here` imports `there`, or a name that the package of `there` re-exports from it."""
    target = module_of(there)
    names = {name for _, name in imports(here.read_text(), package_of(here))}
    init = there.parent / "__init__.py"
    exported = {name for _, name in imports(init.read_text(), package_of(init))} if init.exists() else set()
    ours = {f"{package_of(there)}.{name.rpartition('.')[2]}" for name in exported if name.startswith(f"{target}.")}
    return any(f"{name}.".startswith(f"{target}.") for name in names) or bool(names & ours)


def module_of(path: Path) -> str:
    """Return the dotted name of a file: "transformer.nn.kernels" for transformer/nn/kernels/__init__.py."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_a_missing_import_is_detected():
    package = PACKAGE / "nn" / "models"
    assert imports_directly(PACKAGE / "training" / "tasks" / "_texts.py", package / "_causal_lm.py")
    assert not imports_directly(PACKAGE / "training" / "_step.py", package / "_causal_lm.py")
    assert not imports_directly(PACKAGE / "nn" / "_attention.py", PACKAGE / "nn" / "kernels" / "_reference.py")
