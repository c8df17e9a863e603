"""The patches in examples/elsewhere/ are well-formed and match our signatures; with a checkout, they are trained."""

import ast
import importlib
import inspect
import os
import pathlib
import re
import subprocess
import sys

import flax.linen as nn
import numpy as np
import pytest

from examples.elsewhere import compare

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "elsewhere"
PATCHES = sorted(path.name for path in FOLDER.glob("*.patch"))
DRIVERS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "compare")
README = (FOLDER / "README.md").read_text(encoding="utf-8")

COMPARISONS = {
    "nanodo.patch": ("nanodo", "nanodo"),
    "nanodo_module.patch": ("nanodo", "nanodo"),
    "big_vision.patch": ("big_vision", "big_vision"),
    "lm1b.patch": ("lm1b", "flax"),
    "gemma.patch": ("gemma", "gemma"),
}
"""patch -> its driver, and the folder of the checkout inside TRANSFORMER_ELSEWHERE"""


def text_of(patch):
    return (FOLDER / patch).read_text(encoding="utf-8")


def hunks(text):
    """Return (file, first old line, number of old lines, number of new lines, lines) of each hunk of a unified diff."""
    found = []
    for line in text.splitlines():
        if line.startswith("--- a/"):
            file = line[len("--- a/") :]
        elif line.startswith("@@ "):
            start, old, new = map(int, re.match(r"@@ -(\d+),(\d+) \+\d+,(\d+) @@", line).groups())
            found.append((file, start, old, new, []))
        elif found and line[:1] in (" ", "+", "-") and not line.startswith("+++ "):
            found[-1][4].append(line)
    return found


def side(lines, sign):
    """Return the lines of a hunk before ("-") or after ("+") the patch."""
    return [line[1:] for line in lines if line[0] in (" ", sign)]


def write_original(text, folder):
    """Write the files that a patch changes, as far as the patch shows them; all other lines are empty."""
    files = {}
    for file, start, old, _, lines in hunks(text):
        whole = files.setdefault(file, [])
        whole += [""] * (start - 1 + old - len(whole))
        whole[start - 1 : start - 1 + old] = side(lines, "-")
    for file, lines in files.items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return sorted(files)


def imported(text):
    """Return the imports of a patch from this library: {local name: object}."""
    names = {}
    for line in [line for hunk in hunks(text) for line in hunk[4] if line.startswith("+")]:
        if re.match(r"\+\s*(from|import) transformer\b", line):
            (node,) = ast.parse(line[1:].strip()).body
            module = importlib.import_module(node.module)
            names |= {alias.asname or alias.name: getattr(module, alias.name) for alias in node.names}
    return names


def calls(text, name):
    """Return every call of `name` in the patched lines, including calls of its result: "Name(...)(...)"."""
    found = []
    for hunk in hunks(text):
        code = "\n".join(line for line in side(hunk[4], "+") if "import" not in line)
        for match in re.finditer(rf"(?<![\w.]){name}[\w.]*(?=\()", code):
            end = match.end()
            while code[end : end + 1] == "(":
                end = closing(code, end) + 1
            found.append(ast.parse(code[match.start() : end], mode="eval").body)
    return found


def closing(code, start):
    """Return the index of the parenthesis that closes the one at `start`, for code without parentheses in strings."""
    depth = 0
    for place in range(start, len(code)):
        depth += {"(": 1, ")": -1}.get(code[place], 0)
        if depth == 0:
            return place
    pytest.fail(f"a call does not end within its hunk; create the patch with more context: {code[start:]}")


def bind(node, names):
    """Check the arguments of a call, and of the calls inside `Name(...)(...)`, against the signatures."""
    if isinstance(node.func, ast.Call):
        module = bind(node.func, names)
        assert issubclass(module, nn.Module)
        function, first = module.__call__, ["self"]
    else:
        head, *attributes = ast.unparse(node.func).split(".")
        function, first = names[head], []
        for attribute in attributes:
            function = getattr(function, attribute)
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    inspect.signature(function).bind(*first, *node.args, **keywords)
    return function


def test_every_patch_has_a_comparison():
    assert sorted(COMPARISONS) == PATCHES
    assert {driver for driver, _ in COMPARISONS.values()} == set(DRIVERS)


@pytest.mark.parametrize("patch", PATCHES)
def test_a_patch_names_its_source(patch):
    header = text_of(patch).partition("diff --git")[0]
    assert re.search(r"^Project: [\w-]+/\w+ \(https://github.com/", header, re.M)
    assert re.search(r"^Commit:  ([0-9a-f]{40}$|tags v)", header, re.M)
    assert "License: Apache-2.0" in header
    assert "Replaces " in header


