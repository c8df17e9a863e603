"""Generation: cached equals uncached, rows do not depend on each other, and few programs are compiled."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chat_parts import drawn_params

from transformer.config import (
    ALiBiOptions,
    EmbeddingOptions,
    Execution,
    LayerKind,
    LearnedOptions,
    ParameterOptions,
    RotaryOptions,
    SinusoidalOptions,
    T5BiasOptions,
    TransformerConfig,
)
from transformer.generate import Sampling, generate
from transformer.generate._decoding import decode_step, prefill
from transformer.generate._loop import decode
from transformer.generate._prompts import bucket, pad
from transformer.generate._sampling import SamplerParams
from transformer.nn._masks import Mask
from transformer.nn.models import CausalLM, Seq2Seq

GREEDY = Sampling(temperature=0.0)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6], [5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8]]
NEW = 6

# Untied embeddings with a large spread: greedy decoding does not repeat the last token, and there are no near ties.
HEADS = {"num_heads": 6, "attention.num_kv_heads": 3, "attention.head_dim": 4, "attention.value_dim": 5}
SIZES = {"vocab_size": 31, "d_model": 22, "num_layers": 2, "feed_forward.d_ff": 13} | HEADS
BASE = TransformerConfig(
    **SIZES, position=None, embedding=EmbeddingOptions(tie=False), parameters=ParameterOptions(initializer_range=0.4)
)
CONFIGS = {
    "none, window": BASE.replace(**{"stack.period": (LayerKind(window=3), LayerKind())}),
    "t5, one layer without attention": BASE.replace(
        position=T5BiasOptions(), **{"stack.period": (LayerKind(self_attention=False), LayerKind())}
    ),
    "no residual": BASE.replace(position=RotaryOptions(), **{"norm.position": "pre_without_residual"}),
    "sinusoidal, post": BASE.replace(position=SinusoidalOptions(), **{"norm.position": "post"}),
    "learned, full table": BASE.replace(position=LearnedOptions(max_length=len(PROMPTS[2]) + NEW)),
    "rotary, window, prefix": BASE.replace(
        position=RotaryOptions(), num_layers=3, **{"stack.prefix": (LayerKind(window=5),)}
    ),
    "alibi": BASE.replace(position=ALiBiOptions(), **{"stack.layer_scale": 0.3}),
    "t5, sinks": BASE.replace(
        position=T5BiasOptions(), **{"position.buckets": 6, "position.max_distance": 7, "attention.sinks": True}
    ),
}
SEEDS = {"no residual": 7, "alibi": 5, "t5, sinks": 6}
"""seeds of the parameters with which greedy decoding chooses many different tokens; 4 for the other configs"""
TRANSLATION = BASE.replace(
    **{"embedding.source_vocab_size": 37, "stack.num_encoder_layers": 2, "stack.num_decoder_layers": 3},
    position=LearnedOptions(max_length=13),
)
SOURCES = [[1, 2, 3, 36, 5], [30, 20, 10, 30, 20, 10, 30, 20, 10, 30, 20, 10, 1], [7]]


@functools.cache
def causal(name):
    model = CausalLM(CONFIGS[name])
    return model, drawn_params(model, 0.4, seed=SEEDS.get(name, 4))


@functools.cache
def translator():
    model = Seq2Seq(TRANSLATION)
    return model, drawn_params(model, 0.4, seed=3)


PLAIN = "none, window"


SLOW = {"rotary, window, prefix", "t5, one layer without attention"}


@pytest.mark.default_cases(3)
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in CONFIGS])
def test_cached_equals_uncached(name):
    """Prefill of padded prompts and then single tokens gives the logits of one forward pass of the whole text."""
    model, params = causal(name)
    rows = [np.random.default_rng(length).integers(0, 31, length + NEW) for length in map(len, PROMPTS)]
    prompts = pad([row[:-NEW] for row in rows], 16)
    whole, new = pad(rows, 17), np.stack([row[-NEW:] for row in rows], 1)

    @jax.jit
    def both(params, prompts, whole, new):
        logits, cache = prefill(model, params, prompts, None, 32)

        def step(cache, tokens):
            logits, cache = decode_step(model, params, tokens, cache, None)
            return cache, logits

        _, later = jax.lax.scan(step, cache, new)
        return jnp.concatenate([logits[None], later], 0), model.apply({"params": params}, whole.tokens)

    cached, full = map(np.asarray, both(params, prompts, whole, new))
    for i, logits in enumerate(cached):
        chex.assert_trees_all_close(logits, full[np.arange(3), prompts.lengths - 1 + i], rtol=1e-5, atol=1e-5)


def assert_greedy(full, prompts, new):
    """Check that each new token is the most probable one after the previous tokens, by a forward pass without cache."""
    for logits, prompt, row in zip(np.asarray(full), prompts, new, strict=True):
        assert [int(i) for i in logits[len(prompt) - 1 : len(prompt) - 1 + NEW].argmax(-1)] == row
    assert len({token for row in new for token in row}) > 5, "too few different tokens: choose another seed"


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("name", ["none, window", "learned, full table", "alibi"])
def test_greedy_equals_argmax_of_an_uncached_pass(name):
    model, params = causal(name)
    new = generate(model, params, PROMPTS, max_new_tokens=NEW, sampling=GREEDY)
    whole = pad([np.array(prompt + row) for prompt, row in zip(PROMPTS, new, strict=True)], 17)
    assert_greedy(jax.jit(model.apply)({"params": params}, whole.tokens), PROMPTS, new)


def test_greedy_translation_equals_argmax_of_an_uncached_pass():
    model, params = translator()
    targets = [[3, 1], [4], [1, 5, 9]]
    new = generate(model, params, targets, sources=SOURCES, max_new_tokens=NEW, sampling=GREEDY)
    source = pad([np.array(row) for row in SOURCES], 13)
    whole = pad([np.array(target + row) for target, row in zip(targets, new, strict=True)], 9)

    @jax.jit
    def apply(params, source, target, lengths):
        return model.apply({"params": params}, source, target, source_mask=Mask.lengths(lengths))

    full = apply(params, source.tokens, whole.tokens, source.lengths)
    assert_greedy(full, targets, new)


def test_batched_rows_equal_single_rows():
    model, params = causal("learned, full table")
    together = generate(model, params, PROMPTS, max_new_tokens=NEW, sampling=GREEDY)
    assert together == [generate(model, params, [row], max_new_tokens=NEW, sampling=GREEDY)[0] for row in PROMPTS]


def test_batched_translations_equal_single_translations():
    model, params = translator()
    run = functools.partial(generate, model, params, max_new_tokens=NEW, sampling=GREEDY, bos_id=1)
    together = run(sources=SOURCES)
    assert together == [run(sources=[row])[0] for row in SOURCES]
    assert together == run([[1]] * 3, sources=SOURCES)
    assert together[0] != together[1]


def test_sampling_of_a_row_depends_on_its_seed_and_position():
    """A sample depends neither on the other rows nor on whether earlier tokens were prompt or generated."""
    model, params = causal(PLAIN)
    run = functools.partial(generate, model, params, max_new_tokens=NEW)
    seeds = [11, 5, 8]
    together = run(PROMPTS, seed=seeds)
    assert together == [run([row], seed=seed)[0] for row, seed in zip(PROMPTS, seeds, strict=True)]
    same = run([PROMPTS[0]] * 3, seed=11)
    assert same[0] == together[0]
    assert len({tuple(row) for row in same}) == 3
    half = [row + new[:2] for row, new in zip(PROMPTS, together, strict=True)]
    assert [new[: NEW - 2] for new in run(half, seed=seeds)] == [new[2:] for new in together]
    assert run(PROMPTS, seed=[12, 5, 9])[1] == together[1]
    assert run(PROMPTS, seed=[12, 5, 9])[0] != together[0]

    level = {**params, "output": {"kernel": np.zeros_like(params["output"]["kernel"])}}
    for row in generate(model, level, PROMPTS, max_new_tokens=NEW, seed=seeds):
        assert len(set(row)) > NEW / 2, "all tokens are equally probable: each position must have a separate sample"


def test_a_row_ends_at_its_end_token_while_others_continue():
    model, params = causal(PLAIN)
    free = generate(model, params, PROMPTS, max_new_tokens=NEW, sampling=GREEDY)
    ends = {token for row in free for token in row}
    either = sorted(ends)[:2]  # several may end a row
    want = [row[: min((row.index(end) for end in either if end in row), default=len(row))] for row in free]
    assert generate(model, params, PROMPTS, max_new_tokens=NEW, sampling=GREEDY, eos_id=either) == want
    for eos_id in ends:
        want = [row[: row.index(eos_id)] if eos_id in row else row for row in free]
        assert generate(model, params, PROMPTS, max_new_tokens=NEW, sampling=GREEDY, eos_id=eos_id) == want
    assert generate(model, params, PROMPTS, max_new_tokens=1, sampling=GREEDY) == [row[:1] for row in free]


def test_few_programs_are_compiled():
    """Another prompt length, count, seed, temperature or end token compiles nothing: these are arrays."""
    model, params = causal(PLAIN)
    generate(model, params, [[1] * 5], max_new_tokens=4, sampling=Sampling(temperature=0.9, top_p=0.9))
    before = decode._cache_size()
    for seed, length in enumerate([1, 2, 7, 16]):
        sampling = Sampling(temperature=1.0 + seed, top_p=0.5 + seed / 10)
        generate(
            model, params, [[1] * length], max_new_tokens=4 + length // 2, sampling=sampling, eos_id=seed, seed=seed
        )
    generate(CausalLM(CONFIGS[PLAIN]), params, [[1, 2]], max_new_tokens=4, sampling=Sampling(top_p=0.1))
    assert decode._cache_size() == before
    generate(model, params, [[1] * 17], max_new_tokens=4, sampling=Sampling(top_p=0.1))
    assert decode._cache_size() == before + 1


def test_translation_compiles_once_for_similar_lengths():
    model, params = translator()
    run = functools.partial(generate, model, params, sampling=GREEDY, bos_id=1)
    run(sources=[[1, 2]], max_new_tokens=3)
    before = decode._cache_size()
    run(sources=[[1, 2, 3, 4, 5, 6, 7]], max_new_tokens=5)
    assert decode._cache_size() == before


@pytest.mark.slow
def test_unstacked_layers_equal_scanned_layers():
    """Prefix, two repeats of two kinds, suffix: unrolled and scanned layers generate the same tokens."""
    kinds = [LayerKind(window=size) for size in (2, 3, 5, 9)]
    config = BASE.replace(
        num_layers=6, **{"stack.prefix": (kinds[0],), "stack.period": tuple(kinds[1:3]), "stack.suffix": (kinds[3],)}
    )
    rolled = CausalLM(config)
    params = jax.jit(rolled.init)(jax.random.key(1), jnp.zeros((1, 2), jnp.int32))["params"]
    unrolled = rolled.clone(execution=Execution(scan=False))
    want, got = (generate(model, params, PROMPTS, max_new_tokens=NEW, sampling=GREEDY) for model in (rolled, unrolled))
    assert want == got


@pytest.mark.slow
def test_unstacked_layers_translate_like_scanned_layers():
    model, params = translator()
    run = functools.partial(generate, params=params, sources=SOURCES, max_new_tokens=NEW, sampling=GREEDY, bos_id=1)
    assert run(model) == run(model.clone(execution=Execution(scan=False)))


@pytest.mark.parametrize("size", [1, 15, 16, 17, 63, 64, 65, 100, 128, 129, 1000, 1024, 1025, 5000])
def test_buckets_are_close_and_few(size):
    assert size <= bucket(size) < size + 16 or bucket(size) < 1.25 * size
    assert bucket(bucket(size)) == bucket(size)
    assert len({bucket(n) for n in range(1, 2 ** math.ceil(math.log2(size)) + 1)}) <= 4 * math.log2(max(size, 16)) - 8


def inner_jaxprs(equation):
    for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda value: hasattr(value, "eqns")):
        if hasattr(value, "eqns"):
            yield value


def products(jaxpr):
    """Return the operand shapes of each matrix multiplication in a jaxpr; those in a scan repeat for each iteration."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            found.append(tuple(operand.aval.shape for operand in equation.invars))
        for inner in inner_jaxprs(equation):
            found += products(inner) * (equation.params["length"] if equation.primitive.name == "scan" else 1)
    return found


