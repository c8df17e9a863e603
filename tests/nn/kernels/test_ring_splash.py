"""The ring with splash for each pair of chunks: equal to the reference; hidden blocks are skipped; it compiles."""

import dataclasses
import re

import abstract_meshes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from kernel_parts import assert_close, compiled_kernels, ints, normal, numbers, splash_kernels
from placements import mesh
from training_recipes import change, tiny_recipe

from transformer.config import ConfigError, RotaryOptions
from transformer.data import TextFile
from transformer.nn._masks import Mask
from transformer.nn.kernels import AttentionSpec, reference_attention, ring_attention
from transformer.nn.kernels import _ring as ring
from transformer.nn.kernels import _ring_pairs as ring_pairs
from transformer.nn.kernels import _splash as splash
from transformer.nn.kernels._contract import AttentionShapes
from transformer.training._parallel import MeshPlacement
from transformer.training.plan import batch_shapes, make_plan, parse_topology, topology_devices

pytestmark = pytest.mark.cpu_only("a kernel for TPUs")

SMALL = splash.SplashBlocks(forward=(128, 128), backward_keys=(256, 128), backward_queries=(128, 256))


def arrays(length, dtype=jnp.float32, rows=2, heads=4, kv_heads=2):
    shapes = [(rows, length, heads, 5), (rows, length, kv_heads, 5), (rows, length, kv_heads, 7), (heads,)]
    return [normal(seed, *shape, dtype=dtype) for seed, shape in enumerate(shapes)]


def value_and_grads(kernel, given, mask, softcap=3.0, **options):
    """Return the output, and the gradients for query, key, value and sinks."""
    out_grad = normal(4, *given[0].shape[:3], given[2].shape[3])

    def loss(query, key, value, sinks, mask):
        out, _ = kernel(query, key, value, AttentionSpec(mask=mask, scale=0.7, softcap=softcap, sinks=sinks), **options)
        return (out * out_grad).sum(), out

    grads, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(*given, mask)
    return out, grads


def segments(length, number):
    return Mask.segments(ints((np.arange(length) * number // length)[None]))


def test_two_devices_equal_reference_in_values_and_gradients():
    """Chunks of one block each. The second row has segments, and ends early."""
    mask = Mask.causal() & Mask.window(150) & Mask.lengths(ints([512, 170])) & segments(512, 3)
    given = arrays(512)
    expected = value_and_grads(reference_attention, given, mask)
    with jax.set_mesh(mesh(context=2)):
        assert_close(value_and_grads(ring_attention, given, mask, pair_kernel="splash"), expected)


MASKS = {
    "causal": Mask.causal(),
    "causal window, lengths, segments": (
        Mask.causal() & Mask.window(150) & Mask.lengths(ints([1024, 300])) & segments(1024, 3)
    ),
    "two-sided window, segments": Mask.window(200) & segments(1024, 2),
    "nothing hidden": Mask(),
    "offsets, a row that sees nothing": (Mask.causal() & Mask.lengths(ints([924, 0]))).shifted(ints([-3, 4])),
}


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"data": 2, "context": 2, "tensor": 2}, {"context": 4}], ids=["2 x 2 x 2", "4"])
@pytest.mark.parametrize("case", MASKS)
def test_several_blocks_per_chunk_equal_reference_in_values_and_gradients(case, sizes, monkeypatch):
    monkeypatch.setattr(splash, "SMALL_BLOCKS", SMALL)
    given = arrays(1024)
    expected = value_and_grads(reference_attention, given, MASKS[case])
    with jax.set_mesh(mesh(**sizes)):
        assert_close(value_and_grads(ring_attention, given, MASKS[case], pair_kernel="splash"), expected)


