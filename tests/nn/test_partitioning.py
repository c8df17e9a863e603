"""Logical axis names: no effect without a mesh, a sharding with one."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_specs import attention_spec
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec
from placements import mesh

from transformer.nn._jax_compat import platform_of
from transformer.nn._partitioning import constrain, num_shards, platform
from transformer.nn._sharding import make_mesh
from transformer.nn.kernels import choose

pytestmark = pytest.mark.cpu_only("needs eight devices")


def test_without_a_mesh_constraints_have_no_effect():
    x = jnp.ones((4, 2))
    assert constrain(x, "batch", "embed") is x
    assert num_shards("length") == 1


def test_with_a_mesh_axes_follow_the_rules():
    x = np.ones((4, 6, 8, 3), np.float32)
    with jax.set_mesh(mesh(data=2, context=2, tensor=2)):
        placed = jax.jit(lambda x: constrain(x, "batch", "length", "heads", None))(x)
        assert placed.sharding.spec == PartitionSpec("data", "context", "tensor")
        assert num_shards("length") == 2
        # three heads can't be split in two, so this axis is not sharded
        odd = jax.jit(lambda x: constrain(x, "batch", None, None, "heads"))(x)
        assert "tensor" not in jax.tree.leaves(tuple(odd.sharding.spec))
    with jax.set_mesh(make_mesh({"data": 2, "context": 2, "tensor": 2})):
        odd = jax.jit(lambda x: constrain(x, "batch", None, None, "heads"))(x)
        assert odd.sharding.spec == PartitionSpec("data")
    with jax.set_mesh(mesh(data=2, fsdp=2, other=2)):
        placed = jax.jit(lambda x: constrain(x, "batch", "length", "heads", None))(x)
        assert placed.sharding.spec[0] == ("data", "fsdp")


def test_unsharded_arrays_are_replicated():
    own = make_mesh({"fsdp": 4, "tensor": 2})
    x = jax.device_put(np.ones((8, 6), np.float32), NamedSharding(own, PartitionSpec("fsdp", "tensor")))
    with jax.set_mesh(own):
        whole = jax.jit(lambda x: constrain(x, "embed", "embed"))(x)
    assert whole.sharding.is_fully_replicated
    np.testing.assert_array_equal(whole, x)


def test_the_active_mesh_determines_the_platform():
    """The mesh may have other devices than JAX: a step can be compiled for a TPU on a machine without one."""
    facts = {"platform": "tpu"} if jax.__version_info__ >= (0, 10, 1) else {}
    device = AbstractDevice(device_kind="TPU v5 lite", num_cores=1, **facts)
    assert platform() == "cpu"
    with jax.sharding.use_abstract_mesh(AbstractMesh((2,), ("data",), abstract_device=device)):
        assert platform() == "tpu"
        request = attention_spec(200)
        assert choose("auto", request) == "reference"  # on CPU 200 x 200 scores are too many
    assert platform() == "cpu"
    assert choose("auto", request) == "query_chunked"


def test_kinds_of_devices_name_their_platform():
    """Before JAX 0.10.1 an abstract device has no platform; it is derived from the device kind."""
    kinds = {"cpu": "cpu", "TPU v5 lite": "tpu", "TPU7x": "tpu", "NVIDIA H100 80GB HBM3": "gpu"}
    for kind, expected in kinds.items():
        assert platform_of(types.SimpleNamespace(device_kind=kind)) == expected
    assert platform_of(types.SimpleNamespace(device_kind="Whatever", platform="tpu")) == "tpu"


def test_names_are_checked():
    with pytest.raises(ValueError, match="'bach'"):
        constrain(jnp.ones(2), "bach")
    with pytest.raises(ValueError, match=r"one name per axis: got 1 names for an array of shape \(2, 3\)"):
        constrain(jnp.ones((2, 3)), "batch")
