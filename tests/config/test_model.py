"""Configs are validated on construction, and every field affects the program."""

import dataclasses
import functools
import re
from collections.abc import Iterator

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

from transformer.config import (
    MLA,
    ALiBiOptions,
    ConfigError,
    DynamicImageTokens,
    Execution,
    FeedForwardOptions,
    HeadTransform,
    Images,
    ImageTokens,
    LayerKind,
    LearnedOptions,
    MoE,
    Patches,
    QKNorm,
    RotaryGridOptions,
    RotaryOptions,
    RotaryScaling,
    Series,
    SinusoidalOptions,
    Speech,
    T5BiasOptions,
    TransformerConfig,
    transformer_base,
    transformer_big,
)
from transformer.config._paths import fields_by_path
from transformer.config._positions import POSITIONS
from transformer.nn import ImagePatches
from transformer.nn.models import (
    CausalLM,
    Classifier,
    DualEncoder,
    Embedder,
    Forecaster,
    MaskedLM,
    Seq2Seq,
    SeriesRegressor,
    SpeechToText,
    VisionClassifier,
    VisionLanguageModel,
)

EXECUTION = {"scan": False, "experts": "ragged", "remat": "full", "attention": "blockwise", "sow_weights": True}
QUANTIZED = {"quantization": "int8", "quantization_paths": ("self_attention",)}
TINY = TransformerConfig(vocab_size=11, d_model=12, num_layers=2, num_heads=2, feed_forward=FeedForwardOptions(d_ff=7))
ROTARY = {"position": RotaryOptions()}
YARN = RotaryScaling(kind="yarn", factor=4.0, original_length=64)
LLAMA3 = RotaryScaling(kind="llama3", factor=4.0, original_length=64)
ROUTED = MoE(num_experts=3, capacity_factor=1.0)
T5 = {"position": T5BiasOptions()}
TANH = HeadTransform(activation="tanh", norm=False)
LATENT = MLA(kv_lora_rank=5, qk_nope_head_dim=3, qk_rope_head_dim=4, v_head_dim=2)
IMAGES = {
    "input": Patches(image_height=6, image_width=4, patch_size=2),
    "output.num_classes": 3,
    "output.pooling": "first",
}
GRID = {"position": RotaryGridOptions(), "input": Patches(image_height=4, image_width=4, patch_size=2)}
PATCH_ENCODER = TransformerConfig(
    d_model=8,
    num_layers=2,
    num_heads=2,
    feed_forward=FeedForwardOptions(d_ff=5),
    position=RotaryOptions(sections=(1, 1), restart_frequencies=True),
    **{"stack.period": (LayerKind(within_segments=True),)},
)
DYNAMIC = DynamicImageTokens(token_id=3, encoder=PATCH_ENCODER, patch_size=2, window_size=8)
COORDINATES = {
    "position": RotaryOptions(),
    "attention.head_dim": 8,
    "position.sections": (1, 1, 2),
    "input": DYNAMIC,
}
SERIES = Series(channels=2, context_length=7, horizon=2, patch_length=3, patch_stride=2)

