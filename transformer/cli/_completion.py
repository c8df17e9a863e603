"""`transformer-zoo --completion bash`: a script that completes commands, options and recipes in bash."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterable, Mapping

from transformer.cli._commands import call
from transformer.config._checks import ConfigError
from transformer.config._invocation import SCRIPT
from transformer.config._recipe_files import recipe_files

SHELLS = ("bash",)
TEMPLATE = """\
# Completion of {script} in bash. Load it with: source <({script} --completion bash)
_{function}() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} command=${{COMP_WORDS[1]}} words=
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    words='{commands} --help --version --completion'
  elif [[ $word == -* ]]; then
    case "$command ${{COMP_WORDS[2]}}" in
{options}
    esac
  elif [ "$COMP_CWORD" -eq 2 ]; then
    case $command in
{second}
    esac
  elif [ "$COMP_CWORD $command" = "3 plan" ]; then
    words='{recipes}'
  fi
  [ -z "$words" ] || COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _{function} {script}
"""


def completion(shell: str, commands: Iterable[str]) -> str:
    """Return the completion script of a shell; files complete where neither a command nor an option does."""
    if shell not in SHELLS:
        raise ConfigError(f"--completion must be {' or '.join(SHELLS)}, got {shell!r}. zsh: use bashcompinit and bash.")
    seconds: dict[str, list[str]] = {}
    for first, _, second in (name.partition(" ") for name in commands):
        seconds.setdefault(first, []).extend([second] if second else [])
    recipes = [name for name in recipe_files() if re.fullmatch(r"[\w.-]+", name)]
    second = {"train": recipes} | {name: words for name, words in seconds.items() if words}
    names = {"script": SCRIPT, "function": SCRIPT.replace("-", "_"), "commands": " ".join(seconds)}
    options = _cases({f"'{name}'" if " " in name else f"'{name} '*": _options(name) for name in commands})
    return TEMPLATE.format(**names, options=options, second=_cases(second), recipes=" ".join(recipes))


def _cases(words: Mapping[str, Iterable[str]]) -> str:
    return "\n".join(f"      {pattern}) words='{' '.join(options)}' ;;" for pattern, options in words.items())


def _options(name: str) -> list[str]:
    """Return the options of a command, from its help; for commands with a recipe also the main fields of recipes."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        call(name, ["--help"])
    options = [*re.findall(r"^  (?:-h, )?(--[a-z0-9][a-z0-9.-]*)", text.getvalue(), re.MULTILINE), "--help"]
    if name.startswith(("train", "plan ")):  # a recipe follows
        from transformer.cli._recipe_help import SHOWN

        options += [f"--{group}.{field}".replace("_", "-") for group, fields in SHOWN.items() for field in fields]
        options += ["--help-all"]
    return list(dict.fromkeys(options))
