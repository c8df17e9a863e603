"""Grouped matrix multiplications: all implementations are the same function, on one device and over a mesh."""

import dataclasses
import functools
import logging

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from abstract_meshes import computing_on
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from numeric_parts import random_params

from transformer.config import ConfigError, Execution, MoE
from transformer.nn import _grouped, _moe
from transformer.nn._grouped import Call, choose_experts, megablox_linear, ragged_linear, tile_rows
from transformer.nn._masks import Mask
from transformer.nn._moe import RoutedFeedForward
from transformer.nn._sharding import batch_sharding, make_mesh, state_shardings
from transformer.training.plan import Program, parse_topology, topology_devices
from transformer.training.plan._compile import compile_program

TILE = 8
SIZES = [
    pytest.param([11, 0, 16, 5, 0], id="empty experts"),
    pytest.param([0, 0, 0, 40, 0], id="one expert has everything"),
    pytest.param([8, 8, 8, 8, 8], id="whole tiles"),
    pytest.param([3, 1, 2, 1, 4], id="rows without an expert"),
    pytest.param([0, 0, 0, 0, 0], id="no rows"),
]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "linear", [functools.partial(ragged_linear, tile=None), functools.partial(megablox_linear, tile=TILE)]
)
def test_each_group_is_multiplied_by_its_kernel(linear, dtype, sizes):
    """Outputs and gradients, compared with one multiplication per group. Rows without an expert give no gradient."""
    random = np.random.default_rng(0)
    x, kernel, dy = (
        random.normal(size=shape).astype(np.float32).astype(jnp.dtype(dtype))
        for shape in ((40, 7), (5, 7, 13), (40, 13))
    )
    ends = np.cumsum(sizes)
    groups = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    wide = [array.astype(np.float32) for array in (x, kernel, dy)]
    y = np.concatenate([wide[0][rows] @ wide[1][e] for e, rows in enumerate(groups)])
    dx = np.concatenate([wide[2][rows] @ wide[1][e].T for e, rows in enumerate(groups)])
    dkernel = np.stack([wide[0][rows].T @ wide[2][rows] for rows in groups])

    @jax.jit
    def run(x, kernel, dy):
        y, pull = jax.vjp(lambda x, kernel: linear(x, kernel, jnp.array(sizes, jnp.int32)), x, kernel)
        return (y, *pull(dy))

    found = [np.asarray(array).astype(np.float32) for array in run(x, kernel, dy)]
    error = {"rtol": 2e-2, "atol": 5e-2} if dtype == "bfloat16" else {"rtol": 1e-4, "atol": 1e-5}
    np.testing.assert_allclose(found[0][: ends[-1]], y, **error)
    np.testing.assert_allclose(found[1][: ends[-1]], dx, **error)
    np.testing.assert_allclose(found[2], dkernel, **error)


X = jax.device_put(np.random.default_rng(0).normal(size=(4, 9, 6)).astype(np.float32))
CASES = [
    pytest.param(MoE(num_experts=4, top_k=2), {"gated": True}, id="biases"),
    pytest.param(
        MoE(num_experts=4, top_k=3, capacity_factor=0.6, shared_experts=1), {"use_bias": False}, id="capacity"
    ),
    pytest.param(MoE(num_experts=16, top_k=1, normalize_weights=False), {}, id="experts without tokens"),
]


