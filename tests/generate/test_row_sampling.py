"""Sampling in slots: each row is sampled with its own settings, as `choose` samples a batch with them alone."""

import dataclasses

import jax
import numpy as np
import pytest

from transformer.generate import Sampling
from transformer.generate._penalties import History
from transformer.generate._rows import RowMasks, RowSampling, choose_in_rows
from transformer.generate._sampling import SamplerParams, choose

VOCABULARY, SLOTS = 37, 64
SETTINGS = {
    "greedy": Sampling(temperature=0.0),
    "temperature": Sampling(temperature=2.5),
    "top_k": Sampling(temperature=1.5, top_k=2),
    "top_p": Sampling(temperature=1.5, top_p=0.3),
    "min_p": Sampling(temperature=1.5, min_p=0.4),
    "min_p with top_k": Sampling(temperature=1.5, top_k=20, min_p=0.4),
    "repetition_penalty": Sampling(temperature=0.0, repetition_penalty=3.0),
    "presence_penalty": Sampling(temperature=0.0, presence_penalty=4.0),
    "frequency_penalty": Sampling(temperature=0.0, frequency_penalty=2.0),
    "a negative penalty": Sampling(temperature=0.0, frequency_penalty=-3.0),
    "all": Sampling(
        top_k=12, top_p=0.9, min_p=0.05, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.3
    ),
}
PLAIN = Sampling(temperature=1.0)


def inputs():
    """Return logits, keys and histories of the slots, which differ."""
    random = np.random.default_rng(0)
    history = History(random.random((SLOTS, VOCABULARY)) < 0.3, random.integers(0, 3, (SLOTS, VOCABULARY)))
    logits = random.normal(0, 2, (SLOTS, VOCABULARY)).astype(np.float32)
    return logits, jax.random.split(jax.random.key(1), SLOTS), jax.tree.map(np.asarray, history)


def in_rows(samplings, masks, suppressed=()):
    """Sample one token in each slot with the settings of its row."""
    logits, keys, history = inputs()
    rows = [RowSampling.of(sampling, VOCABULARY, top=False) for sampling in samplings]
    rows = jax.tree.map(lambda *leaves: np.stack(leaves), *rows)
    return np.asarray(choose_all(logits, keys, rows, history, masks, np.array(suppressed, np.int32)))


choose_all = jax.jit(choose_in_rows)
ALL = RowMasks.blank(SLOTS, VOCABULARY)


@pytest.mark.programs(30, reason="one program of `choose` for each set of filters, which the slots are compared with")
def test_settings_per_row_equal_settings_per_batch():
    """Alone in all slots, and in slots between others: the same tokens; and each setting changes some of them."""
    logits, keys, history = inputs()
    alone = {}
    for name, sampling in SETTINGS.items():
        choice = SamplerParams.of(sampling, VOCABULARY)
        alone[name] = np.asarray(jax.jit(choose)(logits, keys, choice, history))
        np.testing.assert_array_equal(in_rows([sampling] * SLOTS, ALL), alone[name], err_msg=name)
        without = Sampling(temperature=sampling.temperature)
        assert sampling == without or (alone[name] != in_rows([without] * SLOTS, ALL)).any(), name
    names = list(SETTINGS)
    mixed = in_rows([SETTINGS[names[slot % len(names)]] for slot in range(SLOTS)], ALL)
    assert mixed.tolist() == [alone[names[slot % len(names)]][slot] for slot in range(SLOTS)]


def test_only_allowed_tokens_are_sampled_in_rows_with_a_constraint():
    """Together with a penalty, with suppressed tokens, and next to rows without a constraint."""
    allowed = np.zeros((SLOTS, ALL.allowed.shape[1] * 32), bool)
    allowed[:, [3, 5, 8]] = True
    words = np.packbits(allowed, axis=1, bitorder="little").view(np.uint32)
    constrained = np.arange(SLOTS) % 2 == 0
    masks = RowMasks(constrained, np.where(constrained[:, None], words, ALL.allowed))
    sampling = Sampling(temperature=3.0, presence_penalty=0.5)
    found = in_rows([sampling] * SLOTS, masks, suppressed=[5])
    assert set(found[constrained]) == {3, 8}
    free = in_rows([sampling] * SLOTS, ALL, suppressed=[5])
    np.testing.assert_array_equal(found[~constrained], free[~constrained])
    assert 5 in in_rows([sampling] * SLOTS, ALL)
    assert 5 not in free


def test_rows_keep_every_field_of_a_sampling():
    """A field that `RowSampling` does not store would be the same for all requests of a server."""
    filters = {"temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.5}
    changed = filters | {"repetition_penalty": 2.0, "presence_penalty": 1.0, "frequency_penalty": 1.0}
    fields = {field.name for field in dataclasses.fields(Sampling)} - {"suppress"}  # an argument of the server
    assert set(changed) == fields
    plain = jax.tree.leaves(RowSampling.of(PLAIN, VOCABULARY, top=False))
    for name, value in changed.items():
        other = jax.tree.leaves(RowSampling.of(dataclasses.replace(PLAIN, **{name: value}), VOCABULARY, top=False))
        assert any(a != b for a, b in zip(plain, other, strict=True)), name
