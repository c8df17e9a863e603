"""Texts in pieces: the tokens of `generate`, a cache that is used again, and few compiled programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chat_parts import drawn_params

from transformer.config import (
    EmbeddingOptions,
    LayerKind,
    LearnedOptions,
    ParameterOptions,
    RotaryOptions,
    RotaryScaling,
    T5BiasOptions,
    TransformerConfig,
)
from transformer.config._progress import showing
from transformer.generate import Sampling, TokenStream, generate
from transformer.generate import _streaming as streaming
from transformer.nn.models import CausalLM, Seq2Seq

GREEDY = Sampling(temperature=0.0)
pytestmark = pytest.mark.programs(14, reason="a stream has own programs, and makes its cache outside of jit")
SIZES = {
    "vocab_size": 31,
    "d_model": 22,
    "num_layers": 2,
    "feed_forward.d_ff": 13,
    "num_heads": 6,
    "attention.num_kv_heads": 3,
}
BASE = TransformerConfig(
    **SIZES,
    **{"attention.head_dim": 4, "attention.value_dim": 5},
    position=RotaryOptions(),
    embedding=EmbeddingOptions(tie=False),
    parameters=ParameterOptions(initializer_range=0.4),
)
CONFIGS = {
    "rotary": BASE.replace(num_layers=1),
    "window": BASE.replace(**{"stack.period": (LayerKind(window=3), LayerKind())}),
    "learned, full table": BASE.replace(position=LearnedOptions(max_length=46)),
    "t5": BASE.replace(position=T5BiasOptions()),
}
PROMPTS = [[3, 1, 4, 1, 5], [int(i) for i in np.random.default_rng(0).integers(0, 31, 37)]]


def build(name):
    model = CausalLM(CONFIGS[name])
    return model, drawn_params(model, 0.4, seed=1)


@pytest.fixture(scope="module")
def rotary():
    return build("rotary")


def joined(pieces):
    pieces = list(pieces)
    return [token for piece in pieces for token in piece.tokens], pieces


@pytest.mark.parametrize(
    "name", ["learned, full table", *(pytest.param(n, marks=pytest.mark.slow) for n in ("rotary", "window", "t5"))]
)
def test_chunks_equal_the_tokens_of_generate(name):
    """Prompts are read in parts of 16 tokens, with padding up to and past the end of a position table."""
    model, params = build(name)
    stream = TokenStream(model, params)
    for prompt in PROMPTS:
        expected = generate(model, params, [prompt], max_new_tokens=9, sampling=GREEDY)[0]
        assert joined(stream.generate(prompt, max_new_tokens=9, sampling=GREEDY))[0] == expected


@pytest.mark.filterwarnings("ignore:a text grew past 20 tokens")
@pytest.mark.programs(16, reason="three lengths of text, which decide the rotation, by a stream, generate and apply")
def test_a_prompt_beyond_the_original_length_is_read_in_one_pass(monkeypatch):
    """Rotary scaling by the length rotates all keys of a prompt by its whole length, and other ones in a next turn."""
    monkeypatch.setattr(streaming, "WIDTHS", (16,))
    scaling = RotaryScaling(kind="dynamic", factor=4.0, original_length=20)
    model = CausalLM(BASE.replace(num_layers=1, **{"position.scaling": scaling}))
    params = build("rotary")[1]
    stream, apply = TokenStream(model, params), jax.jit(model.apply)
    for prompt in (PROMPTS[1][:18], PROMPTS[1][:34], [*PROMPTS[1], *PROMPTS[0]]):
        expected = generate(model, params, [prompt], max_new_tokens=9, sampling=GREEDY)[0]
        got, pieces = joined(stream.generate(prompt, max_new_tokens=9, sampling=GREEDY))
        assert got == expected
        whole = np.asarray(apply({"params": params}, np.array([prompt])), np.float64)[0, -1]
        expected = whole[got[0]] - np.logaddexp.reduce(whole)
        np.testing.assert_allclose(pieces[0].log_probabilities[0], expected, atol=1e-5)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(repetition_penalty=1.5, presence_penalty=0.4, top_k=9),
        pytest.param(Sampling(), marks=pytest.mark.slow),
        pytest.param(Sampling(temperature=0.7, top_k=5, suppress=(3,)), marks=pytest.mark.slow),
    ],
)
def test_sampling_equals_generate(rotary, sampling):
    options = {"max_new_tokens": 40, "sampling": sampling, "seed": 5, "eos_id": [7, 8]}
    expected = generate(*rotary, [PROMPTS[0]], **options)[0]
    got, pieces = joined(TokenStream(*rotary).generate(PROMPTS[0], **options))
    assert got == expected
    assert pieces[-1].ended == (len(expected) < 40)
    assert not any(piece.ended for piece in pieces[:-1])


def test_log_probabilities_equal_a_pass_over_the_whole_text(rotary):
    model, params = rotary
    got, pieces = joined(TokenStream(*rotary).generate(PROMPTS[1], max_new_tokens=12, sampling=Sampling(top_p=0.5)))
    logits = np.asarray(jax.jit(model.apply)({"params": params}, np.array([[*PROMPTS[1], *got]])), np.float64)[0, 36:48]
    expected = logits[np.arange(12), got] - np.logaddexp.reduce(logits, -1)
    np.testing.assert_allclose([p for piece in pieces for p in piece.log_probabilities], expected, atol=1e-5)


def test_the_next_turn_reads_only_its_new_tokens(rotary, monkeypatch):
    read, original = [], streaming.read_part

    def recorded(model, params, tokens, before, count, cache, images):
        read.append((int(before[0]), int(count[0])))
        return original(model, params, tokens, before, count, cache)

    monkeypatch.setattr(streaming, "read_part", recorded)
    stream = TokenStream(*rotary)
    first, _ = joined(stream.generate(PROMPTS[1], max_new_tokens=9, sampling=GREEDY))
    turn = [*PROMPTS[1], *first, 5, 6]
    second, _ = joined(stream.generate(turn, max_new_tokens=9, sampling=GREEDY))
    assert read == [(0, 37), (46, 2)]
    assert second == generate(*rotary, [turn], max_new_tokens=9, sampling=GREEDY)[0]
    other = [*PROMPTS[1][:20], 1, 2, 3]  # a text that differs earlier
    third, _ = joined(stream.generate(other, max_new_tokens=9, sampling=GREEDY))
    assert read[2:] == [(20, 3)]
    assert third == generate(*rotary, [other], max_new_tokens=9, sampling=GREEDY)[0]
    stream.forget()
    joined(stream.generate(other, max_new_tokens=1))
    assert read[3:] == [(0, 23)]


def test_reading_a_long_prompt_reports_progress(rotary, monkeypatch):
    monkeypatch.setattr(streaming, "WIDTHS", (16,))
    seen = []
    with showing(lambda *progress: seen.append(progress[:3])):
        joined(TokenStream(*rotary).generate(PROMPTS[1], max_new_tokens=1))
    assert seen == [("prompt tokens", float(done), 37) for done in (0, 16, 32, 37)]


def test_a_stream_can_be_abandoned_at_any_chunk(rotary):
    stream = TokenStream(*rotary)
    pieces = stream.generate(PROMPTS[0], max_new_tokens=30, sampling=GREEDY)
    started = next(pieces).tokens
    pieces.close()
    expected = generate(*rotary, [PROMPTS[0]], max_new_tokens=30, sampling=GREEDY)[0]
    assert started == expected[: len(started)]
    assert joined(stream.generate(PROMPTS[0], max_new_tokens=30, sampling=GREEDY))[0] == expected


def test_an_old_stream_cannot_continue_after_a_new_one_starts(rotary):
    stream = TokenStream(*rotary)
    first = stream.generate(PROMPTS[0], max_new_tokens=30, sampling=GREEDY)
    next(first)
    second = stream.generate(PROMPTS[1], max_new_tokens=30, sampling=GREEDY)
    started = next(second).tokens
    with pytest.raises(RuntimeError, match="TokenStream"):
        next(first)
    rest, _ = joined(second)
    assert [*started, *rest] == generate(*rotary, [PROMPTS[1]], max_new_tokens=30, sampling=GREEDY)[0]
    third = stream.generate(PROMPTS[1], max_new_tokens=30, sampling=GREEDY)
    next(third)
    stream.forget()
    with pytest.raises(RuntimeError, match="its cache was dropped"):
        next(third)


def test_an_interruption_within_a_chunk_loses_only_the_cache(rotary, monkeypatch):
    stream = TokenStream(*rotary)

    def interrupted(*given):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(streaming, "_advance", interrupted)
        with pytest.raises(KeyboardInterrupt):
            joined(stream.generate(PROMPTS[0], max_new_tokens=5))
    expected = generate(*rotary, [PROMPTS[0]], max_new_tokens=5, sampling=GREEDY)[0]
    assert joined(stream.generate(PROMPTS[0], max_new_tokens=5, sampling=GREEDY))[0] == expected


@pytest.mark.slow
def test_few_programs_are_compiled(rotary):
    """One program for each width of a prompt and one that generates, for each size of the cache."""
    read, advance = streaming.read_part._cache_size(), streaming._advance._cache_size()
    stream = TokenStream(*rotary)
    for length in (1, 5, 16, 17, 50, 64, 100, 200):
        joined(stream.generate(PROMPTS[1] * 6 if length > 199 else [1] * length, max_new_tokens=20, sampling=GREEDY))
    assert streaming.read_part._cache_size() - read <= 3  # 16, 64 and 256 tokens
    assert streaming._advance._cache_size() - advance <= 1


def test_a_long_prompt_is_read_in_parts():
    assert list(streaming._parts(0, 5, 256)) == [(0, 5, 16)]
    assert list(streaming._parts(3, 2100, 4096)) == [(3, 1027, 1024), (1027, 2051, 1024), (2051, 2100, 64)]
    assert list(streaming._parts(0, 9, 7)) == [(0, 7, 7), (7, 9, 7)]


def test_arguments_are_checked_before_the_first_chunk(rotary):
    stream = TokenStream(*rotary)
    for given, message in (
        ({"prompt": [], "max_new_tokens": 1}, "prompt 0 is empty"),
        ({"prompt": [99], "max_new_tokens": 1}, "prompt 0 has id 99"),
        ({"prompt": [1], "max_new_tokens": 0}, "max_new_tokens must be an integer of at least 1"),
        ({"prompt": [1], "max_new_tokens": 1, "eos_id": 31}, "eos_id must be a token id"),
        ({"prompt": [1], "max_new_tokens": 1, "seed": -1}, "seed must be an integer"),
    ):
        with pytest.raises(ValueError, match=message):
            stream.generate(**given)
    translator = Seq2Seq(BASE)
    ids = jnp.zeros((1, 2), jnp.int32)
    params = jax.eval_shape(lambda: translator.init(jax.random.key(0), ids, ids))["params"]
    with pytest.raises(ValueError, match=r"TokenStream.*CausalLM.*Seq2Seq"):
        TokenStream(translator, params)


def test_non_finite_values_are_an_error(rotary):
    model, params = rotary
    broken = jax.tree.map(lambda leaf: leaf, params)
    broken["output"] = {"kernel": np.copy(broken["output"]["kernel"])}
    broken["output"]["kernel"][0, 0] = np.nan
    with pytest.raises(ValueError, match=r"5.*output/kernel.*NaN"):
        joined(TokenStream(model, broken).generate(PROMPTS[0], max_new_tokens=5))
