"""The Jinja environment of chat templates: the settings of transformers, a sandbox, and bounded work.

A template comes with downloaded weights, so it is untrusted code. Jinja's sandbox forbids attributes that lead to the
interpreter, but not endless work: nested loops, strings that double in every iteration, or a width of a billion. Here
every loop iteration, macro and call counts as a step; steps, time, and the size of every string and list are limited.
The checks run inside the rendering thread, so they need neither signals nor a second thread.

Only `_template.py` imports this module, when a template is compiled: jinja2 is an optional dependency.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes as nodes
import jinja2.sandbox
from jinja2.visitor import NodeTransformer

MOST_STEPS = 1_000_000
"""maximum number of loop iterations, macro calls and method calls of one rendering"""
MOST_SECONDS = 10.0
"""maximum time of one rendering"""
LARGEST = 2**24
"""maximum length of a string or list that a template builds, and of the rendered text"""
MOST_WRITTEN = 2**26
"""maximum number of characters that all `{{ ... }}` of a rendering write, those inside macros included"""
MOST_COPIED = 2**28
"""maximum number of characters of template text that loops and macros repeat"""
WIDEST = 10_000
"""maximum width, indentation or precision that a template may ask for"""
MOST_BITS = 4096
"""maximum size of an integer that a template computes"""


class TooMuchWork(Exception):
    """A template exceeded a limit of this module; the message names the limit."""


class Refused(jinja2.TemplateError):
    """The template called `raise_exception`."""


@dataclass
class _Budget:
    """Work of one rendering so far, and its deadline."""

    now: datetime
    steps: int = 0
    copied: int = 0
    written: int = 0
    blocks_length: int = 0
    """characters rendered by the template so far"""
    generated: list[tuple[int, int]] = field(default_factory=list)
    """(start, end) of the text inside `{% generation %}`"""
    deadline: float = field(default_factory=lambda: time.monotonic() + MOST_SECONDS)

    def charge(self, copied: int = 0) -> None:
        """Count one step that repeats `copied` characters of template text."""
        self.steps += 1
        self.copied += copied
        if self.steps > MOST_STEPS:
            raise TooMuchWork(f"it takes more than {MOST_STEPS:,} steps")
        if self.copied > MOST_COPIED:
            raise TooMuchWork(f"its loops repeat more than {MOST_COPIED:,} characters")
        if time.monotonic() > self.deadline:
            raise TooMuchWork(f"it takes longer than {MOST_SECONDS:g} s")


# The budget of the rendering in this thread; None while a template is compiled.
_BUDGET: ContextVar[_Budget | None] = ContextVar("chat_template_budget", default=None)


def render(template: jinja2.Template, values: dict[str, Any], now: datetime) -> tuple[str, list[tuple[int, int]]]:
    """Render a template with bounded work.

    Args:
        template: a template of `environment`.
        values: variables of the template: plain JSON values.
        now: the time that `strftime_now` formats.

    Returns:
        The text, and the (start, end) of each part inside `{% generation %}`.

    Raises:
        TooMuchWork: a limit is exceeded.
        jinja2.TemplateError, Exception: errors of the template.
    """
    budget = _Budget(now)
    token = _BUDGET.set(budget)
    try:
        blocks = []
        for block in template.generate(**values):
            blocks.append(block)
            budget.blocks_length += len(block)
            if budget.blocks_length > LARGEST:
                raise TooMuchWork(f"its text is longer than {LARGEST:,} characters")
        return "".join(blocks), budget.generated
    except (RecursionError, MemoryError):
        raise TooMuchWork("its calls are nested too deeply") from None
    finally:
        _BUDGET.reset(token)


@functools.cache
def environment() -> jinja2.Environment:
    """Return the environment with the filters, functions and tags that transformers gives to chat templates."""
    made = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
        finalize=_finalize,
        loader=jinja2.FunctionLoader(_no_file),
    )
    made.filters["tojson"] = _tojson
    made.filters = {name: _checked_filter(name, function) for name, function in made.filters.items()}
    made.filters |= {"_charge": _charge, "_concatenate": _concatenate, "_bounded": _bounded}
    made.tests = {name: _checked_test(function) for name, function in made.tests.items()}
    made.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now, "dict": _Dict()}
    made.globals |= {"namespace": _Namespace}
    del made.globals["lipsum"]  # random text
    return made


def _no_file(name: str) -> NoReturn:
    """Refuse the tags include, import and extends: a template can't read files."""
    raise jinja2.TemplateRuntimeError(f"a chat template can't read other templates, got {name!r:.80}")


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox with the checks of this module."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _with_checks(super()._parse(source, name, filename), self)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _UNBOUNDED and super().is_safe_attribute(obj, attr, value)

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(obj, _bounded_value(argument))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # The first two names can't collide with keyword arguments of the template's call.
        _step()
        args = _checked_arguments(__obj, args, kwargs)
        return _check_size(super().call(__context, __obj, *args, **kwargs))


