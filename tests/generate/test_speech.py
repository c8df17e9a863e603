"""Decoding of speech: the rules for timestamps, and the loop for one window."""

import functools

import jax
import numpy as np
import pytest
from numeric_parts import random_params

from transformer.config import EmbeddingOptions, LearnedOptions, Speech, TransformerConfig
from transformer.generate._speech import SpeechRules, SpeechState, apply_rules, decode_window, start_window
from transformer.nn.models import SpeechToText

END, START, NO_TIMES = 9, 10, 11  # ids 0 to 8 are text, 12 to 22 timestamps
SIZE = 23
RULES = SpeechRules(
    suppressed=np.isin(np.arange(SIZE), [2, 10]),
    suppressed_first=np.isin(np.arange(SIZE), [9]),
    end_id=np.int32(END),
    no_timestamps_id=np.int32(NO_TIMES),
    last_first=np.int32(14),
)


def allowed(tokens, logits):
    """Return the ids that may follow these tokens: the rules of the paper, one after the other."""
    times = set(range(NO_TIMES + 1, SIZE))
    ids = set(range(SIZE)) - {2, 10, NO_TIMES}
    if not tokens:
        ids &= set(range(NO_TIMES + 1, 15))
    was_time = [token in times for token in tokens]
    if was_time == [True] or was_time[-2:] == [True, True]:
        ids -= times  # a segment starts
    elif was_time[-1:] == [True]:
        ids -= set(range(END))  # a segment has ended: the start of the next one, or the end
    past = [token for token in tokens if token in times]
    if past:
        closes = was_time[-2:] == [False, True]
        ids -= {time for time in times if time < past[-1] or (time == past[-1] and not closes)}
    together = np.logaddexp.reduce([logits[i] for i in ids & times] or [-np.inf])
    text = ids - times
    return ids & times if text and together > max(logits[i] for i in text) else ids


def state_after(tokens):
    state = jax.jit(SpeechState.empty, static_argnums=0)(1)
    for token in tokens:
        state = add(state, np.array([token], np.int32))
    return state


@jax.jit
def add(state, token):
    return state.add(token, jax.numpy.zeros(token.shape), RULES)


@functools.partial(jax.jit, static_argnums=2)
def with_rules(logits, state, timestamps):
    return apply_rules(logits, state, RULES, timestamps)


@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_timestamp_rules_hold_for_random_transcripts(spread):
    generator = np.random.default_rng(int(spread))
    for _ in range(20):
        tokens = []
        while len(tokens) < 12 and (not tokens or tokens[-1] != END):
            logits = generator.normal(0, spread, SIZE).astype(np.float32)
            got = np.flatnonzero(np.isfinite(np.asarray(with_rules(logits[None], state_after(tokens), True))[0]))
            assert set(got) == allowed(tokens, logits), tokens
            tokens.append(int(generator.choice(got)))


def test_without_timestamps_only_suppressed_tokens_are_forbidden():
    logits = np.zeros((1, SIZE), np.float32)
    first = np.asarray(with_rules(logits, state_after([]), False))[0]
    assert np.flatnonzero(~np.isfinite(first)).tolist() == [2, 9, 10]
    later = np.asarray(with_rules(logits, state_after([4]), False))[0]
    assert np.flatnonzero(~np.isfinite(later)).tolist() == [2, 10]


@pytest.fixture(scope="module")
def model():
    config = TransformerConfig(
        vocab_size=SIZE,
        d_model=12,
        num_layers=1,
        num_heads=3,
        position=LearnedOptions(max_length=20, source_max_length=7),
        input=Speech(mel_bins=5),
        embedding=EmbeddingOptions(scale=False),
    )
    model = SpeechToText(config)
    frames = np.random.default_rng(1).normal(size=(2, 14, 5)).astype(np.float32)
    params = random_params(model, frames, np.zeros((2, 1), np.int32), seed=3)["params"]
    return model, jax.tree.map(lambda leaf: 3 * np.asarray(leaf), params), frames


def decode(model, params, frames, prompt, temperature, key=0, limit=17, timestamps=True):
    logits, cache = start_window(model, params, frames, np.int32(START), cache_slots=20)
    prompt = np.broadcast_to(np.array(prompt, np.int32), (len(frames), len(prompt)))
    how = (np.float32(temperature), jax.random.key(key), np.int32(limit), RULES)
    sizes = {"num_frames": frames.shape[1], "new_slots": 20, "timestamps": timestamps}
    return decode_window(model, params, logits, cache, prompt, *how, **sizes)


@pytest.mark.programs(8, reason="decoding has two programs and a key, and the expectation reads and applies the rules")
@pytest.mark.default_cases(1)
@pytest.mark.parametrize(("prompt", "timestamps"), [([], True), ([5, NO_TIMES], False)])
def test_greedy_decoding_takes_the_best_allowed_token(model, prompt, timestamps):
    model, params, frames = model
    result, log_probability = jax.device_get(decode(model, params, frames, prompt, 0.0, timestamps=timestamps))
    assert not result.failed.any()
    score = jax.jit(lambda params, frames, target: model.apply({"params": params}, frames, target))
    for row in range(2):
        tokens, total = [], 0.0
        for _ in range(17):
            target = np.zeros((2, 20), np.int32)
            target[row, : 1 + len(prompt) + len(tokens)] = [START, *prompt, *tokens]
            logits = np.asarray(score(params, frames, target))[row, len(prompt) + len(tokens)]
            logits = np.asarray(with_rules(logits[None], state_after(tokens), timestamps), np.float64)[0]
            best = int(logits.argmax())
            total += logits[best] - np.logaddexp.reduce(logits)
            if best == END:
                break
            tokens.append(best)
        assert result.tokens[row, : result.counts[row]].tolist() == tokens
        assert bool(result.ended[row]) == (best == END)
        np.testing.assert_allclose(log_probability[row], total, rtol=1e-4)


def test_sampling_depends_on_the_key_and_a_low_temperature_is_greedy(model):
    model, params, frames = model
    greedy, cold = (decode(model, params, frames, [], t)[0].tokens for t in (0.0, 1e-4))
    np.testing.assert_array_equal(greedy, cold)
    warm = [decode(model, params, frames, [], 1.0, key)[0].tokens.tolist() for key in (0, 0, 1)]
    assert warm[0] == warm[1]
    assert warm[0] != warm[2]


def test_respects_the_limit_and_reports_non_finite_logits(model):
    model, params, frames = model
    result, _ = decode(model, params, frames, [], 0.0, limit=3)
    assert (result.counts <= 3).all()
    broken = jax.tree.map(lambda leaf: leaf * np.float32(np.nan), params)
    assert decode(model, broken, frames, [], 0.0)[0].failed.any()
