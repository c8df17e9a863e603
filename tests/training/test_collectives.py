"""Collectives of a training step for each mesh layout: no activation is gathered unnecessarily.

The tests read the program that XLA compiles for eight simulated CPU devices. On CPU, XLA uses all-reduce and slice
where other platforms use reduce-scatter, and it sums the three gradients of the common input of queries, keys and
values one by one.
"""

import collections
import dataclasses
import functools
import math
import re

import jax
import jaxlib
import pytest
from training_recipes import tiny_recipe

from transformer.config import Execution, LayerKind, MoE, RotaryOptions
from transformer.data import TextFile
from transformer.nn._sharding import ParallelConfig
from transformer.training._parallel import MeshPlacement
from transformer.training.plan import Program, batch_shapes

pytestmark = pytest.mark.cpu_only("needs eight devices")

BATCH, LENGTH, WIDTH, HEADS, LAYERS, VOCABULARY, EXPERTS = 16, 40, 32, 4, 2, 232, 4
MODEL = {"vocab_size": VOCABULARY, "d_model": WIDTH, "num_heads": HEADS, "num_layers": LAYERS, "feed_forward.d_ff": 24}
MODEL |= {
    "position": RotaryOptions(),
    "parameters.use_bias": False,
    "norm.kind": "rms_norm",
}  # no parameter has an axis of size 40 (LENGTH)
LAYOUTS = {
    "data x8": {},
    "fsdp x8": {"fsdp": 8},
    "tensor x4, data x2": {"tensor": 4},
    "context x4, data x2": {"context": 4},
    "expert x4, data x2": {"expert": 4},
    "fsdp x2, tensor x2, data x2": {"fsdp": 2, "tensor": 2},
}
COUNTED_BY = "0.10.2"  # jaxlib version. Others fuse collectives differently; the other tests show whether it matters.
COUNTS = {
    "data x8": {"all-reduce": 1},
    "fsdp x8": {"all-reduce": 9, "all-gather": 18},
    "tensor x4, data x2": {"all-reduce": 15},
    "context x4, data x2": {"all-reduce": 4, "collective-permute": 80},
    "expert x4, data x2": {"all-reduce": 4, "all-gather": 8, "reduce-scatter": 6},
    "fsdp x2, tensor x2, data x2": {"all-reduce": 22, "all-gather": 18},
}


def recipe_for(parallel, model=MODEL, rows=BATCH, length=LENGTH, scan=False):
    if "expert" in parallel:
        model = model | {"stack.period": (LayerKind(moe=MoE(num_experts=EXPERTS, d_ff=24)),)}
    return dataclasses.replace(
        tiny_recipe(model=model),
        data=TextFile(path="text.txt", sequence_length=length, batch_size=rows),
        execution=Execution(scan=scan),
        parallel=ParallelConfig(**parallel),
    )


@functools.cache
def compiled(layout):
    recipe = recipe_for(LAYOUTS[layout])
    return MeshPlacement(recipe).lower(batch_shapes(recipe)).compile().as_text()


def collective_shapes(layout, *kinds):
    """Result shapes of the collectives of these kinds; those over a single device are excluded."""
    found = []
    for line in compiled(layout).splitlines():
        operation = re.search(rf"= (.+?) (?:{'|'.join(kinds)})(?:-start)?\(", line)
        if operation and not re.search(r"replica_groups=\{\{\d+\}", line):
            sizes = re.findall(r"\b[a-z]+\d+\[([\d,]*)\]", operation[1])
            found += [tuple(map(int, filter(None, size.split(",")))) for size in sizes]
    return found


def of_activations(shapes):
    """The shapes with an axis of the sequence length or of rows times length."""
    return [shape for shape in shapes if any(size % LENGTH == 0 for size in shape)]


def parameter_sizes(layout):
    """Sizes of all parameters, per layer, and of their shards if heads or widths are sharded."""
    placement = MeshPlacement(recipe_for(LAYOUTS[layout]))
    paths = jax.tree_util.tree_leaves_with_path(placement.abstract_state().params)
    whole = {leaf.size // (LAYERS if "layers" in jax.tree_util.keystr(path) else 1) for path, leaf in paths}
    return whole | {size // placement.mesh.shape["tensor"] for size in whole}


@pytest.mark.default_cases(2)
@pytest.mark.skipif(jaxlib.__version__ != COUNTED_BY, reason=f"collectives were counted with jaxlib {COUNTED_BY}")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_collectives_have_the_expected_counts(layout):
    cost = Program(compiled(layout)).cost(8)
    assert {one.kind: one.count for one in cost.collectives} == COUNTS[layout]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_activation_is_gathered_unnecessarily(layout):
    gathered = collections.Counter(of_activations(collective_shapes(layout, "all-gather")))
    needed = collections.Counter()
    if "expert" in layout:
        # The four devices that share the experts gather the activations of their half of the rows, the indices and
        # weights of the selected experts, and, in the backward pass, the gradients. No device gathers all rows.
        half = BATCH // 2, LENGTH
        needed = {(*half, WIDTH): 2 * LAYERS, (*half, 2): 2 * LAYERS}
    assert gathered == needed
    assert not collective_shapes(layout, "all-to-all")


def test_data_parallelism_only_sums_gradients():
    layout = "data x8"
    assert not collective_shapes(layout, "all-gather", "reduce-scatter", "collective-permute")
    assert not of_activations(collective_shapes(layout, "all-reduce"))


@pytest.mark.parametrize("layout", ["fsdp x8", "fsdp x2, tensor x2, data x2"])
def test_fsdp_gathers_only_parameters(layout):
    gathered = {math.prod(shape) for shape in collective_shapes(layout, "all-gather")}
    assert gathered
    assert gathered <= parameter_sizes(layout)


def test_all_chunks_of_the_loss_share_one_gathered_head():
    """The counts include loop iterations, so a gather inside the loop over chunks would be counted once per chunk."""

    def counts(tokens):
        recipe = recipe_for({"fsdp": 2, "tensor": 2}, MODEL | {"num_layers": 1})
        recipe = dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, loss_tokens=tokens))
        cost = Program(MeshPlacement(recipe).lower(batch_shapes(recipe)).compile().as_text()).cost(8)
        assert cost.loops_known
        return {one.kind: one.count for one in cost.collectives if one.kind == "all-gather"}

    assert counts(20) == counts(10)


