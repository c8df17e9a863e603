"""Every module in NNX through Flax's bridge: same parameters, outputs, gradients and names as in Linen."""

import dataclasses
import inspect
from collections import defaultdict
from importlib import import_module

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict

from transformer import (
    MLA,
    CausalLM,
    Classifier,
    Decoder,
    DistilledVisionClassifier,
    DualEncoder,
    Embedder,
    Encoder,
    FeedForwardOptions,
    Forecaster,
    GatedDeltaNet,
    HeadTransform,
    Images,
    LayerInputs,
    LayerKind,
    Mask,
    MaskedLM,
    MoE,
    MultiHeadAttention,
    Patches,
    PatchReconstructor,
    Rotary,
    Seq2Seq,
    Series,
    SeriesClassifier,
    SeriesEncoder,
    SeriesRegressor,
    SpeechEncoder,
    SpeechRecognizer,
    SpeechToText,
    TransformerConfig,
    VisionClassifier,
    VisionEmbedder,
    VisionLanguageModel,
    compat,
)
from transformer.config import (
    Audio,
    DynamicImageTokens,
    ImageTokens,
    LearnedOptions,
    OutputOptions,
    QKNorm,
    RotaryOptions,
    SinusoidalOptions,
    Speech,
    T5BiasOptions,
)
from transformer.nn._attention import AttentionModule
from transformer.nn._blocks import BLOCKS, Block
from transformer.nn._mla import LatentAttention
from transformer.nn._moe import RoutedFeedForward
from transformer.nn._stacks import Stack
from transformer.nn.layers._layers import Embedding, FeedForward, Linear
from transformer.nn.layers._norms import NORMS
from transformer.nn.models._base import Model, TokenEncoder
from transformer.nn.models._encoders import PooledEncoder
from transformer.nn.models._speech import Convolution
from transformer.nn.models._vision import AttentionPooling, VisionEncoder

CONFIG = TransformerConfig(
    vocab_size=13,
    d_model=6,
    num_layers=1,
    num_heads=3,
    feed_forward=FeedForwardOptions(d_ff=5),
    position=RotaryOptions(),
    output=OutputOptions(num_classes=3),
)
HEADED = CONFIG.replace(**{"output.transform": HeadTransform(activation="gelu_erf", norm=True), "output.bias": True})
SERIES = Series(channels=2, context_length=7, horizon=3, patch_length=3, patch_stride=2, shared_embedding=False)
NUMBERS = ("classes", "targets")
PATCHES = Patches(image_height=4, image_width=2, patch_size=2, channels=1)
SOUND = Audio(features=(4,), kernel_sizes=(3,), strides=(2,), position_kernel_size=2, position_groups=2)
LATENT = MLA(kv_lora_rank=4, qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=3, q_lora_rank=5)
ROUTED = MoE(num_experts=4, top_k=2, shared_experts=1, router_bias=True)

put = jax.device_put  # compiles nothing, unlike jnp.asarray
NUMPY_TOKENS = np.asarray([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]], np.int32)
NUMPY_X = np.random.default_rng(0).normal(size=(2, 5, 6)).astype(np.float32)
TOKENS, X = put(NUMPY_TOKENS), put(NUMPY_X)
CONTEXT, PIXELS, SERIES_INPUT = (
    put(NUMPY_X[:, :3]),
    put(NUMPY_X[:, :4, :2, None]),
    put(np.random.default_rng(1).normal(size=(2, 7, 2)).astype(np.float32)),
)
VISION = CONFIG.replace(input=PATCHES, **{"output.pooling": "first"})
IMAGE_ENCODER = TransformerConfig(
    d_model=4,
    num_layers=1,
    num_heads=2,
    feed_forward=FeedForwardOptions(d_ff=3, activation="quick_gelu"),
    position=LearnedOptions(),
    input=PATCHES,
)
INPUTS = LayerInputs(mask=Mask.causal(), context=put(NUMPY_X[:, :3] + 1))

