"""The paged KV cache equals a `KVCache`, for any previous contents of the pages."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from abstract_meshes import computing_on
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import TypeCheckError
from kernel_parts import ints, put
from numeric_parts import random_params

from transformer.config import (
    ALiBiOptions,
    AttentionOptions,
    EmbeddingOptions,
    Execution,
    FeedForwardOptions,
    LayerKind,
    LearnedOptions,
    ParameterOptions,
    RotaryOptions,
    T5BiasOptions,
    TransformerConfig,
)
from transformer.config._checks import ConfigError
from transformer.config._parts import MLA, RotaryScaling
from transformer.data import TextFile
from transformer.nn import _caches, _paged, kernels
from transformer.nn._attention import KeysValues, MultiHeadAttention
from transformer.nn._caches import KVCache, cache_length
from transformer.nn._masks import Mask
from transformer.nn._paged import NO_PAGE, PagedKVCache, copy_pages, heads_together, paged_cache, set_rows
from transformer.nn._positions import ALiBi, Rotary
from transformer.nn._sharding import make_mesh
from transformer.nn.kernels import GATHER_PAGES, _page_blocks, choose
from transformer.nn.kernels._arguments import score_scale
from transformer.nn.kernels._contract import AttentionShapes, AttentionSpec
from transformer.nn.models import CausalLM
from transformer.training import Recipe
from transformer.training.plan import Generation, make_decode_plan, parse_topology, topology_devices

PAGE, PAGES = 3, 5
"""a page size that divides no length below; at most 15 tokens per row"""
HEADS = (2, 4, 5)


def random(number, *shape):
    return put(np.random.default_rng(number).normal(size=shape), np.float32)


def paged_attention(query, cache, start, implementation, **options):
    spec = AttentionSpec(scale=score_scale(None, query.shape[-1]), **options)
    return KeysValues(cache=cache, start=start).attend(query, spec, implementation)[0]


append, whole = jax.jit(PagedKVCache.append), jax.jit(PagedKVCache.whole)


@functools.cache
def created(num_pages, rows, heads, lanes):
    return jax.jit(lambda: PagedKVCache.create(num_pages, PAGE, rows, PAGES, heads, jnp.float32, lanes))()


def pool(rows=2, lanes=1, heads=HEADS, table=None, num_pages=11, dtype=np.float32):
    """A cache whose pool contains NaN, as a row that failed would leave it."""
    cache = created(num_pages, rows, heads, lanes)
    table = np.arange(rows * PAGES).reshape(rows, PAGES)[:, ::-1] if table is None else table
    return dataclasses.replace(cache, pages=put(np.full(cache.pages.shape, np.nan), dtype), page_table=ints(table))


def written(cache, number, num_tokens, counts=None):
    """Append random tokens; return the cache, the keys and the values."""
    heads, size, value_size = cache.kv_heads, cache.head_dim, cache.value_dim
    rows = cache.page_table.shape[0]
    key, value = random(number, rows, num_tokens, heads, size), random(number + 1, rows, num_tokens, heads, value_size)
    cache = dataclasses.replace(cache, chunk_length=None if counts is None else ints(counts))
    return append(cache, key, value, np.zeros((rows, num_tokens), np.int32)), key, value


class TestPool:
    @pytest.mark.parametrize(
        ("heads", "lanes", "stored"),
        [
            ((4, 4, 3), 16, (2, 16)),
            pytest.param((2, 4, 5), 1, (4, 5), marks=pytest.mark.slow),
            pytest.param((3, 4, 4), 16, (6, 16), marks=pytest.mark.slow),
            pytest.param((1, 6, 0), 1, (1, 6), marks=pytest.mark.slow),
        ],
    )
    def test_stored_keys_are_read_back(self, heads, lanes, stored):
        cache = pool(heads=heads, lanes=lanes)
        assert cache.pages.shape[2:] == stored
        cache, *first = written(cache, 1, 4, [4, 2])
        cache, *second = written(cache, 3, 3, [0, 3])
        assert cache.row_lengths.tolist() == [4, 5]
        assert np.isfinite(np.asarray(cache.pages)).all((2, 3)).sum() == 4 + 2 + 3  # padding is not stored
        for found, old, new in zip(whole(cache), first, second, strict=True):
            assert found.shape[:2] == (2, PAGE * PAGES)
            found, old, new = map(np.asarray, (found, old, new))
            np.testing.assert_array_equal(found[0, :4], old[0])
            np.testing.assert_array_equal(found[1, :5], np.concatenate([old[1, :2], new[1]]))
            assert not found[0, 4:].any()
            assert not found[1, 5:].any()

    def test_tokens_without_a_page_change_nothing(self):
        cache = pool(table=[[0, NO_PAGE, NO_PAGE, NO_PAGE, NO_PAGE], [1, 2, 3, 4, 5]])
        cache, *_ = written(cache, 1, 6)
        before = np.asarray(cache.pages)
        assert np.isfinite(before[[0, 1, 2]]).all()
        assert np.isnan(before[3:]).all()
        for _ in range(2):  # 18 tokens do not fit 5 pages of 3
            cache, *_ = written(cache, 3, 6, [0, 6])
        assert np.isnan(np.asarray(cache.pages)[6:]).all()
        np.testing.assert_array_equal(np.asarray(cache.pages)[:3], before[:3])

    def test_pages_are_copied(self):
        model = CausalLM(TransformerConfig(vocab_size=7, d_model=8, num_layers=2, num_heads=2))
        cache = jax.jit(lambda: paged_cache(model, rows=1, pages_per_row=2, num_pages=4, page_size=2))()
        contents = random(0, *cache["layers"]["slot_0"].self_attention.pages.shape)
        cache = jax.tree.map(lambda leaf: contents if leaf.ndim == 5 else leaf, cache)
        copied = jax.jit(copy_pages)(cache, ints([3, 1]), ints([0, NO_PAGE]))["layers"]["slot_0"].self_attention
        expected = np.array(contents)
        expected[:, 0] = expected[:, 3]
        np.testing.assert_array_equal(copied.pages, expected)

    def test_rejects_sizes_below_one(self):
        with pytest.raises(ValueError, match=r"page_size.*1.*got 0"):
            paged_cache(None, rows=1, pages_per_row=1, num_pages=1, page_size=0)


class TestAttention:
    """One layer, with chunks of different lengths: what the pages give is what all tokens at once give."""

    @pytest.mark.parametrize("name", ["window, softcap, sinks", pytest.param("alibi", marks=pytest.mark.slow)])
    def test_supports_chunks_of_mixed_lengths(self, name):
        options = {
            "window, softcap, sinks": {"softcap": 2.0, "sinks": True, "position": Rotary()},
            "alibi": {"position": ALiBi(num_heads=4)},
        }[name]
        mask = Mask.causal() & Mask.window(4) if "window" in name else Mask.causal()
        layer = MultiHeadAttention(num_heads=4, num_kv_heads=2, head_dim=4, value_dim=5, **options)
        x = random(0, 3, 9, 8)
        params = random_params(layer, x, mask=mask)
        apply = jax.jit(functools.partial(layer.apply, params, mask=mask))
        # Rows 0 and 1 share their first page, whose tokens row 0 writes; row 1 begins after them.
        x = np.array(x)
        x[1, :PAGE] = x[0, :PAGE]
        whole = np.asarray(apply(x)[0])
        cache = pool(3, table=[[7, 2, 5, 3, -1], [7, 9, 4, 0, -1], [1, 8, 6, -1, -1]])
        done = np.array([0, 0, 0])
        for counts, start in (([4, 0, 1], None), ([1, 2, 0], [4, PAGE, 1]), ([4, 4, 4], None), ([0, 0, 4], None)):
            done = done if start is None else np.array(start)
            chunk = np.stack([np.roll(x[row], -done[row], axis=0)[:4] for row in range(3)])
            cache = dataclasses.replace(cache, length=ints(done), chunk_length=ints(counts))
            out, cache = apply(chunk, cache=cache)
            out = np.asarray(out)
            for row, count in enumerate(counts):
                part = whole[row, done[row] : done[row] + count]
                np.testing.assert_allclose(out[row, :count], part, rtol=1e-4, atol=1e-5)
            done = done + counts
        assert done.tolist() == cache.row_lengths.tolist() == [9, 9, 9]

    def test_a_context_has_no_pages(self):
        with pytest.raises((ValueError, TypeCheckError)):
            random_params(MultiHeadAttention(num_heads=2), random(0, 1, 2, 4), random(1, 1, 2, 4), cache=pool(1))


BASE = TransformerConfig(
    vocab_size=31,
    d_model=24,
    num_layers=3,
    num_heads=6,
    attention=AttentionOptions(num_kv_heads=3),
    feed_forward=FeedForwardOptions(d_ff=13),
    position=RotaryOptions(),
    embedding=EmbeddingOptions(tie=False),
    parameters=ParameterOptions(initializer_range=0.4),
)
ALTERNATING = (LayerKind(window=3), LayerKind())
LATENT = MLA(kv_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4)
CONFIGS = {
    "alternating windows, prefix": BASE.replace(
        num_layers=3, **{"stack.prefix": (LayerKind(),), "stack.period": ALTERNATING, "attention.softcap": 3.0}
    ),
    "mla": BASE.replace(**{"attention.num_kv_heads": None, "attention.mla": LATENT}),
    "sinks, yarn": BASE.replace(
        **{"attention.sinks": True, "position.scaling": RotaryScaling(kind="yarn", factor=4.0, original_length=8)}
    ),
    "llama3 scaling, value size": BASE.replace(
        **{"attention.value_dim": 5, "position.scaling": RotaryScaling(kind="llama3", factor=4.0, original_length=16)}
    ),
    "one layer without attention, t5": BASE.replace(
        position=T5BiasOptions(), num_layers=2, **{"stack.period": (LayerKind(self_attention=False), LayerKind())}
    ),
    "learned": BASE.replace(position=LearnedOptions(max_length=20)),
    "alibi": BASE.replace(position=ALiBiOptions()),
}
SLOW = [name for name in CONFIGS if name != "alternating windows, prefix"]


class TestModels:
    @pytest.mark.parametrize(
        "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CONFIGS]
    )
    def test_paged_equals_unpaged(self, name):
        """A prefill of mixed lengths and single tokens, against the whole forward pass."""
        model = CausalLM(CONFIGS[name])
        tokens, lengths = np.random.default_rng(1).integers(0, 31, (3, 11)).astype(np.int32), np.array([5, 1, 7])
        variables = random_params(model, tokens)
        whole = np.asarray(jax.jit(model.apply)(variables, tokens))
        apply = jax.jit(functools.partial(model.apply, variables))

        @jax.jit
        def start():
            paged = paged_cache(model, rows=3, pages_per_row=PAGES, num_pages=14, page_size=PAGE, lanes=8)
            table = jnp.array([[7, 2, 5, 3, -1], [0, 9, 4, 12, -1], [1, 8, 6, 13, -1]])
            paged = set_rows(paged, page_table=table, chunk_length=jnp.asarray(lengths))
            return jax.tree.map(lambda leaf: leaf if leaf.dtype == jnp.int32 else jnp.full_like(leaf, jnp.nan), paged)

        paged = start()
        logits, paged = apply(tokens[:, :7], cache=paged)
        logits = np.asarray(logits)
        assert cache_length(paged).tolist() == lengths.tolist()
        for row, length in enumerate(lengths):
            np.testing.assert_allclose(logits[row, :length], whole[row, :length], rtol=1e-3, atol=1e-4)
        paged = jax.jit(lambda paged: set_rows(paged, chunk_length=jnp.ones(3, int)))(paged)
        for step in range(4):
            places = np.arange(3), lengths + step
            logits, paged = apply(tokens[places][:, None], cache=paged)
            np.testing.assert_allclose(np.asarray(logits)[:, 0], whole[places], rtol=1e-3, atol=1e-4)

    @pytest.mark.cpu_only("needs eight devices")
    @pytest.mark.parametrize(
        "sizes",
        [{"data": 2, "tensor": 3}, pytest.param({"fsdp": 4, "tensor": 2}, marks=pytest.mark.slow)],
        ids=str,
    )
    def test_paged_over_a_mesh_equals_one_device(self, sizes):
        """Rows, and the parts of the pool with their pages, are split over data; heads over tensor, if divisible."""
        layer = MultiHeadAttention(num_heads=6, num_kv_heads=3, head_dim=4, position=Rotary())
        x = random(0, 4, 5, 8)
        params = random_params(layer, x)
        x, cache = jax.tree.map(np.asarray, (x, pool(4, heads=(3, 4, 4), num_pages=20)))

        @jax.jit
        def run(x, cache):
            out, cache = layer.apply(params, x[:, :4], mask=Mask.causal(), cache=cache)
            last, cache = layer.apply(params, x[:, 4:], mask=Mask.causal(), cache=cache)
            return jnp.concatenate([out, last], 1), cache.pages

        expected, pages = run(x, cache)
        mesh = make_mesh(sizes, jax.devices()[: int(np.prod(list(sizes.values())))])
        with jax.set_mesh(mesh):
            out, own = run(x, cache)
        written_to = ~np.isnan(np.asarray(pages))
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(np.asarray(own)[written_to], np.asarray(pages)[written_to], rtol=1e-4, atol=1e-5)
        parts = {"data": 2, "fsdp": 4}[next(iter(sizes))]
        assert {shard.data.shape[0] for shard in own.addressable_shards} == {20 // parts}


def spec(cache, mask=None, **options):
    shapes = AttentionShapes(num_queries=1, num_keys=15, head_dim=64, value_dim=64, dtype=jnp.float32)
    mask = Mask.causal() if mask is None else mask
    return AttentionSpec(mask=mask, scale=0.125, pages=cache, shapes=shapes, **options)


class TestKernel:
    """On a CPU the library's reference takes the place of its kernel, with the same arguments."""

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("heads", "groups", "num_tokens", "counts"),
        [((2, 64, 64), 2, 1, None), pytest.param((1, 80, 72), 3, 3, [3, 0, 1], marks=pytest.mark.slow)],
    )
    def test_ragged_paged_arguments_equal_the_reference(self, heads, groups, num_tokens, counts):
        cache = pool(3, 128, heads, [[7, 2, 5, -1, -1], [1, 0, -1, -1, -1], [4, 3, 6, -1, -1]])
        cache = dataclasses.replace(cache, pages=jnp.ones_like(cache.pages))  # the reference multiplies NaN with 0
        cache, *_ = written(cache, 1, 5, [5, 2, 4])
        start = cache.row_lengths
        cache, *_ = written(cache, 3, num_tokens, counts)
        # As the second of two layers, whose pools are one pool for the kernel.
        stacked = jax.tree.map(lambda leaf: jnp.stack([jnp.zeros_like(leaf), leaf]), cache)
        query = random(5, 3, num_tokens, heads[0] * groups, heads[1])
        options = {"mask": Mask.causal() & Mask.window(4), "softcap": 3.0}
        given, expected = (
            paged_attention(query, one, start, implementation=name, **options)
            for one, name in ((dataclasses.replace(stacked, layer=jnp.int32(1)), "ragged_paged"), (cache, "reference"))
        )
        used = np.arange(num_tokens)[None, :] < np.array(counts or [1, 1, 1])[:, None]
        np.testing.assert_allclose(given[used], expected[used], rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize(
        ("options", "change", "why"),
        [
            ({"sinks": put(np.zeros(4), np.float32)}, {}, "use attention sinks: its softmax contains only keys"),
            ({"mask": Mask.causal() & Mask.lengths(ints([1, 1]))}, {}, "hide keys by their number"),
            ({"mask": Mask.window(3)}, {}, "apply a two-sided window: it is only causal"),
            ({}, {"lanes": 1}, "read heads of 64 numbers: a stored head must be a multiple of 128"),
            ({}, {"heads": (1, 128, 0)}, "compute values from keys"),
            ({}, {"heads": (3, 128, 128), "dtype": jnp.bfloat16}, "compute float32 from bfloat16"),
            ({}, {"heads": (3, 128, 128)}, "divide 6 stored heads of keys and values among 1 devices"),
            ({}, {"heads": (2, 256, 256)}, "read 2 key heads of 256 numbers: more than one must have 128"),
            ({}, {"heads": (8, 128, 128)}, "divide 16 float32 heads of keys and values into blocks"),
        ],
    )
    @pytest.mark.cpu_only("the kernel for TPUs also runs on a CPU, in tests")
    def test_rejects_unsupported_options(self, options, change, why):
        cache = pool(**{"lanes": 128, "heads": (2, 64, 64)} | change)
        with pytest.raises(ConfigError, match=rf"ragged_paged.*{why}"):
            choose("ragged_paged", spec(cache, **options))
        with computing_on("tpu", "TPU v5 lite"):
            assert choose("auto", spec(cache, **options)) == GATHER_PAGES

    @pytest.mark.cpu_only("the kernel for TPUs also runs on a CPU, in tests")
    def test_auto_chooses_by_device_and_logs(self, caplog):
        kernels._log_once.cache_clear()  # a choice is logged once per process
        cache = pool(lanes=128, heads=(2, 64, 64))
        assert choose("ragged_paged", spec(cache)) == "ragged_paged"
        with caplog.at_level("INFO", "transformer.nn.kernels"):
            assert choose("auto", spec(cache)) == "page_blocks"
            assert choose("reference", spec(cache)) == GATHER_PAGES
            with computing_on("gpu", "NVIDIA H100"):
                assert choose("auto", spec(cache)) == GATHER_PAGES
            with computing_on("tpu", "TPU v5 lite"):
                assert choose("auto", spec(cache)) == "ragged_paged"
        assert "1 x 15 scores per head in pages of 3 on cpu: auto selects page_blocks" in caplog.text
        assert "in pages of 3 on gpu: auto selects gather_pages (ragged_paged is for" in caplog.text
        assert "on tpu: auto selects ragged_paged" in caplog.text


class TestPageBlocks:
    """The kernel in plain JAX, with blocks of one or two pages."""

    @pytest.mark.parametrize("limits", [{"BLOCK_KEYS": PAGE}, {"BLOCK_KEYS": 2 * PAGE}, {"BLOCK_BYTES": 1}])
    @pytest.mark.parametrize("num_tokens", [1, 3])
    def test_the_kernel_equals_gathered_pages(self, monkeypatch, limits, num_tokens):
        for name, value in limits.items():
            monkeypatch.setattr(_page_blocks, name, value)
        cache = pool(3, 1, (2, 6, 5), [[7, 2, 5, 8, 9], [1, 0, -1, -1, -1], [4, 3, 6, -1, -1]])
        cache, *_ = written(cache, 1, 10, [10, 2, 4])
        start = cache.row_lengths
        cache, *_ = written(cache, 3, num_tokens, [num_tokens, num_tokens, 0])
        query = random(5, 3, num_tokens, 4, 6)
        options = {"mask": Mask.causal() & Mask.window(7), "softcap": 3.0}
        options |= {"sinks": random(6, 4)}

        @jax.jit
        def both(query, cache, start):
            kernels = "page_blocks", "reference"
            return [paged_attention(query, cache, start, implementation=name, **options) for name in kernels]

        given, expected = map(np.asarray, both(query, cache, start))
        np.testing.assert_allclose(given[:2], expected[:2], rtol=1e-5, atol=1e-6)
        assert np.isfinite(given).all()  # padding and the NaN of unused pages are not read

    def test_more_rows_have_smaller_blocks(self, monkeypatch):
        """Pages of 3 tokens with 4 stored heads of 6 numbers: 288 bytes in each row."""
        monkeypatch.setattr(_page_blocks, "BLOCK_BYTES", 1200)
        pages = [_page_blocks.pages_per_block(pool(rows, 1, (2, 6, 5)), rows) for rows in (1, 2, 4, 8)]
        assert pages == [4, 2, 1, 1]

    def test_a_row_does_not_depend_on_longer_rows(self, monkeypatch):
        """Bit by bit: blocks after the end of a row add zeros."""
        monkeypatch.setattr(_page_blocks, "BLOCK_KEYS", PAGE)
        cache = pool(2, 1, (2, 8, 8), [[7, 2, 5, 8, 9], [1, 0, 3, 4, 6]])
        cache, *_ = written(cache, 1, 14, [4, 14])
        query = random(5, 2, 1, 4, 8)
        options = {"mask": Mask.causal(), "softcap": None}

        @jax.jit
        def attend(cache):
            return paged_attention(query, cache, cache.row_lengths - 1, implementation="page_blocks", **options)

        both = np.asarray(attend(cache))
        short = np.asarray(attend(dataclasses.replace(cache, length=ints([4, 0]))))
        np.testing.assert_array_equal(both[0], short[0])
        assert not short[1].any()  # a row without tokens: 0, not NaN

    @pytest.mark.parametrize(
        ("heads", "options", "why"),
        [
            ((1, 128, 0), {}, "compute values from keys"),
            ((2, 64, 64), {"return_weights": True}, "return attention weights: it is for decoding"),
            ((2, 64, 64), {"dropout_rate": 0.5}, "drop attention weights: it is for decoding"),
        ],
    )
    def test_rejects_unsupported_options(self, heads, options, why):
        cache = pool(lanes=1, heads=heads)
        with pytest.raises(ConfigError, match=rf"page_blocks.*{why}"):
            choose("page_blocks", spec(cache, **options))
        assert choose("auto", spec(cache, **options)) == GATHER_PAGES


class TestStoredTogether:
    """Small heads that a `KVCache` stores together, as on a TPU, give what separate heads give."""

    @pytest.mark.slow
    @pytest.mark.parametrize("few", [pytest.param(0, marks=pytest.mark.slow, id="separated"), 32])
    def test_a_model_with_paged_attention_equals_the_reference(self, monkeypatch, few):
        config = BASE.replace(
            d_model=32, num_heads=8, num_layers=2, **{"attention.num_kv_heads": 4, "attention.softcap": 3.0}
        )
        model = CausalLM(config)
        tokens = np.random.default_rng(0).integers(0, 31, (2, 6))
        variables = jax.jit(model.init)(jax.random.key(0), tokens)
        expected = jax.jit(model.apply)(variables, tokens)
        monkeypatch.setattr(_paged, "LANES", {"cpu": 8})  # two heads of four numbers
        monkeypatch.setattr(_caches, "FEW_QUERIES", few)
        cache = model.init_cache(2, 9)
        assert cache["layers"]["slot_0"].self_attention.key.shape == (2, 2, 2, 9, 8)
        logits, cache = jax.jit(model.apply)(variables, tokens[:, :5], cache=cache)
        np.testing.assert_allclose(logits, expected[:, :5], rtol=1e-3, atol=1e-4)
        if few:
            before = cache
            logits, cache = jax.jit(model.apply)(variables, tokens[:, 5:], cache=cache)
            np.testing.assert_allclose(logits, expected[:, 5:], rtol=1e-3, atol=1e-4)
            weights = model.clone(execution=Execution(attention="reference", sow_weights=True))
            _, state = weights.apply(variables, jnp.asarray(tokens[:, 5:]), cache=before, mutable="intermediates")
            assert [leaf.shape for leaf in jax.tree.leaves(state)] == [(2, 2, 8, 1, 9)]

    def test_only_whole_parts_of_a_mesh(self):
        assert [heads_together(kv_heads, size, 128) for kv_heads, size in ((8, 64), (3, 64), (8, 96), (8, 32))] == [
            *(2, 1, 1, 4)
        ]
        mesh = jax.sharding.AbstractMesh((4,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
        with jax.sharding.use_abstract_mesh(mesh):
            assert [heads_together(kv_heads, 64, 128) for kv_heads in (8, 4)] == [2, 1]


def test_scanned_layers_update_their_own_pages():
    """In a scan over layers, a KVCache with a layer index reads and writes that layer only."""
    append = jax.jit(KVCache.append)
    read = jax.jit(lambda cache: (cache.whole(), cache.row_lengths, cache.key_positions))
    one = jax.jit(lambda: KVCache.create(2, 5, 1, 3, 2, jnp.float32))()
    stacked = jax.tree.map(lambda leaf: put(np.broadcast_to(leaf, (4, *leaf.shape))), one)
    key, value, positions = random(0, 2, 3, 1, 3), random(1, 2, 3, 1, 2), ints([[4, 5, 6]] * 2)
    grown = append(dataclasses.replace(stacked, layer=ints(2)), key, value, positions)
    alone = append(one, key, value, positions)
    (arrays, lengths, places), (expected, _, expected_places) = read(grown), read(alone)
    assert lengths.tolist() == [3, 3]
    np.testing.assert_array_equal(places, expected_places)
    for mine, other in zip(arrays, expected, strict=True):
        np.testing.assert_array_equal(mine, other)
    assert not np.asarray(grown.key)[[0, 1, 3]].any()
    assert np.asarray(grown.length)[:, 0].tolist() == [0, 0, 3, 0]


@pytest.mark.usefixtures("tpu_compiler")
@pytest.mark.slow
class TestCompiler:
    """The TPU compiler accepts the kernel for pages, and a decoding step moves few bytes more than it must."""

    @pytest.mark.parametrize("topology", ["v5e:1x1", "v6e:1x1"])
    @pytest.mark.parametrize(
        ("heads", "queries", "width", "page", "dtype"),
        [
            (8, 32, 64, 128, jnp.bfloat16),
            (8, 64, 128, 16, jnp.bfloat16),
            (1, 64, 128, 128, jnp.bfloat16),
            (64, 64, 128, 128, jnp.bfloat16),
            (1, 16, 256, 128, jnp.bfloat16),
            (4, 32, 128, 16, jnp.float32),
        ],
    )
    def test_blocks_fit_into_memory(self, topology, heads, queries, width, page, dtype):
        """Prefill and decoding, for what `ragged_paged_limits` permits."""
        mesh = make_mesh({}, topology_devices(parse_topology(topology)))
        place = NamedSharding(mesh, PartitionSpec())
        options = {"softcap": 3.0}

        def attend(query, cache):
            cache = dataclasses.replace(cache, chunk_length=cache.length)
            mask = Mask.causal() & Mask.window(300)
            return paged_attention(query, cache, cache.length, mask=mask, implementation="ragged_paged", **options)

        with jax.set_mesh(mesh):
            sizes = 2 * 2048 // page, page, 2, 2048 // page, (heads, width, width), dtype
            cache = jax.eval_shape(lambda: PagedKVCache.create(*sizes))
            for num_tokens in (1, 1024):
                query = jax.ShapeDtypeStruct((2, num_tokens, queries, width), dtype)
                given = jax.tree.map(lambda leaf: leaf.update(sharding=place), (query, cache))
                lowered = jax.jit(attend).lower(*given)
                assert "ragged_paged_attention_kernel" in lowered.as_text()
                lowered.compile()

    @pytest.mark.parametrize("paged", [True, False])
    def test_bytes_of_a_decoding_step(self, paged):
        """Heads of 64 numbers are neither padded nor copied, and layers are not copied out of their stack."""
        options = {
            "num_layers": 4,
            "num_heads": 16,
            "attention.num_kv_heads": 8,
            "position": RotaryOptions(),
            "feed_forward.d_ff": 2048,
        }
        model = TransformerConfig(vocab_size=1024, d_model=1024, dtype="bfloat16", **options)
        recipe = Recipe(name="small", model=model, data=TextFile(path="t.txt", sequence_length=2048, batch_size=8))
        topology = parse_topology("v5e:1x1")
        devices = topology_devices(topology)
        plan = make_decode_plan(recipe, Generation(32, 1792, 256), topology, devices, paged=paged)
        assert plan.cache_bytes > 0.8 * plan.least_token_bytes
        assert 0.98 < plan.token_bytes / plan.least_token_bytes < 1.02
