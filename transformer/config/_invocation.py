"""How the user started this program: the first words of all commands in messages."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

SCRIPT = "transformer-zoo"
"""name of the console script that `pip install` creates (pyproject.toml, project.scripts)"""


def program(command: str) -> str:
    """Return the command line for a command, for a shell in the current directory, in the form in which this process
    was started.

    This is `transformer-zoo COMMAND` if the process runs the console script, `python train.py` for "train" if it runs
    that file, and `python -m transformer COMMAND` in all other cases (a notebook, a test, another program).
    """
    caller = Path(sys.argv[0])
    if caller.stem == SCRIPT:
        return f"{_script(caller)} {command}".strip()
    if command == "train" and caller.name == "train.py":
        return f"{python()} {shlex.quote(os.path.relpath(caller))}"
    return f"{python()} -m transformer {command}".strip()


def python() -> str:
    """Return the command for this Python: its relative path if its environment is in the current directory and is not
    active, else `python`.
    """
    path = os.path.relpath(sys.executable)
    inside = not path.startswith(os.pardir) and sys.prefix != os.environ.get("VIRTUAL_ENV")
    return shlex.quote(path) if inside else "python"


def _script(caller: Path) -> str:
    """Return the command for the console script: its name if the shell finds this file in PATH, else its path."""
    found = shutil.which(SCRIPT)
    if found is not None and os.path.realpath(found) == os.path.realpath(caller):
        return SCRIPT
    path = os.path.relpath(caller)
    return shlex.quote(str(caller) if path.startswith(os.pardir) else path)
