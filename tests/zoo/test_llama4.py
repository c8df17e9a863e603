"""Llama 4: chunked attention in caches and packed rows, temperature, experts, and the decoder of whole models."""

import json

import jax
import jax.numpy as jnp
import numeric_parts
import numpy as np
import pytest
from golden import case as golden_case
from golden import ours

from transformer.config import ConfigError, LayerKind, MoE, QueryTemperature
from transformer.generate import Beam, beam_search
from transformer.nn import MultiHeadAttention
from transformer.nn._masks import Mask
from transformer.nn._moe import RoutedFeedForward
from transformer.nn._positions import Rotary
from transformer.zoo import ENTRIES, load_pretrained, save_pretrained
from transformer.zoo.weights import write_weights

FAMILY = ENTRIES["llama4_text"]
HEAD = FAMILY.heads["Llama4ForCausalLM"]
RECORD = golden_case.golden("llama4_text")["lm"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return load_pretrained(ours.write(tmp_path_factory.mktemp("llama4") / "text", RECORD))


LENGTH = 14


@pytest.fixture(scope="module")
def whole(tiny):
    """A function that returns the logits of at most three texts without a cache; one program for all tests.

    The model is causal, so the padding at the end of a text does not change its logits.
    """
    run = jax.jit(tiny.model.apply)

    def logits(*texts):
        tokens = np.zeros((3, LENGTH), np.int32)
        for row, text in zip(tokens, texts, strict=False):
            row[: len(text)] = text
        found = np.asarray(run({"params": tiny.params}, tokens))
        return [row[: len(text)] for row, text in zip(found, texts, strict=False)]

    return logits


def test_cached_is_uncached(tiny, whole):
    tokens = golden_case.tokens(4, 37, 2, LENGTH)
    step = jax.jit(lambda cache, part: tiny.model.apply({"params": tiny.params}, part, cache=cache))
    cache, found = jax.jit(lambda: tiny.model.init_cache(2, LENGTH))(), []
    # Chunks of 4 positions end within the first two parts (after 4 and 8) and between two of the others (after 12).
    for part in np.split(tokens, [5, 10, 11, 12, 13], axis=1):
        logits, cache = step(cache, part)
        found.append(logits)
    np.testing.assert_allclose(np.concatenate(found, axis=1), whole(*tokens), atol=2e-5)


def test_attention_chunks_restart_in_each_packed_text(tiny, whole):
    """Chunks and temperatures count from the start of each text, at any position in the row."""
    first, second = (golden_case.tokens(seed, 37, 1, size)[0] for seed, size in ((1, 5), (2, 9)))
    segments = np.array([[1] * 5 + [2] * 9 + [0] * 2])
    positions = np.concatenate([np.arange(5), np.arange(9), np.zeros(2, int)])[None]
    tokens = np.concatenate([first, second, np.zeros(2, int)])[None]

    @jax.jit
    def run(params, tokens, segments, positions):
        return tiny.model.apply({"params": params}, tokens, mask=Mask.segments(segments), positions=positions)

    packed = np.asarray(run(tiny.params, tokens, segments, positions))[0]
    for part, expected in zip((packed[:5], packed[5:14]), whole(first, second), strict=True):
        np.testing.assert_allclose(part, expected, atol=2e-5)


def test_padding_may_be_a_segment_of_the_cache(tiny, whole):
    """Two tokens of padding before the text: its chunks begin at the text, as without padding."""
    text = golden_case.tokens(3, 37, 1, 9)[0]
    segments = np.array([[0] * 2 + [1] * 9])
    tokens, positions = np.pad(text, (2, 0))[None], np.maximum(np.arange(11) - 2, 0)[None]

    @jax.jit
    def run(params, tokens, positions, segments, slots):
        mask = Mask.segments(segments, slots)
        return tiny.model.apply({"params": params}, tokens, positions, mask, tiny.model.init_cache(1, LENGTH))[0]

    logits = run(tiny.params, tokens, positions, segments, np.pad(segments, ((0, 0), (0, 3))))
    np.testing.assert_allclose(np.asarray(logits)[0, 2:], *whole(text), atol=2e-5)


def test_hypotheses_of_a_beam_share_a_cache(tiny, whole):
    """Slots of the cache are in another order than positions; the scores must be those of the whole texts."""
    prompt = golden_case.tokens(3, 37, 1, 6).tolist()
    beam = Beam(size=3, n_best=3, alpha=0.0)
    found = beam_search(tiny.model, tiny.params, prompts=prompt, eos_id=None, max_new_tokens=7, beam=beam)[0]
    texts = np.array([[*prompt[0], *one.tokens] for one in found])
    logits = np.stack(whole(*texts))[:, 5:-1].astype(np.float64)
    logarithms = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    scores = np.take_along_axis(logarithms, texts[:, 6:, None], axis=2).sum((1, 2))
    np.testing.assert_allclose([one.score for one in found], scores, atol=1e-4)


def test_the_temperature_scales_the_queries():
    plain = MultiHeadAttention(num_heads=2)
    heated = MultiHeadAttention(num_heads=2, temperature=QueryTemperature(scale=0.5, length=3))
    x = np.random.default_rng(0).normal(size=(1, 7, 8)).astype(np.float32)
    params = numeric_parts.random_params(plain, x)["params"]
    out = jax.jit(heated.apply)({"params": params}, x)[0]
    run = jax.jit(plain.apply)
    for position in (0, 1, 2, 6):  # one query at a time: multiply its projection
        factor = np.float32(1 + 0.5 * np.log(1 + (position + 1) // 3))
        query = jax.tree.map(lambda leaf, factor=factor: np.asarray(leaf) * factor, params["query"])
        expected = run({"params": params | {"query": query}}, x)[0]
        np.testing.assert_allclose(np.asarray(out)[:, position], np.asarray(expected)[:, position], atol=1e-5)


@pytest.mark.parametrize("implementation", ["blockwise", "ragged"])
def test_router_weights_scale_the_inputs_of_experts(implementation):
    options = {"num_experts": 3, "top_k": 2, "normalize_weights": False, "scoring": "sigmoid", "scale_inputs": True}
    layer = RoutedFeedForward(MoE(**options), width=5, gated=True, activation="silu", implementation=implementation)
    x = np.random.default_rng(0).normal(size=(2, 4, 6)).astype(np.float32)
    params = numeric_parts.random_params(layer, x)["params"]

    def all_experts(params, x):
        scores = jax.nn.sigmoid(x @ params["router"]["kernel"])
        scores = jnp.where(scores >= jax.lax.top_k(scores, 2)[0][..., 1:], scores, 0.0)
        inputs = x[:, :, None] * scores[..., None]  # (B, T, E, D)
        gate, up = (
            jnp.einsum("btei,eio->bteo", inputs, params["experts"][name]["kernel"])
            + params["experts"][name]["bias"][None, None]
            for name in ("gate", "up")
        )
        out = jnp.einsum("btei,eio->bteo", jax.nn.silu(gate) * up, params["experts"]["down"]["kernel"])
        return jnp.where(scores[..., None] > 0, out + params["experts"]["down"]["bias"][None, None], 0.0).sum(2)

    def with_gradient(run):
        def loss(params, x):
            out = run(params, x)
            return jnp.sin(out).sum(), out

        return jax.grad(loss, has_aux=True)

    @jax.jit
    def both(params, x):
        layers = (lambda params, x: layer.apply({"params": params}, x)[0]), all_experts
        return [with_gradient(run)(params, x) for run in layers]

    (gradient, out), (expected_gradient, expected) = both(params, x)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-5), gradient, expected_gradient)


def whole_model(directory, **changes):
    """Write the tiny model as the decoder of a model that also reads images."""
    text = {name: value for name, value in RECORD["config"].items() if name != "architectures"}
    config = {
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "text_config": text,
        "vision_config": {"model_type": "llama4_vision_model"},
        "eos_token_id": [3, 5],
        "boi_token_index": 7,
    }
    tensors = {name: golden_case.numbers(name, tuple(shape)) for name, shape in RECORD["tensors"].items()}
    tensors = {f"language_model.{name}": array for name, array in tensors.items()}
    for name in ("vision_model.class_embedding", "multi_modal_projector.linear_1.weight"):
        tensors[name] = np.zeros((2, 2), np.float32)
    tensors |= changes.pop("tensors", {})
    write_weights(directory, config | changes, tensors)
    return directory


def test_reads_the_decoder_of_a_model_with_images(tiny, tmp_path):
    loaded = load_pretrained(whole_model(tmp_path / "whole"))
    assert loaded.model.config == tiny.model.config
    assert (loaded.family.name, loaded.fields["eos_token_id"]) == ("llama4_text", [3, 5])
    jax.tree.map(np.testing.assert_array_equal, loaded.params, tiny.params)
    save_pretrained(loaded.model, loaded.params, tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["model_type"] == "llama4_text"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": None}, r"config.json.*text_config"),
        ({"text_config": {"model_type": "llama"}}, r"model_type.*text_config.*llama4_text.*got 'llama'"),
        ({"tensors": {"sound.weight": np.zeros(2)}}, r"sound.weight"),
        ({"tensors": {"language_model.model.new.weight": np.zeros(2)}}, r"1.*model.new.weight"),
    ],
)
def test_rejects_unsupported_models_with_images(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        load_pretrained(whole_model(tmp_path / "whole", **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["sliding_attention"] * 4}, r"layer_types.*sliding_attention.*chunked_attention"),
        ({"layer_types": ["full_attention"]}, r"layer_types.*1.*4"),
        ({"attention_chunk_size": None}, r"layer_types.*chunked_attention.*attention_chunk_size"),
        ({"attention_chunk_size": 0}, r"chunk.*1.*got 0"),
        ({"no_rope_layers": [1, 2, 1, 0]}, r"no_rope_layers.*0.*1.*4"),
        ({"no_rope_layer_interval": 0}, r"no_rope_layer_interval.*1.*got 0"),
        ({"moe_layers": [4]}, r"moe_layers.*4.*got \[4\]"),
        ({"moe_layers": None, "interleave_moe_layer_step": 0}, r"interleave_moe_layer_step"),
        ({"floor_scale": 0}, r"length.*1.*got 0"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
            r"'yarn'",
        ),
    ],
)
def test_rejects_unsupported_configs(changes, message):
    with pytest.raises(ConfigError, match=message):
        FAMILY.read(RECORD["config"] | changes, HEAD)


