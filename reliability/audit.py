"""Search the dependencies in requirements*.txt for known vulnerabilities, with pip-audit and the database of osv.dev.

Usage: python -m reliability.audit [--python .venv-audit/bin/python]

The exit code is 1 if there are vulnerabilities, and 77 if the database can't be reached.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SERVICE = "https://api.osv.dev/v1/query"
NOT_RUN = 77
OPTIONS = ("--no-deps", "--disable-pip", "--vulnerability-service", "osv", "--progress-spinner", "off")
"""all versions are pinned, so that nothing has to be resolved or installed"""


def unreachable(service: str = SERVICE) -> str | None:
    """Return the reason why the database can't be reached, or None if it answers."""
    question = {"package": {"name": "jax", "ecosystem": "PyPI"}, "version": "0.10.2"}
    request = urllib.request.Request(service, json.dumps(question).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            json.load(answer)
    except (OSError, ValueError) as error:
        return str(error)
    return None


def main(arguments: list[str], service: str = SERVICE) -> int:
    """Audit each requirements file; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="Python of the environment that contains pip-audit")
    options = parser.parse_args(arguments)
    if reason := unreachable(service):
        print(
            f"skipped: {service} can't be reached ({reason}); nothing was audited. Run this command with network "
            f"access."
        )
        return NOT_RUN
    bad = []
    for path in sorted(ROOT.glob("requirements*.txt")):
        print(f"{path.name}:", flush=True)
        if subprocess.run([options.python, "-m", "pip_audit", "-r", str(path), *OPTIONS]).returncode:
            bad.append(path.name)
    if bad:
        print(f"vulnerabilities or errors in {', '.join(bad)}: update the packages listed above, then run `make pins`.")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
