"""The text of --help: options are fields of dataclasses, and the string below a field is its meaning.

A clause "None: ..." at the end of this string describes the default of an option whose value is None.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import inspect
import itertools
import re
import shutil
import textwrap
import types
import typing
from typing import Literal, Union


def command_help(command: type, called: str) -> str:
    """Return the help of a command, a dataclass whose fields are its options; `called` are the words that call it."""
    fields = dataclasses.fields(command)
    arguments = [f"{metavar_of(f)}{' ...' if 'tuple' in str(f.type) else ''}" for f in fields if is_positional(f)]
    width = max(shutil.get_terminal_size().columns - 2, 20)
    about = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    parser = help_parser(
        " ".join([called, *arguments, "[OPTIONS]"]), "\n\n".join(textwrap.fill(p, width) for p in about)
    )
    positional, options = parser.add_argument_group("arguments"), parser.add_argument_group("options")
    hints, docs = typing.get_type_hints(command), field_docs(command)
    for field in fields:
        name, doc = field.name.replace("_", "-"), docs.get(field.name, "")
        if is_positional(field):
            positional.add_argument(metavar_of(field), help=_escaped(doc))
        elif dataclasses.is_dataclass(field.default):
            nested = parser.add_argument_group(
                name, textwrap.fill(inspect.cleandoc(field.default.__doc__ or ""), width)
            )
            for inner in dataclasses.fields(field.default):
                add_option(nested, f"{name}.{inner.name}", field.default, inner.name)
        elif field.default is False:
            options.add_argument(f"--{name}", action="store_true", help=_escaped(doc))
        else:
            doc, placeholder = _option(field, doc, hints[field.name])
            options.add_argument(f"--{name}", metavar=placeholder, help=_escaped(doc))
    return parser.format_help()


def _option(field: dataclasses.Field, doc: str, hint: object) -> tuple[str, str]:
    """Return the meaning of an option with its default, and the placeholder of its value."""
    notes = []
    if "UseAppendAction" in str(field.type):
        notes, hint = ["repeatable"], typing.get_args(hint)[0]
    doc, default = described(doc, None if field.default == () else field.default)
    if field.default is dataclasses.MISSING:
        notes.append("required")
    elif default != "none":
        notes.append(f"default: {default}")
    doc += f" ({'; '.join(notes)})" if notes else ""
    return doc, metavar(hint).replace("TEXT", "PATH" if "PathText" in str(field.type) else "TEXT")


def help_parser(usage: str, description: str) -> argparse.ArgumentParser:
    """Return a parser that only formats a help text: it keeps the lines of the description."""
    layout = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=6)
    return argparse.ArgumentParser(usage=usage, description=description, add_help=False, formatter_class=layout)


def add_option(section: argparse._ArgumentGroup, path: str, part: object, name: str, *, off: bool = False) -> None:
    """Add the option `path` ("model.num_layers") of a field of a dataclass to a group of arguments.

    The value of the dataclass `part` is the default; `off`: the dataclass is not in use.
    """
    doc, default = described(field_docs(type(part)).get(name, ""), getattr(part, name))
    section.add_argument(
        f"--{path.replace('_', '-')}",
        metavar=metavar(typing.get_type_hints(type(part))[name]),
        help=_escaped(f"{doc} (default: {'off' if off else default})"),
    )


def described(doc: str, value: object) -> tuple[str, str]:
    """Return the meaning of a field, and its default value as a text: for None, what the clause "None: ..." says."""
    doc = " ".join(doc.split())
    if value is None:
        found = re.search(r"[;,.]? ?\bNone: (.*)$", doc)
        return (doc, "none") if found is None else (doc[: found.start()], found[1])
    text = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return doc, text or "none"


def metavar(hint: object) -> str:
    """Return the placeholder of a value: `INT`, `{a,b}`, `TEXT ...`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return f"{{{','.join(map(str, arguments))}}}"
    if origin in (Union, types.UnionType):
        return "|".join(metavar(one) for one in arguments if one is not type(None))
    if origin is tuple:
        return f"{metavar(arguments[0])} ..."
    if hint is bool:
        return "{True,False}"
    return {str: "TEXT"}.get(hint, getattr(hint, "__name__", str(hint)).upper())


def is_positional(field: dataclasses.Field) -> bool:
    """Return whether the field of a command is an argument without a name."""
    return "Positional" in str(field.type)


def metavar_of(field: dataclasses.Field) -> str:
    """Return the name of a positional argument in help and errors."""
    return re.search(r"metavar=['\"]([^'\"]+)", str(field.type))[1]


def field_docs(cls: type) -> dict[str, str]:
    """Return the docstrings of a dataclass's fields by name: the strings below them, also in its base classes."""
    found: dict[str, str] = {}
    for base in reversed([one for one in cls.__mro__ if dataclasses.is_dataclass(one)]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body
        for statement, after in itertools.pairwise(body):
            if isinstance(statement, ast.AnnAssign) and isinstance(after, ast.Expr):
                text = getattr(after.value, "value", None)
                if isinstance(text, str):
                    found[statement.target.id] = inspect.cleandoc(text)
    return found


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("%", "%%")
