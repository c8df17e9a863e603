"""Check the annotations of modules while the tests run: shapes and types of arrays, with jaxtyping and beartype.

Functions inside functions are not checked. Python defines them again at each call of the outer function, and building
the checks each time took a sixth of the CPU time of the tests.
"""

import ast
from collections.abc import Sequence

import jaxtyping._import_hook as hook
from beartype import beartype as check

__all__ = ["check", "install"]


class OutermostFunctions(hook.JaxtypingTransformer):
    """Decorate classes and functions, except inside functions. It adds to a private class, so its test checks both."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        return self._visit(node, super().visit_FunctionDef)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        return self._visit(node, super().visit_ClassDef)

    def _visit(self, node, visit):
        inside = any(isinstance(parent, ast.FunctionDef) for parent in self._parents)
        self._no_type_check_level += inside
        try:
            return visit(node)
        finally:
            self._no_type_check_level -= inside


def install(modules: Sequence[str]) -> None:
    """Check modules that are imported later.

    The name of the checker is part of the name of stored bytecode, so bytecode of jaxtyping's own hook is not used.
    """
    hook.JaxtypingTransformer = OutermostFunctions
    hook.install_import_hook(modules, f"{__name__}.check")