CASES = {
    "CausalLM": (CausalLM(CONFIG.replace(**{"embedding.tie": False})), (TOKENS,)),
    "CausalLM, routed, latent": (
        CausalLM(
            CONFIG.replace(
                **{"attention.mla": LATENT, "stack.prefix": (LayerKind(),), "stack.period": (LayerKind(moe=ROUTED),)},
                num_layers=2,
            )
        ),
        (TOKENS,),
    ),
    "Seq2Seq": (Seq2Seq(CONFIG.replace(position=T5BiasOptions())), (TOKENS, put(NUMPY_TOKENS[:, :4]))),
    "SpeechToText": (SpeechToText(CONFIG.replace(input=Speech(mel_bins=3))), (put(NUMPY_X[..., :3]), TOKENS)),
    "SpeechEncoder": (SpeechEncoder(CONFIG.replace(input=SOUND, position=None)), (put(NUMPY_X[..., 0]),)),
    "SpeechRecognizer": (
        SpeechRecognizer(CONFIG.replace(input=dataclasses.replace(SOUND, position_norm="batch"), position=None)),
        (put(NUMPY_X[..., 0]),),
    ),
    "MaskedLM": (MaskedLM(HEADED.replace(**{"embedding.token_types": 2})), (TOKENS,)),
    "Classifier": (Classifier(CONFIG), (TOKENS,)),
    "Embedder": (Embedder(HEADED.replace(**{"output.bias": None})), (TOKENS,)),
    "VisionClassifier": (
        VisionClassifier(CONFIG.replace(input=PATCHES, position=LearnedOptions(max_length=3))),
        (PIXELS,),
    ),
    "DistilledVisionClassifier": (
        DistilledVisionClassifier(VISION.replace(input=dataclasses.replace(PATCHES, distillation_token=True))),
        (PIXELS,),
    ),
    "VisionEmbedder": (VisionEmbedder(VISION.replace(**{"output.pooling": "attention"})), (PIXELS,)),
    "AttentionPooling": (AttentionPooling(CONFIG), (X,)),
    "DualEncoder": (
        DualEncoder(
            CONFIG.replace(
                input=Images(
                    encoder=IMAGE_ENCODER.replace(**{"output.pooling": "first"}), features=5, similarity="sigmoid"
                ),
                **{"stack.layer_scale": 0.5},
            )
        ),
        (TOKENS, PIXELS),
    ),
    "VisionLanguageModel": (
        VisionLanguageModel(
            CONFIG.replace(
                input=ImageTokens(
                    token_id=9,
                    encoder=IMAGE_ENCODER.replace(**{"stack.final_norm": False}),
                    unused_layers=1,
                    projector="mlp",
                )
            )
        ),
        (TOKENS,),
    ),
    "VisionLanguageModel of any size": (
        VisionLanguageModel(
            CONFIG.replace(
                position=RotaryOptions(),
                input=DynamicImageTokens(
                    token_id=9,
                    encoder=IMAGE_ENCODER.replace(
                        d_model=8, position=RotaryOptions(sections=(1, 1), restart_frequencies=True), input=None
                    ),
                    patch_size=2,
                ),
            )
        ),
        (TOKENS,),
    ),
    "Forecaster": (
        Forecaster(CONFIG.replace(input=SERIES, position=SinusoidalOptions())),
        (SERIES_INPUT,),
    ),
    **{
        model.__name__: (
            model(
                CONFIG.replace(
                    input=SERIES, position=SinusoidalOptions(), **{f"output.num_{what}": 3 for what in NUMBERS}
                )
            ),
            (SERIES_INPUT,),
        )
        for model in (SeriesEncoder, SeriesClassifier, SeriesRegressor, PatchReconstructor)
    },
    "Encoder": (Encoder(CONFIG.replace(**{"embedding.norm": True}, position=LearnedOptions(max_length=5))), (X,)),
    "Decoder": (Decoder(CONFIG, cross=True), (X, CONTEXT)),
    **{
        block.__name__: (block(CONFIG.replace(**{"norm.position": name}), cross=name != "parallel"), (X, INPUTS))
        for name, block in BLOCKS.items()
    },
    "MultiHeadAttention": (
        MultiHeadAttention(3, num_kv_heads=1, qk_norm=QKNorm(), sinks=True, position=Rotary()),
        (X,),
    ),
    "GatedDeltaNet": (GatedDeltaNet(num_heads=4, num_key_heads=2, key_dim=3, value_dim=2), (X,)),
    "LatentAttention": (LatentAttention(3, LATENT), (X,)),
    "compat.MultiHeadDotProductAttention": (compat.MultiHeadDotProductAttention(3), (X,)),
    "RoutedFeedForward": (RoutedFeedForward(ROUTED, width=5, gated=True), (X,)),
    "FeedForward": (FeedForward(width=5, gated=True), (X,)),
    "Linear": (Linear((2, 5)), (X,)),
    "Convolution": (Convolution(5, stride=2), (X,)),
    "Embedding": (Embedding(13, 6), (TOKENS,)),
    **{norm.__name__: (norm(), (X,)) for norm in NORMS.values()},
}
BASES = {
    AttentionModule,
    Block,
    Stack,
    Model,
    TokenEncoder,
    PooledEncoder,
    VisionEncoder,
}  # base classes that are not used directly