@pytest.mark.slow
def test_bfloat16_with_a_fully_masked_row():
    given, mask = arrays(512), Mask.causal() & Mask.lengths(ints([512, 0]))
    expected = value_and_grads(reference_attention, [*given[:3], None], mask, None)
    half = [*arrays(512, jnp.bfloat16)[:3], None]
    with jax.set_mesh(mesh(context=2)):
        out, grads = value_and_grads(ring_attention, half, mask, None, pair_kernel="splash")
    assert {x.dtype for x in (out, *grads[:3])} == {jnp.dtype(jnp.bfloat16)}
    close = numbers([out, *grads[:3]])
    assert all((x[1] == 0).all() for x in close)
    assert_close(close, [expected[0], *expected[1][:3]], 0.1)


def spec(mask, length=512, **sizes):
    shapes = AttentionShapes(num_queries=length, num_keys=length, length_shards=2, **sizes)
    return AttentionSpec(mask=mask, shapes=shapes)


def test_masked_blocks_are_not_computed(monkeypatch):
    """NaN times a weight of zero is NaN, so NaN values in a block would appear if the block were computed."""
    blocks = dict.fromkeys(("forward", "backward_keys", "backward_queries"), (128, 128))
    monkeypatch.setattr(splash, "SMALL_BLOCKS", splash.SplashBlocks(**blocks))
    mask = Mask.causal().shifted(ints(0))
    pairs = ring_pairs.splash_pairs(spec(mask), 256)
    arranged = jax.jit(lambda *arrays: [pairs.arranged(x[None])[0] for x in arrays])
    query, key, value = numbers(arranged(*arrays(256, rows=1)[:3]))
    query, out = query.reshape(1, 2, 2, 256, 5), np.ones((1, 2, 2, 256, 7), np.float32)
    forward, backward = jax.jit(pairs.forward), jax.jit(pairs.backward)
    poisoned = value.copy()
    poisoned[:, :, 128:] = np.nan  # of the second block of keys
    got, norm = numbers(forward(query, key, poisoned, mask))
    assert np.isfinite(got[..., :128, :]).all()
    assert np.isnan(got[..., 128:, :]).all()
    query_grad, *_ = numbers(backward(query, key, poisoned, mask, out, norm, out))
    assert np.isfinite(query_grad[..., :128, :]).all()
    assert np.isnan(query_grad[..., 128:, :]).all()
    poisoned = out.copy()
    poisoned[..., :128, :] = np.nan  # gradients of the first block of queries
    _, *grads = numbers(backward(query, key, value, mask, out, norm, poisoned))
    for grad in grads:
        assert np.isnan(grad[:, :, :128]).all()
        assert np.isfinite(grad[:, :, 128:]).all()


@pytest.mark.parametrize("for_keys", [False, True])
@pytest.mark.parametrize(
    "mask",
    [Mask.causal(), Mask.causal() & Mask.window(300), Mask.causal() & segments(1024, 4)],
    ids=["causal", "window", "segments"],
)
def test_a_kernel_loads_the_next_block_that_it_computes(mask, for_keys):
    """A step of its grid computes a block that a dense mask shows to be visible, or loads the next one of these."""
    pairs = ring_pairs.splash_pairs(spec(mask, 1024), 1024)

    @jax.jit
    def run():
        infos = pairs._infos(mask.shifted(jnp.array(0)), 1024, 1024, (256, 128), for_keys)
        return infos(jnp.arange(1024)), mask.dense(1024, 1024)

    info, dense = run()
    info = jax.tree.map(np.asarray, info)
    visible = np.asarray(dense).reshape(4, 256, 8, 128).any((1, 3))
    np.testing.assert_array_equal(info.block_mask[0], visible)
    load, order = np.asarray(info.data_next[0]), visible
    if for_keys:  # the grid runs over queries for each block of keys
        load, order = load.T, visible.T
    computed = np.nonzero(order.reshape(-1))[0]
    for step, block in enumerate(load.reshape(-1)):
        following = computed[computed >= step]
        assert block == (following[0] % order.shape[1] if len(following) else 0)
    np.testing.assert_array_equal(info.q_sequence, np.arange(1024))


def computing_on(kind):
    return abstract_meshes.computing_on("tpu" if kind.startswith("TPU") else "gpu", kind)


