"""How the user called this program: the first words of every command that is printed."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

SCRIPT = "transformer-zoo"
"""the console script that `pip install` creates (pyproject.toml, project.scripts)"""


def program(verb: str) -> str:
    """The command line for `verb`, for a shell in the current directory, in the form in which this process was called.

    `transformer-zoo VERB` if the console script runs, `python train.py` for the verb "train" if that file runs, and
    `python -m transformer VERB` in all other cases (a notebook, a test, another program).
    """
    caller = Path(sys.argv[0])
    if caller.stem == SCRIPT:
        return f"{_script(caller)} {verb}".strip()
    if verb == "train" and caller.name == "train.py":
        return f"{python()} {shlex.quote(os.path.relpath(caller))}"
    return f"{python()} -m transformer {verb}".strip()


def python() -> str:
    """This Python, for a shell: its path if its environment is in the current directory and not active, or `python`."""
    path = os.path.relpath(sys.executable)
    inside = not path.startswith(os.pardir) and sys.prefix != os.environ.get("VIRTUAL_ENV")
    return shlex.quote(path) if inside else "python"


def _script(caller: Path) -> str:
    """The console script: its name if the shell finds this file by it, or its path."""
    found = shutil.which(SCRIPT)
    if found is not None and os.path.realpath(found) == os.path.realpath(caller):
        return SCRIPT
    path = os.path.relpath(caller)
    return shlex.quote(str(caller) if path.startswith(os.pardir) else path)