SLOW = {"CausalLM, routed, latent"}

by_case = pytest.mark.parametrize(
    ("module", "inputs"),
    [pytest.param(*case, id=name, marks=pytest.mark.slow if name in SLOW else ()) for name, case in CASES.items()],
)


def bridged(module, *inputs):
    """Return the module in NNX, and the tree of its parameters.

    Initialization is only traced. The parameters then get values other than 0 and 1, so that each has an effect.
    """
    model = nnx.eval_shape(lambda: nnx.bridge.ToNNX(module).lazy_init(*inputs, rngs=nnx.Rngs(0)))
    random = np.random.default_rng(0)
    shapes = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    params = jax.tree.map(lambda leaf: put(random.uniform(0.1, 0.9, leaf.shape).astype(leaf.dtype)), shapes)
    nnx.update(model, params)
    return model, params


def loss_of(out):
    """Return a scalar that depends on all outputs, and the outputs."""
    floats = [leaf for leaf in jax.tree.leaves(out) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return sum(jnp.sin(leaf + jnp.arange(leaf.size).reshape(leaf.shape)).sum() for leaf in floats), out


def close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), a, b)


@pytest.mark.default_cases(9)
@by_case
def test_a_module_trains_in_nnx_as_in_linen(module, inputs):
    model, params = bridged(module, *inputs)
    expected = jax.eval_shape(lambda: module.init(jax.random.key(0), *inputs))["params"]
    assert {path: leaf.shape for path, leaf in flatten_dict(params).items()} == {
        path: leaf.shape for path, leaf in flatten_dict(expected).items()
    }

    @nnx.jit  # one program for both, because compilation takes most of the time
    def step(model, optimizer, params):
        (_, out), gradient = nnx.value_and_grad(lambda model: loss_of(model(*inputs)), has_aux=True)(model)
        optimizer.update(model, gradient)
        linen = jax.grad(lambda params: loss_of(module.apply({"params": params}, *inputs)), has_aux=True)
        return out, linen(params)

    out, (gradient, expected) = step(model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), params)
    close(out, expected)
    trained = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    params, gradient = jax.tree.map(np.asarray, (params, gradient))
    close(trained, jax.tree.map(lambda leaf, slope: leaf - 0.1 * slope, params, gradient))
    slopes, moved = flatten_dict(gradient), flatten_dict(jax.tree.map(np.subtract, trained, params))
    assert not [path for path in slopes if np.abs(slopes[path]).max() > 1e-3 and not np.abs(moved[path]).max()]
    assert any(np.abs(slope).max() > 1e-3 for slope in slopes.values())


def classes_in_use():
    """Return the names of parameters, subtrees and collections for each class of modules."""
    names = defaultdict(set)

    def record(call, args, kwargs, context):
        out = call(*args, **kwargs)
        for tree in context.module.variables.values():
            names[type(context.module)] |= set(tree)
        return out

    with nn.intercept_methods(record):
        for module, inputs in CASES.values():
            jax.eval_shape(lambda module=module, inputs=inputs: module.init(jax.random.key(0), *inputs))
    return names


