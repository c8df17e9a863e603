"""Texts packed into one row with segments have the loss and gradients of the same texts in separate rows."""

import functools

import jax
import numpy as np
import pytest

from transformer.config import Execution, LayerKind, LearnedOptions, MoE, RotaryOptions, StackOptions, TransformerConfig
from transformer.nn.models._kinds import example_inputs
from transformer.training import TrainingConfig
from transformer.training._step import training_loss
from transformer.training.tasks._table import TASKS

VOCABULARY, ROW = 17, 13
LENGTHS = (7, 5, 11, 2, 6, 4)
"""lengths of texts, and of targets"""
SOURCE_LENGTHS = (3, 8, 9, 4, 2, 5)
PLACES = ((0, 1), (2, 3), (4, 5))
"""which texts share a row"""
LOSS = TrainingConfig(label_smoothing=0.1, z_loss=0.01)


def texts(seed, lengths):
    random = np.random.default_rng(seed)
    return [random.integers(3, VOCABULARY, length) for length in lengths]


def laid_out(rows, groups):
    """Pack the rows of each group one after another; return ids, segments (0: padding) and positions."""
    found = np.zeros((3, len(groups), ROW), np.int32)
    for group, members in enumerate(groups):
        start = 0
        for segment, member in enumerate(members, start=1):
            place = slice(start, start + len(rows[member]))
            found[:, group, place] = rows[member], np.full(len(rows[member]), segment), np.arange(len(rows[member]))
            start = place.stop
    return found


def batch(task, packed):
    """Return a batch of all texts, in separate rows or packed, with different weights."""
    groups = PLACES if packed else [(number,) for number in range(len(LENGTHS))]
    tokens, segments, positions = laid_out(texts(0, LENGTHS), groups)
    made = {
        "tokens": tokens,
        "targets": laid_out(texts(1, LENGTHS), groups)[0],
        "weights": np.where(segments, 1 + laid_out(texts(2, LENGTHS), groups)[0] % 3, 0).astype(np.float32),
    }
    if packed:
        made |= {"segment_ids": segments, "positions": positions}
    if task == "seq2seq":
        made["source"], source_segments, source_positions = laid_out(texts(3, SOURCE_LENGTHS), groups)
        if packed:
            made |= {"source_segment_ids": source_segments, "source_positions": source_positions}
        else:
            made["source_lengths"] = np.array(SOURCE_LENGTHS, np.int32)
    return made


@functools.cache
def model_and_loss(task, position, kind=LayerKind()):
    """Return a jitted function: batch -> ((loss with router losses, sum of weights), gradients of the loss).

    All parameters are random, so that each has an effect.
    """
    sizes = {"vocab_size": VOCABULARY, "d_model": 8, "num_heads": 2, "num_layers": 1, "feed_forward.d_ff": 12}
    config = TransformerConfig(
        **sizes,
        position=position,
        stack=StackOptions(period=(kind,)),
    )
    model = TASKS[task].model(config, Execution(scan=False))
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), *example_inputs(model)))["params"]
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jax.device_put((random.normal(size=leaf.shape) / 2).astype(leaf.dtype)), shapes)

    def loss(params, batch):
        loss, weight, routers = training_loss(task, model, params, batch, LOSS, None)
        return loss if routers is None else loss + routers, weight

    loss = jax.value_and_grad(loss, has_aux=True)
    return functools.partial(jax.jit(loss), params)


ROUTED = LayerKind(moe=MoE(num_experts=3, load_balance_weight=1.0, router_z_weight=1.0))


@pytest.mark.default_cases(1)
@pytest.mark.parametrize(
    ("task", "position", "kind"),
    [
        ("causal_lm", RotaryOptions(), LayerKind()),
        ("causal_lm", LearnedOptions(max_length=ROW), LayerKind()),
        pytest.param("seq2seq", RotaryOptions(), ROUTED, marks=pytest.mark.slow),
        ("seq2seq", LearnedOptions(max_length=ROW), LayerKind()),
    ],
)
def test_packed_loss_and_gradients_equal_separate_rows(task, position, kind):
    loss = model_and_loss(task, position, kind)
    (packed, weight), gradients = loss(batch(task, packed=True))
    (alone, same_weight), wanted = loss(batch(task, packed=False))
    assert weight == same_weight > sum(LENGTHS)
    np.testing.assert_allclose(packed, alone, rtol=1e-5)
    # Tolerance relative to the largest gradient: the gradient of a key bias is only rounding error.
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(wanted))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * largest), gradients, wanted)


@pytest.mark.parametrize("name", ["segment_ids", "source_segment_ids", "positions", "source_positions"])
def test_each_part_of_a_packed_batch_is_needed(name):
    """With learned positions, which are absolute; rotary positions only encode distances."""
    loss, right = model_and_loss("seq2seq", LearnedOptions(max_length=ROW)), batch("seq2seq", packed=True)
    wrong = right | {
        name: np.minimum(right[name], 1) if "segment" in name else np.tile(np.arange(ROW), (len(PLACES), 1))
    }
    assert abs(loss(wrong)[0][0] / loss(right)[0][0] - 1) > 1e-4
