"""Times of words: the path of dynamic time warping, edges of tokens, words, and settings that are errors."""

import itertools

import numpy as np
import pytest
import speech_parts

from transformer.config._checks import ConfigError
from transformer.inference import TranscriptionOptions, open_model, transcribe
from transformer.inference._word_times import median_filter, time_warping, token_edges, word_slices

OPTIONS = {"language": "en", "temperatures": (0.0,), "max_compression_ratio": None, "min_log_probability": None}
OPTIONS |= {"max_no_speech": None}


def paths(height, width):
    """Yield every path from the first to the last cell."""
    for count in range(max(height, width), height + width):
        for steps in itertools.product([(1, 0), (0, 1), (1, 1)], repeat=count - 1):
            cells = np.cumsum([(0, 0), *steps], axis=0)
            if tuple(cells[-1]) == (height - 1, width - 1):
                yield cells


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (4, 1), (3, 3), (3, 4)])
def test_dynamic_time_warping_finds_the_cheapest_path(shape):
    cost = np.random.default_rng(0).normal(size=shape)
    rows, columns = time_warping(cost)
    best = min(cost[tuple(cells.T)].sum() for cells in paths(*shape))
    assert cost[rows, columns].sum() == pytest.approx(best)
    steps = np.diff([rows, columns])
    assert ((steps >= 0) & (steps <= 1)).all()
    assert (rows[0], columns[0], rows[-1], columns[-1]) == (0, 0, shape[0] - 1, shape[1] - 1)


def test_tokens_end_where_the_attention_moves_on():
    weights = np.full((2, 4, 40), 1e-3, np.float32)
    for token, (start, end) in enumerate([(0, 10), (10, 12), (12, 30), (30, 40)]):
        weights[:, token, start:end] = 0.1
    assert token_edges(weights, 1).tolist() == [0, 0, 10, 12, 30]
    assert token_edges(weights[:, :0], 7).tolist() == [0]
    constant = token_edges(np.full((1, 3, 9), 0.1, np.float32), 7)
    assert constant.shape == (4,)
    assert (np.diff(constant) >= 0).all()


def test_the_median_removes_single_peaks():
    values = np.zeros((1, 9))
    values[0, 4] = 5.0
    assert not median_filter(values, 3).any()
    np.testing.assert_array_equal(median_filter(values, 1), values)
    np.testing.assert_array_equal(median_filter(values[:, :3], 7), values[:, :3])


@pytest.mark.parametrize(
    ("text", "language", "words"),
    [
        (" Hello, world. Yes!", "en", [" Hello,", " world.", " Yes!"]),
        (' He said "no" (twice)', None, [" He", " said", ' "no"', " (twice)"]),
        ("日本語。", "ja", ["日", "本", "語。"]),
        ("", "en", []),
    ],
)
def test_words_keep_their_punctuation(text, language, words):
    library = speech_parts.tokenizer()
    ids = library.encode(text).ids
    found = word_slices(library.decode, ids, language)
    assert [library.decode(ids[word]) for word in found] == words
    assert [i for word in found for i in ids[word]] == ids


def test_an_incomplete_final_character_belongs_to_the_last_word():
    library = speech_parts.tokenizer()
    ids = library.encode("a é").ids
    assert word_slices(library.decode, ids[:-1], "en")[-1].stop == len(ids) - 1


@pytest.mark.programs(16, reason="a transcription measures silence with single operations")
def test_words_of_a_long_recording_are_ordered_and_join_to_its_text(tmp_path):
    opened = open_model(speech_parts.write_whisper(tmp_path, salt="one", scale=1.0))
    found = transcribe(opened, speech_parts.sound(2.5), TranscriptionOptions(word_timestamps=True, **OPTIONS))
    plain = transcribe(opened, speech_parts.sound(2.5), TranscriptionOptions(timestamps=True, **OPTIONS))
    assert [segment.tokens for segment in plain.segments] == [segment.tokens for segment in found.segments]
    assert {segment.words for segment in plain.segments} == {None}
    for segment in found.segments:
        tokens = [token for word in segment.words for token in word.tokens]
        assert tokens == [token for token in segment.tokens if token < speech_parts.END]
        assert all(0 <= word.start <= word.end <= 2.5 for word in segment.words)
    assert sum(len(segment.words) for segment in found.segments) > 5


@pytest.mark.parametrize(
    ("heads", "message"),
    [([], "got None"), ([[0, 2]], r"got \[0, 2\]"), ([[1, 0]], r"got \[1, 0\]"), ("all", "got None")],
)
def test_wrong_alignment_heads_are_an_error(tmp_path, heads, message):
    generation = speech_parts.GENERATION | {"alignment_heads": heads}
    opened = open_model(speech_parts.write_whisper(tmp_path, generation=generation))
    with pytest.raises(ConfigError, match=rf"alignment_heads.*generation_config.json.*{message}"):
        transcribe(opened, speech_parts.sound(0.5), TranscriptionOptions(word_timestamps=True))


def test_a_median_filter_of_even_width_is_an_error(tmp_path):
    opened = open_model(speech_parts.write_whisper(tmp_path, median_filter_width=4))
    with pytest.raises(ConfigError, match="must be an odd whole number, got 4"):
        transcribe(opened, speech_parts.sound(0.5), TranscriptionOptions(word_timestamps=True))
