"""Continuous batching: rows do not depend on the number of slots, and little is computed for ended rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chat_parts import drawn_params

from transformer.config import Execution, FeedForwardOptions, TransformerConfig
from transformer.generate import Draft, Sampling, generate
from transformer.generate import _continuous as continuous
from transformer.generate._layers import unstack_layers, unstacked_model
from transformer.generate._loop import DecodeResult, Slots, Stepper
from transformer.generate._sampling import SamplerParams
from transformer.nn.models import CausalLM, Seq2Seq

VOCABULARY = 11
CONFIG = TransformerConfig(
    vocab_size=VOCABULARY, d_model=8, num_layers=1, num_heads=2, feed_forward=FeedForwardOptions(d_ff=12)
)
MODEL = CausalLM(CONFIG, Execution(scan=False))
PARAMS = drawn_params(MODEL, 0.3, seed=2)
RANDOM = np.random.default_rng(0)
PROMPTS = [RANDOM.integers(0, VOCABULARY, length).tolist() for length in (3, 20, 1, 7, 5, 18, 2, 4, 9)]


@pytest.mark.programs(36, reason="rows are moved between slots outside of jit")
@pytest.mark.parametrize(
    "slots", [pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(20, marks=pytest.mark.slow)]
)
def test_continuous_batching_equals_one_static_batch(slots):
    for options in ({"sampling": Sampling(temperature=0.0)}, {"seed": 5}, {"seed": list(range(9))}):
        plain = generate(MODEL, PARAMS, PROMPTS, max_new_tokens=10, eos_id=3, **options)
        assert generate(MODEL, PARAMS, PROMPTS, max_new_tokens=10, eos_id=3, slots=slots, **options) == plain
    assert len({len(row) for row in plain}) > 2  # the test needs rows that end at different times


@pytest.mark.programs(30, reason="rows are moved between slots outside of jit")
def test_slots_are_refilled(monkeypatch):
    """The slots of ended rows are used by other prompts, which takes fewer steps than fixed batches of that size."""
    ends = [3, 5]
    lengths = [len(row) for row in generate(MODEL, PARAMS, PROMPTS, max_new_tokens=40, eos_id=ends, seed=3)]
    assert max(lengths) > 4 * np.median(lengths)
    steps, original = [], continuous.continue_decoding

    def counting(stepper, state, *rest):
        before = np.array(state.result.counts), np.array(state.running)
        state = original(stepper, state, *rest)
        steps.append(int((np.array(state.result.counts) - before[0])[before[1]].max(initial=0)))
        return state

    monkeypatch.setattr(continuous, "continue_decoding", counting)
    generate(MODEL, PARAMS, PROMPTS, max_new_tokens=40, eos_id=ends, seed=3, slots=3)
    longest_first = sorted(range(len(PROMPTS)), key=lambda n: -len(PROMPTS[n]))
    batches = sum(max(lengths[n] for n in longest_first[start : start + 3]) for start in range(0, 9, 3))
    assert sum(steps) < batches


@pytest.mark.slow
def test_works_with_scanned_layers_and_other_kernels():
    plain = generate(MODEL, PARAMS, PROMPTS, max_new_tokens=5)
    scanned = CausalLM(CONFIG, Execution(scan=True, attention="splash"))
    assert generate(scanned, PARAMS, PROMPTS, max_new_tokens=5, slots=4) == plain


@pytest.mark.programs(22, reason="rows are moved between slots outside of jit")
def test_non_finite_values_are_named():
    broken = {**PARAMS, "embedding": jax.tree.map(np.copy, PARAMS["embedding"])}
    (table,) = jax.tree.leaves(broken["embedding"])
    table[7] = np.nan
    rows = [row for row in PROMPTS if 7 not in row][:2] + [[7]]
    with pytest.raises(ValueError, match=r"\d+.*embedding/embedding"):
        generate(MODEL, broken, rows, max_new_tokens=5, slots=1)


def test_rejects_unsupported_models_and_options():
    with pytest.raises(ValueError, match=r"slots.*1.*, got 0"):
        generate(MODEL, PARAMS, PROMPTS, max_new_tokens=2, slots=0)
    with pytest.raises(ValueError, match=r"slots and draft can't be used together"):
        generate(MODEL, PARAMS, PROMPTS, max_new_tokens=2, slots=2, draft=Draft(model=MODEL, params=PARAMS))
    seq2seq = Seq2Seq(CONFIG)
    params = drawn_params(seq2seq, 0.4)
    with pytest.raises(ValueError, match=r"slots.*CausalLM.*Seq2Seq.*beam_search_all"):
        generate(seq2seq, params, bos_id=1, sources=[[1], [2]], max_new_tokens=2, slots=1)


def test_free_slots_are_filled_before_the_next_step():
    """A row that ends at its first token frees its slot immediately."""
    choice = SamplerParams.of(Sampling(temperature=0.0), VOCABULARY)
    model = unstacked_model(MODEL)
    params = {**PARAMS, "decoder": unstack_layers(MODEL, PARAMS["decoder"])}

    @jax.jit
    def counts(running, prompts_wait):
        state = Slots(
            tokens=jnp.zeros((2,), jnp.int32),
            running=running,
            keys=jax.random.split(jax.random.key(0), 2),
            cache=model.init_cache(2, 16),
            result=DecodeResult.blank(2, 8),
        )
        stepper = Stepper(model, params, choice, jnp.array([-1]), jnp.array(5))
        return continuous.continue_decoding(stepper, state, prompts_wait).result.counts

    def steps(running, prompts_wait):
        return counts(np.array(running), np.array(prompts_wait)).tolist()

    assert steps([True, True], True) == steps([True, True], False) == [5, 5]
    assert steps([False, True], False) == [0, 5]
    assert steps([False, True], True) == [0, 0]