@pytest.mark.parametrize("layout", ["tensor x4, data x2", "fsdp x2, tensor x2, data x2"])
def test_tensor_parallelism_sums_twice_per_layer_and_pass(layout):
    """As in Shoeybi et al. 2019, arXiv 1909.08053, figure 4: one all-reduce after attention and one after the
    feed-forward layer, the same in the backward pass, and in addition the embedding and, backward, the logits.
    """
    rows = BATCH // (2 if layout.startswith("tensor") else 4)
    summed = [shape for shape in collective_shapes(layout, "all-reduce") if math.prod(shape) == rows * LENGTH * WIDTH]
    forward, back = 1 + 2 * LAYERS, 1 + (1 + 3) * LAYERS  # 3: queries, keys and values; see the docstring of the module
    assert len(summed) == forward + back


def test_context_parallelism_passes_keys_and_values_in_a_ring():
    layout, devices = "context x4, data x2", 4
    assert not collective_shapes(layout, "all-gather", "all-to-all", "reduce-scatter")
    assert not of_activations(collective_shapes(layout, "all-reduce"))
    passed = Program(compiled(layout)).cost(8).collectives
    # Reordering to the load-balanced order and back: two halves each of queries, keys, values and the output, in the
    # forward and the backward pass. Ring: keys and values, and in the backward pass also their gradients.
    home, ring = 2 * 4 * 2, devices * (2 + 4)
    assert {one.kind: one.count for one in passed}["collective-permute"] == (home + ring) * LAYERS
    own = BATCH // 2 * LENGTH // devices * WIDTH
    assert max(math.prod(shape) for shape in collective_shapes(layout, "collective-permute")) == own


def test_experts_stay_on_their_devices():
    """Expert weights are never gathered, and gradients of an expert are summed over the two devices that hold it."""
    layout = "expert x4, data x2"
    shapes = collective_shapes(layout, "all-gather", "all-reduce", "reduce-scatter")
    kernels = collections.Counter(shape for shape in shapes if sorted(shape[-2:]) == [24, WIDTH])
    assert kernels == {(1, 24, WIDTH): LAYERS, (1, WIDTH, 24): LAYERS}


def test_fsdp_holds_an_eighth_of_parameters_gradients_and_optimizer_state():
    """According to the memory analysis of the compiler. With many scanned layers, one gathered layer is small."""
    recipe = recipe_for(
        {"fsdp": 8}, MODEL | {"d_model": 64, "feed_forward.d_ff": 512, "num_layers": 16}, 8, 8, scan=True
    )
    placement, batch = MeshPlacement(recipe), batch_shapes(recipe)
    program = placement.lower(batch).compile()
    state = placement.abstract_state()
    leaves = jax.tree_util.tree_leaves_with_path(state)
    whole, parameters = (
        sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)) for tree in (state, state.params)
    )

    def is_norm(path):
        return "norm" in jax.tree_util.keystr(path)

    # Scales of norms are whole on every device: communicating a vector costs more time than its memory is worth.
    norms = sum(leaf.size * leaf.dtype.itemsize for path, leaf in leaves if is_norm(path))
    memory = program.memory_analysis()
    rows = sum(x.size * x.dtype.itemsize for x in batch.values()) // 8
    assert memory.argument_size_in_bytes - rows < ((whole - norms) / 8 + norms) * 1.01
    assert (
        memory.alias_size_in_bytes > memory.output_size_in_bytes * 0.99
    )  # the new state reuses the buffers of the old one
    # Gradients and all other temporary arrays. Unsharded gradients alone would take `parameters` bytes.
    assert memory.temp_size_in_bytes < 0.6 * parameters
    after, _ = program.output_shardings
    for (path, leaf), sharding in zip(leaves, jax.tree.leaves(after), strict=True):
        ways = 1 if leaf.size == 1 or is_norm(path) else 8
        assert math.prod(sharding.shard_shape(leaf.shape)) == math.prod(leaf.shape) / ways, path