# field -> (model, changes common to both sides, the change)
CHANGES = {
    "vocab_size": (CausalLM, {}, 13),
    "embedding.source_vocab_size": (Seq2Seq, {}, 13),
    "d_model": (CausalLM, {}, 16),
    "num_layers": (CausalLM, {}, 3),
    "stack.num_encoder_layers": (Seq2Seq, {}, 1),
    "stack.encoder_num_heads": (Seq2Seq, {}, 1),
    "stack.encoder_d_ff": (Seq2Seq, {}, 5),
    "stack.num_decoder_layers": (Seq2Seq, {}, 1),
    "num_heads": (CausalLM, {}, 3),
    "attention.num_kv_heads": (CausalLM, {}, 1),
    "attention.head_dim": (CausalLM, {}, 5),
    "attention.value_dim": (CausalLM, {}, 3),
    "feed_forward.d_ff": (CausalLM, {}, 5),
    "feed_forward.activation": (CausalLM, {}, "silu"),
    "feed_forward.gated": (CausalLM, {}, True),
    "parameters.use_bias": (CausalLM, {}, False),
    "attention.biases": (CausalLM, {}, ("query", "value")),
    "norm.kind": (CausalLM, {}, "rms_norm"),
    "norm.epsilon": (CausalLM, {}, 1e-3),
    "norm.position": (CausalLM, {}, "post"),
    "embedding.norm": (CausalLM, {}, True),
    "embedding.width": (CausalLM, {}, 8),
    "position": (CausalLM, {}, ALiBiOptions()),
    "position.max_length": (CausalLM, {"position": LearnedOptions(max_length=9)}, 10),
    "position.halves": (CausalLM, {}, True),
    "position.source_max_length": (Seq2Seq, {"position": LearnedOptions(max_length=9)}, 7),
    "position.base": (CausalLM, ROTARY, 99.0),
    "position.dim": (CausalLM, ROTARY, 2),
    "position.scaling": (CausalLM, ROTARY, YARN),
    "position.sections": (VisionLanguageModel, COORDINATES, (1, 2, 1)),
    "position.restart_frequencies": (VisionLanguageModel, COORDINATES, True),
    "position.buckets": (CausalLM, T5, 16),
    "position.max_distance": (CausalLM, T5, 99),
    "position.per_layer": (CausalLM, T5, True),
    "embedding.scale": (CausalLM, {}, False),
    "embedding.token_types": (MaskedLM, {}, 2),
    "embedding.tie": (CausalLM, {}, False),
    "output.transform": (MaskedLM, {}, TANH),
    "output.pooler": (Embedder, {}, TANH),
    "output.num_targets": (SeriesRegressor, {"input": SERIES, "output.num_targets": 2}, 3),
    "output.target_range": (SeriesRegressor, {"input": SERIES, "output.num_targets": 2}, (0.0, 5.0)),
    "output.bias": (MaskedLM, {}, True),
    "output.scale": (CausalLM, {}, 0.5),
    "dropout_rate": (CausalLM, {}, 0.1),
    "attention.dropout_rate": (CausalLM, {}, 0.1),
    "attention.scale": (CausalLM, {}, 1.0),
    "attention.softcap": (CausalLM, {}, 30.0),
    "output.softcap": (CausalLM, {}, 30.0),
    "attention.qk_norm": (CausalLM, {}, QKNorm()),
    "attention.value_norm": (CausalLM, {}, True),
    "embedding.per_layer_width": (CausalLM, {}, 3),
    "embedding.per_layer_vocab_size": (CausalLM, {"embedding.per_layer_width": 3}, 9),
    "stack.layer_scalar": (CausalLM, {}, True),
    "attention.sinks": (CausalLM, {}, True),
    "attention.output_gate": (CausalLM, {}, True),
    "attention.mla": (CausalLM, ROTARY, LATENT),
    "parameters.initializer_range": (CausalLM, {}, 0.02),
    "output.num_classes": (Classifier, {"output.num_classes": 3}, 4),
    "output.pooling": (Classifier, {"output.num_classes": 3}, "first"),
    "attention.causal": (Embedder, {}, True),
    "output.normalize": (Embedder, {}, True),
    "input": (VisionClassifier, IMAGES, Patches(image_height=6, image_width=4, patch_size=1)),
    "stack.final_norm": (CausalLM, {}, False),
    "stack.layer_scale": (CausalLM, {}, 0.1),
    "input.horizon": (Forecaster, {"input": SERIES}, 3),
    "input.mel_bins": (SpeechToText, {"input": Speech(mel_bins=3)}, 2),
    "dtype": (CausalLM, {}, "bfloat16"),
    "parameters.dtype": (CausalLM, {}, "bfloat16"),
    "stack.prefix": (CausalLM, {}, (LayerKind(window=2),)),
    "stack.period": (CausalLM, {}, (LayerKind(), LayerKind(window=2))),
    "stack.suffix": (CausalLM, {}, (LayerKind(window=2),)),
}


