"""`transformer-zoo --completion bash`: a script that completes verbs, options and recipes in bash."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Mapping, Sequence

from transformer.config._checks import ConfigError
from transformer.config._invocation import SCRIPT
from transformer.config._recipe_files import recipe_files

SHELLS = ("bash",)
RECIPE_VERBS = ("train", "plan")
"""verbs whose first argument is a recipe"""

TEMPLATE = """\
# Completion of {script} in bash. Load it with: source <({script} --completion bash)
_{function}() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} verb=${{COMP_WORDS[1]}} words=
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    words='{verbs} --help --version --completion'
  elif [[ $word == -* ]]; then
    case $verb in
{options}
    esac
  elif [ "$COMP_CWORD" -eq 2 ]; then
    case $verb in
      {recipe_verbs}) words='{recipes}' ;;
    esac
  fi
  [ -z "$words" ] || COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _{function} {script}
"""


def completion(shell: str, verbs: Mapping[str, Callable[[Sequence[str]], int | None]]) -> str:
    """Return the completion script of a shell; files complete where neither a verb nor an option does.

    Args:
        shell: name of the shell, one of `SHELLS`.
        verbs: verb -> function that runs it with arguments.

    Raises:
        ConfigError: the shell is not supported.
    """
    if shell not in SHELLS:
        raise ConfigError(f"--completion must be {' or '.join(SHELLS)}, got {shell!r}. zsh: use bashcompinit and bash.")
    options = [f"      {verb}) words='{' '.join(_options(verb, run))}' ;;" for verb, run in verbs.items()]
    return TEMPLATE.format(
        script=SCRIPT,
        function=SCRIPT.replace("-", "_"),
        verbs=" ".join(verbs),
        options="\n".join(options),
        recipe_verbs=" | ".join(RECIPE_VERBS),
        recipes=" ".join(name for name in recipe_files() if re.fullmatch(r"[\w.-]+", name)),
    )


def _options(verb: str, run: Callable[[Sequence[str]], int | None]) -> list[str]:
    """Return the options of a verb, from its help; for verbs with a recipe also the main fields of recipes."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        run(["--help"])
    found = re.findall(r"^[│ ]*(?:-h, )?(--[a-z0-9][a-z0-9-]*)", text.getvalue(), re.MULTILINE)
    if verb in RECIPE_VERBS:
        from transformer.cli._help import SHOWN

        found += [f"--{group}.{field}".replace("_", "-") for group, fields in SHOWN.items() for field in fields]
        found += ["--help", "--help-all"]
    return list(dict.fromkeys(found))
