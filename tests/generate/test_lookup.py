"""Prompt lookup: the proposals are those of a plain search, and the text is that without proposals."""

import random

import jax
import numpy as np
import pytest
from chat_parts import drawn_params

from transformer.config import ConfigError, Execution, RotaryOptions, RotaryScaling, TransformerConfig
from transformer.generate import PromptLookup, Sampling, generate
from transformer.generate._decoding import Batch
from transformer.generate._lookup import looked_up
from transformer.generate._loop import decode
from transformer.generate._sampling import SamplerParams
from transformer.generate._speculative import Proposer
from transformer.nn.models import CausalLM, Seq2Seq

VOCABULARY = 11
GREEDY = Sampling(temperature=0.0)
PROMPTS = [[1, 2, 3, 4, 1, 2], [4], [5, 6, 7, 5, 6, 7, 5], [10, 2]]


def lm(**fields):
    sizes = {"vocab_size": VOCABULARY, "d_model": 8, "num_layers": 1, "num_heads": 2, "feed_forward.d_ff": 12}
    model = CausalLM(TransformerConfig(**sizes).replace(**fields), Execution(scan=False))
    return model, drawn_params(model, 0.8)


MODEL, PARAMS = lm()


def searched(row, tokens, ngram):
    """The same proposals by a search over lists."""
    for size in range(min(ngram, len(row) - 1), 0, -1):
        for end in range(len(row) - 1, size - 1, -1):  # the last match first
            if row[end - size : end] == row[-size:]:
                whole = list(row)
                for i in range(tokens):
                    whole.append(whole[end + i])
                return whole[len(row) :]
    return [-1] * tokens


def test_proposals_equal_a_plain_search():
    draw, checked = random.Random(0), 0
    for tokens, ngram in ((1, 1), (4, 3), (7, 2)):
        rows = [[draw.randrange(draw.choice([2, 4, 60])) for _ in range(draw.randint(1, 24))] for _ in range(60)]
        # What follows a row is not read.
        text = np.array([row + [row[-1]] * (30 - len(row)) for row in rows], np.int32)
        lengths = np.array([len(row) for row in rows], np.int32)
        found = jax.jit(looked_up, static_argnums=2)(text, lengths, PromptLookup(tokens=tokens, ngram=ngram))
        wanted = [searched(row, tokens, ngram) for row in rows]
        assert found.tolist() == wanted
        checked += sum(-1 in one for one in wanted)
    assert 0 < checked < 180


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.8, top_k=5)], ids=["greedy", "drawn"])
def test_lookup_does_not_change_the_text(sampling):
    options = {"max_new_tokens": 40, "sampling": sampling, "seed": 3}
    plain = generate(MODEL, PARAMS, PROMPTS, **options)
    lookup = PromptLookup(tokens=3, ngram=2)
    assert generate(MODEL, PARAMS, PROMPTS, **options, draft=lookup) == plain
    for end in {row[20] for row in plain}:
        ended = options | {"eos_id": end}
        assert generate(MODEL, PARAMS, PROMPTS, **ended, draft=lookup) == generate(MODEL, PARAMS, PROMPTS, **ended)


def test_a_repetition_saves_steps():
    """A greedy text of a tiny model repeats itself soon: then a round generates all proposals and one token more."""
    lengths = np.array([len(row) for row in PROMPTS], np.int32)
    given = Batch(np.stack([np.pad(row, (0, 16 - len(row)), mode="edge") for row in PROMPTS]).astype(np.int32), lengths)
    keys = jax.random.split(jax.random.key(0), len(PROMPTS))
    how = (keys, SamplerParams.of(GREEDY, VOCABULARY), np.array([-1], np.int32), np.int32(60))
    proposer = Proposer.of(PromptLookup(tokens=5))
    result = decode(MODEL, PARAMS, given, None, *how, cache_slots=96, new_slots=64, proposer=proposer)
    assert result.counts.tolist() == [60] * 4
    assert 59 / 6 <= result.steps.max() <= 30


def test_rejects_unsupported_models_and_options():
    seq2seq = Seq2Seq(MODEL.config)
    params = drawn_params(seq2seq, 0.4)
    with pytest.raises(ValueError, match=r"draft.*CausalLM.*Seq2Seq"):
        generate(seq2seq, params, bos_id=1, sources=[[1]], max_new_tokens=4, draft=PromptLookup())
    with pytest.raises(ValueError, match="slots and draft can't be used together"):
        generate(MODEL, PARAMS, PROMPTS, max_new_tokens=4, draft=PromptLookup(), slots=2)
    scaled, more = lm(position=RotaryOptions(scaling=RotaryScaling(kind="dynamic", factor=2.0, original_length=8)))
    with pytest.raises(ValueError, match="rotary scaling depends on the length of the text"):
        generate(scaled, more, PROMPTS, max_new_tokens=4, draft=PromptLookup())
    for changed in ({"tokens": 0}, {"ngram": -1}):
        with pytest.raises(ConfigError, match=f"{next(iter(changed))}"):
            PromptLookup(**changed)