@pytest.mark.usefixtures("without_type_checks")  # it traces all modules
def test_no_attribute_has_the_name_of_a_parameter():
    """In NNX parameters are attributes: a method or field with the same name would conflict with them."""
    names = classes_in_use()
    own = {cls for cls in subclasses(nn.Module) if cls.__module__.startswith("transformer.") and cls not in BASES}
    assert {cls for cls in own if cls.__qualname__ == cls.__name__} <= names.keys(), "add a case for these classes"
    assert {"self_attention", "feed_forward", "feed_forward_norm"} <= names[BLOCKS["pre"]]
    for cls, subtrees in names.items():
        for name in subtrees:
            attribute = inspect.getattr_static(cls, name, None)
            taken = callable(attribute) or isinstance(attribute, property)
            assert not taken, f"{cls.__name__}.{name} is also the name of a parameter or of a subtree of parameters"
            assert not hasattr(nnx.bridge.ToNNX, name), f"nnx.Module has a {name}, as {cls.__name__} has parameters"


def subclasses(cls):
    found = {cls}
    for one in cls.__subclasses__():
        found |= subclasses(one)
    return found


def test_all_public_modules_have_a_case():
    package = import_module("transformer")
    public = {getattr(package, name) for name in package.__all__ if name not in ("load", "save")}
    modules = {one for one in public if inspect.isclass(one) and issubclass(one, nn.Module)}
    assert len(modules) > 10
    assert modules <= {type(module) for module, _ in CASES.values()}


def test_dropout_uses_nnx_keys():
    module = BLOCKS["pre"](CONFIG.replace(dropout_rate=0.5, **{"attention.dropout_rate": 0.3}))
    noisy = LayerInputs(deterministic=False)
    model, params = bridged(module, X, INPUTS)
    run = nnx.jit(lambda model, seed: model(X, noisy, rngs=nnx.Rngs(dropout=jax.random.key(seed))).x)

    @jax.jit
    def linen(params, seed):
        key = nnx.Rngs(dropout=jax.random.key(seed)).dropout()
        return module.apply({"params": params}, X, noisy, rngs={"dropout": key}).x

    close(run(model, 5), linen(params, 5))
    assert np.abs(np.asarray(run(model, 5)) - np.asarray(run(model, 6))).max() > 0.1

    # The random stream of the model advances with each call.
    @nnx.jit
    def make():
        return nnx.bridge.ToNNX(MultiHeadAttention(3, dropout_rate=0.5), rngs=nnx.Rngs(params=0, dropout=1)).lazy_init(
            X
        )

    keeps, call = make(), nnx.jit(lambda model: model(X, deterministic=False)[0])
    assert np.abs(np.asarray(call(keeps)) - np.asarray(call(keeps))).max() > 1e-3


def test_a_cache_passes_through_nnx():
    module = CausalLM(CONFIG)
    model, params = bridged(module, TOKENS)
    cache = nnx.jit(lambda model: model.init_cache(2, 5))(model)
    close(cache, jax.jit(lambda: module.init_cache(2, 5))())
    run = nnx.jit(lambda model, tokens, cache: model(tokens, cache=cache))
    first, cache = run(model, NUMPY_TOKENS[:, :3], cache)
    second, cache = run(model, NUMPY_TOKENS[:, 3:], cache)
    whole = jax.jit(module.apply)({"params": params}, TOKENS)
    close(np.concatenate([first, second], axis=1), whole)
    np.testing.assert_array_equal(cache["layers"]["slot_0"].self_attention.length, 5)


def test_methods_are_called_by_name():
    both, ours = Seq2Seq(CONFIG), CausalLM(CONFIG)
    encoding, params = bridged(both, TOKENS, TOKENS)
    model, _ = bridged(ours, TOKENS)

    @nnx.jit
    def call(encoding, model, params):
        head, (logits, aux) = model.head(model.hidden(TOKENS)), model.with_aux(TOKENS)
        encoded = both.apply({"params": params}, TOKENS, method="encode")
        return (encoding.encode(TOKENS), head, logits, aux), (encoded, *[model(TOKENS)] * 2, {})

    close(*call(encoding, model, params))
    table, params = bridged(Embedding(13, 6), TOKENS)
    attended = nnx.jit(lambda table: table.attend(X))(table)
    close(attended, NUMPY_X @ np.asarray(params["embedding"]).T)
