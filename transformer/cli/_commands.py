"""Find the command of a command line in a table of commands, call it, and describe all commands."""

from __future__ import annotations

import importlib
import platform
import typing
from collections.abc import Mapping, Sequence
from importlib import metadata

from transformer.config._checks import ConfigError, nearest
from transformer.config._invocation import program


def call(name: str, arguments: Sequence[str]) -> int | None:
    """Run the function `main` of the module of a command: `inspect text` is `cli/_inspect_text.py`.

    It receives its options as `command`, or its `arguments` to parse them itself, or both. All kinds of `plan` share a
    module.
    """
    first, _, second = name.partition(" ")
    if first == "plan" and second:
        return call(first, [second, *arguments])
    main = importlib.import_module(f"transformer.cli._{name.replace(' ', '_')}").main
    values, hints = {"arguments": arguments}, typing.get_type_hints(main)
    if "command" in hints:
        from transformer.cli._arguments import parse

        values["command"] = parse(hints["command"], name, arguments)
    return main(**{parameter: values[parameter] for parameter in hints.keys() & values})


def find(words: Sequence[str], commands: Mapping[str, str]) -> tuple[str, list[str]]:
    """Return the command that a command line begins with, and its arguments."""
    for size in (1, 2):
        name = " ".join(words[:size])
        if name in commands:
            return name, list(words[size:])
    group = words[0] if words and members(words[0], commands) else ""
    names = list(members(group, commands) if group else dict.fromkeys(name.partition(" ")[0] for name in commands))
    name_words = words[1:2] if group else words[:1]
    remedy = f"Use one of {', '.join(names)}; {program(group)} --help explains them."
    if not name_words or name_words[0].startswith("-"):
        raise ConfigError(f"missing command{f' after {group}' if group else ''}. {remedy}")
    asked = f"{group} {name_words[0]}".strip()
    raise ConfigError(f"unknown command {asked!r:.200}.{nearest(asked, names)} {remedy}")


def members(group: str, commands: Mapping[str, str]) -> dict[str, str]:
    """Return the commands whose first of two words is this one."""
    return {name: summary for name, summary in commands.items() if name.startswith(f"{group} ")}


def usage(commands: Mapping[str, str], group: str = "") -> str:
    """Return the text that --help prints, for all commands or for those of a group."""
    width = max(map(len, commands))
    called = program("")
    lines = [f"  {name:{width}}  {summary}" for name, summary in commands.items()]
    end = f"{called} COMMAND --help lists the options of a command"
    if not group:
        end += f"; {called} --version prints versions; {called} --completion bash prints a completion script"
    return "\n".join([f"usage: {program(group)} COMMAND ...", "", *lines, "", f"{end}."])


def versions() -> str:
    """Return the text that --version prints: the versions of this package, Python and the numeric libraries."""
    from transformer import __version__

    lines = [f"transformer-zoo {__version__}", f"python {platform.python_version()}"]
    for name in ("jax", "jaxlib", "flax"):
        try:
            lines.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            lines.append(f"{name} not installed")
    return "\n".join(lines)
