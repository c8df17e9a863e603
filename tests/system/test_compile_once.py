"""A second call with arrays of the same shapes compiles nothing, even if the model was loaded again; and texts of all
lengths need only few shapes.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import case as golden_case
from golden import ours
from hypothesis import given, settings
from hypothesis import strategies as st
from inference_parts import write_models
from training_recipes import initial_params, tiny_batch, tiny_recipe

from transformer.generate import Draft, Sampling, beam_search, generate
from transformer.inference import (
    SentenceSettings,
    classify,
    embed,
    open_model,
    score,
    translate_lines,
)
from transformer.inference._text_batches import PACKED, TOKENS, _batches, run_pairs
from transformer.training._step import compiled_eval_step, make_eval_step
from transformer.training.tasks._evaluation import evaluate_loss
from transformer.training.tasks._numbers import _forecasts

LONG, SHORT = "the big cat sat on the small mat under a tree", "a dog ran"
COMPILED = "/jax/core/compile/backend_compile_duration"
"""event that JAX reports for every compiled program, including those of single operations"""
_programs: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **facts: _programs.append(facts.get("fun_name", "?")) if event == COMPILED else None
)


def programs(call):
    """Return the names of the programs that a call compiles."""
    before = len(_programs)
    call()
    return _programs[before:]


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("weights"))


def test_compiled_programs_are_counted():
    """`programs` reports the programs of jit and those of operations outside of jit."""
    assert any("jit(added)" in name for name in programs(lambda: jax.jit(_named(lambda x: x + 3))(np.ones(1009))))
    assert programs(lambda: jnp.ones(1013) * 3)


def _named(function):
    function.__name__ = "added"
    return function


def _draft(opened):
    return Draft(model=opened.model, params=opened.params, tokens=2)


GREEDY, SAMPLED = Sampling(temperature=0.0), Sampling(top_k=5, temperature=0.7)
PROMPTS = [[5, 6, 7], [8], [9, 10]]
USES = {
    "load": ("encoder", lambda opened: None),
    "embed": ("encoder", lambda opened: embed(opened, [LONG, SHORT])),
    "embed, first and normalized": ("encoder", lambda opened: embed(opened, [SHORT], SentenceSettings("first", True))),
    "embed by a writer": ("writer", lambda opened: embed(opened, [LONG, SHORT])),
    "embed by an encoder-decoder": ("translator", lambda opened: embed(opened, [LONG, SHORT])),
    "classify": ("classifier", lambda opened: classify(opened, [LONG, SHORT])),
    "score": ("writer", lambda opened: score(opened, [LONG, SHORT, " ".join([LONG] * 9)])),
    "score given a source": ("translator", lambda opened: score(opened, [SHORT, LONG], [LONG, SHORT])),
    "generate greedily": (
        "writer",
        lambda opened: generate(opened.model, opened.params, PROMPTS, max_new_tokens=3, sampling=GREEDY),
    ),
    "generate in slots": (
        "writer",
        lambda opened: generate(opened.model, opened.params, PROMPTS, max_new_tokens=3, sampling=SAMPLED, slots=2),
    ),
    "generate with a draft": (
        "writer",
        lambda opened: generate(opened.model, opened.params, PROMPTS, max_new_tokens=3, draft=_draft(opened)),
    ),
    "translate": ("translator", lambda opened: list(translate_lines(opened, [SHORT, LONG], max_new_tokens=3))),
    "beam search": (
        "writer",
        lambda opened: beam_search(opened.model, opened.params, prompts=PROMPTS, eos_id=4, max_new_tokens=3),
    ),
}


SLOW = ("generate in slots", "generate with a draft", "translate")
"""uses that compile several large programs each"""


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in USES])
def test_the_second_call_compiles_nothing(directories, name):
    kind, use = USES[name]
    use(open_model(directories[kind]))
    assert programs(lambda: use(open_model(directories[kind]))) == []


def test_similar_sizes_share_programs(directories):
    """Different numbers of texts with different lengths share programs if they fit the same batch shape."""
    opened = open_model(directories["writer"])
    embed(opened, [LONG, SHORT])
    score(opened, [LONG, SHORT])
    other = [SHORT, SHORT, "the cat ran on"]  # 14 tokens; the first call had 16
    assert programs(lambda: embed(opened, other)) == []
    assert programs(lambda: score(opened, other)) == []
    assert programs(lambda: embed(opened, [LONG] * 3)) != []  # a different batch shape


def test_evaluation_compiles_once():
    recipe = tiny_recipe()
    params = initial_params(recipe.task, recipe.model)
    batches = [tiny_batch(seed=seed) for seed in (0, 1)]

    def evaluate():
        return evaluate_loss(compiled_eval_step(dataclasses.replace(recipe)), params, batches)

    loss = evaluate()
    assert programs(evaluate) == []
    step = jax.jit(make_eval_step(recipe))
    sums = [step(params, batch) for batch in batches]
    expected = sum(float(one["loss_sum"]) for one in sums) / sum(float(one["weight"]) for one in sums)
    assert loss.loss == pytest.approx(expected, rel=1e-5)


def test_forecasts_compile_once(tmp_path):
    opened = open_model(ours.write(tmp_path / "series", golden_case.golden("patchtst")["forecast"]))
    config = opened.model.config
    values = golden_case.past_values(config.series.context_length, config.series.channels)
    assert programs(lambda: _forecasts(opened.model, opened.params, values)) != []
    again = open_model(opened.directory)
    assert programs(lambda: _forecasts(again.model, again.params, values)) == []


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=80),
    st.sampled_from([None, 13, 64, 100, 300]),
    st.sampled_from([1, 64, 256, TOKENS["cpu"]]),
)
@settings(max_examples=200, deadline=None)
def test_batches_contain_every_token_once_with_its_position(lengths, longest, most):
    lengths = [min(length, longest or length) for length in lengths]
    first = itertools.accumulate([1, *lengths])  # a distinct id for each token
    texts = [(range(start, start + length),) for start, length in zip(first, lengths, strict=False)]
    seen = {}
    for numbers, batch in _batches(texts, longest, most):
        (ids,) = batch.columns
        assert longest is None or ids.shape[1] <= longest
        assert ids.size <= max(most, ids.shape[1])
        flat, real = ids.reshape(-1), 0
        for place, number in numbers.items():
            start, length = batch.starts[place], batch.lengths[place]
            assert start // ids.shape[1] == (start + length - 1) // ids.shape[1]  # within one row
            seen[number] = flat[start : start + length].tolist()
            real += length
            if batch.segments is not None:
                own = batch.segments.reshape(-1) == place + 1
                np.testing.assert_array_equal(np.flatnonzero(own), np.arange(start, start + length))
                np.testing.assert_array_equal(batch.positions.reshape(-1)[own], np.arange(length))
            else:
                assert start % ids.shape[1] == 0
        assert np.count_nonzero(ids) == real  # all other positions are padding
    assert seen == {number: list(text[0]) for number, text in enumerate(texts)}


def test_batches_have_few_sizes_and_little_padding():
    """Both for thousands of short texts, and for arbitrary numbers of texts with arbitrary lengths."""
    random, sizes = np.random.default_rng(0), set()
    for count in (1, 2, 3, 7, 40, 333, 3000):
        lengths = random.integers(4, PACKED, count)
        texts = [(range(1, 1 + length),) for length in lengths]
        shapes = [batch.columns[0].shape for _, batch in _batches(texts, 512, TOKENS["cpu"])]
        sizes |= set(shapes)
        if count > 300:
            assert sum(map(np.prod, shapes)) < 1.06 * lengths.sum()
    assert len(sizes) <= 8
    sizes = set()
    for _ in range(300):
        lengths = np.exp(random.uniform(0, np.log(512), random.integers(1, 100))).astype(int)
        batches = _batches([(range(length),) for length in lengths], 512, TOKENS["cpu"])
        sizes |= {batch.columns[0].shape for _, batch in batches}
    assert len(sizes) <= 80


def test_pairs_keep_their_order():
    random = np.random.default_rng(1)
    pairs = [
        (random.integers(1, 9, s).tolist(), random.integers(1, 9, t).tolist(), random.integers(1, 9, t).tolist())
        for s, t in random.integers(1, 50, (31, 2))
    ]
    sizes = set()

    def compute(source, lengths, tokens, follow):
        sizes.add((*source.shape, tokens.shape[1]))
        total = sum(source[:, column] * (column < lengths) for column in range(source.shape[1]))
        return total[:, None] * 10_000 + tokens * 100 + follow

    found = run_pairs(pairs, compute, limits=(None, 50), most=256)
    for (source, tokens, follow), row in zip(pairs, found, strict=True):
        np.testing.assert_array_equal(row, sum(source) * 10_000 + np.array(tokens) * 100 + np.array(follow))
    assert all(rows * max(source, target) <= 256 for rows, source, target in sizes)
    assert max(target for _, _, target in sizes) <= 50


def test_an_overflow_in_one_text_does_not_affect_others(directories):
    """Packed texts do not affect each other: the error reports only the text whose numbers are not finite."""
    opened = open_model(directories["encoder"])
    params = jax.tree.map(lambda leaf: leaf, opened.params)
    dog = opened.tokenizer.encode("dog")[0]
    table = np.array(params["embedding"]["embedding"])
    table[dog] = np.inf
    params["embedding"]["embedding"] = jax.device_put(table)
    broken = dataclasses.replace(opened, params=params)
    with pytest.raises(ValueError, match="numbers of text 1 that are not finite"):
        embed(broken, ["a big cat", SHORT])
    np.testing.assert_allclose(embed(broken, ["a big cat"]), embed(opened, ["a big cat"]), atol=1e-6)
