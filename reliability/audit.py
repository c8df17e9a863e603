"""Known vulnerabilities of everything that requirements*.txt names, by pip-audit and the database of osv.dev.

Usage: python -m reliability.audit [--python .venv-audit/bin/python]    exit code 1: there are some; 77: not reached
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
"""every pin is exact: nothing has to be resolved or installed"""


def unreachable(service: str = SERVICE) -> str | None:
    """Why the database can't be asked; None when it answers."""
    question = {"package": {"name": "jax", "ecosystem": "PyPI"}, "version": "0.10.2"}
    request = urllib.request.Request(service, json.dumps(question).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            json.load(answer)
    except (OSError, ValueError) as error:
        return str(error)
    return None


def main(arguments: list[str], service: str = SERVICE) -> int:
    """Audits each file; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="of the environment that pip-audit is in")
    options = parser.parse_args(arguments)
    if reason := unreachable(service):
        print(f"skipped: {service} can't be reached ({reason}), and nothing was audited. Call it with a network.")
        return NOT_RUN
    bad = []
    for path in sorted(ROOT.glob("requirements*.txt")):
        print(f"{path.name}:", flush=True)
        if subprocess.run([options.python, "-m", "pip_audit", "-r", str(path), *OPTIONS]).returncode:
            bad.append(path.name)
    if bad:
        print(f"found something, or failed, in {', '.join(bad)}: raise what is named there, then `make pins`.")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