# Checks inside the compiled template: statements and filters that the parser adds to the syntax tree.


def _with_checks(tree: nodes.Template, made: jinja2.Environment) -> nodes.Template:
    """Add a step to every loop iteration, macro and block, and checks to `~`, comparisons and keys of dicts."""
    tree = _Checks().visit(tree)
    for node in list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block))):
        copied = sum(len(data.data) for data in _own_text(node))
        step = nodes.Filter(nodes.Const(copied), "_charge", [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(step).set_lineno(node.lineno))
    tree.set_environment(made)
    return tree


def _own_text(node: nodes.Node) -> Iterator[nodes.TemplateData]:
    """Yield the template text in a node, except that of loops and macros inside, which are counted for themselves."""
    for child in node.iter_child_nodes():
        if isinstance(child, nodes.TemplateData):
            yield child
        elif not isinstance(child, nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block):
            yield from _own_text(child)


class _Checks(NodeTransformer):
    """Replace `a ~ b` by `[a, b] | _concatenate`, `a == b` by `a | _bounded == b | _bounded`, and keys likewise."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        parts = nodes.List(node.nodes).set_lineno(node.lineno)
        return nodes.Filter(parts, "_concatenate", [], [], None, None).set_lineno(node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = self._bounded(node.expr)
        for operand in node.ops:
            operand.expr = self._bounded(operand.expr)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = self._bounded(node.key)
        return node

    def _bounded(self, node: nodes.Expr) -> nodes.Expr:
        if isinstance(node, nodes.Const):
            return node
        return nodes.Filter(node, "_bounded", [], [], None, None).set_lineno(node.lineno)


def _step() -> None:
    if (budget := _BUDGET.get()) is not None:
        budget.charge()


@jinja2.pass_context  # so that the compiler does not evaluate the filter itself
def _charge(context: Any, copied: int) -> str:
    if (budget := _BUDGET.get()) is not None:
        budget.charge(copied)
    return ""


@jinja2.pass_context
def _concatenate(context: Any, parts: list[Any]) -> str:
    _check_length(sum(_text_length(part) for part in parts))
    return "".join(map(str, parts))


@jinja2.pass_context
def _bounded(context: Any, value: Any) -> Any:
    return _bounded_value(value)


def _bounded_value(value: Any) -> Any:
    """Check a value before it is compared or hashed: both visit all entries, which nested lists can share."""
    if isinstance(value, list | tuple | dict):
        _text_length(value)
    return value


def _finalize(value: Any) -> Any:
    """Check and count a value before it is written into the text; the value is unchanged."""
    length = _text_length(value)
    if (budget := _BUDGET.get()) is not None:
        budget.written += length
        if budget.written > MOST_WRITTEN:
            raise TooMuchWork(f"it writes more than {MOST_WRITTEN:,} characters")
    return value


# Limits of values.


def _check_length(length: int) -> None:
    if length > LARGEST:
        raise TooMuchWork(f"it builds a text or list of more than {LARGEST:,} characters or entries")


def _check_size(value: Any) -> Any:
    if isinstance(value, str | bytes | list | tuple | dict):
        _check_length(len(value))
    return value


def _text_length(value: Any) -> int:
    """Return about the length of `str(value)`; stops early: nested lists can share parts, and be huge as a text."""
    if isinstance(value, str):
        return len(value)
    length, waiting = 0, [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple):
            waiting += one
        length += len(one) if isinstance(one, str) else 8
        _check_length(length + len(waiting))
    return length


def _check_operation(operator: str, left: Any, right: Any) -> None:
    """Check the result of an operator before it is computed."""
    sized = str, list, tuple
    whole = isinstance(left, int) and isinstance(right, int)
    if operator == "+" and isinstance(left, sized) and isinstance(right, sized):
        _check_length(len(left) + len(right))
    elif operator == "%" and isinstance(left, str):
        _check_widths(_PERCENT, left, right if isinstance(right, tuple) else [right])
        _check_length(len(left) + _text_length(right) * max(left.count("%"), 1))
    elif operator == "*" and whole:
        _check_bits(left.bit_length() + right.bit_length())
    elif operator == "*":
        count = next((x for x in (left, right) if isinstance(x, int)), 0)
        _check_length(sum(len(x) for x in (left, right) if isinstance(x, sized)) * max(count, 0))
    elif operator == "**" and whole:
        _check_bits(left.bit_length() * max(right, 1))


def _check_bits(bits: int) -> None:
    if bits > MOST_BITS:
        raise TooMuchWork(f"it computes a number of more than {MOST_BITS:,} bits")


_PERCENT = re.compile(r"%(?:\([^)]*\))?([-+ #0-9.*]*)")
"""a field of the operator %, with its flags, width and precision"""
_BRACES = re.compile(r"\{[^{}]*:([^{}]*)")
"""a field of str.format, with its format"""


def _check_widths(fields: re.Pattern, layout: str, values: Sequence[Any]) -> None:
    """Check the widths in a format string, and those that `%` takes from the formatted values."""
    if fields is _BRACES and re.search(r":[^{}]*\{", layout):
        raise TooMuchWork("it computes the format of a text")
    total = 0
    for given in fields.findall(layout):
        numbers = re.findall(r"[0-9]+", given)
        if any(len(digits) > 5 or int(digits) > WIDEST for digits in numbers):
            raise TooMuchWork(f"it formats text with a width of more than {WIDEST:,}")
        total += sum(map(int, numbers))
        if "*" in given:
            total += given.count("*") * WIDEST
            _check_numbers(values)
    _check_length(total)


def _check_numbers(values: Sequence[Any]) -> None:
    for value in values:
        if isinstance(value, int | float) and not -WIDEST <= value <= WIDEST:
            raise TooMuchWork(f"it asks for a width of more than {WIDEST:,}")


_UNBOUNDED = frozenset(["encode", "translate", "to_bytes"])
"""methods that templates can't call: their results, bytes included, can be of any length"""
_COMPARING = frozenset(["get", "index", "count", "changed", "fromkeys"])
"""methods that compare or hash their arguments"""


def _checked_arguments(function: Any, args: tuple, kwargs: dict[str, Any]) -> tuple:
    """Check the call of a method, and return its positional arguments; those of `join` become a list."""
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    wrapped = getattr(function, "__wrapped__", None)  # the sandbox wraps str.format
    if wrapped is not None and name in ("format", "format_map"):
        owner = getattr(wrapped, "__self__", None)
    if name in _COMPARING:
        _bounded_value([owner, *args])
    if not isinstance(owner, str):
        return args
    if name == "join" and len(args) == 1:
        args = (list(args[0]),)  # the lengths of an iterator's items are not known before it is read
    _check_string_method(owner, name, args, kwargs)
    return args


def _check_string_method(owner: str, name: str, args: tuple, kwargs: dict[str, Any]) -> None:
    """Check a call of a string method, whose result can be much longer than its arguments."""
    given = (*args, *kwargs.values())
    if name in ("format", "format_map"):
        _check_widths(_BRACES, owner, given)
        _check_length(len(owner) + _text_length(list(given)) * max(owner.count("{"), 1))
    elif name == "replace":
        _check_replacement(owner, *given[:2])
    elif name == "join" and args:
        _check_joined(args[0], owner)
    elif name in ("center", "ljust", "rjust", "zfill", "expandtabs"):
        _check_numbers(given)
        tabs = owner.count("\t") if name == "expandtabs" else 0
        _check_length(len(owner) + tabs * next((size for size in given if isinstance(size, int)), 8))


def _check_replacement(text: str, old: Any = "", new: Any = "") -> None:
    if isinstance(old, str) and isinstance(new, str):
        _check_length(len(text) + text.count(old) * len(new))


def _check_joined(parts: list[Any], separator: Any) -> None:
    _check_length(sum(_text_length(part) for part in parts) + len(parts) * _text_length(separator))


_WIDTHS = frozenset(["center", "indent", "wordwrap", "batch", "slice", "round", "tojson"])
"""filters whose arguments are widths or counts"""
_TEXTS = frozenset(
    ["string", "tojson", "pprint", "join", "format", "urlencode", "xmlattr", "safe", "escape", "e", "trim"]
)
"""filters that convert a value to text"""
_COMPARED = frozenset(["sort", "unique", "min", "max", "groupby", "dictsort"])
"""filters that compare or hash the entries of a value"""
_ARGUMENTS = {
    "join": ("d",),
    "replace": ("old", "new"),
    "indent": ("width",),
    "sum": ("attribute", "start"),
    "urlize": ("trim_url_limit", "nofollow", "target", "rel"),
    "wordwrap": ("width", "break_long_words", "wrapstring"),
}
"""names of the arguments of filters whose results can be much longer than the value"""


def _checked_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that checks its arguments and its result."""
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0  # the environment or context

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _step()
        before, value, rest = args[:skipped], args[skipped], args[skipped + 1 :]
        if name in _WIDTHS:
            _check_numbers([*rest, *kwargs.values()])
        if name in _TEXTS or name in _COMPARED:
            _text_length(value)
        if name == "format":
            _check_operation("%", str(value), (*rest, *kwargs.values()))
        elif name == "join":
            value = list(value)  # the lengths of an iterator's items are not known before it is read
        if name in _ARGUMENTS:
            _check_growth(name, value, {**dict(zip(_ARGUMENTS[name], rest, strict=False)), **kwargs})
        return _check_size(function(*before, value, *rest, **kwargs))

    return checked


def _check_growth(name: str, value: Any, given: dict[str, Any]) -> None:
    """Check a filter whose result can be much longer than its value; `given` are its arguments by name."""
    if name == "join":
        _check_joined(value, given.get("d", ""))
    elif name == "sum":
        if isinstance(given.get("start"), list | tuple | str):
            raise TooMuchWork("it adds lists with the filter sum")
    elif name == "replace":
        _check_replacement(str(value), given.get("old"), given.get("new"))
    else:
        text = str(value)
        times = {"indent": text.count("\n") + 1, "wordwrap": len(text) + 1, "urlize": len(text.split())}[name]
        added = [one for one in given.values() if isinstance(one, str)]
        width = given.get("width", 4) if name == "indent" and not added else 0
        _check_length(len(text) + times * (sum(map(len, added)) + max(width, 0)))


def _checked_test(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a test, such as `equalto` or `in`, that checks its arguments before it compares them."""

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            _bounded_value(value)
        return function(*args, **kwargs)

    return checked


# Functions and tags that transformers adds to Jinja.


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter escapes the characters of HTML."""
    for text in (indent, *(separators or ())):
        if isinstance(text, str) and len(text) > WIDEST:
            raise TooMuchWork(f"it asks for a width of more than {WIDEST:,}")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    length, pieces = 0, []
    for piece in encoder.iterencode(value):
        length += len(piece)
        _check_length(length)
        pieces.append(piece)
    return "".join(pieces)


def _raise_exception(message: Any) -> None:
    raise Refused(str(message))


def _strftime_now(layout: str) -> str:
    _check_widths(re.compile("%([-_0^#0-9]*)"), layout, [])
    budget = _BUDGET.get()
    return (datetime.now() if budget is None else budget.now).strftime(layout)


class _Dict:
    """`dict` in a template: not the class itself, whose attributes lead to the interpreter."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict:
        return dict(*map(_bounded_value, args), **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(jinja2.utils.Namespace):
    """`namespace` in a template, without attributes that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any):
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _Namespace._check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check_name(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check_name(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.sandbox.SecurityError(f"a namespace can't have the attribute {name!r}")


class _Generation(jinja2.ext.Extension):
    """The tag `{% generation %} ... {% endgeneration %}`: the text inside is what the assistant wrote."""

    tags = frozenset(["generation"])

    def parse(self, parser: Any) -> nodes.CallBlock:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_record"), [], [], body).set_lineno(line)

    def _record(self, caller: Callable[[], str]) -> str:
        text = caller()
        if (budget := _BUDGET.get()) is not None:
            budget.generated.append((budget.blocks_length, budget.blocks_length + len(text)))
        return text


def line_of(error: BaseException) -> int | None:
    """Return the line of a template at which an error occurred, if it is known."""
    if (line := getattr(error, "lineno", None)) is not None:
        return line
    found, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            found = trace.tb_lineno
        trace = trace.tb_next
    return found


@contextlib.contextmanager
def during_compilation() -> Iterator[None]:
    """Convert the errors of Python's own parser for a template that is nested too deeply."""
    try:
        yield
    except (RecursionError, MemoryError):
        raise TooMuchWork("its blocks or expressions are nested too deeply") from None
