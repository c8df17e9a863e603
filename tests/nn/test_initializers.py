"""Initializers behave as in Flax: kernels are drawn as matrices, and boxes with metadata are kept."""

import flax.linen as nn
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from transformer import MLA, MoE, MultiHeadAttention
from transformer.nn._mla import LatentAttention
from transformer.nn._moe import RoutedFeedForward
from transformer.nn.layers._layers import FeedForward, Linear, glorot_uniform

KEY = jax.device_put(np.array([0, 3], np.uint32))
"""a random key, in the old format, because `jax.random.key` compiles a program"""
D, N, H = 24, 4, 6


def ones(*shape):
    return jax.device_put(np.ones(shape, np.float32))


X = ones(1, 5, D)
INITIALIZERS = {
    "xavier_uniform": nn.initializers.xavier_uniform(),
    "lecun_normal": nn.initializers.lecun_normal(),
    "he_normal": nn.initializers.he_normal(),
    "fan_out": nn.initializers.variance_scaling(2.0, "fan_out", "truncated_normal"),
    "orthogonal": nn.initializers.orthogonal(),
    "normal": nn.initializers.normal(0.02),
    "constant": nn.initializers.constant(0.5),
}
BOXES = {"partitioning": nn.with_partitioning, "logical": nn.with_logical_partitioning}


def params_of(module, *inputs, **options):
    return jax.jit(lambda: module.init(KEY, *inputs, **options))()["params"]