@functools.cache
def program(model: type, config: TransformerConfig) -> str:
    """Return the traced program of initialization and a training-mode call as text, including constants."""
    inputs = (np.zeros((2, 5), np.int32),) * (2 if model is Seq2Seq else 1)
    if model in (VisionClassifier, DualEncoder):
        patches = config.patches or config.images.patches
        pixels = np.zeros((2, patches.image_height, patches.image_width, patches.channels))
        inputs = (inputs[0], pixels) if model is DualEncoder else (pixels,)
    named = {}
    if (images := config.dynamic_images) is not None:
        values = np.zeros((2, 1, 4 * images.merge**2, images.patch_size**2 * images.channels))
        named["images"] = ImagePatches(values, np.full((2, 1, 2), 2 * images.merge))
    elif model is VisionLanguageModel:
        patches = config.image_tokens.patches
        named["images"] = np.zeros((2, 1, patches.image_height, patches.image_width, patches.channels))
    if model in (Forecaster, SeriesRegressor):
        inputs = (np.zeros((2, config.series.context_length, config.series.channels)),)
    if model is SpeechToText:
        inputs = (np.zeros((2, 5, config.speech.mel_bins)), inputs[0])

    def run(inputs, named):
        key = jax.random.key(0)
        return model(config).init_with_output({"params": key, "dropout": key}, *inputs, deterministic=False, **named)

    return text_of(jax.make_jaxpr(run)(inputs, named))


def text_of(closed: jax.extend.core.ClosedJaxpr) -> str:
    """Return a program as text. Lowering to StableHLO, which has the same information, takes as long as tracing."""
    text = re.sub(r"0x[0-9a-f]+", "", str(closed.jaxpr))  # without addresses of Python functions
    return "\n".join([text, *(repr((array.shape, array.tobytes())) for array in constants(closed))])


def constants(program: object) -> Iterator[np.ndarray]:
    """Yield the constant arrays of a program and of all programs in it."""
    if isinstance(program, jax.extend.core.ClosedJaxpr):
        yield from map(np.asarray, program.consts)
        program = program.jaxpr
    if isinstance(program, jax.extend.core.Jaxpr):
        for equation in program.eqns:
            for value in equation.params.values():
                for part in value if isinstance(value, tuple | list) else [value]:
                    yield from constants(part)


def test_equal_configs_have_equal_programs():
    """Otherwise, the tests of single fields would show nothing."""
    config = TINY.replace(dropout_rate=0.1, **{"feed_forward.activation": "silu"}, **ROTARY)
    texts = []
    for _ in range(2):
        program.cache_clear()
        routed_program.cache_clear()
        jax.clear_caches()
        texts.append([program(CausalLM, config), routed_program(ROUTED)])
    assert texts[0] == texts[1]


POSITION_FIELDS = {f"position.{field.name}" for kind in POSITIONS.values() for field in dataclasses.fields(kind)}


def test_every_field_has_a_change():
    assert (fields_by_path(TransformerConfig()).keys() | POSITION_FIELDS) - CHANGES.keys() == set()


@pytest.mark.parametrize("field", CHANGES)
def test_every_field_is_read(field):
    model, common, value = CHANGES[field]
    base = TINY.replace(**common)
    assert program(model, base) != program(model, base.replace(**{field: value}))