def test_splash_computes_the_pairs_on_a_tpu_if_the_sizes_allow():
    def kind(asked, chunk=128, **options):
        return type(ring._pairs(asked, chunk, 128, options.get("kernel"))).__name__

    causal = Mask.causal()
    with computing_on("TPU v5"):
        assert kind(spec(causal)) == "SplashPairs"
        assert kind(spec(causal), kernel="blockwise") == "BlockwisePairs"
        assert kind(spec(causal), chunk=192) == "BlockwisePairs"
        assert kind(spec(causal, head_dim=257)) == "BlockwisePairs"
        assert kind(spec(causal, dtype=jnp.float16)) == "BlockwisePairs"
        with pytest.raises(ConfigError, match=r"192.*pair_kernel="):
            kind(spec(causal), chunk=192, kernel="splash")
    with computing_on("TPU v3"):
        assert kind(spec(causal, dtype=jnp.bfloat16)) == "BlockwisePairs"
    with computing_on("NVIDIA H100"):
        assert kind(spec(causal)) == "BlockwisePairs"
        with pytest.raises(ConfigError, match=r"splash in the ring .* can't run on gpu"):
            kind(spec(causal), kernel="splash")
    assert kind(spec(causal)) == "BlockwisePairs"


def test_no_external_library_is_called(monkeypatch):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as library

    monkeypatch.setattr(library, "_splash_attention_bwd_dq", lambda q, k, v: q)
    assert re.match(
        r"call the kernels of this jax \(.*\), which", ring_pairs.splash_pairs_refusal(spec(Mask.causal()), 128)
    )


@pytest.mark.slow
class TestCompiler:
    """The TPU compiler accepts the ring with splash; it also checks block sizes and memory."""

    @pytest.fixture
    def devices(self, tpu_compiler):
        return topology_devices(parse_topology("v5e:2x2"))

    def recipe(self, length, **execution):
        sizes = {
            "d_model": 16,
            "num_heads": 4,
            "attention.num_kv_heads": 2,
            "feed_forward.d_ff": 8,
            "position": RotaryOptions(),
        }
        parallel = {"devices": None, "fsdp": 2, "context": 2}
        recipe = change(tiny_recipe(model=sizes), parallel=parallel, execution=execution)
        return dataclasses.replace(recipe, data=TextFile(path="t.txt", sequence_length=length, batch_size=4))

    def test_a_train_step_runs(self, devices):
        recipe = self.recipe(2048)
        plan = make_plan(recipe, parse_topology("v5e:2x2"), devices)
        assert plan.fits
        # The FLOPs of the kernels are counted: at least the attention of the model, in forward and backward pass.
        assert plan.computed_flops >= plan.flops.total
        assert splash_kernels(recipe, devices) == {"fwd": 1, "dq": 1, "dkv": 1}

    def test_a_length_without_whole_blocks_uses_the_blockwise_kernel(self, devices):
        recipe = self.recipe(1920)
        assert "tpu_custom_call" not in MeshPlacement(recipe, devices).lower(batch_shapes(recipe)).as_text()

    @pytest.mark.parametrize(("remat", "kernels"), [("none", 3), ("full", 4), ("dots", 3), ("names", 3)])
    def test_the_forward_ring_reruns_only_with_full_rematerialization(self, devices, remat, kernels):
        recipe = self.recipe(1024, remat=remat)
        assert compiled_kernels(recipe, devices) == kernels

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
    def test_supports_the_largest_heads_with_all_features(self, devices, dtype):
        shapes = (2, 4096, 4, 256), (2, 4096, 2, 256), (2, 4096, 2, 256)
        shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
        mask = Mask.causal() & Mask.window(700) & Mask.lengths(ints([9, 0])) & segments(4096, 3)

        def loss(*arrays):
            extras = {"scale": 0.7, "softcap": 3.0, "sinks": jnp.zeros(4)}
            return ring_attention(*arrays, AttentionSpec(mask=mask, **extras))[0].astype(jnp.float32).sum()

        two = jax.sharding.Mesh(np.array(devices[:2]), ("context",), axis_types=(AxisType.Auto,))
        with jax.set_mesh(two):
            compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*shapes).compile()
        assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 3
