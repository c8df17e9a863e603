"""Topologies of TPUs, for the compiler."""

from __future__ import annotations

import importlib.util
import math
import os
import re
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies

from transformer.chips import CHIPS, Chip
from transformer.config import ConfigError, nearest


class CompilerError(RuntimeError):
    """The TPU compiler is not installed, or refuses a topology; the message says what to do."""


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
    """Devices to put into a mesh and to compile for. `XLA_FLAGS` loses what is for CPUs and GPUs.

    Raises:
        CompilerError: libtpu is not installed, or gives no such topology.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise CompilerError('planning needs the TPU compiler, libtpu. Install it: pip install "libtpu>=0.0.51"')
    # libtpu reads these at its first program, and at a flag that it does not know it ends the process.
    flags = os.environ.get("XLA_FLAGS", "").split()
    os.environ["XLA_FLAGS"] = " ".join(flag for flag in flags if not re.match("--xla_(cpu|gpu)_", flag))
    bounds = [min(2, size) if size % 2 == 0 else 1 for size in topology.shape[:2]] + [1]
    options = {"chips_per_host_bounds": bounds}
    if topology.chip.config is not None:
        options["chip_config_name"] = topology.chip.config
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=str(topology), **options).devices
    except jax.errors.JaxRuntimeError as error:
        raise CompilerError(
            f"the TPU compiler gives no topology {topology}. A usual one is {topology.chip.name}:"
            f"{topology.chip.example}. It says: {str(error).partition(chr(10))[0]}"
        ) from error
    return list(devices)
