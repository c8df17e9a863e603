"""Tests of the standard streams in any locale, in a narrow terminal and with closed descriptors."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from transformer.__main__ import COMMANDS
from transformer.cli import _limits as limits
from transformer.cli import _streams as streams
from transformer.cli._errors import run_program

ROOT = Path(__file__).resolve().parents[2]
PRINT = """
import sys
from transformer.cli._errors import run_program
from transformer.cli._streams import decode_argument
def say():
    print(decode_argument(sys.argv[1]), sys.stdin.read(), end="")
    print(decode_argument(sys.argv[1]), file=sys.stderr)
sys.exit(run_program(say, debug=False))
"""


def call(words, *, shell="", stdin=b"", **variables):
    """Run a Python process; return its exit code, and stdout and stderr as bytes."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHON"))}
    environment |= {"GLIBC_TUNABLES": "", "PYTHONDONTWRITEBYTECODE": "1"} | variables
    command = ["bash", "-c", f'"$@" {shell}', "bash", sys.executable, *words]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, input=stdin, timeout=120)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "variables",
    [
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "latin-1:strict"},
    ],
)
def test_texts_are_utf8_in_every_locale(variables):
    code, out, err = call(["-c", PRINT, "dieciséis"], stdin="año 😀".encode(), **variables)
    assert (code, out.decode(), err.decode()) == (0, "dieciséis año 😀", "dieciséis\n")


@pytest.mark.parametrize("text", ["", "año", "😀", "\ud800", "\udcff\udcc3"])
def test_a_valid_argument_is_unchanged(text):
    assert streams.decode_argument(text) == text


@pytest.mark.parametrize("words", [["-m", "transformer", "list"], ["train.py", "--list"]])
def test_a_closed_stdout_is_a_one_line_error(words):
    code, out, err = call(words, shell=">&-")
    assert (code, out) == (1, b"")
    assert err == b"error: stdout is closed, so the output has nowhere to go. Redirect it: > FILE, or > /dev/null.\n"


def test_a_closed_stderr_sends_no_error_to_stdout():
    assert call(["train.py", "nope"], shell="2>&-") == (2, b"", b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_behind_stdout_is_reported():
    code, _, err = call(["train.py", "--list"], shell="> /dev/full")
    assert (code, err) == (1, b"error: stdout: No space left on device. Free some disk space, or use another path.\n")


@pytest.mark.parametrize(("columns", "expected"), [("1", "20"), ("19", "20"), ("20", "20"), ("90", "90")])
def test_a_narrow_terminal_counts_as_20_columns(columns, expected, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    assert run_program(lambda: print(os.environ["COLUMNS"]), debug=False) == 0
    assert capsys.readouterr().out == f"{expected}\n"


def test_zero_columns_mean_an_unknown_width(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "0")
    assert run_program(lambda: print(os.environ.get("COLUMNS")), debug=False) == 0
    assert capsys.readouterr().out == "None\n"


def test_help_of_every_command_prints_in_a_narrow_terminal():
    program = f"""
import contextlib
from transformer.__main__ import main
for name in {[*COMMANDS]}:
    with contextlib.suppress(SystemExit):
        main([*name.split(), "--help"])
main(["train", "number_words", "--help"])
"""
    code, out, err = call(["-c", program], COLUMNS="2")
    assert (code, err) == (0, b"")
    assert out.count(b"--debug") >= len(COMMANDS) - 1
    assert b"--data." in out


def test_too_little_address_space_is_a_one_line_error():
    words = ["-c", 'ulimit -v 1000000; exec "$@"', "bash", sys.executable, "train.py", "number_words"]
    done = subprocess.run(["bash", *words], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: address space limit too low to start JAX: expected at least ")
    assert done.stderr.endswith(
        "got 0.95 GiB, the limit of this shell. Raise the limit (ulimit -v unlimited) and try again.\n"
    )


def test_an_unlimited_address_space_is_enough(monkeypatch):
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    limits.check_address_space()
    enough = limits.BASE_BYTES + limits.BYTES_PER_CORE * os.cpu_count()
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (enough, enough))
    limits.check_address_space()


def test_a_missing_platform_is_a_one_line_error():
    program = "import sys, jax; from transformer.cli._errors import run_program; "
    program += "sys.exit(run_program(lambda: jax.devices() and None, debug=False))"
    code, out, err = call(["-c", program], JAX_PLATFORMS="cuda")
    assert (code, out) == (1, b"")
    assert err.startswith(b"error: JAX found no device for JAX_PLATFORMS=cuda")
    assert err.endswith(b" devices lists the devices of this machine.\n")
    assert err.count(b"\n") == 1
