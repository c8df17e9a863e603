"""Speech recognition: two convolutions of the frames, the encoder-decoder model, and generation from frames."""

import functools

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import case as golden_case
from golden import ours
from numeric_parts import random_params

from transformer.__main__ import main
from transformer.config import ConfigError, FeedForwardOptions, LearnedOptions, Speech, TransformerConfig
from transformer.generate import Sampling, generate
from transformer.inference import LoadedModel, embed
from transformer.nn._parameter_axes import axes_of
from transformer.nn.models import Seq2Seq, SpeechToText
from transformer.nn.models._speech import Convolution
from transformer.zoo import abstract_params, load_pretrained
from transformer.zoo.weights._files import write_weights

CONFIG = TransformerConfig(
    vocab_size=23,
    d_model=12,
    num_layers=1,
    num_heads=3,
    feed_forward=FeedForwardOptions(d_ff=17),
    input=Speech(mel_bins=5),
)
CONFIG = CONFIG.replace(
    **{"parameters.initializer_range": 0.6, "embedding.tie": False}
)  # large weights, so that the text depends on the frames
MODEL = SpeechToText(CONFIG.replace(position=LearnedOptions(max_length=19, source_max_length=7)))
NUMBERS = np.random.default_rng(1).normal(size=(2, 14, 5)).astype(np.float32)
FRAMES = jax.device_put(NUMBERS)
TARGET = np.asarray([[3, 1, 4, 1], [5, 9, 2, 6]], np.int32)
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def variables():
    return random_params(MODEL, FRAMES, TARGET)


@pytest.mark.parametrize("stride", [1, 2])
def test_a_convolution_spans_three_frames(stride):
    module = Convolution(7, stride)
    params = jax.tree.map(np.asarray, random_params(module, FRAMES)["params"])
    padded = np.pad(FRAMES, ((0, 0), (1, 1), (0, 0)))
    expected = sum(np.einsum("btm,md->btd", padded[:, i : i + 14], params["kernel"][i]) for i in range(3))
    got = jax.jit(module.apply)({"params": params}, FRAMES)
    np.testing.assert_allclose(got, expected[:, ::stride] + params["bias"], atol=1e-5)


def test_a_position_depends_on_five_frames(variables):
    """Before attention, position s depends on exactly the frames 2s - 2 to 2s + 2."""

    def heard(frames):
        return MODEL.apply(variables, frames, method=lambda module, frames: module._embed_source(frames))[0, :, 0]

    reach = np.abs(np.asarray(jax.jit(jax.jacobian(heard))(FRAMES))[:, 0]).max(2)
    distance = np.arange(14)[None, :] - 2 * np.arange(7)[:, None]
    np.testing.assert_array_equal(reach > 0, np.abs(distance) <= 2)


def test_a_speech_model_is_a_seq2seq_that_halves_the_source_length():
    """Without a position table any length is allowed; an odd length is rounded up."""
    assert issubclass(SpeechToText, Seq2Seq)
    free = SpeechToText(CONFIG)
    params = abstract_params(free)
    encode = functools.partial(free.apply, method=SpeechToText.encode)
    for length, positions in ((1, 1), (8, 4), (9, 5)):
        frames = jax.ShapeDtypeStruct((2, length, 5), jnp.float32)
        assert jax.eval_shape(encode, {"params": params}, frames).shape == (2, positions, 12)


def test_cached_is_uncached(variables):
    step = jax.jit(lambda cache, source, target: MODEL.apply(variables, source, target, cache=cache))
    first, cache = step(jax.jit(lambda: MODEL.init_cache(2, 4))(), FRAMES, TARGET[:, :3])
    last, _ = step(cache, None, TARGET[:, 3:])
    whole = jax.jit(MODEL.apply)(variables, FRAMES, TARGET)
    np.testing.assert_allclose(np.concatenate([first, last], 1), whole, atol=1e-5)


