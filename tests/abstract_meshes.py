"""Meshes of devices that this machine does not have."""

import jax
from jax.sharding import AbstractDevice, AbstractMesh


def computing_on(platform, kind):
    """Return a context whose mesh has two devices of this platform and kind.

    Before JAX 0.10.1, an abstract device has no platform; its kind determines the platform.
    """
    facts = {"platform": platform} if "platform" in AbstractDevice.__dataclass_fields__ else {}
    device = AbstractDevice(device_kind=kind, num_cores=1, **facts)
    return jax.sharding.use_abstract_mesh(AbstractMesh((2,), ("data",), abstract_device=device))