def run(module, params, x, mask=Mask()):
    slope = np.cos(np.arange(x.size, dtype=np.float32)).reshape(x.shape)

    def loss(params, x):
        y = module.apply(params, x, mask, deterministic=False)[0].astype(jnp.float32)
        return (y * slope).sum() + (y**2).sum(), y

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, x)


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("implementation", ["ragged", "megablox"])
@pytest.mark.parametrize(("moe", "changes"), CASES)
def test_a_layer_does_not_depend_on_its_implementation(moe, changes, implementation):
    module = RoutedFeedForward(moe, width=8, activation="silu", implementation="blockwise", **changes)
    params = random_params(module, X)
    found = run(dataclasses.replace(module, implementation=implementation), params, X)
    chex.assert_trees_all_close(found, run(module, params, X), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", ["ragged", "megablox"])
def test_a_bfloat16_layer_equals_the_blockwise_layer(implementation):
    module = RoutedFeedForward(MoE(num_experts=4), width=8, implementation="blockwise", dtype=jnp.bfloat16)
    params = random_params(module, X)
    found = run(dataclasses.replace(module, implementation=implementation), params, X)
    chex.assert_trees_all_close(found, run(module, params, X), rtol=0.1, atol=0.15)


@pytest.mark.cpu_only("needs eight devices")
@pytest.mark.parametrize(
    ("implementation", "sizes"),
    [
        ("ragged", {"fsdp": 2, "tensor": 2, "expert": 2}),
        pytest.param("megablox", {"fsdp": 2, "tensor": 2, "expert": 2}, marks=pytest.mark.slow),
        pytest.param("ragged", {"data": 2, "context": 2, "tensor": 2}, marks=pytest.mark.slow),
        pytest.param("ragged", {"expert": 8}, marks=pytest.mark.slow),
        pytest.param("ragged", {"tensor": 8}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("rows", [4, pytest.param(3, marks=pytest.mark.slow)])
def test_a_layer_over_a_mesh_equals_one_device(implementation, sizes, rows):
    """Rows, length, hidden features and experts are split; 3 rows can't be split, and neither can 9 positions in 2."""
    x = jax.device_put(np.asarray(X)[:rows, : 9 if sizes.get("context", 1) == 1 else 8])
    module = RoutedFeedForward(MoE(num_experts=8, top_k=2), width=8, gated=True, implementation="blockwise")
    params = random_params(module, x)
    expected = run(module, params, x)
    mesh = make_mesh(sizes)
    placed = jax.device_put(jax.tree.map(np.asarray, params), state_shardings(params, mesh))
    with jax.set_mesh(mesh):
        found = run(dataclasses.replace(module, implementation=implementation), placed, x)
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.cpu_only("needs eight devices")
@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"fsdp": 2, "tensor": 2, "expert": 2}, (("data", "fsdp", "expert"), (), ("expert",), ("tensor",), ("fsdp",))),
        ({"data": 2, "context": 2, "tensor": 2}, (("data",), ("context",), (), ("tensor",), ())),
    ],
    ids=["experts", "length"],
)
def test_mesh_axes_shard_the_layer(sizes, expected):
    """Kernels stay split over fsdp until they are needed, so that a device never stores whole kernels."""
    experts = {"up": {"kernel": jax.device_put(np.zeros((8, 6, 8), np.float32))}}
    with jax.set_mesh(make_mesh(sizes)):
        split = _moe._split(jax.device_put(np.zeros((8, 8, 6), np.float32)), experts, 8)
    present = {axis for axis, size in sizes.items() if size > 1}
    assert [{*axes} & present for axes in split] == [{*axes} & present for axes in expected]


@pytest.mark.cpu_only("needs eight devices")
@pytest.mark.parametrize("moe", [MoE(num_experts=4), MoE(num_experts=4, capacity_factor=0.6)])
def test_a_layer_with_explicit_axes_equals_one_device(moe):
    module = RoutedFeedForward(moe, width=8, implementation="blockwise")
    params = random_params(module, X)
    segments = np.repeat([[1, 2, 0]], [4, 3, 2], axis=1).repeat(4, 0).astype(np.int32)
    expected = run(module, params, X, Mask.segments(jax.device_put(segments)))
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, PartitionSpec("data")))
        placed = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
        mask = Mask.segments(jax.device_put(segments, NamedSharding(mesh, PartitionSpec("data"))))
        found = run(dataclasses.replace(module, implementation="ragged"), placed, x, mask)
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-4)


KINDS = {"tpu": "TPU v5", "gpu": "NVIDIA H100", "cpu": "cpu"}
CALL = Call(rows=1000, num_experts=8, dtype=jnp.dtype("bfloat16"), quantized=False)


@pytest.mark.parametrize(
    ("platform", "change", "name"),
    [
        ("tpu", {}, "ragged"),
        ("tpu", {"dtype": jnp.dtype("float16")}, "blockwise"),
        ("tpu", {"quantized": True}, "blockwise"),
        ("cpu", {}, "blockwise"),
        ("gpu", {}, "blockwise"),
    ],
)
def test_auto_chooses_and_logs(caplog, platform, change, name):
    _grouped._log_once.cache_clear()
    with caplog.at_level(logging.INFO, "transformer.nn.grouped"), computing_on(platform, KINDS[platform]):
        assert choose_experts("auto", CALL._replace(**change)) == name
    assert f"1000 rows for 8 experts on {platform}: auto selects {name}" in caplog.text
    assert ("because ragged can't" in caplog.text) == (platform == "tpu" and name == "blockwise")


