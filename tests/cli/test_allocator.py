"""Tests of the restart with an allocator that keeps freed memory."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from transformer.cli import _allocator as allocator
from transformer.cli._allocator import KEEP, VARIABLE, keep_freed_memory

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import os, sys
print(os.getpid(), sys.argv[1:], os.environ.get("GLIBC_TUNABLES"))
sys.stdout.flush()
from transformer.cli._allocator import keep_freed_memory
keep_freed_memory()
"""


with_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs the allocator of glibc")


def write(folder):
    path = folder / "program.py"
    path.write_text(PROGRAM)
    return str(path)


def outputs(command, environment):
    """Return the lines that a command prints, one per start of the program."""
    ours = {name: value for name, value in os.environ.items() if name != VARIABLE and not name.startswith("MALLOC_")}
    ours |= {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(command, env=ours, capture_output=True, text=True, check=True).stdout.splitlines()


@with_glibc
@pytest.mark.parametrize("chosen", [None, "", "glibc.malloc.arena_max=1"])
def test_a_program_restarts_once_with_the_same_arguments(chosen, tmp_path):
    environment = {} if chosen is None else {VARIABLE: chosen}
    out = outputs([sys.executable, write(tmp_path), "one", "two words"], environment)
    (first, *again) = [line.split(" ", 1) for line in out]
    assert first[1] == f"['one', 'two words'] {chosen}"
    assert again == ([[first[0], f"['one', 'two words'] {KEEP}"]] if chosen is None else [])


@with_glibc
def test_a_nested_program_does_not_restart(tmp_path):
    """A notebook runs it with %run, another program with runpy: a restart would end the calling program."""
    inside = f"import runpy; runpy.run_path({write(tmp_path)!r}, run_name='__main__')"
    assert len(outputs([sys.executable, "-c", inside], {})) == 1


@with_glibc
@pytest.mark.parametrize(("platforms", "starts"), [("cpu", 2), ("tpu", 1), ("cuda,cpu", 1)])
def test_only_programs_on_the_cpu_restart(platforms, starts, tmp_path):
    assert len(outputs([sys.executable, write(tmp_path)], {"JAX_PLATFORMS": platforms})) == starts


@pytest.mark.parametrize("present", ["tpu", "gpu"])
def test_a_machine_with_an_accelerator_does_not_restart(present, monkeypatch):
    monkeypatch.setattr(allocator, "accelerator_present", lambda environment: present)
    monkeypatch.setattr(allocator, "_owns_process", lambda: True)
    monkeypatch.setattr(allocator.os, "execve", lambda *given: pytest.fail("started again"))
    keep_freed_memory({})


@pytest.mark.parametrize("environment", [{VARIABLE: ""}, {"MALLOC_ARENA_MAX": "1"}])
def test_user_settings_are_kept(environment, monkeypatch):
    monkeypatch.setattr(allocator.os, "execve", lambda *given: pytest.fail("started again"))
    keep_freed_memory(environment)
    monkeypatch.setattr(allocator.platform, "libc_ver", lambda: ("", ""))
    keep_freed_memory({})


@pytest.mark.parametrize("at", ["execve", "libc_ver", "accelerator_present"])
def test_a_failed_restart_is_skipped(at, monkeypatch):
    def refuse(*given, **options):
        refused.append(at)
        raise PermissionError(13, "Permission denied", "here")

    refused = []
    monkeypatch.setattr(allocator, "_owns_process", lambda: True)
    monkeypatch.setattr(allocator, "accelerator_present", lambda environment: "cpu")
    monkeypatch.setattr(allocator.platform, "libc_ver", lambda: ("glibc", "2.36"))
    owner = {"execve": allocator.os, "libc_ver": allocator.platform}.get(at, allocator)
    monkeypatch.setattr(owner, at, refuse)
    keep_freed_memory({})
    assert refused == [at]
