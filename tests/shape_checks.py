"""Check the annotations of modules while the tests run: shapes and types of arrays, with jaxtyping and beartype.

Tracing a model calls thousands of annotated functions, so the checks do only what they need. `jaxtyping.jaxtyped` binds
the arguments to the signature at each call and checks them twice, for its error message, which took a sixth of the CPU
time of the tests. `checked` leaves this out, and functions without shapes in their annotations need only beartype.
Functions inside functions are not checked: Python defines them again at each call of the outer function, and building
the checks each time took another sixth.
"""

import ast
import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Sequence

import beartype
import jaxtyping
import jaxtyping._import_hook as hook

__all__ = ["checked", "install"]

CHECK = beartype.beartype(conf=beartype.BeartypeConf(violation_type=jaxtyping.TypeCheckError))
SETTINGS = jaxtyping.config
AXES = jaxtyping.jaxtyped("context")
"""context with its own sizes of axes, for the arguments and the result of one call"""


def checked(thing):
    """Return a function that checks its annotations at each call. Of a class, only the constructor of a dataclass does.

    Raises:
        jaxtyping.TypeCheckError: at a call, if an argument or the result does not match its annotation.
    """
    if isinstance(thing, type):
        if dataclasses.is_dataclass(thing) and not hasattr(thing.__init__, "unchecked"):
            thing.__init__ = checked(thing.__init__)
        return thing
    annotations = {name: _resolved(value, thing.__globals__) for name, value in inspect.get_annotations(thing).items()}
    if not annotations:
        return thing
    # The caller's function keeps its own annotations, which may be strings.
    copy = types.FunctionType(thing.__code__, thing.__globals__, thing.__name__, thing.__defaults__, thing.__closure__)
    functools.update_wrapper(copy, thing)
    del copy.__wrapped__
    copy.__kwdefaults__, copy.__annotations__ = thing.__kwdefaults__, annotations
    check = CHECK(copy)

    if any(map(_has_shape, annotations.values())):

        @functools.wraps(thing)
        def wrapper(*args, **kwargs):
            __tracebackhide__ = True
            if SETTINGS.jaxtyping_disable:
                return thing(*args, **kwargs)
            with AXES:
                return check(*args, **kwargs)

    else:

        @functools.wraps(thing)
        def wrapper(*args, **kwargs):
            __tracebackhide__ = True
            return (thing if SETTINGS.jaxtyping_disable else check)(*args, **kwargs)

    wrapper.unchecked = thing
    return wrapper


def _resolved(annotation, namespace):
    """Return the type that an annotation names; `Any` if a part of it is imported for type checkers only."""
    holder = types.SimpleNamespace(__annotations__={"value": annotation})
    try:
        return typing.get_type_hints(holder, namespace, include_extras=True)["value"]
    except NameError:
        return typing.Any


def _has_shape(hint) -> bool:
    if isinstance(hint, type) and issubclass(hint, (jaxtyping.AbstractArray, jaxtyping.PyTree)):
        return True
    return any(map(_has_shape, typing.get_args(hint)))


class OutermostFunctions(hook.JaxtypingTransformer):
    """Decorate classes and functions, except inside functions. It adds to a private class, so its test checks both."""

    def __init__(self, *, typechecker):
        super().__init__(typechecker=Decorator())

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


class Decorator:
    """The decorator that `OutermostFunctions` adds."""

    def get_ast(self) -> ast.expr:
        return ast.parse(f"__import__({__name__!r}).checked", mode="eval").body


def install(modules: Sequence[str]) -> None:
    """Check modules that are imported later.

    The name of the decorator is part of the name of stored bytecode, so bytecode of jaxtyping's own hook is not used.
    """
    hook.JaxtypingTransformer = OutermostFunctions
    hook.install_import_hook(modules, f"{__name__}.checked")
