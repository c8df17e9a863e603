"""Topologies of TPUs, for the compiler."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies

from transformer.config._checks import ConfigError, nearest
from transformer.nn.kernels._probing import library_version, matching_libtpu
from transformer.training._chips import CHIPS, Chip

PROBE = """
import json, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

device = topologies.get_topology_desc(platform="tpu", **json.loads(sys.argv[1])).devices[0]
x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=SingleDeviceSharding(device))
jax.jit(lambda x: x @ x).lower(x).compile().memory_analysis()
"""
"""compiles one matrix multiplication for a topology, whose options are its argument"""

CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL}
"""signals that end a process whose compiler does not fit JAX"""


class CompilerError(RuntimeError):
    """The TPU compiler is not installed, does not work with this JAX, or refuses a topology or a program."""


@dataclass(frozen=True)
class Topology:
    """Chips of a kind in a grid; its shape is how many there are along each axis."""

    chip: Chip
    shape: tuple[int, ...]

    def __str__(self):
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def num_chips(self) -> int:
        """Chips in all."""
        return math.prod(self.shape)

    @property
    def unit(self) -> str:
        """What JAX's devices are here: chips, or cores of them."""
        return self.chip.unit

    @property
    def hbm(self) -> float:
        """High-bandwidth memory of a device, GiB."""
        return self.chip.hbm / self.chip.devices


def parse_topology(text: str) -> Topology:
    """The topology of "v5e:4x4".

    Raises:
        ConfigError: an unknown chip, or sizes that are none or more than a pod; names what there is.
    """
    examples = ", ".join(f"{name}:{chip.example}" for name, chip in CHIPS.items())
    name, _, sizes = text.partition(":")
    chip = CHIPS.get(name)
    if chip is None:
        near = nearest(name, CHIPS)
        close = next((known for known in CHIPS if f"'{known}'" in near), None)
        hint = f" Did you mean {f'{close}:{CHIPS[close].example}'!r}?" if close else ""
        raise ConfigError(
            f"there is no TPU {name!r} in --topology {text!r}.{hint} Known, with a usual size: {examples}."
        )
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", sizes) or sizes.count("x") + 1 != chip.axes:
        wanted = "x".join("ABC"[: chip.axes])
        raise ConfigError(
            f"a topology of {chip.name} is {chip.name}:{wanted}, chips along each of {chip.axes} axes, got {text!r}. "
            f"Did you mean '{chip.name}:{chip.example}'?"
        )
    topology = Topology(chip, tuple(map(int, sizes.split("x"))))
    if topology.num_chips > chip.pod:
        raise ConfigError(
            f"{topology} is {topology.num_chips:,} chips, but a pod of {name} has {chip.pod:,}. Give fewer."
        )
    return topology


def topology_devices(topology: Topology) -> list[Any]:
    """Devices to put into a mesh and to compile for. Flags for CPUs and GPUs are removed from `XLA_FLAGS`.

    Raises:
        CompilerError: libtpu is not installed, crashes with this JAX, or does not offer such a topology.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise CompilerError('planning needs the TPU compiler, libtpu. Install it: pip install "libtpu>=0.0.51"')
    # libtpu reads these at its first program, and at a flag that it does not know it ends the process.
    flags = os.environ.get("XLA_FLAGS", "").split()
    os.environ["XLA_FLAGS"] = " ".join(flag for flag in flags if not re.match("--xla_(cpu|gpu)_", flag))
    bounds = [min(2, size) if size % 2 == 0 else 1 for size in topology.shape[:2]] + [1]
    options = {"topology_name": str(topology), "chips_per_host_bounds": bounds}
    if topology.chip.config is not None:
        options["chip_config_name"] = topology.chip.config
    check_compiler(json.dumps(options))
    try:
        devices = topologies.get_topology_desc(platform="tpu", **options).devices
    except jax.errors.JaxRuntimeError as error:
        raise CompilerError(
            f"the TPU compiler gives no topology {topology}. A usual one is {topology.chip.name}:"
            f"{topology.chip.example}. It says: {str(error).partition(chr(10))[0]}"
        ) from error
    return list(devices)


@functools.cache
def check_compiler(options: str) -> None:
    """Compile a tiny program in a process of its own: an unsuitable libtpu ends its process by a segmentation fault.

    Args:
        options: of `topologies.get_topology_desc`, as JSON.

    Raises:
        CompilerError: the process crashed; names the libtpu that fits. Any other error is left to the caller, who meets
            it again.
    """
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",  # which asks Google Cloud's metadata server
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-c", PROBE, options]
    code = subprocess.run(command, env=environment, capture_output=True, check=False).returncode
    if -code not in CRASHES:
        return
    jax_version = library_version("jax")
    raise CompilerError(
        f"{library_version('libtpu')} does not work with {jax_version}: compiling one matrix multiplication crashed "
        f"({signal.Signals(-code).name}). Install the version that {jax_version} was released with: "
        f'pip install "{matching_libtpu()}"'
    )
