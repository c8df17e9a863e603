"""One recipe on one device and on eight, by mesh and by pmap: equal losses, and correct shardings."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from training_recipes import tiny_batch, tiny_recipe

from transformer.config import ConfigError, RotaryOptions, T5BiasOptions
from transformer.data import TextFile
from transformer.nn._sharding import DcnConfig, ParallelConfig, make_mesh, mesh_sizes, parameter_spec
from transformer.training import _state as state_module
from transformer.training._parallel import MeshPlacement, PmapPlacement, place
from transformer.training._recipe import from_json, to_json
from transformer.training._state import parameter_paths

pytestmark = pytest.mark.cpu_only("needs eight devices")

MODEL = {"d_model": 16, "num_heads": 4, "num_layers": 2, "feed_forward.d_ff": 24, "position": RotaryOptions()}
LAYOUTS = {
    "data x8": {},
    "fsdp x8": {"fsdp": 8},
    "tensor x4, data x2": {"tensor": 4},
    "context x4, data x2": {"context": 4},
    "fsdp x2, tensor x2, data x2": {"fsdp": 2, "tensor": 2},
    "two slices: fsdp x4, data x2 across slices": {"fsdp": 4, "dcn": DcnConfig(data=2)},
    "two slices: tensor x2, fsdp x2 in each and x2 across slices": {"fsdp": 2, "tensor": 2, "dcn": DcnConfig(fsdp=2)},
}


def recipe_for(task, parallel, dropout=0.0, **training):
    recipe = tiny_recipe(task, model=MODEL | {"dropout_rate": dropout}, optimizer={"learning_rate": 1e-2}, **training)
    if task == "causal_lm":
        recipe = dataclasses.replace(recipe, data=TextFile(path="text.txt", sequence_length=8, batch_size=8))
    return dataclasses.replace(recipe, parallel=parallel)


def batches(task, count):
    """Return rows of different lengths, with eight targets each."""
    for seed in range(count):
        batch = {name: np.asarray(array) for name, array in tiny_batch(task, seed=seed).items()}
        for name in ("tokens", "targets", "weights"):
            batch[name] = np.pad(batch[name], ((0, 0), (0, 1)))
        if "source" in batch:
            batch["source"] = np.pad(batch["source"], ((0, 0), (0, 3)))
        yield batch


def losses(recipe, steps=6):
    placement = place(recipe)
    state, found = placement.spread(placement.new_state()), []
    for batch in batches(recipe.task, steps):
        state, metrics = placement.train_step(state, batch)
        found.append(float(metrics["loss_sum"]) / float(metrics["weight"]))
    return found, placement.whole(state)


PMAP = "pmap copies arrays of each shape to its devices and back"


@pytest.mark.parametrize("kind", ["mesh", pytest.param("pmap", marks=pytest.mark.programs(24, reason=PMAP))])
def test_a_placement_runs_the_given_step(kind):
    """The loop passes the pure step; a placement only distributes it."""

    def make_counting_step(recipe, axis_name=None):
        return lambda state, batch, limit=None: (state.replace(step=state.step + 7), {"rows": batch["weights"].sum()})

    recipe = recipe_for("causal_lm", ParallelConfig(kind=kind, devices=1))
    placement = place(recipe, make_counting_step)
    state, metrics = placement.train_step(placement.spread(placement.new_state()), next(batches("causal_lm", 1)))
    assert placement.whole(state).step == 7
    assert metrics.keys() == {"rows"}


@pytest.fixture(scope="module")
def alone():
    """Return losses and parameters on one device, computed once."""
    found = {}

    def get(task, dropout):
        if (task, dropout) not in found:
            found[task, dropout] = losses(recipe_for(task, ParallelConfig(devices=1), dropout))
        return found[task, dropout]

    return get


SLICES = "two slices: tensor x2, fsdp x2 in each and x2 across slices"
QUICK = {("causal_lm", "fsdp x8"), ("causal_lm", SLICES)}


@pytest.mark.parametrize(
    ("task", "layout"),
    [
        pytest.param(task, layout, marks=() if (task, layout) in QUICK else pytest.mark.slow)
        for task in ("causal_lm", "seq2seq")
        for layout in LAYOUTS
    ],
)
def test_any_mesh_gives_the_same_losses(task, layout, alone):
    """With dropout: random keys are partitionable, so the values do not depend on the device that computes them."""
    expected, state = alone(task, 0.2)
    found, other = losses(recipe_for(task, ParallelConfig(**LAYOUTS[layout]), 0.2))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    ours, theirs = (
        dict(zip(parameter_paths(s.params), jax.tree.leaves(s.params), strict=True)) for s in (state, other)
    )
    for path in ours:
        # A bias on keys adds the same value to all scores of a query. Its gradient is only rounding error, which Adam
        # divides by its own size, so it can't be compared.
        if not path.endswith("key/bias"):
            np.testing.assert_allclose(ours[path], theirs[path], atol=2e-4, err_msg=path)


@pytest.mark.programs(28, reason=PMAP)
@pytest.mark.parametrize("task", ["causal_lm", pytest.param("seq2seq", marks=pytest.mark.slow)])
def test_pmap_gives_the_same_losses(task, alone):
    expected, _ = alone(task, 0.0)
    found, state = losses(recipe_for(task, ParallelConfig(kind="pmap")))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert state.step.shape == ()


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [pytest.param("splash", marks=pytest.mark.slow), "ring"])
def test_a_recipe_may_name_a_kernel_for_whole_sequences(kernel, alone):
    """Its parameters are initialized from an example that such a kernel would reject."""
    expected, _ = alone("causal_lm", 0.0)
    recipe = recipe_for("causal_lm", ParallelConfig(context=4 if kernel == "ring" else 1))
    recipe = dataclasses.replace(recipe, execution=dataclasses.replace(recipe.execution, attention=kernel))
    np.testing.assert_allclose(losses(recipe, steps=2)[0], expected[:2], rtol=1e-5)


def test_accumulation_within_a_mesh(alone):
    expected, _ = alone("causal_lm", 0.0)
    recipe = recipe_for("causal_lm", ParallelConfig(data=4, devices=4), accumulation=2)
    np.testing.assert_allclose(losses(recipe)[0], expected, rtol=1e-5)


def test_fsdp_holds_an_eighth():
    """Parameters and optimizer state are split, except for those that are too small and the vectors of norms."""
    recipe = tiny_recipe(model=MODEL | {"d_model": 64, "feed_forward.d_ff": 96})
    placement = place(dataclasses.replace(recipe, parallel=ParallelConfig(fsdp=8)))
    state = placement.new_state()
    leaves = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state) if "norm" not in str(path)]
    whole = sum(leaf.nbytes for leaf in leaves)
    part = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    assert part < whole / 8 * 1.1
    kernel = state.params["decoder"]["layers"]["slot_0"]["feed_forward"]["up"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (2, 8, 96)


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(fsdp=4, tensor=2),
        pytest.param(ParallelConfig(kind="pmap", devices=4), marks=pytest.mark.programs(16, reason=PMAP)),
    ],
)
def test_a_step_keeps_the_sharding_of_the_state(parallel):
    """Otherwise the next step would be compiled again."""
    placement = place(recipe_for("causal_lm", parallel))
    state = placement.spread(placement.new_state())
    before = jax.tree.map(where, state)
    after, _ = placement.train_step(state, next(batches("causal_lm", 1)))
    assert jax.tree.map(where, after) == before


def where(leaf):
    """Return the sharding of an array in comparable form; before JAX 0.10, pmap used a different class of shardings."""
    if jax.__version_info__ >= (0, 10):
        return leaf.sharding
    parts = leaf.sharding.devices_indices_map(leaf.shape)
    return {
        device: [part.indices(size) for part, size in zip(parts[device], leaf.shape, strict=True)] for device in parts
    }


def test_a_new_state_is_traced_once(monkeypatch):
    """Its shapes and its values come from one trace, which takes seconds for a model with many kinds of layers."""
    calls, make = [], state_module.initial_params
    monkeypatch.setattr(state_module, "initial_params", lambda recipe: calls.append(recipe) or make(recipe))
    placement = place(recipe_for("causal_lm", ParallelConfig(fsdp=8)))
    state = placement.new_state()
    assert len(calls) == 1
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), placement.abstract_state())
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), state) == shapes


@pytest.fixture(scope="module")
def one_device():
    """The step is compiled once."""
    return place(recipe_for("causal_lm", ParallelConfig(devices=1)))


@pytest.mark.parametrize("parallel", [ParallelConfig(), ParallelConfig(kind="pmap")])
def test_evaluation_takes_any_number_of_rows(parallel, one_device):
    placement = place(recipe_for("causal_lm", parallel))
    params = placement.new_state().params
    batch = {name: array[:3] for name, array in next(batches("causal_lm", 1)).items()}
    sums = placement.eval_step(params, batch)
    assert float(sums["weight"]) == batch["weights"].sum()
    again = one_device.eval_step(jax.device_get(params), batch)
    np.testing.assert_allclose(float(sums["loss_sum"]), float(again["loss_sum"]), rtol=1e-5)


@pytest.mark.parametrize(
    ("path", "shape", "spec"),
    [
        ("decoder/layers/slot_0/self_attention/query/kernel", (2, 16, 4, 4), (None, "fsdp", "tensor", None)),
        ("decoder/prefix_0/self_attention/query/kernel", (16, 4, 4), ("fsdp", "tensor", None)),
        ("0/mu/decoder/layers/slot_0/self_attention/out/kernel", (2, 4, 4, 16), (None, "tensor", None, "fsdp")),
        ("decoder/layers/slot_0/self_attention/key/kernel", (2, 16, 3, 4), (None, "fsdp", None, None)),
        ("embedding/embedding", (7, 16), (None, "fsdp")),
        ("embedding/embedding", (8, 16), ("tensor", "fsdp")),
        ("decoder/layers/slot_0/feed_forward/down/kernel", (2, 24, 16), (None, "tensor", "fsdp")),
        ("decoder/layers/slot_0/feed_forward/experts/up/kernel", (2, 4, 16, 24), (None, "expert", "fsdp", "tensor")),
        ("decoder/final_norm/scale", (16,), (None,)),
        ("decoder/layers/slot_0/self_attention/out/bias", (2, 16), (None, "fsdp")),
        ("0/count", (), ()),
        ("something/else", (16, 16), ()),
    ],
)
def test_parameters_have_the_documented_sharding(path, shape, spec):
    sizes = {"data": 1, "fsdp": 2, "expert": 2, "context": 1, "tensor": 2}
    assert tuple(parameter_spec(path, shape, sizes)) == spec


def test_every_parameter_of_the_models_has_a_rule():
    """FSDP splits every parameter but the vectors of norms; one without a rule would be replicated."""
    for task in ("causal_lm", "seq2seq"):
        recipe = tiny_recipe(
            task, model=MODEL | {"position": T5BiasOptions(), "embedding.tie": False, "feed_forward.gated": True}
        )
        state = MeshPlacement(dataclasses.replace(recipe, parallel=ParallelConfig(fsdp=8))).abstract_state()
        whole = [
            jax.tree_util.keystr(path, simple=True, separator="/")
            for path, leaf in jax.tree_util.tree_leaves_with_path(state.params)
            if leaf.sharding.is_fully_replicated and "norm" not in jax.tree_util.keystr(path)
        ]
        assert {path.rsplit("/", 2)[-1] for path in whole} <= {"position_table", "bias"}, whole
        assert not [path for path in whole if "down" in path], whole


def test_the_data_axis_uses_remaining_devices():
    assert mesh_sizes({"data": -1, "tensor": 2}, 8) == {"data": 4, "fsdp": 1, "expert": 1, "context": 1, "tensor": 2}


@dataclasses.dataclass(frozen=True)
class Chip:
    """The attributes that JAX needs to make a mesh of a torus: the coordinates of each device."""

    id: int
    coords: tuple[int, int, int]
    platform = "tpu"
    device_kind = "TPU v5p"
    process_index = 0
    slice_index = 0
    core_on_chip = 0


@pytest.mark.parametrize("sizes", [{"fsdp": 64}, {"data": 16, "tensor": 4}, {"data": 2, "fsdp": 32}], ids=str)
def test_a_mesh_may_split_torus_axes(sizes):
    """With 4x4x4 chips, the last mesh axis consists of half an axis of the torus and of the rest."""
    chips = [Chip(id, coords) for id, coords in enumerate(itertools.product(range(4), repeat=3))]
    mesh = make_mesh(sizes, chips)
    assert {axis: size for axis, size in mesh.shape.items() if size > 1} == sizes
    assert set(mesh.devices.flat) == set(chips)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mesh_sizes({"data": 3}, 8), r"the mesh data 3 needs 3 devices, but there are 8\. Sizes must multiply"),
        (lambda: mesh_sizes({"data": -1, "tensor": 3}, 8), r"needs a multiple of 3 devices, .* one of 1, 2, 4, 8"),
        (lambda: mesh_sizes({"data": -1, "fsdp": -1}, 8), r"only one mesh axis can be -1 .* got data and fsdp"),
        (lambda: mesh_sizes({"dat": 2}, 8), r"'dat'"),
        (lambda: ParallelConfig(tensor=0), r"parallel.tensor.*1.*-1.*, got 0"),
        (lambda: ParallelConfig(kind="pmp"), r"'pmap'\?"),
        (lambda: ParallelConfig(kind="pmap", tensor=2), r"parallel.tensor.*2"),
        (lambda: ParallelConfig(devices=0), r"parallel.devices"),
        (lambda: place(recipe_for("causal_lm", ParallelConfig(devices=9))), r"devices.*9.*8"),
        (lambda: place(recipe_for("causal_lm", ParallelConfig(tensor=8))), r"num_heads \(4\).*1.*2.*4"),
        (lambda: PmapPlacement(recipe_for("causal_lm", ParallelConfig(kind="pmap", data=2))), r"pmap runs on all 8"),
    ],
)
def test_an_invalid_mesh_names_a_valid_one(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("parallel", [ParallelConfig(), ParallelConfig(kind="pmap")])
def test_rejects_rows_that_cannot_be_distributed(parallel):
    recipe = recipe_for("causal_lm", parallel)
    recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, batch_size=12))
    with pytest.raises(ConfigError, match=r"batch_size \(12\).*8.*8.*16"):
        place(recipe)
    odd = recipe_for("causal_lm", ParallelConfig(context=4))
    with pytest.raises(ConfigError, match=r"7.*parallel.context \(4\)"):
        place(dataclasses.replace(odd, data=dataclasses.replace(odd.data, sequence_length=7)))


def test_rejects_pair_lengths_that_the_mesh_cannot_divide():
    placement = place(recipe_for("seq2seq", ParallelConfig(context=4)))
    batch = next(batches("seq2seq", 1)) | {"source": np.ones((8, 6), np.int32)}
    with pytest.raises(ConfigError, match=r"source.*6.*parallel.context \(4\).*4.*8"):
        placement.train_step(placement.abstract_state(), batch)


def test_the_step_can_be_lowered_and_inspected():
    placement = place(recipe_for("causal_lm", ParallelConfig(fsdp=8)))
    text = placement.lower(next(batches("causal_lm", 1))).compile().as_text()
    assert "all-gather" in text


def test_missing_fields_of_a_file_take_their_defaults():
    recipe = recipe_for("causal_lm", ParallelConfig())
    values = to_json(recipe)
    del values["recipe"]["parallel"], values["recipe"]["model"]["stack"]["period"][0]["self_attention"]
    assert from_json(values) == recipe
