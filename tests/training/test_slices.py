"""Several slices: which devices are neighbors in a mesh, and errors that name valid sizes."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from training_recipes import tiny_recipe

from transformer.config import ConfigError
from transformer.nn._sharding import AXES, DcnConfig, ParallelConfig, make_mesh
from transformer.training._parallel import MeshPlacement
from transformer.training._recipe import from_json, to_json

pytestmark = pytest.mark.cpu_only("needs eight devices")


@dataclasses.dataclass(frozen=True)
class Chip:
    """The attributes that JAX needs to make a mesh of TPU slices."""

    id: int
    slice_index: int
    coords: tuple[int, int, int]
    platform = "tpu"
    device_kind = "TPU v5p"
    core_on_chip = 0

    @property
    def process_index(self):
        return self.slice_index


def chips(slices):
    places = itertools.product(range(slices), itertools.product(range(2), repeat=3))
    return [Chip(number, index, coords) for number, (index, coords) in enumerate(places)]


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A device of a process, without slices."""

    id: int
    process_index: int
    platform = "gpu"


SLICES = {
    "TPU": (chips(2), lambda device: device.slice_index),
    "simulated": ([Gpu(number, 0) for number in range(16)], lambda device: device.id // 8),
    "processes": ([Gpu(number, number // 4) for number in range(16)], lambda device: device.process_index // 2),
}


@pytest.mark.parametrize("kind", SLICES)
@pytest.mark.parametrize(
    ("sizes", "dcn"),
    [
        ({"data": 2, "fsdp": 8}, {"data": 2}),
        ({"data": 4, "tensor": 4}, {"data": 2}),
        ({"fsdp": 4, "context": 2, "tensor": 2}, {"fsdp": 2}),
        ({"data": 2, "tensor": 8}, {"tensor": 2}),
    ],
    ids=str,
)
def test_only_the_axes_across_slices_leave_a_slice(kind, sizes, dcn):
    """Along such an axis, each half is in one slice; along all others, all devices are in one slice."""
    devices, slice_of = SLICES[kind]
    mesh = make_mesh(sizes, devices, DcnConfig(**dcn))
    assert set(mesh.devices.flat) == set(devices)
    assert {axis: size for axis, size in mesh.shape.items() if size > 1} == sizes
    slices = np.vectorize(slice_of)(mesh.devices)
    for place, axis in enumerate(AXES):
        lines = np.moveaxis(slices, place, -1).reshape(-1, mesh.shape[axis])
        assert (np.sort(lines, axis=1) == lines).all()
        assert {tuple(np.bincount(line)) for line in lines.tolist()} <= (
            {(mesh.shape[axis] // 2,) * 2} if axis in dcn else {(mesh.shape[axis],), (0, mesh.shape[axis])}
        )


def test_mesh_sizes_are_products_of_ici_and_dcn_sizes():
    parallel = ParallelConfig(fsdp=2, tensor=2, dcn=DcnConfig(data=2))
    assert parallel.sizes == {"data": -1, "fsdp": 2, "expert": 1, "context": 1, "tensor": 2}
    parallel = dataclasses.replace(parallel, data=1, dcn=DcnConfig(data=2, fsdp=3))
    assert parallel.sizes == {"data": 2, "fsdp": 6, "expert": 1, "context": 1, "tensor": 2}
    placement = MeshPlacement(
        dataclasses.replace(tiny_recipe(), parallel=ParallelConfig(data=4, dcn=DcnConfig(data=2)))
    )
    assert placement.describe() == "mesh: data 8 (data 2 across slices)"


def test_a_recipe_written_before_slices_is_read():
    recipe = dataclasses.replace(tiny_recipe(), parallel=ParallelConfig(dcn=DcnConfig(fsdp=2)))
    assert from_json(to_json(recipe)) == recipe
    values = to_json(tiny_recipe())
    del values["recipe"]["parallel"]["dcn"]
    assert from_json(values) == tiny_recipe()


def placed(parallel, devices):
    return MeshPlacement(dataclasses.replace(tiny_recipe(), parallel=parallel), devices)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DcnConfig(data=-1), r"parallel\.dcn\.data.*1.*got -1"),
        (
            lambda: ParallelConfig(kind="pmap", dcn=DcnConfig(data=2)),
            r"parallel\.dcn\.data.*2.*parallel\.kind",
        ),
        (
            lambda: make_mesh({"data": 16}, chips(2)),
            r"2.*got 1 \(no --parallel\.dcn options\).*--parallel\.dcn\.data 2",
        ),
        (
            lambda: make_mesh({"data": 32}, chips(4), DcnConfig(data=2)),
            r"4.*got --parallel\.dcn\.data 2.*--parallel\.dcn\.data 4",
        ),
        (
            lambda: make_mesh({"fsdp": 8}, chips(1), DcnConfig(fsdp=2)),
            r"1.*got --parallel\.dcn\.fsdp 2",
        ),
        (
            lambda: make_mesh({"data": 12}, chips(2)[:12], DcnConfig(data=2)),
            r"8.*4.*parallel\.devices",
        ),
        (
            lambda: make_mesh({"data": 6}, [Gpu(number, number // 2) for number in range(6)], DcnConfig(data=2)),
            r"3.*2.*--parallel\.dcn\.data 2.*3",
        ),
        (
            lambda: make_mesh({"fsdp": 8}, jax.devices(), DcnConfig(data=2)),
            r"parallel\.dcn\.data \(2\).*\(1\).*parallel\.dcn",
        ),
        (
            lambda: placed(ParallelConfig(data=8, dcn=DcnConfig(data=2)), jax.devices()),
            r"the mesh data 16 needs 16 devices, but there are 8",
        ),
    ],
)
def test_rejects_slices_that_do_not_fit(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