@pytest.mark.parametrize("option", [{"chunk": 3}, {"temperature": QueryTemperature()}, {"qk_norm": False}])
def test_options_of_attention_need_attention(option):
    with pytest.raises(ConfigError, match=f"{next(iter(option))}"):
        LayerKind(self_attention=False, **option)


def test_equal_factors_of_the_scaling_divide_low_frequencies_only():
    """Published files have equal factors: a frequency is either unchanged or divided."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}
    values = RECORD["config"] | {"rope_parameters": scaling | {"original_max_position_embeddings": 64}}
    found = FAMILY.read(values, HEAD).rotary.scaling
    scaled = Rotary(scaling=found).frequencies(64)
    plain = Rotary().frequencies(64)
    turns = 64 * plain / (2 * np.pi)
    np.testing.assert_allclose(scaled, np.where(turns > 1, plain, plain / 8))


def test_the_published_config_of_scout_equals_its_variant():
    """The object text_config of meta-llama/Llama-4-Scout-17B-16E."""
    published = {
        "attention_bias": False,
        "attention_chunk_size": 8192,
        "attn_scale": 0.1,
        "attn_temperature_tuning": 4,
        "floor_scale": 8192,
        "for_llm_compressor": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "interleave_moe_layer_step": 1,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16_384,
        "max_position_embeddings": 262_144,
        "moe_layers": list(range(48)),
        "no_rope_layers": [1, 1, 1, 0] * 12,
        "num_attention_heads": 40,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500_000.0,
        "use_qk_norm": True,
        "vocab_size": 202_048,
    }
    assert FAMILY.read(published, HEAD) == FAMILY.read(FAMILY.variants["llama-4-scout-text"].fields, HEAD)
    higher = published["rope_scaling"] | {"factor": 16.0}
    assert FAMILY.read(published | {"rope_scaling": higher}, HEAD) != FAMILY.read(published, HEAD)
