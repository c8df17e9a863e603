"""Ring attention: equal to one device in values and gradients, balanced, nothing gathered, memory by 1 / devices."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_specs import attention_spec
from jax.sharding import NamedSharding, PartitionSpec
from kernel_parts import assert_close, ints, normal, numbers, put
from numeric_parts import random_params
from placements import mesh

from transformer.config import ConfigError, Execution, FeedForwardOptions, RotaryOptions, TransformerConfig
from transformer.nn._attention import MultiHeadAttention, dot_product_attention
from transformer.nn._masks import Mask
from transformer.nn._partitioning import shard_map
from transformer.nn._positions import Rotary
from transformer.nn.kernels import AttentionSpec, choose, reference_attention, ring_attention
from transformer.nn.kernels import _blockwise as blockwise
from transformer.nn.models import CausalLM

pytestmark = pytest.mark.cpu_only("needs eight devices")

B, T, N, K, H, HV = 2, 48, 4, 2, 5, 7
QUERY = normal(0, B, T, N, H)
KEY = normal(1, B, T, K, H)
VALUE = normal(2, B, T, K, HV)
SINKS = normal(3, N)
OUT_GRAD = normal(4, B, T, N, HV)
PLAIN = {"scale": 0.7}


def value_and_grads(kernel, softcap=None, sinks=SINKS, arrays=(QUERY, KEY, VALUE), **options):
    """The mask is an argument, so that masks with the same structure share a compiled program."""

    def loss(query, key, value, sinks, mask):
        extras = PLAIN | {"softcap": softcap, "sinks": sinks}
        out, _ = kernel(query, key, value, AttentionSpec(mask=mask, **extras), **options)
        return (out * OUT_GRAD[:, :, : out.shape[2]]).sum(), out

    program = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True))
    # JAX compiles programs that split arrays of one device over a mesh, but none for arrays of NumPy.
    return lambda mask: program(*jax.tree.map(np.asarray, (*arrays, sinks, mask)))


def masks(base, **rows):
    """Return masks with the same structure, whose lengths, segments and offsets hide nothing or much."""
    plain = {"lengths": [T, T], "segments": [T, 0, 0], "offset": [0, 0]}
    cases = [plain] + [plain | {name: row} for name, row in rows.items()] + [plain | rows]
    return [
        (base & Mask.lengths(ints(case["lengths"])) & segments(case["segments"])).shifted(ints(case["offset"]))
        for case in cases
    ]


def segments(sizes):
    return Mask.segments(ints(np.repeat([0, 1, 2], sizes)[None]))


EIGHT, FOUR, TWO = {"context": 8}, {"data": 2, "context": 4}, {"data": 2, "context": 2, "tensor": 2}
CASES = {
    "causal on 8": (EIGHT, masks(Mask.causal(), lengths=[29, 0], segments=[11, 30, 7], offset=[-3, 4]), {}, {}),
    "all on 2 x 2 x 2, blocks that do not divide": (
        TWO,
        masks(Mask.causal() & Mask.window(19), lengths=[20, 9], segments=[13, 20, 15]),
        {"softcap": 3.0},
        {"block": 5},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_ring_equals_reference_in_values_and_gradients(case):
    sizes, masks, options, block = CASES[case]
    reference, ring = (
        value_and_grads(reference_attention, **options),
        value_and_grads(ring_attention, **options, **block),
    )
    for mask in masks:
        expected = reference(mask)
        with jax.set_mesh(mesh(**sizes)):
            assert_close(ring(mask), expected)


def test_indivisible_heads_are_replicated():
    """Three key heads or one batch row can't be split over two devices: all compute them, and gradients count once.

    The mask is not causal, so that each device computes the chunks that it stores.
    """
    arrays = [normal(seed, 1, 24, heads, 3) for seed, heads in enumerate((6, 3, 3))]

    def run(kernel):
        def loss(*arrays):
            return jnp.square(kernel(*arrays, AttentionSpec(mask=Mask.window(11), **PLAIN))[0]).sum()

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*arrays)

    expected = run(reference_attention)
    with jax.set_mesh(mesh(**TWO)):
        assert_close(run(ring_attention), expected)


def test_bfloat16_with_a_fully_masked_row():
    half = [np.asarray(x).astype(jnp.bfloat16) for x in (QUERY, KEY, VALUE)]
    mask = Mask.causal() & Mask.lengths(ints([T, 0]))
    expected = value_and_grads(reference_attention, sinks=None)(mask)
    with jax.set_mesh(mesh(**FOUR)):
        got = value_and_grads(ring_attention, sinks=None, arrays=half)(mask)
    (_, out), grads = got
    assert {x.dtype for x in (out, *grads[:3])} == {jnp.dtype(jnp.bfloat16)}
    got = numbers([out, *grads[:3]])
    for x in got:
        assert (x[1] == 0).all()
        assert np.isfinite(x).all()
    assert_close(got[:3], [expected[0][1], *expected[1][:2]], 0.06)


@pytest.mark.parametrize(("mask", "each"), [(Mask.causal(), 9), (Mask(), 16), (Mask.causal() & Mask.window(2), 4)])
def test_every_device_computes_equally_many_chunk_pairs(mask, each, monkeypatch):
    """Count at run time. With contiguous chunks, a causal mask would give the four devices 3, 7, 11 and 15 pairs."""
    counts = collections.Counter()
    forward = blockwise.forward

    def counted(*arguments):
        jax.debug.callback(lambda device: counts.update([int(device)]), jax.lax.axis_index("context"))
        return forward(*arguments)

    monkeypatch.setattr(blockwise, "forward", counted)
    with jax.set_mesh(mesh(context=4)):
        run = jax.jit(lambda *arrays: ring_attention(*arrays, AttentionSpec(mask=mask, **PLAIN))[0])
        run(*(np.asarray(x)[:1] for x in (QUERY, KEY, VALUE))).block_until_ready()
    jax.effects_barrier()
    assert counts.keys() == {0, 1, 2, 3}
    assert max(counts.values()) - min(counts.values()) <= 1
    assert max(counts.values()) == each


def compiled_gradient(implementation, length, devices, bias=None):
    """Compile the gradients of causal attention for all three arguments, sharded along the length."""
    ring = mesh(context=devices)
    split = NamedSharding(ring, PartitionSpec(None, "context"))
    array = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32, sharding=split)

    def loss(query, key, value):
        out = dot_product_attention(query, key, value, mask=Mask.causal(), bias=bias, implementation=implementation)
        return out.sum()

    with jax.set_mesh(ring):
        gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)), out_shardings=(split,) * 3)
        return gradient.lower(array, array, array).compile()


def collectives(compiled):
    return collections.Counter(
        re.findall(r"\b(all-gather|all-reduce|all-to-all|collective-permute)\(", compiled.as_text())
    )


def test_the_ring_gathers_nothing_and_holds_only_its_shard():
    two, eight = compiled_gradient("ring", 32_768, 2), compiled_gradient("auto", 32_768, 8)
    for compiled in (two, eight):
        assert collectives(compiled).keys() == {"collective-permute"}
    sizes = [compiled.memory_analysis().temp_size_in_bytes for compiled in (two, eight)]
    assert sizes[1] < 0.35 * sizes[0]


def test_rotary_attention_keeps_the_length_sharded():
    x = np.asarray(normal(5, B, 16, 12))
    attention = MultiHeadAttention(num_heads=4, num_kv_heads=2, head_dim=6, position=Rotary())
    params = random_params(attention, x)

    def run(params, x):
        return attention.apply(params, x, mask=Mask.causal() & Mask.lengths(jnp.array([16, 11])))[0]

    expected = jax.jit(run)(params, x)
    four = mesh(**FOUR)
    with jax.set_mesh(four):
        split = jax.device_put(x, NamedSharding(four, PartitionSpec("data", "context")))
        compiled = jax.jit(run).lower(params, split).compile()
        got = compiled(params, split)
    assert_close(got, expected)
    assert got.sharding.spec[:2] == ("data", "context")
    assert collectives(compiled).keys() == {"collective-permute"}


@pytest.mark.slow
def test_a_whole_model_is_the_same_on_a_mesh():
    config = TransformerConfig(
        vocab_size=11,
        d_model=12,
        num_layers=2,
        num_heads=2,
        feed_forward=FeedForwardOptions(d_ff=8),
        position=RotaryOptions(),
    )
    tokens = np.random.default_rng(7).integers(0, 11, (4, 16)).astype(np.int32)
    model = CausalLM(config, Execution(scan=True, remat="full"))
    params = random_params(CausalLM(config), tokens)

    def loss(params, tokens):
        logits = model.apply(params, tokens)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1).mean()

    expected = jax.jit(jax.value_and_grad(loss))(params, tokens)
    four = mesh(**FOUR)
    with jax.set_mesh(four):
        split = jax.device_put(tokens, NamedSharding(four, PartitionSpec("data", "context")))
        compiled = jax.jit(jax.value_and_grad(loss)).lower(params, split).compile()
        got = compiled(params, split)
    assert_close(got, expected)
    assert collectives(compiled)["collective-permute"] > 0


def request(queries=32, keys=None, weights=False, length_shards=4, **facts):
    keys = queries if keys is None else keys
    return attention_spec(queries, keys, weights, length_shards=length_shards, **facts)


REFUSED = {
    "no mesh": (request(length_shards=1), "run here: no active mesh"),
    "weights": (request(weights=True), "return attention weights"),
    "bias": (request(has_bias=True), "add a bias"),
    "dropout": (request(has_dropout=True), "drop attention weights"),
    "array": (request(has_dense_mask=True), "apply a mask array"),
    "cross": (request(32, 48), "attend from 32 queries to 48 keys"),
    "length": (request(36), "split 36 positions: on 4 devices the length must be a multiple of 8"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_ring_features_name_supported_kernels(case):
    asked, message = REFUSED[case]
    whole = ["query_chunked"] if asked.shapes.length_shards == 1 else []
    able = ["reference"] if asked.return_weights else ["reference", *whole, "blockwise"]
    able += ["all_gather_kv"] if asked.shapes.length_shards > 1 and not asked.return_weights else []
    with pytest.raises(ConfigError, match=rf"{message}.*\..*{' or '.join(able)}"):
        choose("ring", asked)
    assert choose("auto", asked) == "reference"


GATHERED_REFUSED = {
    "no mesh": (request(length_shards=1), "run here: no active mesh"),
    "weights": (request(weights=True), "return attention weights"),
    "length": (request(34), "split 34 queries: on 4 devices their number must be a multiple of 4"),
}


@pytest.mark.parametrize("case", GATHERED_REFUSED)
def test_unsupported_all_gather_features_name_supported_kernels(case):
    asked, message = GATHERED_REFUSED[case]
    with pytest.raises(ConfigError, match=rf"all_gather_kv.*{message}.*\."):
        choose("all_gather_kv", asked)


def test_auto_uses_the_ring_if_the_length_is_sharded():
    assert choose("auto", request()) == "ring"
    assert choose("ring", request()) == "ring"
    assert choose("blockwise", request()) == "blockwise"
    assert choose("auto", request(128, has_bias=True)) == "reference"  # 128 x 32 scores per device
    assert choose("auto", request(512, has_bias=True)) == "all_gather_kv"
    assert choose("auto", request(512, 24_000)) == "all_gather_kv"
    assert choose("auto", request(513)) == "blockwise"  # not divisible: each device has the whole length
    with pytest.raises(
        ConfigError,
        match=r",.*all_gather_kv.*got 'rings'.*'ring'",
    ):
        choose("rings", request())


FACTS = {
    "bias": {"bias": lambda queries, keys: -jnp.abs(queries[:, None] - keys[None, :]) * 0.1},
    "dropout": {"dropout_rate": 0.5},
    "array": {"mask": put(np.tri(T, dtype=bool))},
    "cross": {"key": normal(1, B, 24, K, H), "value": normal(2, B, 24, K, HV)},
    "weights": {"return_weights": True},
}


@pytest.mark.parametrize("fact", FACTS)
def test_attention_passes_the_requested_features_to_the_choice(fact):
    arguments = {"query": QUERY, "key": KEY, "value": VALUE} | FACTS[fact]
    if fact == "dropout":
        arguments["dropout_key"] = jax.random.key(0)
    expected = jax.jit(lambda: dot_product_attention(**arguments))()
    with jax.set_mesh(mesh(**FOUR)):
        with pytest.raises(ConfigError, match=REFUSED[fact][1].partition(" from")[0]):
            dot_product_attention(**arguments, implementation="ring")
        assert_close(jax.jit(lambda: dot_product_attention(**arguments))(), expected)


def biased(table):
    return lambda queries, keys: table[:, queries[:, None] - keys[None, :] + T - 1][None]


ARRAY = Mask.array(put(np.random.default_rng(6).random((B, N, T, T)) < 0.4))
GATHERED = {
    "self": (KEY, VALUE, ARRAY & segments([11, 30, 7]) & Mask.causal() & Mask.window(19)),
    "cross": (normal(1, B, 23, K, H), normal(2, B, 23, K, HV), Mask.lengths(ints([9, 0]))),
}


@pytest.mark.parametrize("case", GATHERED)
def test_all_gather_kv_equals_reference_in_values_and_gradients(case):
    key, value, mask = GATHERED[case]

    def run(implementation):
        def loss(query, key, value, table, sinks):
            options = {"mask": mask, "softcap": 3.0, "sinks": sinks, "bias": biased(table)}
            out = dot_product_attention(query, key, value, **options, implementation=implementation)
            return (out * OUT_GRAD).sum(), out

        program = jax.jit(jax.value_and_grad(loss, argnums=range(5), has_aux=True))
        return program(QUERY, key, value, normal(5, N, 2 * T), SINKS)

    expected = run("reference")
    with jax.set_mesh(mesh(**FOUR)):
        assert_close(run("all_gather_kv"), expected)


def test_all_gather_kv_gathers_only_keys_and_values_with_linear_memory():
    def bias(queries, keys):
        return -0.1 * (queries[:, None] - keys[None, :])

    short, long = (compiled_gradient("auto", length, 8, bias) for length in (8192, 16_384))
    assert 0 < collectives(short)["all-gather"] <= 4  # keys and values, once forward and once backward
    sizes = [compiled.memory_analysis().temp_size_in_bytes for compiled in (short, long)]
    assert sizes[1] < 2.2 * sizes[0]


def test_all_gather_kv_dropout_differs_on_each_device():
    @jax.jit
    def run(query, key, ones):
        options = {"dropout_rate": 0.25, "dropout_key": jax.random.key(0), "implementation": "all_gather_kv"}
        return dot_product_attention(query, key, ones, **options)

    with jax.set_mesh(mesh(**FOUR)):
        out = np.asarray(run(np.zeros_like(QUERY), KEY, np.ones((B, T, K, 1), np.float32)))
    assert out.mean() == pytest.approx(1.0, abs=0.02)
    parts = out.reshape(B, 4, T // 4, N)
    assert (parts[:, 0] != parts[:, 1]).mean() > 0.5


class TestMapped:
    def test_each_device_receives_its_shard(self):
        x = np.arange(24, dtype=np.float32).reshape(4, 6)

        def double(x, scale):
            assert x.shape == (2, 3)
            assert scale.shape == (3,)
            return x * scale[None]

        with jax.set_mesh(mesh(data=2, context=2)):
            run = jax.jit(shard_map(double, [("batch", "length"), ("length",)], ("batch", "length")))
            np.testing.assert_array_equal(run(x, np.full(6, 2, np.float32)), 2 * x)

    def test_an_axis_that_does_not_divide_every_array_is_not_sharded(self):
        def shapes(x, y):
            assert (x.shape, y.shape) == ((2, 6), (5,))
            return x

        with jax.set_mesh(mesh(data=2, context=2)):
            jax.jit(shard_map(shapes, [("batch", "length"), ("length",)], ("batch", "length")))(
                np.ones((4, 6), np.float32), np.ones(5, np.float32)
            )

    def test_without_a_mesh_shard_map_is_the_plain_function(self):
        def whole(x):
            assert x.shape == (4, 6)
            return x

        same = shard_map(whole, [("batch", "length")], ("batch", "length"))
        assert same(put(np.ones((4, 6), np.float32))).shape == (4, 6)

    def test_names_are_counted(self):
        with pytest.raises(ValueError, match=r"shard_map.*got \('batch',\).*\(4.*6\)"):
            shard_map(lambda x: x, [("batch",)], ("batch",))(put(np.ones((4, 6), np.float32)))
