"""Gemma 4: shared keys and values in caches, pages and loops, published configs, and the decoder of whole models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import case as golden_case
from golden import ours

from transformer.config import (
    ConfigError,
    EmbeddingOptions,
    Execution,
    LayerKind,
    RotaryOptions,
    RotaryScaling,
    TransformerConfig,
)
from transformer.generate import Beam, beam_search
from transformer.nn._masks import Mask
from transformer.nn._paged import paged_cache, set_rows
from transformer.nn._positions import Rotary
from transformer.nn.models import CausalLM, Classifier
from transformer.zoo import ENTRIES, load_pretrained
from transformer.zoo.weights import write_weights

FAMILY = ENTRIES["gemma4_text"]
HEAD = FAMILY.heads["Gemma4ForCausalLM"]
RECORD = golden_case.golden("gemma4_text")["lm"]
LOCAL, GLOBAL = "sliding_attention", "full_attention"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return load_pretrained(ours.write(tmp_path_factory.mktemp("gemma4") / "text", RECORD))


@pytest.fixture(scope="module")
def looped():
    """A model whose layers with the keys and values of others repeat, with random parameters."""
    fields = RECORD["config"] | {"num_hidden_layers": 6, "layer_types": [LOCAL, GLOBAL] * 3, "num_kv_shared_layers": 4}
    model = CausalLM(FAMILY.read(fields | {"per_layer_config": None}, HEAD))
    assert model.config.repeats() == 2
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), int))["params"]
    random = np.random.default_rng(0)

    def draw(path, leaf):
        number = random.normal(size=leaf.shape)
        if path[-1].key in ("scale", "layer_scalar"):
            number = 1 + 0.2 * number
        else:
            number = number / np.sqrt(leaf.shape[-2])
        return jax.device_put(number.astype(leaf.dtype))  # jnp.asarray compiles a program for each shape

    return model, jax.tree_util.tree_map_with_path(draw, shapes)


def test_cached_is_uncached(looped):
    model, params = looped
    tokens = golden_case.tokens(4, 37, 2, 14)
    whole = jax.jit(model.apply)({"params": params}, tokens)
    step = jax.jit(lambda cache, part: model.apply({"params": params}, part, cache=cache))
    cache, found = jax.jit(lambda: model.init_cache(2, 14))(), []
    for part in np.split(tokens, [6, 12, 13], axis=1):
        logits, cache = step(cache, part)
        found.append(logits)
    np.testing.assert_allclose(np.concatenate(found, axis=1), whole, atol=1e-4)
    sizes = [leaf.size for leaf in jax.tree.leaves(cache["layers"])]
    assert sum(sizes) < 200, "layers without own keys and values only count tokens"


@pytest.mark.slow
def test_a_loop_gives_the_values_and_gradients_of_separate_layers(looped):
    model, params = looped
    tokens = jnp.asarray(golden_case.tokens(5, 37, 2, 9))
    other = CausalLM(model.config, Execution(scan=False, remat="full"))

    def loss(params, model):
        return jax.nn.log_softmax(model.apply({"params": params}, tokens))[..., 3].mean()

    both = [jax.jit(jax.value_and_grad(loss), static_argnums=1)(params, one) for one in (model, other)]
    jax.tree.map(lambda one, two: np.testing.assert_allclose(one, two, rtol=1e-4, atol=2e-5), *both)
    for name in ("key", "value"):  # of layers whose keys and values are read by others
        kernel = both[0][1]["decoder"]["prefix_1"]["self_attention"][name]["kernel"]
        assert np.abs(kernel).max() > 1e-6


@pytest.mark.slow
def test_pages_give_the_logits_of_a_cache(looped):
    model, params = looped
    tokens = jnp.asarray(golden_case.tokens(6, 37, 2, 7))
    whole = jax.jit(model.apply)({"params": params}, tokens)
    cache = paged_cache(model, rows=2, pages_per_row=2, num_pages=4, page_size=4)
    cache = set_rows(cache, page_table=jnp.asarray([[2, 0], [1, 3]]))
    step = jax.jit(lambda cache, part: model.apply({"params": params}, part, cache=cache))
    first, cache = step(cache, tokens[:, :5])
    rest, _ = step(cache, tokens[:, 5:])
    np.testing.assert_allclose(jnp.concatenate([first, rest], axis=1), whole, atol=1e-4)


def test_packed_texts_are_independent(tiny):
    first, second = (golden_case.tokens(seed, 37, 1, size) for seed, size in ((1, 5), (2, 7)))
    segments = np.array([[1] * 5 + [2] * 7])
    positions = np.concatenate([np.arange(5), np.arange(7)])[None]

    @jax.jit
    def run(params, tokens, segments, positions):
        return tiny.model.apply({"params": params}, tokens, mask=Mask.segments(segments), positions=positions)

    packed = np.asarray(run(tiny.params, np.concatenate([first, second], axis=1), segments, positions))
    apply, separate = jax.jit(tiny.model.apply), np.zeros((2, 7), np.int32)
    separate[0, :5], separate[1] = (
        first[0],
        second[0],
    )  # padding at the end changes nothing, because the model is causal
    separate = np.asarray(apply({"params": tiny.params}, separate))
    np.testing.assert_allclose(packed[0, :5], separate[0, :5], atol=1e-4)
    np.testing.assert_allclose(packed[0, 5:], separate[1], atol=1e-4)


def test_hypotheses_of_a_beam_share_a_cache(tiny):
    prompt = golden_case.tokens(3, 37, 1, 6).tolist()
    beam = Beam(size=3, n_best=3, alpha=0.0)
    found = beam_search(tiny.model, tiny.params, prompts=prompt, eos_id=None, max_new_tokens=7, beam=beam)[0]
    texts = np.array([[*prompt[0], *one.tokens] for one in found])
    logits = np.asarray(jax.jit(tiny.model.apply)({"params": tiny.params}, texts), np.float64)[:, 5:-1]
    whole = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    scores = np.take_along_axis(whole, texts[:, 6:, None], axis=2).sum((1, 2))
    np.testing.assert_allclose([one.score for one in found], scores, atol=1e-3)


def test_proportional_scaling_rotates_the_first_pairs_only():
    scheme = Rotary(base=99.0, scaling=RotaryScaling(kind="proportional", factor=2.0, share=0.3))
    expected = 99.0 ** (-np.arange(0, 20, 2) / 20) / 2
    np.testing.assert_allclose(scheme.frequencies(20), np.where(np.arange(10) < 3, expected, 0.0))


def test_published_fields_equal_the_reference():
    """Published files name the sizes of global layers; the reference writes them for each layer."""
    published = {name: value for name, value in RECORD["config"].items() if name != "per_layer_config"}
    config = FAMILY.read(published | {"global_head_dim": 8}, HEAD)
    assert config == FAMILY.read(RECORD["config"], HEAD)
    with_heads = published | {"global_head_dim": 6, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
    own = FAMILY.read(with_heads | {"num_kv_shared_layers": 0}, HEAD).layers()[1].kind
    assert (own.head_dim, own.num_kv_heads, own.keys_as_values) == (6, 1, True)


def test_reads_the_decoder_of_a_model_with_images_and_sound(tiny, tmp_path):
    tensors = {name: golden_case.numbers(name, tuple(shape)) for name, shape in RECORD["tensors"].items()}
    renamed = {f"model.language_{name}": array for name, array in tensors.items() if name != "lm_head.weight"}
    for part in ("vision_tower", "embed_vision", "audio_tower", "embed_audio"):
        renamed[f"model.{part}.weight"] = np.zeros((2, 2), np.float32)
    config = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "image_token_id": 5}
    write_weights(tmp_path / "whole", config | {"text_config": RECORD["config"]}, renamed)
    loaded = load_pretrained(tmp_path / "whole")
    assert loaded.model.config == tiny.model.config
    jax.tree.map(np.testing.assert_array_equal, loaded.params, tiny.params)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enable_moe_block": True, "num_experts": 4}, r"top_k_experts.*moe_intermediate_size"),
        ({"use_bidirectional_attention": "all"}, r"use_bidirectional_attention.*'all'"),
        ({"num_kv_shared_layers": 4}, r"num_kv_shared_layers.*0.*3.*got 4"),
        ({"num_kv_shared_layers": 3}, r"full_attention"),
        ({"layer_types": [LOCAL] * 3}, r"layer_types.*3.*4"),
        ({"per_layer_config": {"7": {"head_dim": 8}}}, r"per_layer_config.*7.*4"),
        ({"per_layer_config": {"1": {"sliding_window": 8}}}, r"per_layer_config.*sliding_window.*head_dim"),
        ({"per_layer_config": [8]}, r"per_layer_config.*got \[8\]"),
        ({"rope_parameters": {"other": {}}}, r"rope_parameters"),
        (
            {"rope_parameters": {LOCAL: {"rope_type": "default", "partial_rotary_factor": 0.5}}},
            r"partial_rotary_factor.*sliding_attention.*rope_type",
        ),
        (
            {"rope_parameters": {GLOBAL: {"rope_type": "dynamic", "factor": 2.0}}},
            r"'dynamic'",
        ),
        (
            {"rope_parameters": {GLOBAL: {"rope_type": "proportional", "beta": 2.0}}},
            r"rope_parameters.*full_attention",
        ),
    ],
)
def test_rejects_unsupported_configs(changes, message):
    with pytest.raises(ConfigError, match=message):
        FAMILY.read(RECORD["config"] | changes, HEAD)


SIZES = {"vocab_size": 7, "d_model": 8, "num_heads": 2, "position": RotaryOptions()}
STORES, READS = LayerKind(stores_kv="a"), LayerKind(reads_kv="a")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stack.period": (STORES, READS)}, r"stores_kv='a'.*stack.prefix"),
        ({"stack.prefix": (STORES, STORES), "stack.period": (READS,)}, "must be the name of one layer"),
        ({"stack.prefix": (READS, STORES)}, r"stores_kv='a'"),
        ({"stack.prefix": (STORES,), "stack.period": (LayerKind(reads_kv="b"),)}, "Name one of a"),
        (
            {"stack.prefix": (STORES,), "stack.period": (LayerKind(reads_kv="a", head_dim=6),)},
            r"head_dim 4.*reads_kv='a'.*6",
        ),
        (
            {
                "stack.prefix": (STORES,),
                "stack.period": (READS,),
                "position.scaling": RotaryScaling(kind="dynamic", factor=2.0),
            },
            r"reads_kv",
        ),
        ({"stack.period": (LayerKind(num_kv_heads=3),)}, r"num_kv_heads.*LayerKind"),
        ({"stack.period": (LayerKind(head_dim=3),)}, r"head_dim \(3\)"),
        ({"embedding.per_layer_vocab_size": 3}, r"per_layer_vocab_size"),
    ],
)
def test_rejects_unsupported_layer_configs(changes, message):
    with pytest.raises(ConfigError, match=message):
        TransformerConfig(num_layers=2, **SIZES, **changes)


def test_rejects_contradictory_layer_kinds():
    for options, message in (
        ({"reads_kv": "a", "keys_as_values": True}, "Remove reads_kv, or keys_as_values"),
        ({"reads_kv": "a", "stores_kv": "b"}, "Remove reads_kv, or stores_kv"),
        ({"self_attention": False, "head_dim": 4}, "head_dim is an option of self-attention"),
    ):
        with pytest.raises(ConfigError, match=message):
            LayerKind(**options)
    with pytest.raises(ConfigError, match=r"share.*kind='proportional'"):
        RotaryScaling(kind="linear", factor=2.0, share=0.5)
    with pytest.raises(ConfigError, match=r"expected at most 1\.0, got 1\.5"):
        RotaryScaling(kind="proportional", factor=1.0, share=1.5)


def test_per_layer_embeddings_need_a_model_that_computes_them():
    config = TransformerConfig(num_layers=1, **SIZES, embedding=EmbeddingOptions(per_layer_width=3))
    model = Classifier(config.replace(**{"output.num_classes": 2}))
    with pytest.raises(ConfigError, match=r"per_layer_width.*CausalLM"):
        jax.eval_shape(lambda ids: model.init(jax.random.key(0), ids), np.zeros((1, 2), int))


@pytest.mark.programs(15, reason="only calls outside of jax.jit check the values of tokens")
def test_a_token_outside_the_table_of_per_layer_embeddings_is_an_error():
    options = EmbeddingOptions(per_layer_width=3, per_layer_vocab_size=5)
    model = CausalLM(TransformerConfig(num_layers=1, **SIZES, embedding=options))
    with pytest.raises(ValueError, match=r"0.*4 \(embedding.per_layer_vocab_size 5\).*got 6"):
        model.init(jax.random.key(0), jnp.asarray([[6]]))
