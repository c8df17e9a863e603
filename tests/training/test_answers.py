"""Exact match of answers in conversations: equal to a count by hand, and to greedy decoding."""

import functools

import jax
import numpy as np
import pytest
from numeric_parts import random_params, random_values
from training_recipes import short_recipe

from transformer.config import FeedForwardOptions, TransformerConfig
from transformer.data import NumberChat, prepare
from transformer.generate import Sampling, generate
from transformer.nn.models import CausalLM
from transformer.training._recipe import build_model, with_vocabulary
from transformer.training._state import abstract_state
from transformer.training._step import make_eval_step
from transformer.training.tasks._evaluation import EvalLoss, evaluate_loss
from transformer.training.tasks._log_probabilities import answer_sums, exact_answers
from transformer.training.tasks._table import TASKS


def counted(right, weights, segments):
    """Count (exact answers, answers) with loops."""
    exact = answers = 0
    for row in range(len(right)):
        place = 0
        while place < len(right[row]):
            if weights[row, place] == 0:
                place += 1
                continue
            end = place
            while end < len(right[row]) and weights[row, end] > 0 and segments[row, end] == segments[row, place]:
                end += 1
            answers += 1
            exact += bool(right[row, place:end].all())
            place = end
    return exact, answers


@pytest.mark.parametrize("seed", range(5))
def test_answers_are_contiguous_targets_in_one_segment(seed):
    draw = np.random.default_rng(seed)
    right, weights = draw.random((7, 31)) < 0.8, (draw.random((7, 31)) < 0.6).astype(np.float32)
    segments = np.sort(draw.integers(0, 5, (7, 31)), axis=1).astype(np.int32)
    count = jax.jit(exact_answers)
    found = count(right, weights, segments)
    assert tuple(map(float, found)) == counted(right, weights, segments)
    alone = count(right, weights)
    assert tuple(map(float, alone)) == counted(right, weights, np.zeros_like(segments))
    assert 0 < found[0] < found[1]


def test_an_exact_match_equals_the_greedy_output():
    """The references of half the rows are what the model writes; those of the others differ in one token."""
    config = TransformerConfig(
        vocab_size=13, d_model=8, num_heads=2, num_layers=1, feed_forward=FeedForwardOptions(d_ff=8)
    )
    model, draw = CausalLM(config), np.random.default_rng(0)
    params = random_params(model, np.zeros((1, 1), int))["params"]
    prompts = draw.integers(0, 13, (6, 5))
    answers = np.array(generate(model, params, prompts.tolist(), max_new_tokens=4, sampling=Sampling(temperature=0.0)))
    for row, place in ((1, 0), (3, 2), (5, 3)):
        answers[row, place] = (answers[row, place] + 1) % 13
    texts = np.concatenate([prompts, answers], 1)
    weights = np.zeros((6, 8), np.float32)
    weights[:, 4:] = 1
    batch = {"targets": texts[:, 1:], "weights": weights}
    sums = jax.jit(functools.partial(answer_sums, model))(params, {"tokens": texts[:, :-1]}, batch)
    assert (float(sums["exact_answers"]), float(sums["answers"])) == (3, 6)


def chat_recipe():
    data = NumberChat(train_examples=20, validation_examples=60, test_examples=20, batch_size=4, eval_batch_size=8)
    model = TransformerConfig(
        d_model=8, num_heads=2, num_layers=1, feed_forward=FeedForwardOptions(d_ff=8), dropout_rate=0.0
    )
    return short_recipe("chat", model, data)


def test_evaluation_counts_all_answers_of_packed_conversations():
    recipe = chat_recipe()
    dataset = prepare(recipe.data)
    recipe = with_vocabulary(recipe, dataset.tokenizer.vocab_size)
    params, batches = random_values(abstract_state(recipe).params), dataset.eval_batches()
    step = jax.jit(make_eval_step(recipe))
    sums = [step(params, batch) for batch in batches]
    assert sum(float(one["answers"]) for one in sums) == 60
    assert len(batches[0]["tokens"]) * len(batches) < 60  # packed
    result = evaluate_loss(step, params, batches)
    assert result.others == {"exact_match": 0.0}
    assert str(result).endswith("exact match 0.00 %")

    @jax.jit
    def of_tokens(params, batch):
        """The loss and the accuracy, as for running text."""
        logits = TASKS["sft"].forward(build_model(recipe), {"params": params}, batch, deterministic=True)
        loss, weight = TASKS["sft"].loss(logits, batch, None)
        return {"loss_sum": loss, "weight": weight, **TASKS["sft"].measures(logits, batch)}

    for name, value in of_tokens(params, batches[0]).items():
        np.testing.assert_allclose(sums[0][name], value, rtol=1e-5)


def test_shares_are_printed_in_percent():
    text = str(EvalLoss(0.5, 10.0, 0.25, others={"reward_margin": 0.75, "prefers_chosen": 0.9}))
    assert text == "loss 0.5000, accuracy 25.00 %, reward margin 0.7500, prefers chosen 90.00 %"
