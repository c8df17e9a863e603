"""Options of commands that also take a recipe and its overrides (`train`, `plan`). Without tyro: its import is slow."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

from transformer.config._checks import ConfigError

HELP = ("-h", "--help")


def split_options(
    arguments: Sequence[str], *, flags: Iterable[str], options: Iterable[str], hint: str
) -> tuple[argparse.Namespace, list[str]]:
    """Split the words of a command line: the options of the command itself, and the recipe and its overrides.

    `flags` are options without a value; `hint` ends the error about a missing value.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in flags:
        parser.add_argument(flag, action="store_true")
    for option in options:
        parser.add_argument(option)
    try:
        return parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error}. {hint}") from None
