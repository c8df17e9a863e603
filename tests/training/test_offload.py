"""Offload to host memory: the same bits as without it, arrays in the memory that was asked for, and errors."""

import dataclasses
import types

import jax
import numpy as np
import pytest
from training_recipes import tiny_batch, tiny_recipe

from transformer.config import ConfigError, Execution, RotaryOptions
from transformer.nn._sharding import HOST_MEMORY, ParallelConfig
from transformer.training._memory import shard_bytes
from transformer.training._parallel import MeshPlacement, place
from transformer.training._state import abstract_state
from transformer.training._step import make_train_step
from transformer.training.plan import batch_shapes
from transformer.training.workdir._checkpoint import Checkpointer

pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="XLA can't partition these programs on a CPU")
MODEL = {
    "d_model": 16,
    "num_heads": 4,
    "num_layers": 2,
    "feed_forward.d_ff": 24,
    "position": RotaryOptions(),
    "dropout_rate": 0.1,
}


def recipe_for(remat, parallel, scan=True):
    recipe = tiny_recipe(model=MODEL, optimizer={"learning_rate": 1e-2})
    return dataclasses.replace(recipe, execution=Execution(remat=remat, scan=scan), parallel=parallel)


HOST = ParallelConfig(fsdp=2, devices=2, optimizer_memory_host_offload=True)
ON_DEVICES = dataclasses.replace(HOST, optimizer_memory_host_offload=False)


def trained(recipe, steps=3):
    placement = place(recipe)
    state, losses = placement.spread(placement.new_state()), []
    for seed in range(steps):
        batch = {name: np.asarray(array) for name, array in tiny_batch(seed=seed).items()}
        state, metrics = placement.train_step(state, batch)
        losses.append(float(metrics["loss_sum"]))
    return placement, placement.whole(state), losses


def memory_kinds(tree):
    """Return the memory kinds of the arrays and of the scalars in a tree of arrays or shapes."""
    leaves = jax.tree.leaves(tree)
    return tuple(
        {leaf.sharding.memory_kind for leaf in leaves if bool(leaf.shape) is arrays} for arrays in (True, False)
    )


def same_bits(a, b):
    return [x.tobytes() for x in map(np.asarray, jax.tree.leaves(a))] == [
        x.tobytes() for x in map(np.asarray, jax.tree.leaves(b))
    ]


@pytest.fixture(scope="module")
def offloaded():
    return trained(recipe_for("offload", HOST))


@pytest.fixture(scope="module")
def resident():
    return trained(recipe_for("names", ON_DEVICES))


@pytest.mark.slow
def test_offload_gives_bit_identical_results(offloaded, resident):
    assert offloaded[2] == resident[2]
    assert same_bits(offloaded[1], resident[1])


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [ParallelConfig(devices=1), ParallelConfig(kind="pmap", devices=2)], ids=str)
@pytest.mark.parametrize("scan", [True, False])
def test_activation_offload_works_on_one_device_and_with_pmap(parallel, scan):
    expected, found = (trained(recipe_for(remat, parallel, scan)) for remat in ("names", "offload"))
    assert found[2] == expected[2]
    assert same_bits(found[1], expected[1])


@pytest.mark.slow
def test_the_optimizer_state_stays_in_host_memory(offloaded, resident):
    """Also after a step, and as the target of restoring; step counts stay on the devices."""
    placement, state, _ = offloaded
    for opt_state in (state.opt_state, placement.abstract_state().opt_state, placement.new_state().opt_state):
        assert memory_kinds(opt_state) == ({HOST_MEMORY}, {"device"})
    assert memory_kinds(state.params)[0] == {"device"}
    assert shard_bytes(placement.abstract_state().opt_state) < 100 < shard_bytes(resident[0].abstract_state().opt_state)


def test_activations_are_copied_to_the_host():
    """A CPU has one memory, so its program does not show the copies; the step before lowering does."""
    copies = {}
    for remat in ("names", "offload"):
        recipe = recipe_for(remat, ON_DEVICES)
        text = str(jax.make_jaxpr(make_train_step(recipe))(abstract_state(recipe), batch_shapes(recipe)))
        copies[remat] = text.count("devices=(MemorySpace.Host,)")
    # The input of a layer, the output of its attention, and the hidden layer of its feed-forward layer.
    assert copies == {"names": 0, "offload": 3}


@pytest.mark.programs(10, reason="saving a state copies shards of each shape and sharding")
@pytest.mark.parametrize(
    ("saved", "target"), [(HOST, ON_DEVICES), (ON_DEVICES, HOST)], ids=["from host memory", "from device memory"]
)
def test_a_checkpoint_does_not_depend_on_offload(saved, target, tmp_path):
    before, after = (place(recipe_for("none", parallel)) for parallel in (saved, target))
    state = before.new_state()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, state, data={}, recipe={"name": "r"})
    with Checkpointer(tmp_path) as checkpointer:
        restored = checkpointer.restore_newest(after.abstract_state()).state
    assert same_bits(restored, state)
    assert memory_kinds(restored.opt_state) == memory_kinds(after.new_state().opt_state)
    assert memory_kinds(restored.opt_state) != memory_kinds(state.opt_state)


@pytest.mark.cpu_only("needs eight devices")
def test_a_step_keeps_the_optimizer_state_in_host_memory():
    placement = place(recipe_for("none", HOST))
    state, _ = placement.train_step(placement.new_state(), {k: np.asarray(v) for k, v in tiny_batch(seed=9).items()})
    assert memory_kinds(state.opt_state) == ({HOST_MEMORY}, {"device"})


class WithoutHostMemory:
    """A device that has only its own memory."""

    platform, device_kind, process_index = "x", "X 100", 0

    def addressable_memories(self):
        return [types.SimpleNamespace(kind="device")]


@pytest.mark.parametrize(
    ("recipe", "option"),
    [
        (recipe_for("offload", ON_DEVICES), "--execution.remat offload"),
        (recipe_for("none", HOST), "--parallel.optimizer-memory-host-offload"),
    ],
)
def test_reports_a_device_without_host_memory(recipe, option):
    message = (
        rf"{option} needs devices with the memory kind pinned_host, but X 100 has device\. Remove {option}; .* full"
    )
    with pytest.raises(ConfigError, match=message):
        MeshPlacement(recipe, [WithoutHostMemory(), WithoutHostMemory()])


def test_pmap_keeps_its_state():
    with pytest.raises(ConfigError, match=r"pmap keeps the whole state in device memory, but .* Remove that option"):
        ParallelConfig(kind="pmap", optimizer_memory_host_offload=True)
