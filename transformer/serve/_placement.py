"""Where the engine stores parameters and pages: on one device, or sharded over a mesh."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TypeVar

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformer.config._checks import ConfigError
from transformer.generate._layers import Params
from transformer.nn._partitioning import axis_rules
from transformer.nn._sharding import check_model, state_shardings
from transformer.nn.models._causal_lm import CausalLM
from transformer.nn.quantization._adapted import has_encoded

Tree = TypeVar("Tree")
SPLIT = {"heads": "tensor", "kv_heads": "tensor", "feed_forward": "tensor", "vocab": "tensor", "expert": "expert"}
"""logical axis -> mesh axis that splits it"""
RULES = (*SPLIT.items(), *((name, None) for name in ("batch", "length", "embed", "head_dim")))
"""rules of parameters and activations. All devices have all rows: a row may use any page of the pool, and a prompt is
read as a batch of one row."""


class Placement:
    """The devices of an engine.

    In the mesh, one of `make_mesh`, only `tensor` and `expert` are larger than 1; None: the default device. Its devices
    are those of all processes, or some of this one; another mesh, or one that does not fit the model, is a ConfigError.
    """

    def __init__(self, model: CausalLM, mesh: Mesh | None):
        self.mesh = mesh
        processes = set() if mesh is None else {device.process_index for device in mesh.devices.flat}
        self.is_shared = len(processes) > 1
        """whether other processes have some of the devices"""
        if self.is_shared and len(processes) < jax.process_count():
            raise ConfigError(
                f"a mesh with devices of several processes needs those of all {jax.process_count()} processes, got "
                f"those of {len(processes)}. Pass a mesh of jax.devices(), or of jax.local_devices()."
            )
        if mesh is None:
            return
        if other := [axis for axis, size in mesh.shape.items() if size > 1 and axis not in SPLIT.values()]:
            raise ConfigError(
                f"a server shards a model over tensor and expert only, got {other[0]} {mesh.shape[other[0]]}. Pass "
                f"--parallel.tensor or --parallel.expert."
            )
        check_model(model.config, mesh.shape)

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """Set the mesh and its rules for the calls of this thread inside the `with` block."""
        if self.mesh is None:
            yield
            return
        with jax.set_mesh(self.mesh), axis_rules(RULES):
            yield

    def sharded(self, params: Params) -> Params:
        """Return parameters on the devices; arrays that are stored there already are not copied."""
        if self.mesh is None:
            return params
        if has_encoded(params):
            raise ConfigError("quantized weights are not sharded over a mesh. Remove --parallel, or use other weights.")
        return jax.device_put(params, state_shardings(params, self.mesh, RULES))

    def everywhere(self, tree: Tree) -> Tree:
        """Return a tree of arrays that each device has as a whole."""
        if self.mesh is None:
            return jax.device_put(tree)
        return jax.device_put(tree, NamedSharding(self.mesh, PartitionSpec()))