@pytest.mark.parametrize(
    ("scaling", "field", "value"),
    [
        (YARN, "kind", "linear"),
        (YARN, "factor", 8.0),
        (YARN, "original_length", 16),
        (LLAMA3, "low_frequency_factor", 3.0),
        (LLAMA3, "high_frequency_factor", 9.0),
        (YARN, "beta_fast", 3.0),
        (YARN, "beta_slow", 9.0),
        (YARN, "attention_factor", 2.0),
        (YARN, "truncate", False),
    ],
)
def test_every_field_of_rotary_scaling_is_read(scaling, field, value):
    base = TINY.replace(position=RotaryOptions(), **{"attention.head_dim": 16, "position.scaling": scaling})
    changed = base.replace(**{"position.scaling": dataclasses.replace(scaling, **{field: value})})
    assert program(CausalLM, base) != program(CausalLM, changed)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("window", 2),
        ("rotary_base", 9.0),
        ("rotary", False),
        ("rotary_scaling", YARN),
        ("self_attention", False),
        ("moe", ROUTED),
        ("attention_norm", False),
    ],
)
def test_every_field_of_a_layer_kind_is_read(field, value):
    base = TINY.replace(**ROTARY)
    assert program(CausalLM, base) != program(
        CausalLM, base.replace(**{"stack.period": (LayerKind(**{field: value}),)})
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_lora_rank", 7),
        ("qk_nope_head_dim", 5),
        ("qk_rope_head_dim", 6),
        ("v_head_dim", 3),
        ("q_lora_rank", 5),
        ("norm_epsilon", 0.1),
    ],
)
def test_every_field_of_a_latent_is_read(field, value):
    base = TINY.replace(**ROTARY, **{"attention.mla": LATENT})
    assert program(CausalLM, base) != program(
        CausalLM, base.replace(**{"attention.mla": dataclasses.replace(LATENT, **{field: value})})
    )


@pytest.mark.parametrize(("field", "value"), [("activation", "relu"), ("norm", True), ("use_bias", False)])
def test_every_field_of_a_head_transform_is_read(field, value):
    changed = TINY.replace(**{"output.transform": dataclasses.replace(TANH, **{field: value})})
    assert program(MaskedLM, TINY.replace(**{"output.transform": TANH})) != program(MaskedLM, changed)


@pytest.mark.parametrize(
    ("field", "value"),
    [("image_height", 8), ("image_width", 6), ("patch_size", 1), ("channels", 1), ("use_bias", False)]
    + [("class_token", False), ("distillation_token", True), ("registers", 2)],
)
def test_every_field_of_patches_is_read(field, value):
    base = TINY.replace(**IMAGES | {"output.pooling": "mean"})
    changed = base.replace(input=dataclasses.replace(base.patches, **{field: value}))
    assert program(VisionClassifier, base) != program(VisionClassifier, changed)


def test_positions_are_resized_only_on_request():
    plain = Patches(image_height=6, image_width=4, patch_size=2, class_token=False)
    base = TINY.replace(**IMAGES | {"output.pooling": "mean", "position": None, "input": plain})
    changed = base.replace(input=dataclasses.replace(plain, resize_positions=True))
    assert program(VisionClassifier, base) != program(VisionClassifier, changed)
    with pytest.raises(ConfigError, match=r"class_token=False.*registers=0.*drop_remainder=False"):
        Patches(image_height=6, image_width=4, patch_size=2, resize_positions=True)
    with pytest.raises(ConfigError, match=r"got position=LearnedOptions.*position=None"):
        program(VisionClassifier, changed.replace(position=LearnedOptions(max_length=6)))


def test_pixels_outside_whole_patches_are_dropped_only_on_request():
    with pytest.raises(ConfigError, match=r"image_height \(7\).*patch_size"):
        Patches(image_height=7, image_width=4, patch_size=2)
    patches = Patches(image_height=7, image_width=5, patch_size=2, drop_remainder=True)
    assert patches.count == 6
    with pytest.raises(ConfigError, match="must be a multiple"):
        Patches(image_height=1, image_width=5, patch_size=2, drop_remainder=True)
    with pytest.raises(ConfigError, match="needs class_token=True"):
        Patches(image_height=4, image_width=4, patch_size=2, class_token=False, distillation_token=True)


IMAGE_ENCODER = TransformerConfig(
    d_model=8,
    num_layers=1,
    num_heads=2,
    feed_forward=FeedForwardOptions(d_ff=5),
    position=LearnedOptions(),
    input=Patches(image_height=6, image_width=4, patch_size=2),
    **{"output.pooling": "first"},
)
DUAL = Images(encoder=IMAGE_ENCODER, features=8)