@pytest.mark.parametrize("patch", PATCHES)
def test_a_patch_applies_to_its_context_lines(patch, tmp_path):
    text = text_of(patch)
    for _, _, old, new, lines in hunks(text):
        assert (len(side(lines, "-")), len(side(lines, "+"))) == (old, new)
    files = write_original(text, tmp_path / "original")
    folder = files[0].partition("/")[0]
    copy = compare.patched_copy(tmp_path / "original", patch, folder)
    for file in files:
        before, after = ((top / file).read_text() for top in (tmp_path / "original", copy))
        assert "transformer" in after
        assert "transformer" not in before


@pytest.mark.parametrize("patch", PATCHES)
def test_a_patch_fits_our_signatures(patch):
    text = text_of(patch)
    names = imported(text)
    assert names
    for name in names:
        found = calls(text, name)
        assert found, f"{patch} imports {name} but does not call it"
        for node in found:
            bind(node, names)


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        ("Mask.casual()", "casual"),
        ("MultiHeadAttention(num_head=2)(x)", "num_head"),
        ("MultiHeadAttention(num_heads=2)(x, x, x)", "too many positional"),
        ("dot_product_attention(q, k)", "value"),
    ],
)
def test_a_mismatched_call_is_detected(call, problem):
    """The check above can fail."""
    name = re.match(r"\w+", call).group()
    text = f"--- a/x.py\n+++ b/x.py\n@@ -1,0 +1,2 @@\n+from transformer import {name}\n+y = {call}\n"
    names, (node,) = imported(text), calls(text, name)
    with pytest.raises((TypeError, AttributeError), match=problem):
        bind(node, names)


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_driver_is_short_and_documents_its_command(driver):
    text = (FOLDER / f"{driver}.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 80
    document = ast.get_docstring(ast.parse(text))
    assert f"Usage: python -m examples.elsewhere.{driver} CHECKOUT" in document


@pytest.mark.parametrize("patch", PATCHES)
def test_the_readme_has_a_row_for_each_patch(patch):
    text = text_of(patch)
    (row,) = [line for line in README.splitlines() if line.startswith("|") and f"[`{patch}`]({patch})" in line]
    lines = [line for hunk in hunks(text) for line in hunk[4]]
    added, removed = (sum(line[0] == sign for line in lines) for sign in "+-")
    assert f"| +{added} −{removed} |" in row
    commit = re.search(r"^Commit:  (.*)$", text, re.M).group(1)
    assert (commit[:7] if re.fullmatch(r"[0-9a-f]{40}", commit) else re.search(r"v[\d.]+", commit).group()) in row
    assert f"python -m examples.elsewhere.{COMPARISONS[patch][0]} " in row


def test_check_stops_on_a_difference(capsys):
    compare.check([2.0, 1.0], [2.0, 1.0 + 1e-7], 1e-6)
    assert "largest relative difference between the losses: 1.0e-07" in capsys.readouterr().out
    for other in (1.0 + 1e-5, np.nan):
        with pytest.raises(SystemExit, match="more than the tolerance"):
            compare.check([2.0, 1.0], [2.0, other], 1e-6)


def test_load_separates_two_versions(tmp_path):
    for version in ("one", "two"):
        (tmp_path / version / "someproject").mkdir(parents=True)
        (tmp_path / version / "someproject" / "__init__.py").write_text("")
        (tmp_path / version / "someproject" / "names.py").write_text(f"name = {version!r}\n")
        (tmp_path / version / "someproject" / "model.py").write_text("from someproject.names import name\n")
    loaded = [compare.load(tmp_path / version, "someproject.model")[0] for version in ("one", "two")]
    assert [module.name for module in loaded] == ["one", "two"]
    assert str(tmp_path / "two") not in sys.path


def test_a_wrong_checkout_is_an_error(tmp_path):
    with pytest.raises(SystemExit, match="nanodo/"):
        compare.patched_copy(tmp_path, "nanodo.patch", "nanodo")
    (tmp_path / "nanodo").mkdir()
    (tmp_path / "nanodo" / "model.py").write_text("another version\n")
    with pytest.raises(SystemExit, match="Check out the commit that the patch names"):
        compare.patched_copy(tmp_path, "nanodo.patch", "nanodo")


@pytest.mark.slow
@pytest.mark.parametrize("patch", PATCHES)
def test_the_patched_project_trains_like_the_original(patch):
    driver, project = COMPARISONS[patch]
    checkouts = os.environ.get("TRANSFORMER_ELSEWHERE")
    if not checkouts:
        pytest.skip("TRANSFORMER_ELSEWHERE is not set to a folder with checkouts: see examples/elsewhere/README.md")
    checkout = pathlib.Path(checkouts).resolve() / project
    if not checkout.is_dir():
        pytest.skip(f"checkout {checkout} not found: see examples/elsewhere/README.md")
    arguments = [str(checkout), patch] if driver == "nanodo" else [str(checkout)]
    command = [sys.executable, "-m", f"examples.elsewhere.{driver}", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "largest relative difference between the losses" in done.stdout