def loop_bodies(jaxpr):
    """Yield the bodies of the outermost while loops."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "while":
            yield equation.params["body_jaxpr"]
        else:
            for inner in inner_jaxprs(equation):
                yield from loop_bodies(inner)


@pytest.mark.default_cases(1)
@pytest.mark.parametrize(("scan", "copied"), [(True, 0), (True, 2**31), (False, 0)])
def test_a_step_has_the_expected_matrix_multiplications(scan, copied, monkeypatch):
    """Count matrix multiplications: cross-attention computes keys and values only in the first call.

    In a step, only scores and weighted values involve the source. On CPU layers are unrolled even if training scans
    them, unless they are large.
    """
    monkeypatch.setattr("transformer.generate._layers.COPIED", {"cpu": copied})
    jax.clear_caches()  # earlier traces used another limit
    config = TRANSLATION.replace(position=SinusoidalOptions())
    model = Seq2Seq(config, Execution(scan=scan))
    ids = jnp.zeros((1, 2), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), ids, ids)["params"]
    batch, source_length = 3, 29
    rows = pad([np.ones(source_length, int)] * batch, source_length)
    program = functools.partial(decode, model, cache_slots=17, new_slots=16)
    jaxpr = jax.make_jaxpr(program)(
        params,
        pad([np.ones(1, int)] * batch, 1),
        rows,
        jax.random.split(jax.random.key(0), batch),
        SamplerParams.of(GREEDY, 31),
        np.array([-1], np.int32),
        np.int32(5),
    ).jaxpr
    layers, encoder_layers = TRANSLATION.decoder_layers, TRANSLATION.encoder_layers
    (body,) = loop_bodies(jaxpr)
    step = products(body)
    # Self-attention: query, key, value, scores, weighted values, output; cross-attention has no key and value;
    # feed-forward: 2.
    assert len(step) == layers * (6 + 4 + 2) + 1
    assert sum(source_length in left + right for left, right in step) == 2 * layers
    assert not any({source_length, 22} <= {*left, *right} for left, right in step)
    assert ("scan[" in str(body)) == (scan and not copied), "unrolled layers are not copied out of a stack at each step"
    assert len(products(jaxpr)) - len(step) == layers * (6 + 6 + 2) + encoder_layers * (6 + 2) + 1


def test_a_broken_parameter_is_named():
    model, params = causal(PLAIN)
    broken = jax.tree.map(lambda leaf: leaf, params)
    broken["embedding"] = {"embedding": np.copy(params["embedding"]["embedding"])}
    broken["embedding"]["embedding"][9] = np.nan
    sound = [[1, 2], [3]]
    with pytest.raises(ValueError, match=r"1.*3 \(after 3.*0"):
        generate(model, broken, [[1, 2], [3, 9, 2]], max_new_tokens=4, sampling=GREEDY)
    with pytest.raises(ValueError, match=r"embedding/embedding.*NaN"):
        generate(model, broken, [[9], [9]], max_new_tokens=4, sampling=GREEDY)
    free = generate(model, params, sound, max_new_tokens=1, sampling=GREEDY)
    poisoned = jax.tree.map(lambda leaf: leaf, params)
    poisoned["embedding"] = {"embedding": np.copy(params["embedding"]["embedding"])}
    poisoned["embedding"]["embedding"][free[0][0]] = np.nan
    with pytest.raises(ValueError, match=r"0.*3 \(after 2.*1"):
        generate(model, poisoned, sound, max_new_tokens=4, sampling=GREEDY)


def test_distinguishes_an_overflow_from_a_broken_parameter():
    model, params = causal(PLAIN)
    huge = {
        **params,
        "output": {"kernel": np.clip(np.float64(params["output"]["kernel"]) * 1e40, -3e38, 3e38).astype(np.float32)},
    }
    with pytest.raises(ValueError, match="float32"):
        generate(model, huge, [[1, 2], [3]], max_new_tokens=2, sampling=GREEDY)


def test_padding_does_not_affect_results():
    """NaN in row 0 of the table has no effect, because padding repeats ids of its own row."""
    model, params = causal(PLAIN)
    spoiled = {**params, "embedding": {"embedding": np.copy(params["embedding"]["embedding"])}}
    spoiled["embedding"]["embedding"][0] = np.nan
    prompts = [[3, 1], [4, 1, 5, 9, 2]]
    free = generate(model, params, prompts, max_new_tokens=3, sampling=GREEDY)
    assert 0 not in free[0] + free[1]
    assert generate(model, spoiled, prompts, max_new_tokens=3, sampling=GREEDY) == free


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": []}, r"prompts.*got \[\]"),
        ({"prompts": "text"}, r"prompts.*got 'text'"),
        ({"prompts": None}, "prompts is missing. Pass a list"),
        ({"prompts": [[1], []]}, "prompt 1 is empty: there must be at least one token"),
        ({"prompts": ["text"]}, r"0.*got 'text'"),
        (
            {"prompts": [[1], [2, 31]]},
            r"1.*31.*1.*0.*30 \(vocab_size",
        ),
        ({"prompts": [[2, -1]]}, "prompt 0 has id -1 at index 1"),
        ({"max_new_tokens": 0}, r"max_new_tokens.*1.*got 0"),
        ({"eos_id": 31}, r"eos_id.*0.*30 \(vocab_size 31\).*got 31"),
        ({"seed": -1}, r"seed.*0.*4294967295.*got -1"),
        ({"seed": [1, 2]}, r"seed.*1.*got 2"),
        ({"sources": [[1]]}, r"sources.*Seq2Seq"),
    ],
)
def test_rejects_invalid_prompts(arguments, message):
    model = CausalLM(BASE)
    with pytest.raises(ValueError, match=message):
        generate(model, {}, **({"prompts": [[1, 2]], "max_new_tokens": 3} | arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sources": None, "prompts": [[1]]}, r"sources.*Seq2Seq"),
        ({"bos_id": None}, r"bos_id"),
        ({"bos_id": 31}, r"bos_id.*0.*30"),
        ({"sources": [[36], [37]]}, "source 1 has id 37 at index 0, but token ids must be from 0 to 36"),
        ({"sources": [[]]}, "source 0 is empty"),
        ({"prompts": [[1]] * 2}, "as many prompts as sources, got 2 and 1"),
        (
            {"sources": [[1] * 14]},
            r"0.*14.*13.*\(max_length\)",
        ),
        ({"max_new_tokens": 13}, "prompt 0 has 1 tokens, 14 with 13 new ones, but .* only 13 .* at most 12 new"),
        ({"prompts": [[1] * 13]}, "prompt 0 has 13 tokens, 16 with 3 new ones, but .* Shorten the prompt"),
    ],
)
def test_rejects_invalid_sources(arguments, message):
    with pytest.raises(ValueError, match=message):
        generate(Seq2Seq(TRANSLATION), {}, **({"sources": [[1, 2]], "bos_id": 1, "max_new_tokens": 3} | arguments))


@pytest.mark.usefixtures("without_type_checks")
def test_rejects_models_that_cannot_generate():
    with pytest.raises(ValueError, match=r'got \{"params".*...\}.*params\["params"\]'):
        generate(CausalLM(BASE), {"params": {}}, [[1]], max_new_tokens=1)
    with pytest.raises(ValueError, match="vocab_size"):
        generate(CausalLM(BASE.replace(vocab_size=None)), {}, [[1]], max_new_tokens=1)
    with pytest.raises(ValueError, match=r"generate.*CausalLM.*Seq2Seq.*TransformerConfig"):
        generate(BASE, {}, [[1]], max_new_tokens=1)


@pytest.mark.parametrize("kernel", ["splash", "ring"])
def test_a_full_sequence_kernel_does_not_affect_decoding(kernel):
    model, params = causal("alibi")
    named = CausalLM(model.config, Execution(attention=kernel))
    assert generate(named, params, PROMPTS, max_new_tokens=NEW) == generate(model, params, PROMPTS, max_new_tokens=NEW)
