"""Multi-head latent attention: both orders of multiplication agree, and the cache stores only latents."""

import jax
import jax.export as export
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from numeric_parts import random_params

from transformer.config import (
    MLA,
    AttentionOptions,
    ConfigError,
    FeedForwardOptions,
    LayerKind,
    NormOptions,
    RotaryOptions,
    TransformerConfig,
)
from transformer.generate import Sampling, generate
from transformer.nn._caches import KVCache, cache_length, set_cache_length
from transformer.nn._masks import Mask
from transformer.nn._mla import LatentAttention, Latents, absorbs
from transformer.nn._positions import Rotary
from transformer.nn._sharding import make_mesh, parameter_spec
from transformer.nn.kernels import AttentionSpec
from transformer.nn.models import CausalLM, Seq2Seq

B, T, D, N = 2, 7, 10, 3
SIZES = MLA(kv_lora_rank=6, qk_nope_head_dim=5, qk_rope_head_dim=4, v_head_dim=3, q_lora_rank=11)
DEEPSEEK_V3 = MLA(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, q_lora_rank=1536)
TINY = TransformerConfig(
    vocab_size=13,
    d_model=D,
    num_layers=2,
    num_heads=N,
    feed_forward=FeedForwardOptions(d_ff=7),
    position=RotaryOptions(),
    norm=NormOptions(kind="rms_norm"),
    attention=AttentionOptions(mla=SIZES),
)


def normal(seed, *shape):
    return jax.device_put(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def layer(mla=SIZES, **options):
    """Return a layer, random parameters (including biases and scales), and an input."""
    module, x = LatentAttention(num_heads=N, mla=mla, **options), normal(0, B, T, D)
    return module, random_params(module, x)["params"], x


def language_model(**changes):
    model = CausalLM(TINY.replace(**changes))
    return model, random_params(model, np.zeros((1, 1), np.int32))["params"]


def test_both_multiplication_orders_give_equal_values_and_gradients():
    latents = (normal(0, B, T, N, 9), normal(1, B, T, 1, 10), normal(2, 6, N, 5), normal(3, 6, N, 3))
    mask, wanted = Mask.causal() & Mask.lengths(jax.device_put(np.array([7, 4]))), normal(4, B, T, N, 3)

    @jax.jit
    def run(attend, *arrays):
        def weighted(query, *latents):
            spec = AttentionSpec(mask=mask, scale=0.4, softcap=2.0, return_weights=True)
            out, weights = attend(Latents(*latents), query, spec, "auto")
            return (out * wanted).sum(), (out, weights)

        return jax.value_and_grad(weighted, argnums=(0, 1, 2, 3), has_aux=True)(*arrays)

    ours, theirs = (run(jax.tree_util.Partial(attend), *latents) for attend in (Latents.expanded, Latents.absorbed))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-5), ours, theirs)
    assert all(np.abs(leaf).max() > 0.1 for leaf in jax.tree.leaves(ours))


def test_latent_attention_equals_its_formula():
    """Equations 9 to 19 and 37 to 47 of DeepSeek-V2 (arXiv 2405.04434), in a loop over tokens and heads."""
    module, params, x = layer(position=Rotary(base=9.0))
    got, _ = jax.jit(lambda: module.apply({"params": params}, x, mask=Mask.causal()))()
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)

    def rms(name, vector):
        return p[name]["scale"] * vector / np.sqrt((vector**2).mean() + 1e-6)

    def turn(pairs, position):
        angle = position * 9.0 ** -np.array([0.0, 0.5])
        first, second = pairs[:2], pairs[2:]
        return np.concatenate(
            [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)]
        )

    expected = np.zeros((B, T, D))
    for b in range(B):
        row = np.asarray(x, np.float64)[b]
        latents = [rms("latent_norm", one @ p["latent"]["kernel"]) for one in row]
        turned = [turn(one @ p["rotary_key"]["kernel"], s) for s, one in enumerate(row)]
        for t, one in enumerate(row):
            source = rms("query_norm", one @ p["query_latent"]["kernel"])
            for n in range(N):
                query = source @ p["query"]["kernel"][:, n]
                query = np.concatenate([query[:5], turn(query[5:], t)])
                keys = [np.concatenate([latents[s] @ p["key"]["kernel"][:, n], turned[s]]) for s in range(t + 1)]
                weights = np.exp(np.array(keys) @ query / 3.0)
                values = np.array(latents[: t + 1]) @ p["value"]["kernel"][:, n]
                expected[b, t] += weights / weights.sum() @ values @ p["out"]["kernel"][n]
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5)


def test_parameters_are_public():
    module = LatentAttention(num_heads=N, mla=SIZES, use_bias=True)
    params = jax.eval_shape(module.init, jax.random.key(0), normal(0, B, T, D))["params"]
    shapes = {
        jax.tree_util.keystr(k, simple=True, separator="/"): v.shape for k, v in jax.tree.leaves_with_path(params)
    }
    assert shapes == {
        "query_latent/kernel": (10, 11),
        "query_latent/bias": (11,),
        "query_norm/scale": (11,),
        "query/kernel": (11, 3, 9),
        "latent/kernel": (10, 6),
        "latent/bias": (6,),
        "latent_norm/scale": (6,),
        "rotary_key/kernel": (10, 4),
        "rotary_key/bias": (4,),
        "key/kernel": (6, 3, 5),
        "value/kernel": (6, 3, 3),
        "out/kernel": (3, 3, 10),
        "out/bias": (10,),
    }


