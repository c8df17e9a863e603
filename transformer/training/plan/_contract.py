"""The interface of a topology: the devices that a program is compiled for, and the conventions of their compiler."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from transformer.training._chips import Chip
from transformer.training._memory import GIB
from transformer.training.plan._hlo import Program


class CompilerError(RuntimeError):
    """The compiler is not installed, does not work with this JAX, or rejects a topology or a program."""


@dataclass(frozen=True)
class Topology(ABC):
    """Devices of one kind, and how they are connected."""

    chip: Chip

    platform: ClassVar[str] = "tpu"
    """platform of the devices in JAX: "cpu", "gpu" or "tpu" """
    network: ClassVar[str] = "across slices"
    """which collectives use the data-center network"""
    checks_memory: ClassVar[bool] = False
    """whether the compiler rejects a program that needs too much memory"""
    counts_launches: ClassVar[bool] = False
    """whether the number of started kernels matters for the time of a program"""
    notes: ClassVar[tuple[str, ...]] = ()
    """what the estimates of a compiled program don't contain, as sentences"""

    @abstractmethod
    def __str__(self) -> str: ...

    @property
    @abstractmethod
    def num_chips(self) -> int:
        """Total number of chips."""

    @property
    @abstractmethod
    def smallest(self) -> str:
        """Name of the smallest topology of this chip."""

    @abstractmethod
    def devices(self) -> list[Any]:
        """Return the devices, to make a mesh of and compile for.

        Raises:
            CompilerError: the compiler is not installed, does not work with this JAX, or rejects the topology.
        """

    @property
    def unit(self) -> str:
        """Hardware unit that is a device in JAX, such as "chip", "core" or "GPU"."""
        return self.chip.unit

    @property
    def hbm(self) -> float:
        """Memory of a device, in GiB."""
        return self.chip.hbm / self.chip.devices

    @property
    def usable_bytes(self) -> int:
        """Bytes of the memory of a device that JAX can use."""
        return round(self.hbm * GIB)

    @property
    def memory_note(self) -> str:
        """Why `usable_bytes` is less than the memory, and how to change it; otherwise empty."""
        return ""

    def program(self, text: str, devices: Sequence[Any]) -> Program:
        """Return a program for devices of this topology, in the order of its mesh, from the text of the compiler."""
        return Program(text)


CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL}
"""signals that end a process whose compiler is incompatible with JAX"""


@functools.cache
def probe(program: str, *arguments: str) -> tuple[str, str]:
    """Run a Python program in a child process, because an incompatible compiler crashes its process.

    Returns:
        The name of the signal if the process crashed, such as "SIGSEGV", otherwise "", and its stderr.
    """
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",  # don't query Google Cloud's metadata server
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, check=False, text=True, errors="replace")
    return signal.Signals(-done.returncode).name if -done.returncode in CRASHES else "", done.stderr


def remove_flags(pattern: str) -> None:
    """Remove the flags whose beginning matches a regular expression from the environment variable `XLA_FLAGS`.

    A compiler reads the variable at its first program, and ends the process if it finds a flag of another compiler.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    os.environ["XLA_FLAGS"] = " ".join(flag for flag in flags if not re.match(pattern, flag))
