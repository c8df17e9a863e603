"""Speculative decoding: a draft changes the run time but not the generated tokens, for any draft and sampling."""

import dataclasses

import jax
import numpy as np
import pytest
from chat_parts import drawn_params

from transformer.config import ConfigError, Execution, LearnedOptions, TransformerConfig
from transformer.generate import Draft, Sampling, generate
from transformer.generate._decoding import Batch
from transformer.generate._loop import decode
from transformer.generate._sampling import SamplerParams
from transformer.generate._speculative import Proposer
from transformer.nn.models import CausalLM, Seq2Seq

VOCABULARY = 11
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [10, 2]]
GREEDY = Sampling(temperature=0.0)


def lm(seed, **fields):
    sizes = {"vocab_size": VOCABULARY, "d_model": 8, "num_layers": 2, "num_heads": 2, "feed_forward.d_ff": 12}
    model = CausalLM(TransformerConfig(**(sizes | fields)), Execution(scan=bool(seed % 2)))
    # Sharper than the initial distribution, so that a draft agrees with the model on some tokens and not on others.
    return model, drawn_params(model, 0.8, seed)


MODEL, PARAMS = lm(0)
OTHER = Draft(model=lm(1, num_layers=1)[0], params=lm(1, num_layers=1)[1], tokens=3)
DRAFTS = {"another": OTHER, "itself": Draft(model=MODEL, params=PARAMS, tokens=2)}


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.8, top_k=5)], ids=["greedy", "drawn"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_speculation_does_not_change_the_text(draft, sampling):
    plain = generate(MODEL, PARAMS, PROMPTS, max_new_tokens=12, sampling=sampling, seed=3)
    found = generate(MODEL, PARAMS, PROMPTS, max_new_tokens=12, sampling=sampling, seed=3, draft=DRAFTS[draft])
    assert found == plain
    # Use a late token as the end token: it ends the row even if later proposals were accepted.
    for end in {row[7] for row in plain}:
        options = {"max_new_tokens": 12, "sampling": sampling, "seed": 3, "eos_id": end}
        assert generate(MODEL, PARAMS, PROMPTS, **options, draft=DRAFTS[draft]) == generate(
            MODEL, PARAMS, PROMPTS, **options
        )


def learned(rows):
    model, params = lm(0, position=LearnedOptions(max_length=rows))
    return Draft(model=model, params=params, tokens=3)


@pytest.mark.slow
def test_proposals_beyond_the_position_table_have_no_effect():
    large, small = learned(12), learned(14)
    options = {"max_new_tokens": 7, "sampling": GREEDY}
    plain = generate(large.model, large.params, PROMPTS, **options)
    for draft in (small, large):
        assert generate(large.model, large.params, PROMPTS, **options, draft=draft) == plain


def rounds(draft, tokens, new=13):
    lengths = np.array([len(row) for row in PROMPTS], np.int32)
    given = Batch(np.stack([np.pad(row, (0, 16 - len(row)), mode="edge") for row in PROMPTS]).astype(np.int32), lengths)
    keys = jax.random.split(jax.random.key(0), len(PROMPTS))
    ends, limit = np.array([-1], np.int32), np.int32(new)
    how = (keys, SamplerParams.of(GREEDY, VOCABULARY), ends, limit)
    proposals = {"proposer": Proposer.of(dataclasses.replace(draft, tokens=tokens)), "draft_params": draft.params}
    result = decode(MODEL, PARAMS, given, None, *how, cache_slots=48, new_slots=16, **proposals)
    return int(result.steps.max())


def test_accepted_proposals_save_steps():
    assert rounds(DRAFTS["itself"], 3) == 3  # one token from the prefill, then four per round
    assert rounds(DRAFTS["itself"], 5) == 2
    assert 3 < rounds(OTHER, 3) <= 12


def test_batched_rows_equal_single_rows():
    together = generate(MODEL, PARAMS, PROMPTS, max_new_tokens=9, sampling=GREEDY, draft=OTHER)
    alone = [generate(MODEL, PARAMS, [row], max_new_tokens=9, sampling=GREEDY, draft=OTHER)[0] for row in PROMPTS]
    assert together == alone


@pytest.mark.slow
def test_non_finite_values_are_named():
    broken = jax.tree.map(lambda leaf: leaf, PARAMS)
    broken["decoder"]["final_norm"]["scale"] = broken["decoder"]["final_norm"]["scale"] * np.float32(np.nan)
    with pytest.raises(ValueError, match=r"0.*3.*decoder/final_norm/scale"):
        generate(MODEL, broken, PROMPTS, max_new_tokens=4, draft=OTHER)
    # A draft whose proposals are always wrong is no error.
    hopeless = Draft(model=MODEL, params=broken)
    plain = generate(MODEL, PARAMS, PROMPTS, max_new_tokens=4, sampling=GREEDY)
    assert generate(MODEL, PARAMS, PROMPTS, max_new_tokens=4, sampling=GREEDY, draft=hopeless) == plain


def test_rejects_a_draft_that_does_not_fit():
    other = Draft(model=lm(0, vocab_size=12)[0], params=lm(0, vocab_size=12)[1])
    with pytest.raises(
        ValueError,
        match=r"\(11 tokens\).*12",
    ):
        generate(MODEL, PARAMS, PROMPTS, max_new_tokens=4, draft=other)
    short = learned(8)
    with pytest.raises(ValueError, match=r"prompt 2 has 5 tokens, 9 with 4 new ones, but .* only 8"):
        generate(MODEL, PARAMS, PROMPTS, max_new_tokens=4, draft=short)
    seq2seq = Seq2Seq(MODEL.config)
    params = drawn_params(seq2seq, 0.4)
    with pytest.raises(ValueError, match=r"draft.*CausalLM.*Seq2Seq"):
        generate(seq2seq, params, bos_id=1, sources=[[1]], max_new_tokens=4, draft=OTHER)
    with pytest.raises(ConfigError, match=r"draft.*CausalLM.*Seq2Seq"):
        Draft(model=seq2seq, params=params)
    with pytest.raises(ConfigError, match="tokens of a draft must be an integer of at least 1, got 0"):
        Draft(model=MODEL, params=PARAMS, tokens=0)
