"""Weights of big_vision: compared with the models, written with Flax's own modules, in every form of the files."""

import zipfile

import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from npz_parts import archive, array_of

from transformer.nn.models import DualEncoder, VisionClassifier, VisionEmbedder
from transformer.zoo import load_big_vision, load_pretrained, save_pretrained
from transformer.zoo.weights import WeightsError
from transformer.zoo.weights._npz import NpzFile

WIDTH, HEADS, LAYERS, D_FF = 12, 3, 2, 17
PIXELS = np.random.default_rng(1).uniform(-1, 1, (2, 8, 8, 3)).astype(np.float32)
TOKENS = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])

# The modules of big_vision with the names of their parameters (big_vision/models/vit.py at 0b73d7b, class _Model, and
# proj/image_text/text_transformer.py and two_towers.py).


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH, name="Dense_1")(nn.gelu(nn.Dense(D_FF, name="Dense_0")(x)))


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        attention = nn.MultiHeadDotProductAttention(HEADS, name="MultiHeadDotProductAttention_0")
        x = x + attention(nn.LayerNorm(name="LayerNorm_0")(x))
        return x + Mlp(name="MlpBlock_0")(nn.LayerNorm(name="LayerNorm_1")(x))


class Layers(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(LAYERS):
            x = Layer(name=f"encoderblock_{i}")(x)
        return nn.LayerNorm(name="encoder_norm")(x)


class Pool(nn.Module):
    @nn.compact
    def __call__(self, x):
        probe = self.param("probe", nn.initializers.normal(), (1, 1, WIDTH))
        probe = jnp.repeat(probe, len(x), 0)
        x = nn.MultiHeadDotProductAttention(HEADS, name="MultiHeadDotProductAttention_0")(probe, x)
        return (x + Mlp(name="MlpBlock_0")(nn.LayerNorm(name="LayerNorm_0")(x)))[:, 0]


class Images(nn.Module):
    pooling: str = "tok"
    classes: int | None = 5
    transform: bool = False

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(WIDTH, (4, 4), strides=(4, 4), padding="VALID", name="embedding")(x).reshape(len(x), 4, WIDTH)
        x = x + self.param("pos_embedding", nn.initializers.normal(0.3), (1, 4, WIDTH))
        if self.pooling == "tok":
            token = self.param("cls", nn.initializers.normal(), (1, 1, WIDTH))
            x = jnp.concatenate([jnp.repeat(token, len(x), 0), x], 1)
        x = Layers(name="Transformer")(x)
        x = Pool(name="MAPHead_0")(x) if self.pooling == "map" else x[:, 0] if self.pooling == "tok" else x.mean(1)
        x = jnp.tanh(nn.Dense(WIDTH, name="pre_logits")(x)) if self.transform else x
        return x if self.classes is None else nn.Dense(self.classes, name="head")(x)


class Texts(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(11, WIDTH, name="Embed_0")(tokens)
        x = x + self.param("pos_embedding", nn.initializers.normal(0.3), (1, 5, WIDTH))
        return nn.Dense(WIDTH, name="head")(Layers(name="Encoder_0")(x)[:, -1])


class Towers(nn.Module):
    @nn.compact
    def __call__(self, images, tokens):
        image, text = Images("map", None, name="img")(images), Texts(name="txt")(tokens)
        image, text = (x / jnp.linalg.norm(x, axis=1, keepdims=True) for x in (image, text))
        t, b = (self.param(name, nn.initializers.constant(value), (1,)) for name, value in (("t", 1.3), ("b", -2.0)))
        return image @ text.T * jnp.exp(t)[None] + b[None]


def drawn(module, *inputs):
    """Return random parameters of a module by path; no parameter has its usual initial value."""
    shapes = jax.eval_shape(lambda *inputs: module.init(jax.random.key(0), *inputs), *inputs)["params"]
    flat = flax.traverse_util.flatten_dict(shapes, sep="/")
    generator = np.random.default_rng(0)
    return {name: generator.normal(0, 0.4, leaf.shape).astype(np.float32) for name, leaf in flat.items()}


def computed(module, flat, *inputs):
    return jax.jit(module.apply)({"params": flax.traverse_util.unflatten_dict(flat, sep="/")}, *inputs)


def scanned(flat):
    """Stack the layers, as big_vision does with scan=True."""
    found = {}
    for name, array in flat.items():
        if "encoderblock_0" in name:
            rows = [flat[name.replace("encoderblock_0", f"encoderblock_{i}")] for i in range(LAYERS)]
            found[name.replace("encoderblock_0", "encoderblock")] = np.stack(rows)
        elif "encoderblock" not in name:
            found[name] = array
    return found


def before_linen(flat):
    """Rename to the names of vision_transformer's files: modules of a block share one count; the class token has a
    position.
    """
    old = {"LayerNorm_1": "LayerNorm_2", "MlpBlock_0": "MlpBlock_3"}
    old["MultiHeadDotProductAttention_0"] = "MultiHeadDotProductAttention_1"
    found = {}
    for name, array in flat.items():
        found["/".join(old.get(part, part) for part in name.split("/"))] = array
    table = found.pop("pos_embedding")
    found["Transformer/posembed_input/pos_embedding"] = np.concatenate([np.full_like(table[:, :1], 0.1), table], 1)
    found["cls"] = found["cls"] - 0.1
    return found


@pytest.mark.default_cases(3)
@pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
@pytest.mark.parametrize(
    ("options", "form"),
    [
        ({}, dict),
        ({"transform": True}, before_linen),
        ({"pooling": "gap"}, scanned),
        ({"pooling": "map", "classes": None}, dict),
    ],
)
def test_a_vision_transformer_equals_big_vision(tmp_path, options, form, write):
    module = Images(**options)
    flat = drawn(module, PIXELS)
    write(tmp_path / "vit.npz", **form(flat))
    model, params = load_big_vision(tmp_path / "vit.npz")
    assert type(model) is (VisionEmbedder if options.get("classes", 5) is None else VisionClassifier)
    got = jax.jit(model.apply)({"params": params}, PIXELS)
    np.testing.assert_allclose(got, computed(module, flat, PIXELS), atol=1e-4)


@pytest.mark.programs(11, reason="it loads, runs and saves a model with two inputs")
@pytest.mark.default_cases(1)
@pytest.mark.parametrize("form", [dict, scanned])
def test_siglip_equals_big_vision(tmp_path, form):
    flat = drawn(Towers(), PIXELS, TOKENS)
    np.savez(tmp_path / "siglip.npz", **{f"params/{name}": array for name, array in form(flat).items()}, step=3)
    model, params = load_big_vision(tmp_path / "siglip.npz")
    assert type(model) is DualEncoder
    got = jax.jit(model.apply)({"params": params}, TOKENS, PIXELS)
    np.testing.assert_allclose(got, computed(Towers(), flat, PIXELS, TOKENS), atol=1e-4)
    save_pretrained(model, params, tmp_path / "out")  # for everything else
    again = load_pretrained(tmp_path / "out")
    assert again.family.name == "siglip"
    jax.tree.map(np.testing.assert_array_equal, again.params, params)


@pytest.mark.programs(9, reason="it loads models of two dtypes and saves one")
def test_reads_bfloat16_and_converts_dtypes(tmp_path):
    flat = drawn(Images(), PIXELS)
    np.savez(tmp_path / "vit.npz", **{name: array.astype(jnp.bfloat16).view("V2") for name, array in flat.items()})
    model, params = load_big_vision(tmp_path / "vit.npz")
    assert model.config.dtype == "bfloat16"
    np.testing.assert_array_equal(params["class_token"], flat["cls"][0, 0].astype(jnp.bfloat16))
    assert load_big_vision(tmp_path / "vit.npz", dtype="float32")[0].config.dtype == "float32"
    save_pretrained(model, params, tmp_path / "out")
    assert load_pretrained(tmp_path / "out").family.name == "vit"


def without(name):
    return lambda flat: {key: array for key, array in flat.items() if key != name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("Transformer/encoder_norm/bias"), r"1.*Transformer/encoder_norm/bias"),
        (lambda flat: flat | {"more": np.zeros(3)}, "1 unexpected: more"),
        (lambda flat: flat | {"head/bias": np.zeros(4, np.float32)}, r"head/bias.*\(5,\).*got \(4,\)"),
        (without("pos_embedding"), r"pos_embedding"),
        (lambda flat: flat | {"pos_embedding": np.zeros((1, 7, 12))}, "must be square, got patches of 4 x 4 pixels"),
        (without("embedding/kernel"), r"'embedding/kernel'.*4"),
        (lambda flat: {}, r"'embedding/kernel'.*4"),
        (lambda flat: flat | {"head/bias": np.array([{}], object)}, "array 'head/bias'.* has the dtype object|takes"),
        (lambda flat: flat | {"cls": np.full((1, 1, 12), np.nan, np.float32)}, "not finite: cls"),
        (
            lambda flat: flat | {"Transformer/encoderblock_7/LayerNorm_0/bias": np.zeros(12)},
            r"Transformer/encoderblock_0.*1",
        ),
        (
            lambda flat: flat | {"Transformer/encoderblock/LayerNorm_0/bias": np.zeros((2, 12))},
            "two arrays are the parameter",
        ),
    ],
)
def test_incomplete_files_are_an_error(tmp_path, change, message):
    np.savez(tmp_path / "vit.npz", **change(drawn(Images(), PIXELS)))
    with pytest.raises(WeightsError, match=message):
        load_big_vision(tmp_path / "vit.npz")


GOOD = archive(array_of((3,), bytes(12)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "File is not a zip file"),
        (GOOD[:-9], "File is not a zip file"),
        (archive(b"abc"), "array|magic"),
        (archive(array_of((2**40, 2**40))), "the shape .* is impossible"),
        (archive(array_of((2**40,))), "takes 4398046511[0-9]+ bytes, got"),
        (archive(array_of((10**6,), bytes(4 * 10**6)), zipfile.ZIP_DEFLATED), "100 times the size of the archive"),
        (archive(array_of((3,), bytes(12)), name="a\n.npy"), "printable characters"),
    ],
)
def test_damaged_archives_are_one_line_errors(tmp_path, content, message):
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(WeightsError, match=message) as error:
        NpzFile(tmp_path / "a.npz")
    assert "\n" not in str(error.value)


def test_reports_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="big_vision"):
        load_big_vision(tmp_path)