def assert_equal(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize("init", INITIALIZERS.values(), ids=INITIALIZERS)
def test_attention_starts_with_the_parameters_of_flax(init):
    theirs = params_of(nn.MultiHeadDotProductAttention(N, kernel_init=init), X)
    assert_equal(params_of(MultiHeadAttention(N, kernel_init=init), X), theirs)


def test_output_init_applies_only_to_the_output_projection():
    inits = INITIALIZERS["he_normal"], INITIALIZERS["normal"]
    theirs = params_of(nn.MultiHeadDotProductAttention(N, kernel_init=inits[0], out_kernel_init=inits[1]), X)
    assert_equal(params_of(MultiHeadAttention(N, kernel_init=inits[0], output_init=inits[1]), X), theirs)


@pytest.mark.parametrize("init", [INITIALIZERS["xavier_uniform"], INITIALIZERS["orthogonal"]])
@pytest.mark.parametrize(("features", "contract"), [((N, H), 1), ((7,), 2), ((3, 5), 2)])
def test_linear_starts_with_the_kernel_of_dense_general(init, features, contract):
    x = ones(2, N, H)
    theirs = params_of(nn.DenseGeneral(features, axis=tuple(range(-contract, 0)), kernel_init=init), x)
    assert_equal(params_of(Linear(features, contract, kernel_init=init), x), theirs)


def test_xavier_uniform_has_the_deviation_of_512_inputs_and_outputs():
    attention = MultiHeadAttention(8, kernel_init=nn.initializers.xavier_uniform())
    for kernel in jax.tree.leaves(params_of(attention, ones(1, 1, 512))):
        if kernel.ndim == 3:
            assert np.std(kernel) == pytest.approx(np.sqrt(2 / 1024), rel=0.01)  # 0.0442


def test_the_default_is_glorot_uniform_over_the_axes_of_the_kernel():
    kernel = np.asarray(params_of(Linear((N, H), 2), ones(2, 3, 8))["kernel"])
    limit = np.sqrt(6 / (3 * 8 + N * H))
    assert kernel.shape == (3, 8, N, H)
    assert 0.95 * limit < np.abs(kernel).max() <= limit
    pair = jax.jit(lambda: (glorot_uniform(2)(KEY, (3, 8, N, H)), glorot_uniform()(KEY, (24, 24))))()
    np.testing.assert_array_equal(*(np.asarray(one).ravel() for one in pair))


MLA_SIZES = MLA(kv_lora_rank=8, q_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=5)
MOE = MoE(num_experts=3, top_k=2, shared_experts=1)


@pytest.mark.parametrize(
    ("module", "maps"),
    [
        (LatentAttention(N, MLA_SIZES, kernel_init=nn.initializers.xavier_uniform()), 7),
        (FeedForward(40, gated=True, kernel_init=nn.initializers.xavier_uniform()), 3),
        (RoutedFeedForward(MOE, 400, kernel_init=nn.initializers.xavier_uniform()), 5),
    ],
    ids=["latent", "feed_forward", "experts"],
)
def test_every_kernel_is_initialized_by_its_fan_in_and_fan_out(module, maps):
    """The Xavier limit of each kernel is that of its matrix, including `out` and `down`."""
    inputs = {"query": 6, "key": 8, "value": 8, "out": N * 5}
    found = 0
    for path, kernel in jax.tree.leaves_with_path(jax.tree.map(np.asarray, params_of(module, X))):
        names = [part.key for part in path]
        if names[-1] != "kernel" or kernel.ndim == 1:
            continue
        one = kernel[0] if names[0] == "experts" else kernel
        rows = inputs.get(names[0], one.shape[0])
        limit = np.sqrt(6 / (rows + one.size // rows))
        assert 0.8 * limit < np.abs(kernel).max() <= limit * (1 + 1e-6), names
        found += 1
    assert found == maps


@pytest.mark.parametrize("box", BOXES.values(), ids=BOXES)
def test_metadata_boxes_are_kept_as_in_flax(box):
    init = box(nn.initializers.xavier_uniform(), ("embed", "heads", "head_dim"))
    out = box(nn.initializers.xavier_uniform(), ("heads", "head_dim", "embed"))
    ours = jax.eval_shape(MultiHeadAttention(N, kernel_init=init, output_init=out).init, KEY, X)
    theirs = jax.eval_shape(nn.MultiHeadDotProductAttention(N, kernel_init=init, out_kernel_init=out).init, KEY, X)
    assert nn.get_partition_spec(ours) == nn.get_partition_spec(theirs)
    assert nn.get_partition_spec(ours)["params"]["query"]["kernel"] == PartitionSpec("embed", "heads", "head_dim")
    boxed = params_of(MultiHeadAttention(N, kernel_init=init, output_init=out), X)
    plain = params_of(MultiHeadAttention(N, kernel_init=nn.initializers.xavier_uniform()), X)
    assert_equal(nn.meta.unbox(boxed), plain)


def test_a_box_constrains_the_kernel_and_not_its_initial_matrix():
    """Names are those of (D, N, H): applied to the matrix (D, N H), the sharding constraint would be an error."""
    init = nn.with_partitioning(nn.initializers.xavier_uniform(), (None, "heads", None))
    plain = params_of(Linear((N, H), kernel_init=nn.initializers.xavier_uniform()), X)
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        boxed = params_of(Linear((N, H), kernel_init=init), X)
        sharded = jax.jit(lambda params: Linear((N, H)).apply({"params": params}, X))(boxed)
    assert_equal(nn.meta.unbox(boxed), plain)
    expected = jax.jit(lambda params: Linear((N, H)).apply({"params": params}, X))(plain)
    np.testing.assert_allclose(sharded, expected, rtol=1e-5, atol=1e-6)


def test_the_box_of_an_expert_gains_an_axis_for_the_experts():
    init = nn.with_partitioning(nn.initializers.xavier_uniform(), ("embed", "mlp"))
    specs = nn.get_partition_spec(jax.eval_shape(RoutedFeedForward(MOE, 5, kernel_init=init).init, KEY, X))["params"]
    assert specs["experts"]["up"]["kernel"] == PartitionSpec(None, "embed", "mlp")
    assert specs["router"]["kernel"] == specs["shared"]["up"]["kernel"] == PartitionSpec("embed", "mlp")