def test_generated_text_equals_the_uncached_model(variables):
    """With prompts of several tokens, and frames as an array or as lists; other frames give another text."""
    params = variables["params"]
    prompts = [[3, 1], [5, 9]]
    rows = generate(MODEL, params, prompts, sources=FRAMES, max_new_tokens=5, sampling=GREEDY)
    target = np.asarray([prompt + row for prompt, row in zip(prompts, rows, strict=True)])
    likeliest = np.argmax(jax.jit(MODEL.apply)(variables, FRAMES, target), -1)
    assert likeliest[:, 1:-1].tolist() == rows
    swapped = NUMBERS[::-1].tolist()
    assert generate(MODEL, params, prompts, sources=swapped, max_new_tokens=5, sampling=GREEDY) != rows


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize(
    ("model", "frames", "message"),
    [
        (MODEL, NUMBERS[0], r"\(batch.*14.*5\).*got float32.*\(14.*5\)"),
        (MODEL, NUMBERS[:, :12], r"got float32.*\(2.*12.*5\)"),
        (MODEL, NUMBERS.swapaxes(1, 2), r"got float32.*\(2.*5.*14\)"),
        (MODEL, NUMBERS.astype(np.int32), r"frames.*got int32"),
        (SpeechToText(CONFIG), NUMBERS[:, :, :3], r"\(batch.*5\)"),
        (
            SpeechToText(CONFIG.replace(input=None)),
            FRAMES,
            r"input.*SpeechToText.*input=Speech",
        ),
        (
            SpeechToText(CONFIG.replace(**{"embedding.source_vocab_size": 9})),
            FRAMES,
            r"source_vocab_size",
        ),
    ],
)
def test_rejects_invalid_audio_models(model, frames, message):
    with pytest.raises((ValueError, ConfigError), match=message):
        jax.eval_shape(lambda *given: model.init(jax.random.key(0), *given), frames, TARGET)


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([[3, 4], [5]], r"SpeechToText.*\(batch.*bins\)"),
        ([[3, 4], [5, 6]], r"frames.*\(batch.*14.*5\)"),
        (NUMBERS[:1], r"as many prompts as sources, got 2 and 1"),
        (None, r"sources is missing"),
    ],
)
def test_rejects_sources_that_are_not_frames(sources, message):
    with pytest.raises(ValueError, match=message):
        generate(MODEL, {}, [[1], [2]], sources=sources, max_new_tokens=2)


def test_a_speech_model_rejects_text_sources(tmp_path, capsys):
    opened = LoadedModel(MODEL, {}, tmp_path, vocabulary=None, context=None, bos_id=None)
    with pytest.raises(ConfigError, match="SpeechToText"):
        embed(opened, ["one"])
    directory = ours.write(tmp_path / "speech", golden_case.golden("whisper")["lm"])
    assert main(["generate", str(directory), "--prompt", "one"]) == 2
    assert "contains a model of type SpeechToText." in capsys.readouterr().err


def test_every_parameter_has_axes():
    for path, leaf in flax.traverse_util.flatten_dict(abstract_params(MODEL), sep="/").items():
        axes = axes_of(path, leaf.ndim)
        assert axes is not None, path
        assert leaf.ndim - len(axes.names) == ("/layers/" in path), (path, leaf.shape, axes)


def test_files_may_repeat_the_tied_table_but_must_be_complete(tmp_path):
    record = golden_case.golden("whisper")["lm"]
    table = "model.decoder.embed_tokens.weight"
    tensors = {name: golden_case.numbers(name, tuple(shape)) for name, shape in record["tensors"].items()}
    write_weights(tmp_path / "tied", record["config"], tensors | {"proj_out.weight": tensors[table]})
    assert load_pretrained(tmp_path / "tied").model.config.embedding.tie
    write_weights(tmp_path / "other", record["config"], tensors | {"proj_out.weight": tensors[table] + 1})
    with pytest.raises(ValueError, match=r"proj_out.weight.*model.decoder.embed_tokens.weight"):
        load_pretrained(tmp_path / "other")
