"""From words on a command line to a typed dataclass; what is wrong with them in one line."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from collections.abc import Sequence
from typing import TypeVar

import tyro

from transformer.config import ConfigError, nearest

Command = TypeVar("Command")


def parse(command: type[Command], verb: str, arguments: Sequence[str]) -> Command:
    """The command that the arguments ask for; its docstring and its fields' are what --help shows.

    Raises:
        ConfigError: an unknown option (with the nearest right one), a missing or wrong value.
        SystemExit: --help, after it was printed (code 0).
    """
    options = [f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(command)] + ["--help"]
    for word in arguments:
        option = word.split("=", 1)[0]
        if option.startswith("--") and option.replace("_", "-") not in options:
            hint = nearest(option, options) or f" A text that begins with dashes is given as --prompt='{option}'."
            raise ConfigError(f"{verb} has no option {option}.{hint} --help shows them all.")
    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured):
            return tyro.cli(
                tyro.conf.FlagCreatePairsOff[command], args=list(arguments), prog=f"python -m transformer {verb}"
            )
    except SystemExit as stop:
        if stop.code in (None, 0):
            raise
        raise ConfigError(_message(captured.getvalue())) from None


def _message(box: str) -> str:
    """The first paragraph inside one of tyro's boxes, on one line. Its frame is blank where UTF-8 can't be printed."""
    paragraph: list[str] = []
    for line in box.splitlines()[1:]:
        line = line.strip("│╰╯ ")
        if line.strip("─-"):
            paragraph.append(line)
        elif paragraph:
            break
    text = " ".join(paragraph)
    text = re.sub(r"^Missing from [^:]*: (\S+) (.*?)( \(required\))?$", r"\1 is missing: \2", text)
    text = re.sub(r"no type matching (\S+) could be instantiated from \['(.*)'\]", r"expected \1, got '\2'", text)
    text = re.sub(r"^Error parsing (\S+): ", r"\1: ", text).rstrip(".")
    text = text.replace("{None}|", "").replace("Unrecognized options:", "this is one word too many:")
    return f"{text}. --help says what each option takes."
