"""Comparison of the times of words with those of transformers: tiny random models of Whisper."""

import jax
import numpy as np
import pytest
import speech_parts

from transformer.inference import TranscriptionOptions, open_model, transcribe
from transformer.inference._transcribe import Transcriber
from transformer.inference._word_times import median_filter, time_warping, word_slices

pytestmark = pytest.mark.parity

PLAIN = {"temperatures": (0.0,), "max_compression_ratio": None, "min_log_probability": None, "max_no_speech": None}
HEADS = [[0, 1], [1, 0], [1, 1]]


@pytest.fixture(scope="module")
def transformers():
    pytest.importorskip("torch")
    return pytest.importorskip("transformers")


@pytest.fixture(scope="module", params=["one", "three"])
def pair(request, transformers, tmp_path_factory):
    """(reference model, feature extractor, our model)."""
    directory = tmp_path_factory.mktemp("whisper")
    generation = speech_parts.GENERATION | {"alignment_heads": HEADS}
    speech_parts.write_whisper(
        directory, salt=request.param, scale=2.0, generation=generation, decoder_layers=2, median_filter_width=5
    )
    theirs = transformers.WhisperForConditionalGeneration.from_pretrained(directory, attn_implementation="eager").eval()
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(directory)
    return theirs, extractor, open_model(directory)


def expected_times(theirs, extractor, samples):
    """Return (token, start, end) of each text token of the reference."""
    import torch

    found = extractor(samples, sampling_rate=speech_parts.RATE, return_tensors="pt", return_attention_mask=True)
    options = {"return_token_timestamps": True, "return_timestamps": True, "return_segments": True}
    with torch.no_grad():
        result = theirs.generate(
            found.input_features, attention_mask=found.attention_mask, task="transcribe", language="en", **options
        )
    tokens, times = result["sequences"][0].tolist(), result["token_timestamps"][0].tolist()
    return [(token, times[i - 1] if i else 0.0, times[i]) for i, token in enumerate(tokens) if token < speech_parts.END]


@pytest.mark.parametrize("seconds", [1.0, 0.7])
def test_token_times_equal_transformers(pair, seconds):
    theirs, extractor, ours = pair
    samples = speech_parts.sound(seconds, 3)
    expected = expected_times(theirs, extractor, samples)
    options = TranscriptionOptions(word_timestamps=True, language="en", **PLAIN)
    transcriber = Transcriber(ours, options)
    found = transcriber.window(transcriber.features.frames(samples)[:100], "en", True, jax.random.key(0))
    edges = transcriber.edges(found, round(100 * seconds)) * transcriber.step
    tokens = found.best.tokens
    got = [(token, edges[i], edges[i + 1]) for i, token in enumerate(tokens) if token < speech_parts.END]
    np.testing.assert_allclose(got, expected, atol=1e-4)
    assert len({start for _, start, _ in got}) > 3
    words = [word for segment in transcribe(ours, samples, options).segments for word in segment.words]
    assert [token for word in words for token in word.tokens] == [token for token, _, _ in got]
    first = 0
    for word in words:
        last = first + len(word.tokens) - 1
        assert (word.start, word.end) == pytest.approx((min(got[first][1], seconds), min(got[last][2], seconds)))
        first = last + 1


@pytest.mark.parametrize("width", [3, 5, 7, 21])
def test_median_filter_and_warping_equal_transformers(transformers, width):
    import torch
    from transformers.models.whisper import generation_whisper as reference

    values = np.random.default_rng(width).normal(size=(2, 3, 9, 10))
    expected = reference._median_filter(torch.tensor(values), width).numpy()
    np.testing.assert_allclose(median_filter(values, width), expected)
    for matrix in (values[0, 0], np.round(values[0, 1]), values[0, 2, :1], values[0, 2, :, :1], np.zeros((4, 6))):
        for ours, theirs in zip(time_warping(matrix), reference._dynamic_time_warping(matrix), strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("language", ["english", "chinese"])
def test_words_equal_transformers(transformers, language):
    from transformers.models.whisper import tokenization_whisper as reference

    library = speech_parts.tokenizer()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=library, eos_token="<|endoftext|>")
    tokenizer.decode = lambda ids, **_: library.decode(ids)
    generator = np.random.default_rng(0)
    texts = ['a b "c" (d), e', " ¿Qué? -¡Sí!", "日本語。 好", "", "...a 'b' c's", " ( a"]
    texts += ["".join(generator.choice(list(" ab.,'\"(¿é日"), 12)) for _ in range(60)]
    for text in texts:
        ids = library.encode(text).ids
        _, expected, _ = reference._combine_tokens_into_words(tokenizer, ids, language)
        code = {"english": "en", "chinese": "zh"}[language]
        assert [ids[word] for word in word_slices(library.decode, ids, code)] == expected, text
