"""Options of commands that also take a recipe and its overrides (`train`, `plan`). Without tyro: its import is slow."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from transformer.config._checks import ConfigError

HELP = ("-h", "--help")


def split_options(
    arguments: Sequence[str], *, flags: Sequence[str], options: Mapping[str, str | None], hint: str
) -> tuple[argparse.Namespace, list[str]]:
    """Split the options of a command itself from the rest: the recipe and its overrides.

    Args:
        arguments: the words of the command line.
        flags: options without a value.
        options: option -> its value if the command line gives none; None: a value is required.
        hint: ends the error about a missing value.

    Raises:
        ConfigError: an option has no value.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in flags:
        parser.add_argument(flag, action="store_true")
    for option, without_value in options.items():
        parser.add_argument(option, nargs=None if without_value is None else "?", const=without_value)
    try:
        return parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error}. {hint}") from None
