"""Penalties and log-probabilities: the formulas, and `generate` with them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chat_parts import drawn_params

from transformer.config import ConfigError, EmbeddingOptions, ParameterOptions, RotaryOptions, TransformerConfig
from transformer.generate import Sampling, generate, sample
from transformer.generate._penalties import History, log_probabilities, penalized
from transformer.nn.models import CausalLM

VOCAB = 31
SIZES = {"vocab_size": VOCAB, "d_model": 20, "num_layers": 2, "feed_forward.d_ff": 13, "num_heads": 2}
CONFIG = TransformerConfig(
    **SIZES,
    position=RotaryOptions(),
    embedding=EmbeddingOptions(tie=False),
    parameters=ParameterOptions(initializer_range=0.4),
)
ALL = Sampling(temperature=0.0, repetition_penalty=1.7, presence_penalty=0.6, frequency_penalty=0.3)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6]]


@pytest.fixture(scope="module")
def model():
    made = CausalLM(CONFIG)
    return made, drawn_params(made, 0.4, seed=2)


begin = jax.jit(History.of, static_argnums=2)
add = jax.jit(History.add)


def history(prompt, generated):
    """The history of a row of at most three prompt tokens."""
    row = np.zeros((1, 5), np.int32)
    row[0, : len(prompt)] = prompt
    made = begin(row, np.array([len(prompt)], np.int32), VOCAB)
    for token in generated:
        made = add(made, np.array([token], np.int32), np.array([True]))
    return made


def by_hand(logits, prompt, generated, sampling):
    """The penalties as a loop over the vocabulary."""
    result = np.array(logits, np.float64)
    for token in range(VOCAB):
        count = generated.count(token)
        if token in prompt or count:
            factor = sampling.repetition_penalty
            result[token] = result[token] / factor if result[token] > 0 else result[token] * factor
        result[token] -= sampling.frequency_penalty * count + sampling.presence_penalty * (count > 0)
    return result


def test_penalties_equal_their_formulas():
    logits = np.random.default_rng(0).normal(size=VOCAB).astype(np.float32)
    for prompt, generated in (([3, 4], [5, 5, 3]), ([7], []), ([1, 1], [1])):
        got = np.asarray(jax.jit(penalized)(logits[None], history(prompt, generated), ALL.penalties))[0]
        np.testing.assert_allclose(got, by_hand(logits, prompt, generated, ALL), rtol=1e-6)


def test_padding_and_ended_rows_do_not_count():
    made = history([3], [])
    assert np.flatnonzero(np.asarray(made.in_prompt)[0]).tolist() == [3]
    assert np.asarray(add(made, np.array([5], np.int32), np.array([False])).counts).sum() == 0


def test_without_penalties_no_history_is_compiled():
    assert Sampling().penalties is None
    assert not Sampling(top_p=0.9).penalties
    assert all(Sampling(**{name: 1.5}).penalties for name in ("repetition_penalty", "presence_penalty"))


@pytest.mark.parametrize(
    "changes",
    [
        {"repetition_penalty": 1.7, "presence_penalty": 0.2, "frequency_penalty": 0.4},
        pytest.param({"presence_penalty": 2.0}, marks=pytest.mark.slow),
        pytest.param({"frequency_penalty": 0.7}, marks=pytest.mark.slow),
    ],
)
def test_generate_equals_a_loop_over_tokens(model, changes):
    """Greedy decoding of two rows, each compared with the model on the whole text and the penalties by hand."""
    sampling = Sampling(temperature=0.0, **changes)
    rows = generate(*model, PROMPTS, max_new_tokens=9, sampling=sampling)
    assert rows != generate(*model, PROMPTS, max_new_tokens=9, sampling=Sampling(temperature=0.0))
    texts = np.zeros((2, 16), np.int32)
    for text, prompt, row in zip(texts, PROMPTS, rows, strict=True):
        text[: len(prompt) + len(row)] = [*prompt, *row]
    both = np.asarray(jax.jit(model[0].apply)({"params": model[1]}, texts))
    for logits, prompt, row in zip(both, PROMPTS, rows, strict=True):
        for i, token in enumerate(row):
            expected = by_hand(logits[len(prompt) + i - 1], prompt, row[:i], sampling)
            assert expected[token] > expected.max() - 1e-4


def test_log_probabilities_include_the_penalties():
    logits = np.random.default_rng(0).normal(size=(3, VOCAB)).astype(np.float32)
    expected = logits[np.arange(3), [4, 0, 9]] - np.logaddexp.reduce(logits.astype(np.float64), -1)
    found = jax.jit(log_probabilities)(logits, np.array([4, 0, 9], np.int32))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_rejects_penalties_where_unsupported(model):
    with pytest.raises(ConfigError, match="sample can't apply penalties"):
        sample(jnp.zeros((1, VOCAB)), jax.random.key(0), ALL)
    with pytest.raises(ValueError, match="penalties can't be used with slots or a draft"):
        generate(*model, PROMPTS, max_new_tokens=2, sampling=ALL, slots=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repetition_penalty": 0.0}, r"repetition_penalty.*0"),
        ({"repetition_penalty": float("inf")}, r"repetition_penalty.*0"),
        ({"presence_penalty": float("nan")}, r"presence_penalty"),
        ({"frequency_penalty": float("inf")}, r"frequency_penalty"),
    ],
)
def test_values_are_checked(changes, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(Sampling(), **changes)


@pytest.mark.parity
def test_the_repetition_penalty_equals_transformers():
    torch = pytest.importorskip("torch")
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = np.random.default_rng(0).normal(size=VOCAB).astype(np.float32)
    prompt, generated = [3, 4, 4], [5, 5, 3]
    theirs = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[*prompt, *generated]]), torch.tensor(logits)[None])
    only = Sampling(repetition_penalty=1.7).penalties
    ours = jax.jit(penalized)(logits[None], history(prompt, generated), only)
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-6)