@pytest.mark.default_cases(3)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("encoder", IMAGE_ENCODER.replace(d_model=6)),
        ("encoder", IMAGE_ENCODER.replace(**{"norm.epsilon": 0.1})),
        ("features", 5),
        ("projections", "text"),
        ("similarity", "sigmoid"),
    ],
)
def test_every_field_of_images_is_read(field, value):
    base = TINY.replace(input=DUAL, **{"output.pooling": "last"})
    changed = base.replace(input=dataclasses.replace(DUAL, **{field: value}))
    assert program(DualEncoder, base) != program(DualEncoder, changed)


BETWEEN = ImageTokens(
    token_id=3, encoder=IMAGE_ENCODER.replace(input=Patches(image_height=4, image_width=4, patch_size=2))
)


@pytest.mark.default_cases(4)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("token_id", 4),
        ("encoder", BETWEEN.encoder.replace(d_model=6)),
        ("encoder", BETWEEN.encoder.replace(**{"norm.epsilon": 0.1})),
        ("pool", 2),
        ("projector", "mlp"),
        ("projector", "normalized"),
        ("attention", "image"),
        ("attention", "prefix"),
    ],
)
def test_every_field_of_image_tokens_is_read(field, value):
    base = TINY.replace(input=BETWEEN)
    changed = base.replace(input=dataclasses.replace(BETWEEN, **{field: value}))
    assert program(VisionLanguageModel, base) != program(VisionLanguageModel, changed)


def test_unused_layers_have_parameters():
    base = TINY.replace(input=BETWEEN, **{"input.encoder.stack.final_norm": False, "input.unused_layers": 0})
    changed = base.replace(**{"input.unused_layers": 1})
    assert program(VisionLanguageModel, base) != program(VisionLanguageModel, changed)


@pytest.mark.default_cases(5)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("encoder", PATCH_ENCODER.replace(**{"norm.epsilon": 0.1})),
        ("encoder", PATCH_ENCODER.replace(**{"stack.suffix": (LayerKind(),)})),
        ("window_size", 4),
        ("merge", 1),
        ("token_id", 4),
        ("frames", 1),
        ("patch_size", 3),
        ("channels", 1),
    ],
)
def test_every_field_of_dynamic_image_tokens_is_read(field, value):
    base = TINY.replace(**COORDINATES)
    changed = base.replace(input=dataclasses.replace(DYNAMIC, **{field: value}))
    assert program(VisionLanguageModel, base) != program(VisionLanguageModel, changed)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"encoder": IMAGE_ENCODER}, r"encoder.*row and a column.*sections"),
        ({"window_size": 3}, r"window_size \(3\).*patch_size.*\(4\)"),
        ({"window_size": None}, r"within_segments=True.*window_size"),
        ({"token_id": -1}, r"token_id.*0.*got -1"),
    ],
)
def test_dynamic_image_tokens_are_checked(fields, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(DYNAMIC, **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"position.sections": (1, 1, 1)}, r"position.sections \(1.*1.*1\).*4.*3"),
        ({"position.sections": (2, 0, 2)}, r"position.sections.*1.*got \(2.*0.*2\)"),
        ({"position.sections": None, "position.restart_frequencies": True}, r"restart_frequencies.*position.sections"),
        (
            {"position.scaling": RotaryScaling(kind="dynamic", factor=2.0)},
            "supports no scaling by the length of the text",
        ),
    ],
)
def test_sections_are_checked(fields, message):
    with pytest.raises(ConfigError, match=message):
        TINY.replace(**COORDINATES | fields)


def test_image_tokens_are_checked():
    with pytest.raises(ConfigError, match=r"final_norm is True.*unused_layers is 2"):
        dataclasses.replace(BETWEEN, unused_layers=2)
    with pytest.raises(ConfigError, match=r"encoder.input is not patches"):
        dataclasses.replace(BETWEEN, encoder=TINY)
    with pytest.raises(ConfigError, match=r"pool \(3\) must divide the 2 rows and 2 columns"):
        dataclasses.replace(BETWEEN, pool=3)


def test_images_without_a_projection_need_the_shared_width():
    with pytest.raises(ConfigError, match=r"\(5\).*d_model.*\(8\)"):
        dataclasses.replace(DUAL, features=5, projections="text")
    with pytest.raises(ConfigError, match=r"DualEncoder.*input=Images"):
        _ = TINY.image_encoder


