"""A call that does not fit its cache: an error outside jit, NaN inside jit, and never a result that lacks keys."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_parts import ints, put
from numeric_parts import random_params

from transformer.config import FeedForwardOptions, LayerKind, RotaryOptions, TransformerConfig
from transformer.config._parts import MLA, GatedDelta
from transformer.nn._attention import MultiHeadAttention
from transformer.nn._caches import KVCache, set_cache_length
from transformer.nn._masks import Mask
from transformer.nn._mla import LatentAttention
from transformer.nn._paged import NO_PAGE, paged_cache, set_rows
from transformer.nn.models import CausalLM

SLOTS, BEFORE, T = 8, (3, 6), 5
"""after its tokens in the cache, row 0 has room for all T tokens and row 1 for two"""
FIT = np.array([[True] * T, [True] * 2 + [False] * 3])
DELTA = GatedDelta(num_heads=4, num_key_heads=2, key_dim=3, value_dim=5, conv_width=3)
LATENT = MLA(kv_lora_rank=7, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=3)
KINDS = {
    "full": {},
    "window": {"stack.period": (LayerKind(window=3),)},
    "latent": {"attention.mla": LATENT},
    "linear": {"stack.period": (LayerKind(gated_delta=DELTA), LayerKind())},
    "stored": {"stack.prefix": (LayerKind(stores_kv="a"), LayerKind(reads_kv="a"))},
}


def language_model(kind):
    config = TransformerConfig(
        vocab_size=19,
        d_model=12,
        num_layers=2,
        num_heads=2,
        feed_forward=FeedForwardOptions(d_ff=8),
        position=RotaryOptions(),
    )
    model = CausalLM(config.replace(**KINDS[kind]))
    return model, random_params(model, np.zeros((1, 2), np.int32))


def paged(model, table):
    cache = paged_cache(model, rows=2, pages_per_row=2, num_pages=4, page_size=4)
    return set_rows(cache, page_table=jnp.asarray(table, jnp.int32))


def slots(model):
    return model.init_cache(2, SLOTS)


CASES = [
    *((kind, slots) for kind in KINDS),
    ("full", lambda model: paged(model, [[0, 1], [2, 3]])),
    pytest.param("latent", lambda model: paged(model, [[0, 1], [2, 3]]), marks=pytest.mark.slow),
]
SLOW = {"window", "stored", "linear"}


@pytest.mark.parametrize(
    ("kind", "create"),
    [case if case[0] not in SLOW else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_tokens_beyond_the_cache_give_nan_inside_jit(kind, create):
    """Those of the tokens with room are the results of a cache that is long enough."""
    model, variables = language_model(kind)
    tokens = np.random.default_rng(0).integers(0, 19, (2, 16)).astype(np.int32)

    @jax.jit
    def run(variables, tokens, before):
        def after(cache):
            _, cache = model.apply(variables, tokens[:, :6], mask=Mask.lengths(before), cache=cache)
            cache = set_cache_length(cache, before)
            got, cache = model.apply(variables, tokens[:, 6 : 6 + T], cache=cache)
            return got, model.apply(variables, tokens[:, :1], cache=cache)[0]

        return after(create(model)), after(model.init_cache(2, 16))

    (got, late), (expected, _) = jax.tree.map(np.asarray, run(variables, tokens, ints(BEFORE)))
    np.testing.assert_array_equal(np.isfinite(got).all(-1), FIT)
    np.testing.assert_array_equal(np.isnan(got).all(-1), ~FIT)
    np.testing.assert_allclose(got[FIT], expected[FIT], rtol=1e-4, atol=1e-5)
    assert np.isnan(late).all()  # both rows are full by now


def test_a_token_without_a_page_is_nan_and_padding_needs_none():
    model, variables = language_model("full")

    @jax.jit
    def run(variables, tokens, table, counts):
        cache = set_rows(paged(model, table), chunk_length=counts)
        return model.apply(variables, tokens, cache=cache)[0]

    tokens, table = np.ones((2, 6), np.int32), ints([[0, 1], [2, NO_PAGE]])
    missing = np.isnan(np.asarray(run(variables, tokens, table, ints([6, 6])))).all(-1)
    assert missing.tolist() == [[False] * 6, [False] * 4 + [True] * 2]
    assert np.isfinite(np.asarray(run(variables, tokens, table, ints([6, 4])))).all()


def test_without_causality_missing_keys_make_every_token_nan():
    attention = MultiHeadAttention(num_heads=2)
    x = np.random.default_rng(0).normal(size=(2, T, 8)).astype(np.float32)
    variables = random_params(attention, x)
    cache = jax.jit(lambda: KVCache.create(2, SLOTS, 2, 4, 4, jnp.float32))()
    cache = dataclasses.replace(cache, length=ints(BEFORE))
    run = jax.jit(lambda variables, x, cache, mask: attention.apply(variables, x, mask=mask, cache=cache)[0])
    assert np.isnan(np.asarray(run(variables, x, cache, Mask()))).all((1, 2)).tolist() == [False, True]
    groups = Mask.causal() & Mask.groups(ints([[0] * T] * 2))
    assert np.isnan(np.asarray(run(variables, x, cache, groups))).all((1, 2)).tolist() == [False, True]


@pytest.mark.programs(9, reason="outside jit, the embedding consists of separate programs")
@pytest.mark.parametrize("kind", ["full", "latent", "linear"])
def test_outside_jit_a_full_cache_is_an_error_before_any_layer(kind):
    model, variables = language_model(kind)
    cache = set_cache_length(jax.jit(lambda: slots(model))(), ints(BEFORE))
    with pytest.raises(ValueError, match=r"row 1 has 6 tokens in 8 slots.*at least 9 slots"):
        model.apply(variables, ints(np.ones((2, 3))), cache=cache)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([[0, 1], [2, 3]], "3 more tokens, but row 1 has 6 tokens, and its table names 2 pages of 4 .*pages_per_row"),
        ([[0, NO_PAGE], [2, 3]], "row 0 has 3 tokens, and its table names 1 pages of 4 tokens.*set_rows"),
    ],
)
@pytest.mark.programs(9, reason="outside jit, the embedding consists of separate programs")
def test_outside_jit_a_token_without_a_page_is_an_error(table, message):
    model, variables = language_model("full")
    cache = set_rows(jax.jit(lambda: paged(model, table))(), length=ints(BEFORE))
    with pytest.raises(ValueError, match=message):
        model.apply(variables, ints(np.ones((2, 3))), cache=cache)


def test_a_single_layer_checks_its_cache_outside_jit():
    x = put(np.zeros((2, 3, 8)), np.float32)
    for layer, sizes in ((MultiHeadAttention(num_heads=2), (2, 4, 4)), (LatentAttention(2, LATENT), (1, 9, 0))):
        cache = jax.jit(KVCache.create, static_argnums=range(6))(2, SLOTS, *sizes, jnp.float32)
        cache = dataclasses.replace(cache, length=ints(BEFORE))
        with pytest.raises(ValueError, match=r"3 more tokens.*row 1 has 6 tokens in 8 slots"):
            layer.apply({"params": {}}, x, cache=cache)


@pytest.mark.parametrize("heads_per_stored", [1, 2, 4])
def test_heads_stored_together_need_no_extra_memory(heads_per_stored):
    cache = KVCache.create(3, 5, 4, 2, 2, jnp.float32, heads_per_stored)
    assert cache.key.size == cache.value.size == 3 * 5 * 4 * 2
