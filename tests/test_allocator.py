"""The programs start themselves once more with an allocator that keeps what is freed, unless told otherwise."""

import os
import platform
import subprocess
import sys

import pytest

from transformer.cli import allocator
from transformer.cli.allocator import KEEP, VARIABLE, keep_freed_memory

PROGRAM = """
import os, sys
print(os.getpid(), sys.argv[1:], os.environ.get("GLIBC_TUNABLES"))
sys.stdout.flush()
from transformer.cli.allocator import keep_freed_memory
keep_freed_memory()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="its allocator is another")
@pytest.mark.parametrize("chosen", [None, "", "glibc.malloc.arena_max=1"])
def test_a_program_is_started_once_more_with_the_same_words(chosen):
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    environment |= {} if chosen is None else {VARIABLE: chosen}
    command = [sys.executable, "-c", PROGRAM, "one", "two words"]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    (first, *again) = [line.split(" ", 1) for line in out]
    assert first[1] == f"['one', 'two words'] {chosen}"
    assert again == ([[first[0], f"['one', 'two words'] {KEEP}"]] if chosen is None else [])


@pytest.mark.parametrize("environment", [{VARIABLE: ""}, {"MALLOC_ARENA_MAX": "1"}])
def test_what_the_user_set_stays(environment, monkeypatch):
    monkeypatch.setattr(allocator.os, "execve", lambda *given: pytest.fail("started again"))
    keep_freed_memory(environment)
    monkeypatch.setattr(allocator.platform, "libc_ver", lambda: ("", ""))
    keep_freed_memory({})


def test_a_restart_that_the_system_refuses_is_left_out(monkeypatch):
    def refuse(*given):
        raise PermissionError(13, "Permission denied", given[0])

    monkeypatch.setattr(allocator.os, "execve", refuse)
    monkeypatch.setattr(allocator.platform, "libc_ver", lambda: ("glibc", "2.36"))
    keep_freed_memory({})
