"""The kinds of TPU, by their published figures, and topologies of them for the compiler."""

from __future__ import annotations

import importlib.util
import math
import re
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies

from transformer.config import ConfigError, nearest


class CompilerError(RuntimeError):
    """The TPU compiler is not installed, or refuses a topology; the message says what to do."""


@dataclass(frozen=True, kw_only=True)
class Chip:
    """A kind of TPU by its name, with the figures of a whole chip that its maker publishes."""

    name: str
    devices: int = 1
    """what JAX calls devices on a chip: 2 where each core, or half of the chip, is one with its own half of the HBM"""
    unit: str = "chip"
    """what such a device is"""
    axes: int
    """of a topology: 2 or 3"""
    example: str
    """a usual topology"""
    pod: int
    """most chips there are in one"""
    flops: float
    """peak of bfloat16 products, FLOP/s"""
    hbm: float
    """capacity, GiB"""
    hbm_bandwidth: float
    """bytes/s"""
    ici_bandwidth: float
    """to other chips over all links, one way, bytes/s"""
    config: str | None = None
    """the compiler's name for how the cores of a chip are joined; None: its default"""


CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            name="v2",
            devices=2,
            unit="core",
            axes=2,
            example="2x2",
            pod=256,
            flops=46e12,
            hbm=16,
            hbm_bandwidth=7e11,
            ici_bandwidth=248e9,
        ),
        Chip(
            name="v3",
            devices=2,
            unit="core",
            axes=2,
            example="2x2",
            pod=1024,
            flops=123e12,
            hbm=32,
            hbm_bandwidth=9e11,
            ici_bandwidth=328e9,
        ),
        Chip(
            name="v4",
            axes=3,
            example="2x2x1",
            pod=4096,
            flops=275e12,
            hbm=32,
            hbm_bandwidth=1.2e12,
            ici_bandwidth=300e9,
            config="megacore",
        ),
        Chip(
            name="v5e", axes=2, example="4x4", pod=256, flops=197e12, hbm=16, hbm_bandwidth=819e9, ici_bandwidth=200e9
        ),
        Chip(
            name="v5p",
            axes=3,
            example="2x2x2",
            pod=8960,
            flops=459e12,
            hbm=95,
            hbm_bandwidth=2765e9,
            ici_bandwidth=600e9,
        ),
        Chip(
            name="v6e", axes=2, example="4x4", pod=256, flops=918e12, hbm=32, hbm_bandwidth=1.6e12, ici_bandwidth=400e9
        ),
        Chip(
            name="tpu7x",
            devices=2,
            unit="core",
            axes=3,
            example="2x2x1",
            pod=9216,
            flops=2307e12,
            hbm=192,
            hbm_bandwidth=7.38e12,
            ici_bandwidth=600e9,
        ),
    )
}
"""Chips by name. Figures: Google Cloud's documentation of each TPU version (docs.cloud.google.com/tpu/docs/v5e and so
on; bidirectional bandwidths halved): those of v5e, v5p and v6e were compared with it in November 2026, v4 and tpu7x not
yet; of v2 and v3, Norrie et al. 2021, "The Design Process for Google's Training Chips: TPUv2 and TPUv3", IEEE Micro
41(2), table 1."""


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
    """Devices to put into a mesh and to compile for.

    Raises:
        CompilerError: libtpu is not installed, or gives no such topology.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise CompilerError('planning needs the TPU compiler, libtpu. Install it: pip install "transformer-zoo[plan]"')
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
