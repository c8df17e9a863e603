"""Topologies by name: TPU slices such as "v5e:4x4", and hosts of GPUs such as "h100:2x8"."""

from __future__ import annotations

import re
from typing import Any

from transformer.config._checks import ConfigError, nearest
from transformer.training._chips import CHIPS
from transformer.training._gpus import GPUS
from transformer.training.plan._contract import Topology
from transformer.training.plan._gpu_topology import gpu_topology
from transformer.training.plan._tpu_topology import tpu_topology


def parse_topology(text: str) -> Topology:
    """Parse a topology: "v5e:4x4", 4 x 4 TPU chips; "h100:2x8", 2 hosts of 8 GPUs; "2*v5e:4x4", two slices.

    Raises:
        ConfigError: the kind is unknown, or the sizes are invalid, larger than a TPU pod or than a host of GPUs, or the
            chip does not support several slices; the message names a valid topology.
    """
    slices, several, one = text.partition("*")
    name, _, sizes = (one if several else text).partition(":")
    if several and not re.fullmatch(r"[1-9]\d*", slices):
        raise ConfigError(
            f"the number of slices in --topology {text!r} must be an integer of at least 1, got {slices!r}. For two "
            f"slices, pass --topology '2*{one}'."
        )
    number = int(slices) if several else 1
    if name in CHIPS:
        return tpu_topology(text, CHIPS[name], sizes, number)
    if name in GPUS:
        return gpu_topology(text, GPUS[name], sizes, number)
    examples = {name: f"{name}:{chip.example}" for name, chip in CHIPS.items()}
    examples |= {name: f"{name}:1x{gpu.most_per_host}" for name, gpu in GPUS.items()}
    near = nearest(name, examples)
    close = next((example for known, example in examples.items() if f"'{known}'" in near), None)
    hint = f" Did you mean {close!r}?" if close else ""
    raise ConfigError(
        f"unknown GPU or TPU {name!r} in --topology {text!r}.{hint} Known kinds, each with an example: "
        f"{', '.join(examples.values())}."
    )


def topology_devices(topology: Topology) -> list[Any]:
    """Return the devices of a topology, to make a mesh of and compile for; nothing can run on them.

    Removes the flags of other compilers from the environment variable `XLA_FLAGS`.

    Raises:
        CompilerError: the compiler of the devices is not installed, does not work with this JAX, or does not support
            the topology.
    """
    return topology.devices()