@pytest.mark.default_cases(4)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("channels", 3),
        ("context_length", 8),
        ("horizon", 3),
        ("patch_length", 2),
        ("patch_stride", 1),
        ("scaling", "mean"),
        ("shared_embedding", False),
        ("class_token", True),
        ("pooling", "max"),
    ],
)
def test_every_field_of_series_is_read(field, value):
    changed = dataclasses.replace(SERIES, **{field: value})
    assert program(Forecaster, TINY.replace(input=SERIES)) != program(Forecaster, TINY.replace(input=changed))


@pytest.mark.parametrize(("field", "value"), [("scope", "all"), ("kind", "zero_centered_rms_norm"), ("scale", False)])
def test_every_field_of_a_norm_of_queries_and_keys_is_read(field, value):
    base = TINY.replace(**{"attention.qk_norm": QKNorm()})
    assert program(CausalLM, base) != program(CausalLM, base.replace(**{f"attention.qk_norm.{field}": value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_experts", 5),
        ("top_k", 3),
        ("d_ff", 5),
        ("shared_experts", 1),
        ("normalize_weights", False),
        ("capacity_factor", 0.5),
        ("load_balance_weight", 0.5),
        ("router_z_weight", 0.5),
        ("router_bias", True),
        ("scoring", "sigmoid"),
        ("e_score_correction_bias", True),
        ("num_groups", 2),
        ("top_groups", 2),
        ("routed_scaling_factor", 2.0),
    ],
)
def test_every_field_of_a_routed_feed_forward_is_read(field, value):
    base = dataclasses.replace(ROUTED, num_experts=6, num_groups=3) if field == "top_groups" else ROUTED
    if field == "num_groups":
        base = dataclasses.replace(ROUTED, num_experts=4)
    assert routed_program(base) != routed_program(dataclasses.replace(base, **{field: value}))


@functools.cache
def routed_program(moe):
    model = CausalLM(TINY.replace(**{"stack.period": (LayerKind(moe=moe),)}))

    def run(tokens):
        # A training step, in which experts can have a capacity.
        return model.init_with_output(jax.random.key(0), tokens, deterministic=False, method=CausalLM.with_aux)

    return text_of(jax.make_jaxpr(run)(np.zeros((2, 5), np.int32)))


@pytest.mark.default_cases(3)
@pytest.mark.parametrize(("field", "value"), (EXECUTION | QUANTIZED).items())
def test_every_field_of_execution_is_read(field, value):
    config = TINY.replace(**{"stack.period": (LayerKind(moe=ROUTED),)})

    def program(execution):
        def loss(params, tokens):
            logits, sown = CausalLM(config, execution).apply(params, tokens, mutable=["intermediates"])
            return logits.sum(), sown

        tokens = jax.ShapeDtypeStruct((2, 5), jnp.int32)
        params = jax.eval_shape(CausalLM(config).init, jax.random.key(0), tokens)
        return text_of(jax.make_jaxpr(jax.grad(loss, has_aux=True))(params, tokens))

    assert set(EXECUTION) | set(QUANTIZED) == {field.name for field in dataclasses.fields(Execution)}
    before = Execution()
    if field in QUANTIZED:
        pytest.importorskip("qwix")
        before = Execution(quantization="fp8" if field == "quantization" else "int8")
    assert program(before) != program(dataclasses.replace(before, **{field: value}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_model": 10, "num_heads": 3}, r"d_model \(10\).*num_heads \(3\).*head_dim"),
        ({"num_heads": 8, "attention.num_kv_heads": 3}, r"num_heads \(8\).*num_kv_heads \(3\)"),
        ({"feed_forward.activation": "gelu_tan"}, r"activation.*got 'gelu_tan'.*'gelu_tanh'\?"),
        ({"feed_forward.activation": "swiglu_clamped"}, r"gated=True"),
        ({"norm.kind": "layernorm"}, r"'layer_norm'\?"),
        ({"position": "rotary"}, r"RotaryOptions.*got 'rotary'"),
        ({"d_model": 0}, r"d_model.*1.*got 0"),
        ({"num_layers": 2.5}, r"num_layers.*1.*got 2.5"),
        ({"dropout_rate": 1.0}, r"dropout_rate.*0.0.*1.0.*got 1.0"),
        ({"dropout_rate": None}, r"dropout_rate"),
        ({"d_model": None}, r"d_model"),
        ({"norm.epsilon": -1.0}, r"norm.epsilon"),
        ({"position": LearnedOptions()}, r"max_length.*max_length"),
        ({"position": RotaryOptions(), "attention.head_dim": 5}, r"position.dim"),
        ({"position": RotaryOptions(), "position.dim": 128}, r"attention.head_dim"),
        ({"d_model": 9, "num_heads": 3}, r"d_model \(9\)"),
        ({"position": T5BiasOptions(), "position.max_distance": 4}, r"max_distance \(4\)"),
        ({"stack.period": ()}, r"period is empty"),
        ({"stack.period": (LayerKind(), LayerKind()), "num_layers": 3}, r"num_layers \(3\)"),
        ({"stack.prefix": (LayerKind(),) * 7}, r"num_layers \(6\).*\(7\)"),
        (
            {"attention.biases": ("query", "keys")},
            r"biases.*got 'keys'.*'key'\?",
        ),
        ({"embedding.token_types": 0}, r"token_types.*1.*got 0"),
        ({"output.scale": 0.0}, r"scale.*, got 0.0"),
        ({"position": SinusoidalOptions(halves=True), "d_model": 9, "num_heads": 3}, r"d_model \(9\)"),
        ({"position": RotaryGridOptions()}, r"input is not Patches"),
        ({**GRID, "d_model": 6, "num_heads": 1}, r"\(6\) must be a multiple of 4"),
        (
            IMAGES | {"position": LearnedOptions(max_length=6)},
            r"max_length \(6\).*7.*\(1\).*\(6\)",
        ),
        (
            {"input": SERIES, "position": LearnedOptions(max_length=6)},
            r"max_length \(6\).*3",
        ),
        (
            {"norm.position": "reordered", "stack.period": (LayerKind(attention_norm=False),)},
            r"attention_norm=False.*norm.position='reordered'",
        ),
        (
            {"attention.mla": LATENT},
            r"attention.mla.*SinusoidalOptions.*position=Rot",
        ),
        (
            ROTARY | {"attention.mla": LATENT, "attention.qk_norm": QKNorm()},
            r"attention.qk_norm.*attention.mla.*attention.qk_norm.*attention.mla",
        ),
        (
            ROTARY | {"attention.mla": LATENT, "attention.sinks": True},
            r"attention.sinks.*attention.mla",
        ),
        (
            ROTARY | {"attention.mla": LATENT, "attention.num_kv_heads": 2},
            r"num_kv_heads.*2.*attention.mla",
        ),
        (
            ROTARY | {"attention.mla": LATENT, "attention.biases": ("key",)},
            r"attention.biases.*\('key',\)",
        ),
        (
            {"stack.num_encoder_layers": 3, "stack.period": (LayerKind(), LayerKind())},
            r"num_encoder_layers \(3\)",
        ),
    ],
)
def test_an_invalid_model_names_the_field_to_change(changes, message):
    with pytest.raises(ConfigError, match=message):
        TransformerConfig(**changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TINY.replace(d_modle=3), r"'d_modle'.*'d_model'\?"),
        (lambda: RotaryScaling(kind="yarm", factor=2.0), r"'yarn'\?"),
        (lambda: RotaryScaling(kind="linear", factor=0.5), r"factor.*1.0.*got 0.5"),
        (lambda: RotaryScaling(kind="llama3", factor=2.0, low_frequency_factor=5.0), r"low_freq"),
        (lambda: RotaryScaling(kind="yarn", factor=2.0, beta_slow=40.0), r"beta_fast \(32.0\)"),
        (
            lambda: RotaryScaling(kind="linear", factor=2.0, truncate=False),
            r"truncate.*kind='yarn'",
        ),
        (
            lambda: RotaryScaling(kind="llama3", factor=2.0, attention_factor=1.0),
            r"attention_factor",
        ),
        (lambda: RotaryScaling(kind="yarn", factor=2.0, attention_factor=0.0), r"attention_factor"),
        (lambda: HeadTransform(activation="tan", norm=True), r"'tanh'\?"),
        (lambda: Patches(image_height=7, image_width=4, patch_size=2), r"image_height \(7\)"),
        (
            lambda: Patches(image_height=4, image_width=4, patch_size=0),
            r"patch_size.*1",
        ),
        (
            lambda: LayerKind(attention_norm=False, self_attention=False),
            r"attention_norm.*attention_no",
        ),
        (lambda: LayerKind(window=0), r"window.*1.*got 0"),
        (lambda: LayerKind(window=3, self_attention=False), r"window is an option of .* Remove window, or set"),
        (lambda: QKNorm(scope="heads"), r"scope.*got 'heads'.*'head'\?"),
        (lambda: MoE(num_experts=0), r"num_experts.*1.*got 0"),
        (lambda: MoE(num_experts=2, top_k=3), r"top_k \(3\).*num_experts \(2\)"),
        (lambda: MoE(num_experts=2, top_k=1), r"weight.*1"),
        (lambda: MoE(num_experts=2, scoring="sigmod"), r"scoring.*'sigmoid'\?"),
        (lambda: MoE(num_experts=6, num_groups=4), r"num_experts \(6\).*num_groups \(4\).*2"),
        (lambda: MoE(num_experts=3, num_groups=3), r"num_experts \(3\).*num_groups \(3\).*2"),
        (lambda: MoE(num_experts=4, num_groups=2, top_groups=3), r"top_groups \(3\).*num_groups \(2\)"),
        (lambda: MoE(num_experts=4, num_groups=2, top_k=3), r"top_k \(3\).*2.*top_groups"),
        (lambda: MoE(num_experts=2, routed_scaling_factor=0.0), r"routed_scaling_factor.*got 0.0"),
        (lambda: MoE(num_experts=2, capacity_factor=0.0), r"capacity_factor.*got 0.0"),
        (lambda: MoE(num_experts=2, shared_experts=-1), r"shared_experts.*0"),
        (lambda: MoE(num_experts=2, router_z_weight=-0.1), r"router_z_weight.*0.0"),
        (
            lambda: MLA(kv_lora_rank=5, qk_nope_head_dim=3, qk_rope_head_dim=3, v_head_dim=2),
            r"qk_rope_head_dim \(3\)",
        ),
        (
            lambda: MLA(kv_lora_rank=0, qk_nope_head_dim=3, qk_rope_head_dim=4, v_head_dim=2),
            r"kv_lora_rank.*1",
        ),
        (
            lambda: dataclasses.replace(SERIES, patch_length=8),
            r"patch_length \(8\).*context_length \(7\)",
        ),
        (lambda: dataclasses.replace(SERIES, scaling="sdt"), r"'std'\?"),
        (lambda: dataclasses.replace(SERIES, horizon=0), r"horizon.*1.*got 0"),
        (
            lambda: dataclasses.replace(SERIES, class_token=True, pooling="mean"),
            r"pooling='mean'.*class_token",
        ),
        (lambda: Speech(mel_bins=0), r"mel_bins.*1.*got 0"),
        (lambda: Execution(remat="dot"), r"'dots'\?"),
    ],
)
def test_invalid_parts_name_the_field_to_change(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_the_models_of_the_paper_have_its_parameter_counts():
    """Vaswani et al. 2017, table 3: 65 and 213 million parameters with a shared vocabulary of 37,000 tokens."""
    for config, millions in [(transformer_base(), 65), (transformer_big(), 213)]:
        tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
        model = Seq2Seq(config.replace(vocab_size=37_000))
        params = jax.eval_shape(model.init, jax.random.key(0), tokens, tokens)
        count = sum(leaf.size for leaf in jax.tree.leaves(params))
        assert count / 1e6 == pytest.approx(millions, rel=0.04)
    assert transformer_big(dropout_rate=0.2).d_model == 1024