@pytest.mark.cpu_only("needs eight devices")
def test_auto_runs_the_loop_if_the_sharding_is_unknown(monkeypatch, caplog):
    monkeypatch.setattr(_grouped, "platform", lambda: "tpu")
    with caplog.at_level(logging.INFO, "transformer.nn.grouped"):
        assert choose_experts("auto", CALL._replace(rows=1001)) == "blockwise"
    assert "without an active mesh. Call inside `with jax.set_mesh(mesh):`" in caplog.text


@pytest.mark.parametrize(
    ("platform", "kind", "change", "message"),
    [
        (
            "gpu",
            KINDS["gpu"],
            {},
            r"megablox implementation of experts can't run on gpu: .* Use blockwise or ragged, or auto",
        ),
        ("cpu", "cpu", {"quantized": True}, r"megablox .* can't quantize .* Use blockwise, or auto"),
        (
            "cpu",
            "cpu",
            {"dtype": jnp.dtype("float16")},
            r"float16",
        ),
        ("tpu", "TPU v3", {}, r"bfloat16.*TPU v3.*\(execution.experts\)"),
    ],
)
def test_an_unsupported_implementation_names_supported_ones(platform, kind, change, message):
    with computing_on(platform, kind), pytest.raises(ConfigError, match=message):
        choose_experts("megablox", CALL._replace(**change))


@pytest.mark.cpu_only("needs eight devices")
def test_a_mesh_without_rules_gets_an_error():
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    module = RoutedFeedForward(MoE(num_experts=4), width=8, implementation="megablox")
    params = random_params(module, X)
    with jax.set_mesh(mesh), pytest.raises(ConfigError, match=r"can't run under a mesh whose axes rows have no rule"):
        jax.eval_shape(module.apply, params, X)


def test_rejects_an_unknown_name():
    with pytest.raises(ConfigError, match=r"experts.*got 'raged'"):
        Execution(experts="raged")


def test_repeated_tiles_are_a_small_share_of_all_rows():
    for rows in (2**10, 2**14, 2**20):
        for experts in (4, 8, 128):
            tile = tile_rows(rows, experts)
            assert tile == _grouped.LANES or (experts - 1) * tile <= rows / 8


@pytest.mark.usefixtures("tpu_compiler")
@pytest.mark.slow
class TestCompiler:
    @pytest.mark.parametrize(
        ("topology", "implementation", "sizes"),
        [
            ("v4:2x2x1", "auto", {"fsdp": 4}),
            ("v5e:2x2", "auto", {"fsdp": 4}),
            ("v6e:2x2", "auto", {"fsdp": 4}),
            ("v5p:2x2x1", "auto", {"fsdp": 4}),
            ("v5p:2x2x1", "auto", {"tensor": 2, "expert": 2}),
            ("v5p:2x2x1", "megablox", {"fsdp": 4}),
        ],
    )
    def test_kernels_compile_over_a_mesh(self, topology, implementation, sizes):
        """The tiles fit in the fast memory; the FLOPs are those of three kernels for each of three projections."""
        topology = parse_topology(topology)
        mesh = make_mesh(sizes, topology_devices(topology))
        module = RoutedFeedForward(
            MoE(num_experts=8),
            width=14_336,
            activation="silu",
            gated=True,
            use_bias=False,
            dtype=jnp.bfloat16,
            implementation=implementation,
        )
        x = jax.ShapeDtypeStruct((8, 4096, 4096), jnp.bfloat16, sharding=batch_sharding(mesh, 3))
        params = jax.eval_shape(module.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 8, 4096), jnp.bfloat16))
        places = state_shardings(params, mesh)
        params = jax.tree.map(lambda leaf, place: leaf.update(sharding=place), params, places)
        with jax.set_mesh(mesh):
            gradient = jax.jit(jax.grad(lambda p, x: (module.apply(p, x)[0].astype(jnp.float32) ** 2).sum(), (0, 1)))
            text = compile_program(gradient.lower(params, x), {}, topology)[1]
        cost = Program(text).cost(4, expert_shards=sizes.get("expert", 1))
        rows, tile = 2 * 8 * 4096 // (4 if "fsdp" in sizes else 2), tile_rows(2 * 8 * 4096 // 4, 8)
        assert cost.kernels == 0
        if "fsdp" in sizes:
            experts = 3 * 3 * 2 * (rows + 7 * tile) * 4096 * 14_336
            assert experts <= cost.flops < 1.01 * experts
