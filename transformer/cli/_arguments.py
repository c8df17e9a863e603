"""Parse a command line into a typed dataclass; report errors in one line."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import tyro

from transformer.cli._help import command_help, field_docs, is_positional, metavar_of
from transformer.cli._own_options import HELP
from transformer.config._checks import ConfigError, boxed_message, nearest
from transformer.config._invocation import program
from transformer.config._local_paths import local_path

Parsed = TypeVar("Parsed", bound="Command")

PathText: TypeAlias = str
"""type of an option with a path whose text is kept as given; `Path` is the type of any other path"""


@dataclass(frozen=True, kw_only=True)
class Command:
    """Options of every command."""

    json: bool = False
    """print JSON"""
    debug: bool = False
    """show the traceback of an error"""

    def answer(self, lines: Iterable[object], values: Mapping[str, object]) -> None:
        """Print the lines, or with --json the values. Non-ASCII characters of JSON are escaped, for any encoding."""
        if self.json:
            print(json.dumps(values, indent=2))
            return
        for line in lines:
            print(line)


def parse(command: type[Parsed], name: str, arguments: Sequence[str]) -> Parsed:
    """Parse arguments into a command; `--help` prints the docstrings of the class and its fields (SystemExit)."""
    options = [*_options(command), "--help"]
    for word in arguments:
        option = word.split("=", 1)[0]
        if option.startswith("--") and option.replace("_", "-") not in options:
            texts = [text for text in ("--prompt", "--text") if text in options]
            hint = nearest(option, options)
            if not hint and texts:
                hint = f" Pass a text that starts with dashes as {texts[0]}='{option}'."
            raise ConfigError(f"{name} has no option {option}.{hint} --help lists all options.")
    _refuse_empty_paths(command, name, arguments)
    if set(HELP) & set(arguments):
        print(command_help(command, program(name)), end="")
        raise SystemExit(0)
    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured):
            parsed = tyro.cli(tyro.conf.FlagCreatePairsOff[command], args=list(arguments), prog=program(name))
    except SystemExit:
        raise ConfigError(f"{boxed_message(captured.getvalue())} --help describes each option.") from None
    _refuse_remote_paths(parsed)
    for field in filter(is_positional, dataclasses.fields(command)):
        if getattr(parsed, field.name) == ():
            meaning = " ".join(field_docs(command)[field.name].split())
            raise ConfigError(f"{metavar_of(field)} is missing: {meaning}. --help describes each option.")
    return parsed


def _options(command: type, prefix: str = "--") -> Iterator[str]:
    """Yield the options of a command; those of a field that is a dataclass have its name before a dot."""
    for field in dataclasses.fields(command):
        name = prefix + field.name.replace("_", "-")
        if dataclasses.is_dataclass(field.default):
            yield from _options(type(field.default), f"{name}.")
        else:
            yield name


def _path_fields(command: Command | type[Command]) -> list[dataclasses.Field]:
    """Return the fields of a command that contain paths: those of the types `Path` and `PathText`."""
    return [field for field in dataclasses.fields(command) if "Path" in str(field.type)]


def _refuse_remote_paths(command: Command) -> None:
    """Raise ConfigError for a path that starts with a scheme, such as s3://."""
    for field in _path_fields(command):
        value = getattr(command, field.name)
        name = metavar_of(field) if is_positional(field) else f"--{field.name.replace('_', '-')}"
        for path in value if isinstance(value, tuple) else (value,):
            if path is not None:
                local_path(path, name)


def _refuse_empty_paths(command: type[Command], name: str, arguments: Sequence[str]) -> None:
    """Raise ConfigError for an empty path: pathlib would read it as the current directory."""
    fields = _path_fields(command)
    options = {f"--{field.name.replace('_', '-')}" for field in fields if not is_positional(field)}
    before, leading = "", True  # after an option, an empty argument may be one of several texts
    for word in arguments:
        option, separator, value = word.partition("=")
        empty = option if separator and not value else before if word == "" else ""
        if empty.replace("_", "-") in options:
            raise ConfigError(f"{empty} must name a file or a directory, got ''. Remove it, or pass a path.")
        leading = leading and not word.startswith("-")
        if word == "" and leading and len(fields) > len(options):
            raise ConfigError(f"{name} needs a file or a directory, got ''. Pass a path.")
        before = word


def check_least(option: str, value: int | None, least: int = 1) -> None:
    """Raise ConfigError for the value of an option that is below the least one; None: the option is not given."""
    if value is not None and value < least:
        raise ConfigError(f"--{option} must be at least {least}, got {value}.")


@contextlib.contextmanager
def option_names_in_errors(**options: str) -> Iterator[None]:
    """Replace field names in a ConfigError with their options: `size="beam_size"` turns `size` into `--beam-size`."""
    try:
        yield
    except ConfigError as error:
        fields = rf"\b({'|'.join(options)})\b"
        text = re.sub(fields, lambda found: f"--{options[found[0]].replace('_', '-')}", str(error))
        raise ConfigError(text) from None
