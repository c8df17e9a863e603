"""The files of inference/ import each other in one direction: loaded model, verbs, opened model."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

from transformer import inference

ROOM = Path(inference.__file__).parent


def imported(file):
    """Return the files of the room that a file imports, inside functions and for type checkers too."""
    modules = [node.module for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
    return {name.rpartition(".")[2] for name in modules if name and name.startswith("transformer.inference._")}


def test_imports_have_no_cycle():
    graph = {file.stem: imported(file) for file in ROOM.glob("_[a-z]*.py")}
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError
    assert not graph["_loaded_model"]
    assert all("_opened_model" not in graph[name] for name in order)
