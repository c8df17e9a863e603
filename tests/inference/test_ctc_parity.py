"""Comparison of words and times with those of transformers: tiny random models, greedy decoding."""

import numpy as np
import pytest
import speech_parts

from transformer.inference import open_model, transcribe

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("salt", ["a", "f", "k"])
def test_words_and_times_equal_transformers(tmp_path, salt):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    directory = speech_parts.write_ctc(tmp_path / "ctc", salt=salt)
    theirs = transformers.Wav2Vec2ForCTC.from_pretrained(directory).eval()
    tokenizer = transformers.Wav2Vec2CTCTokenizer.from_pretrained(directory)
    extractor = transformers.Wav2Vec2FeatureExtractor.from_pretrained(directory)
    samples = speech_parts.sound(0.9)
    given = extractor(samples, sampling_rate=16_000, return_tensors="pt").input_values
    with torch.no_grad():
        tokens = theirs(given).logits[0].argmax(-1).tolist()
    expected = tokenizer.decode(tokens, output_word_offsets=True)
    found = transcribe(open_model(directory), samples)
    assert len(expected.word_offsets) > 2
    assert found.text.split() == expected.text.split()
    seconds = 40 / 16_000
    times = [(word["start_offset"] * seconds, word["end_offset"] * seconds) for word in expected.word_offsets]
    np.testing.assert_allclose([(one.start, one.end) for one in found.segments], times, atol=1e-3)
    assert [one.text.strip() for one in found.segments] == [word["word"] for word in expected.word_offsets]