def test_outputs_are_causal_and_depend_only_on_distances():
    module, params, x = layer()
    run = jax.jit(lambda x, shift: module.apply({"params": params}, x, mask=Mask.causal(), positions=shift)[0])
    positions = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
    slopes = np.asarray(jax.jit(jax.jacobian(lambda x: run(x, positions)[0].sum(-1)))(x))[:, 0]
    for t in range(T):
        assert np.abs(slopes[t, : t + 1]).max(-1).min() > 1e-4
        np.testing.assert_array_equal(slopes[t, t + 1 :], 0.0)
    whole = np.asarray(run(x, positions))
    np.testing.assert_allclose(run(x, positions + 40), whole, atol=1e-5)
    assert np.abs(np.asarray(run(x, 2 * positions)) - whole).max() > 1e-2


def test_a_cache_filled_in_parts_equals_the_whole_and_holds_latents():
    """Single tokens use absorbed attention; longer inputs compute keys and values from the latents."""
    wide = MLA(kv_lora_rank=17, qk_nope_head_dim=5, qk_rope_head_dim=4, v_head_dim=3)
    assert [absorbs(width, T, wide) for width in (1, T - 1, T)] == [True, False, False]
    module, params, x = layer(wide)
    run = jax.jit(lambda x, cache: module.apply({"params": params}, x, mask=Mask.causal(), cache=cache))
    x = np.asarray(x)
    whole = np.asarray(run(x, None)[0])
    empty = jax.jit(lambda: KVCache.create(B, T, 1, 17 + 4, 0, jnp.float32))()
    for widths in ((1, T - 1), (T - 1, 1), (T,)):
        cache, parts = empty, []
        for width in widths:
            start = sum(part.shape[1] for part in parts)
            part, cache = run(x[:, start : start + width], cache)
            parts.append(part)
        np.testing.assert_allclose(np.concatenate(parts, 1), whole, atol=1e-5)
    assert jax.jit(cache_length)(cache).tolist() == [T, T]
    back = set_cache_length(cache, jax.device_put(np.array([2, 2], np.int32)))
    np.testing.assert_allclose(run(x[:, 2:3], back)[0], whole[:, 2:3], atol=1e-5)


def test_decoding_is_absorbed_and_training_is_not():
    assert absorbs(1, 4096, DEEPSEEK_V3)
    assert not absorbs(4096, 4096, DEEPSEEK_V3)


@pytest.fixture
def untyped():
    """Disable the type checker of these tests, which does not accept a symbolic length as an integer."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def test_accepts_a_symbolic_length(untyped):
    """jax.export with a symbolic length: the cheaper order can be determined for it."""
    module, params, x = layer()
    (length,) = export.symbolic_shape("T")
    run = jax.jit(lambda x: module.apply({"params": params}, x, mask=Mask.causal())[0])
    exported = export.export(run)(jax.ShapeDtypeStruct((B, length, D), x.dtype))
    assert exported.out_avals[0].shape == (B, length, D)


def test_the_cache_holds_only_the_latent_and_the_rotated_key():
    model = CausalLM(TINY.replace(**{"attention.mla": DEEPSEEK_V3}))
    cache = jax.eval_shape(lambda: model.init_cache(1, 10))
    assert sum(leaf.size for leaf in jax.tree.leaves(cache) if leaf.dtype == jnp.float32) == 2 * 10 * (512 + 64)


def test_prompts_of_different_lengths_continue_independently():
    model, params = language_model(num_layers=1, **{"stack.period": (LayerKind(window=5),)})
    prompts, greedy = [[3, 1, 4, 1, 5], [9, 2]], Sampling(temperature=0.0)
    together = generate(model, params, prompts=prompts, max_new_tokens=6, sampling=greedy)
    run = jax.jit(model.apply)
    for prompt, row in zip(prompts, together, strict=True):
        tokens = list(prompt)
        for _ in row:
            logits = run({"params": params}, np.array([tokens + [0] * (11 - len(tokens))], np.int32))
            tokens.append(int(np.asarray(logits)[0, len(tokens) - 1].argmax()))
        assert tokens[len(prompt) :] == row


def test_weights_are_returned_on_request_and_dropout_applies():
    module, params, x = layer(dropout_rate=0.5)

    @jax.jit
    def run(key):
        options = {"deterministic": True, "sow_weights": True, "mutable": "intermediates"}
        (plain, _), kept = module.apply({"params": params}, x, **options)
        dropped, _ = module.apply({"params": params}, x, deterministic=False, rngs={"dropout": key})
        return plain, dropped, kept["intermediates"]["weights"][0]

    plain, dropped, weights = map(np.asarray, run(jax.random.key(3)))
    assert weights.shape == (B, N, T, T)
    np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-6)
    assert np.abs(plain - dropped).max() > 1e-2


def test_a_mesh_gives_the_values_of_one_device():
    model, params = language_model(num_layers=1, num_heads=4)
    tokens = np.arange(8, dtype=np.int32).reshape(2, 4)
    run = jax.jit(model.apply)
    expected = run({"params": params}, tokens)
    mesh = make_mesh({"fsdp": 2, "tensor": 4})
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(run({"params": params}, tokens), expected, atol=1e-5)
    place = "decoder/layers/slot_0/self_attention/"
    assert parameter_spec(f"{place}key/kernel", (1, 6, 4, 5), mesh.shape) == jax.P(None, "fsdp", "tensor", None)
    assert parameter_spec(f"{place}rotary_key/kernel", (1, 10, 4), mesh.shape) == jax.P(None, "fsdp", None)
    assert parameter_spec(f"{place}query_latent/kernel", (1, 10, 11), mesh.shape) == jax.P(None, "fsdp", None)


def test_cross_attention_is_refused():
    tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    with pytest.raises(ConfigError, match=r"mla supports only self-attention: leave it out for an encoder-decoder"):
        jax.eval_shape(Seq2Seq(TINY).init, jax.random.key(0), tokens, tokens)
