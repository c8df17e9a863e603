"""The decoder that reads images between its tokens."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numeric_parts import random_params

from transformer.config import (
    ConfigError,
    FeedForwardOptions,
    ImageTokens,
    LayerKind,
    LearnedOptions,
    ParameterOptions,
    Patches,
    RotaryOptions,
    TransformerConfig,
)
from transformer.nn import make_mesh, state_shardings
from transformer.nn._masks import Mask
from transformer.nn.models import CausalLM, VisionLanguageModel

ENCODER = TransformerConfig(
    d_model=8,
    num_layers=1,
    num_heads=2,
    feed_forward=FeedForwardOptions(d_ff=5, activation="gelu_erf"),
    position=LearnedOptions(),
    input=Patches(image_height=4, image_width=6, patch_size=2, class_token=True),
    **{"embedding.norm": True, "stack.final_norm": False},
)
IMAGES = ImageTokens(token_id=10, encoder=ENCODER, unused_layers=1, projector="mlp")
CONFIG = TransformerConfig(
    vocab_size=11,
    d_model=12,
    num_layers=2,
    num_heads=3,
    feed_forward=FeedForwardOptions(d_ff=7),
    position=RotaryOptions(),
    input=IMAGES,
    parameters=ParameterOptions(initializer_range=0.5),
    **{"stack.period": (LayerKind(window=13), LayerKind())},
)
M = IMAGES.token_id
NUMBERS = np.asarray([[1, 2, *[M] * 6, 3, *[M] * 6, 4, 5], [*[M] * 6, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6]], np.int32)
TOKENS = jax.device_put(NUMBERS)
PICTURES = np.random.default_rng(1).normal(size=(2, 2, 4, 6, 3)).astype(np.float32)
PIXELS = jax.device_put(PICTURES)


@functools.cache
def made(attention="causal"):
    """Return the model and its parameters."""
    model = VisionLanguageModel(CONFIG.replace(input=dataclasses.replace(IMAGES, attention=attention)))
    return model, {"params": random_params(model, TOKENS)["params"]}


def depends(attention, row, **options):
    """Return, for each pair of tokens (i, j) of a row, whether the output of i depends on the embedding of j."""
    model, variables = made(attention)

    def outputs(x):
        def run(bound):
            groups = bound._groups(TOKENS == M, True, options.get("prefix_lengths"))
            mask = None if groups is None else Mask.groups(groups)
            return bound.decoder(x, mask=mask, deterministic=True)[0]

        return model.apply(variables, method=run)[row] @ jnp.arange(CONFIG.d_model) ** 2

    x = jax.random.normal(jax.random.key(2), (*TOKENS.shape, CONFIG.d_model))
    jacobian = jax.jit(jax.jacobian(outputs))(x)[:, row]  # (T, T, D)
    return np.abs(np.asarray(jacobian)).max(-1) > 0


@pytest.mark.slow
def test_causality_is_exact_except_within_groups():
    tokens = np.arange(TOKENS.shape[1])
    earlier = tokens[:, None] >= tokens[None, :]
    assert (depends("causal", 0) == earlier).all()
    first, second = (tokens >= 2) & (tokens < 8), (tokens >= 9) & (tokens < 15)
    same = (first[:, None] & first[None, :]) | (second[:, None] & second[None, :])
    assert (depends("image", 0) == (earlier | same)).all()
    prefix = tokens < 7
    got = depends("prefix", 1, prefix_lengths=jnp.asarray([0, 7]))
    assert (got == (earlier | (prefix[:, None] & prefix[None, :]))).all()
    assert depends("prefix", 1).all()  # the whole prompt


def test_features_replace_the_embeddings_of_their_own_row():
    """A picture changes the tokens from its own place on, in its row only; the order of pictures is that of markers."""
    model, variables = made()
    apply = jax.jit(lambda pixels: model.apply(variables, TOKENS, images=pixels))
    base = np.asarray(apply(PIXELS))
    negative, other = PICTURES.copy(), PICTURES.copy()
    negative[0, 1] *= -1
    other[1, 1] = 7.0
    changed = np.asarray(apply(negative))
    same = np.isclose(base, changed, rtol=0, atol=1e-6).all(-1)
    assert same[0, :9].all()
    assert not same[0, 9:].any()
    assert same[1].all()
    spare = np.asarray(apply(other))  # the second row has one image
    np.testing.assert_allclose(spare, base, rtol=0, atol=1e-6)


def test_layers_after_the_features_are_not_computed():
    model, variables = made()
    apply = jax.jit(lambda variables: model.apply(variables, TOKENS, images=PIXELS))
    broken = jax.tree.map(lambda leaf: np.asarray(leaf) * np.nan, variables["params"]["image_unused"])
    got = apply({"params": variables["params"] | {"image_unused": broken}})
    np.testing.assert_array_equal(got, apply(variables))


@pytest.mark.parametrize("attention", ["image", pytest.param("prefix", marks=pytest.mark.slow)])
def test_cached_is_uncached(attention):
    """A prompt with images, then the rest of the text token by token."""
    model, variables = made(attention)
    split = 15
    given = {"prefix_lengths": jax.device_put(np.asarray([split, split]))} if attention == "prefix" else {}
    whole = jax.jit(lambda: model.apply(variables, TOKENS, images=PIXELS, **given))()
    step = jax.jit(lambda cache, tokens, images: model.apply(variables, tokens, cache=cache, images=images))
    logits, cache = step(jax.jit(lambda: model.init_cache(2, 20))(), NUMBERS[:, :split], PIXELS)
    parts = [logits]
    for i in range(split, TOKENS.shape[1]):
        logits, cache = step(cache, NUMBERS[:, i : i + 1], None)
        parts.append(logits)
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, atol=2e-5)


def test_without_images_the_model_equals_its_decoder():
    model, variables = made("image")
    text = np.asarray([[1, 2, 3, 4]])
    params = {name: variables["params"][name] for name in ("embedding", "decoder")}
    expected = jax.jit(CausalLM(CONFIG.replace(input=None)).apply)({"params": params}, text)
    np.testing.assert_array_equal(jax.jit(model.apply)(variables, text), expected)


def test_sharded_is_unsharded():
    model, variables = made("image")
    run = jax.jit(lambda variables, pixels: model.apply(variables, TOKENS, images=pixels))
    expected = run(variables, PIXELS)
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": -1})
    places = state_shardings(jax.eval_shape(lambda: variables), mesh)
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(run(jax.device_put(jax.device_get(variables), places), PIXELS), expected, atol=2e-5)


EXCESS = "row 0 has 12 image tokens: expected a multiple of 6 of at most 6"


@pytest.mark.programs(10, reason="image tokens are counted only outside of jit")
def test_wrong_inputs_are_errors(monkeypatch):
    model, variables = made()
    # The number of vectors is what matters; the layers of the images would compile many programs.
    vectors = jax.device_put(np.zeros((2, 6, CONFIG.d_model), np.float32))
    with monkeypatch.context() as patch:
        patch.setattr(VisionLanguageModel, "_image_features", lambda *given: (vectors, {}))
        with pytest.raises(ValueError, match=EXCESS):
            model.apply(variables, TOKENS, images=jax.device_put(PICTURES[:, :1]))
    with pytest.raises(ValueError, match=r"prefix_lengths.*input.attention='prefix'"):
        jax.eval_shape(lambda: model.apply(variables, TOKENS, images=PIXELS, prefix_lengths=jnp.asarray([1, 1])))
    with pytest.raises(ConfigError, match=r"input.token_id \(10\).*vocab_size \(7\)"):
        random_params(VisionLanguageModel(CONFIG.replace(vocab_size=7)), TOKENS)
    with pytest.raises(ConfigError, match=r"needs input=ImageTokens\(...\)"):
        random_params(VisionLanguageModel(CONFIG.replace(input=None)), TOKENS)
