"""Beam search: equals brute force, reports correct scores, and rows do not depend on each other."""

import dataclasses
import functools
import itertools
import math
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer.config import (
    ALiBiOptions,
    ConfigError,
    EmbeddingOptions,
    Execution,
    LayerKind,
    LearnedOptions,
    RotaryOptions,
    SinusoidalOptions,
    Speech,
    TransformerConfig,
)
from transformer.generate import Beam, Sampling, beam_search, beam_search_all, generate
from transformer.generate import _batches as batches
from transformer.generate._batches import _batches
from transformer.generate._beam import USUAL
from transformer.generate._beam_search import continue_search, start_search, top_k
from transformer.generate._rules import Rules
from transformer.nn._masks import Mask
from transformer.nn.models import CausalLM, Seq2Seq, SpeechToText
from transformer.zoo import load_pretrained

GREEDY = Sampling(temperature=0.0)
SOURCES = [[1, 2, 3, 6, 5], [4, 3, 2, 4, 3, 2, 4, 3, 2, 4, 3, 2, 1], [6]]
END, RARE, NEVER, SEED = 3, 15, 28, 1
SIZES = {
    "vocab_size": 29,
    "embedding.source_vocab_size": 7,
    "d_model": 12,
    "num_layers": 1,
    "num_heads": 2,
    "feed_forward.d_ff": 13,
}
CONFIG = TransformerConfig(**SIZES, position=LearnedOptions(max_length=13), embedding=EmbeddingOptions(tie=False))
FOUR = Beam(n_best=4)


@functools.cache
def translator(scan=False, **fields):
    model = Seq2Seq(CONFIG.replace(**fields), Execution(scan=scan))
    ids, random = np.zeros((1, 2), np.int32), np.random.default_rng(SEED)
    shapes = jax.eval_shape(lambda *ids: model.init(jax.random.key(0), *ids), ids, ids)["params"]
    return model, jax.tree.map(lambda leaf: (0.6 * random.standard_normal(leaf.shape)).astype(np.float32), shapes)


@functools.cache
def teacher(**fields):
    model, params = translator(**fields)

    @jax.jit
    def run(params, source, length, target):
        logits = model.apply({"params": params}, source, target, source_mask=Mask.lengths(length))
        return jax.nn.log_softmax(logits, -1)

    return functools.partial(run, params)


def log_probability(source, begin, tokens, ends, **fields):
    """Return the log-probability of the tokens and any of the end tokens, from one pass without cache."""
    target = np.zeros((1, 12), np.int32)
    target[0, : len(begin) + len(tokens)] = [*begin, *tokens]
    padded = np.zeros((1, 13), np.int32)
    padded[0, : len(source)] = source
    logs = np.asarray(teacher(**fields)(padded, np.array([len(source)], np.int32), target), np.float64)[0]
    total = sum(logs[len(begin) - 1 + i, token] for i, token in enumerate(tokens))
    return total + (np.logaddexp.reduce(logs[len(begin) + len(tokens) - 1, ends]) if ends else 0.0)


def penalty(length, alpha):
    return ((5 + length) / 6) ** alpha


def search(beam=USUAL, sources=SOURCES, eos_id=END, fields=(), **options):
    """Search with the translator of these tests."""
    model, params = translator(**dict(fields))
    return beam_search(model, params, sources, eos_id=eos_id, beam=beam, **({"bos_id": 1} | options))


@pytest.mark.slow
def test_a_beam_of_one_without_penalty_is_greedy():
    model, params = translator()
    greedy = generate(model, params, sources=SOURCES, bos_id=1, eos_id=END, max_new_tokens=9, sampling=GREEDY)
    found = search(Beam(size=1, alpha=0.0), max_new_tokens=9)
    assert [row[0].tokens for row in found] == greedy
    assert [row[0].ended for row in found] == [len(row) < 9 for row in greedy]
    assert len({len(row) < 9 for row in greedy}) == 2, "all rows end in the same way: choose another seed"


def test_rules_apply_to_every_hypothesis():
    """Also for one that was forked from others. A score is that of the tokens under the rules, with any formula."""
    rules = Rules(fewest=3, force_end=True, no_repeat_ngram=2, repetition_penalty=1.5, ranks_cut=True)
    beam = Beam(size=4, n_best=4, alpha=0.5, norm=(1, 1), early_stop=False, estimated=True, rules=rules)
    found = search(beam, max_new_tokens=6)
    for source, row in zip(SOURCES, found, strict=True):
        assert len(row) == 4
        for one in row:
            text = [1, *one.tokens]
            assert one.ended
            assert len(one.tokens) >= 3
            assert len(set(itertools.pairwise(text))) == len(text) - 1, "two tokens occur twice in this order"
            total, whole = 0.0, [*one.tokens, END]
            for place, token in enumerate(whole[:5]):  # the sixth is forced
                known = log_probability(source, [1], whole[:place], [])
                step = log_probability(source, [1], whole[: place + 1], []) - known
                total += step * (1.5 if token in text[: place + 1] else 1.0)
            assert one.log_probability == pytest.approx(total, abs=1e-4)
            assert one.score == pytest.approx(total / (1 + len(whole)) ** 0.5, abs=1e-4)
    assert any(len(one.tokens) == 5 for row in found for one in row)
    assert any(len(one.tokens) < 5 for row in found for one in row)


def test_a_truncated_hypothesis_is_ranked_by_its_score():
    """With long targets preferred, it is the best although others have ended."""
    plain = Beam(size=4, n_best=4, alpha=1.0, norm=(0, 1), early_stop=False)
    after = search(plain, max_new_tokens=5)
    together = search(dataclasses.replace(plain, rules=Rules(ranks_cut=True)), max_new_tokens=5)
    assert any(not row[0].ended and any(one.ended for one in row) for row in together)
    for one, other in zip(after, together, strict=True):
        assert [hypothesis.score for hypothesis in other] == sorted((h.score for h in other), reverse=True)
        assert [hypothesis.ended for hypothesis in one] == sorted((h.ended for h in one), reverse=True)


def test_an_exhaustive_beam_finds_the_best_hypothesis():
    """Enumerate all rows of up to three tokens before the end.

    Two tokens end a row and count as one end; two other tokens may be chosen.
    """
    ends, words, limit, fields = [END, 0], [1, 2], 4, {"position.max_length": 32}
    beam, others = Beam(size=32, n_best=32, alpha=0.9, early_stop=False), set(range(29)) - {*ends, *words}
    found = search(beam, eos_id=ends, max_new_tokens=limit, suppress=sorted(others), fields=fields)
    for source, row in zip(SOURCES, found, strict=True):
        space = {}
        for length in range(limit):
            for tokens in itertools.product(words, repeat=length):
                space[tokens] = log_probability(source, [1], tokens, ends, **fields) / penalty(length + 1, 0.9)
        ended = [one for one in row if one.ended]
        assert len(space) == 15
        assert [tuple(one.tokens) for one in ended] == sorted(space, key=lambda tokens: -space[tokens])
        for one in ended:
            assert one.score == pytest.approx(space[tuple(one.tokens)], abs=1e-4)
        cut = row[len(ended) :]
        assert {tuple(one.tokens) for one in cut} == set(itertools.product(words, repeat=limit))
        assert not any(one.ended for one in cut)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        pytest.param({"scan": True, "num_layers": 2, "position": RotaryOptions()}, marks=pytest.mark.slow),
    ],
)
def test_scores_equal_teacher_forcing(fields):
    for alpha in (0.0, 0.6):
        beam = dataclasses.replace(FOUR, alpha=alpha)
        found = search(beam, prompts=[[1], [2], [1]], max_new_tokens=6, fields=fields)
        for source, prompt, row in zip(SOURCES, [[1], [2], [1]], found, strict=True):
            assert 1 <= len(row) <= 4
            assert len({(*one.tokens, one.ended) for one in row}) == len(row), "equal hypotheses"
            for one in row:
                expected = log_probability(source, prompt, one.tokens, [END] if one.ended else [], **fields)
                assert one.log_probability == pytest.approx(expected, abs=1e-4)
                assert one.score == pytest.approx(expected / penalty(len(one.tokens) + one.ended, alpha), abs=1e-4)
                assert END not in one.tokens
                assert one.ended or len(one.tokens) == 6
            order = [(one.ended, one.score) for one in row]
            assert order == sorted(order, reverse=True)
        kinds = {one.ended for row in found for one in row}
        assert kinds == {True, False} or fields, "too few cases are covered: choose another seed"


def test_batched_rows_equal_single_rows():
    beam = dataclasses.replace(FOUR, length_ratio=0.5, length_extra=4)
    for end in (END, RARE):
        together = search(beam, eos_id=end)
        for source, row in zip(SOURCES, together, strict=True):
            [alone] = search(beam, [source], eos_id=end)
            assert [(one.tokens, one.ended) for one in row] == [(one.tokens, one.ended) for one in alone]
            np.testing.assert_allclose([one.score for one in row], [one.score for one in alone], atol=1e-5)
    assert len({tuple(row[0].tokens) for row in together}) == 3


@pytest.mark.slow
def test_early_stopping_can_miss_longer_hypotheses():
    """The exact rule finds scores that are at least as good, and sometimes better."""
    pairs = []
    for first in range(6):
        sources = [[1 + (first + i * j) % 6 for j in range(1, 8)] for i in range(1, 4)]
        exact, early = (search(Beam(early_stop=early_stop, alpha=2.0), sources) for early_stop in (False, True))
        pairs += [(e[0].score, f[0].score) for e, f in zip(exact, early, strict=True) if e[0].ended and f[0].ended]
    assert pairs
    assert all(exact >= early - 1e-5 for exact, early in pairs)
    assert any(exact > early + 1e-3 for exact, early in pairs), "both rules find the same: choose another seed"


def test_the_source_length_limits_the_target_length():
    beam = Beam(size=4, length_ratio=0.5, length_extra=2)
    assert [beam.longest(n) for n in (1, 2, 5, 13)] == [2, 3, 4, 8]
    assert [len(row[0].tokens) for row in search(beam, eos_id=NEVER)] == [4, 8, 2]
    assert [len(row[0].tokens) for row in search(beam, eos_id=NEVER, max_new_tokens=3)] == [3, 3, 2]
    # The position table has 13 rows; one is used by the first token of the target.
    assert [len(row[0].tokens) for row in search(eos_id=NEVER)] == [12, 12, 12]


@pytest.mark.slow
def test_a_longer_cache_continues_after_a_full_one():
    """The target is longer than twice its padded source."""
    model, params = translator(position=SinusoidalOptions())
    [[long]] = beam_search(model, params, [[1, 2, 3]], bos_id=1, eos_id=None, beam=Beam(size=2))
    assert len(long.tokens) == 53
    whole = np.array([[1, *long.tokens]], np.int32)
    logits = jax.jit(model.apply)({"params": params}, jnp.array([[1, 2, 3]]), whole[:, :-1])
    logs = np.asarray(jax.nn.log_softmax(logits, -1))[0]
    assert long.log_probability == pytest.approx(logs[np.arange(53), whole[0, 1:]].sum(), abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("window", "position"), [pytest.param(3, RotaryOptions(), marks=pytest.mark.slow), (None, ALiBiOptions())]
)
def test_hypotheses_with_a_shared_cache_attend_only_to_their_own_tokens(window, position):
    """With a window (counted in positions, not cache slots), distance biases, and prompts of different lengths."""
    config = CONFIG.replace(**{"embedding.source_vocab_size": None}, num_layers=2, position=position)
    model = CausalLM(config.replace(**{"stack.period": (LayerKind(window=window), LayerKind())}))
    params = jax.tree.map(lambda leaf: 3 * leaf, jax.jit(model.init)(jax.random.key(1), jnp.zeros((1, 2), jnp.int32)))
    prompts = [[3, 1, 4, 1, 5], [7]]
    found = beam_search(model, params["params"], prompts=prompts, eos_id=END, max_new_tokens=7, beam=FOUR)
    assert len({tuple(one.tokens[:2]) for one in found[0]}) > 1, "the hypotheses do not diverge: choose another seed"
    for prompt, row in zip(prompts, found, strict=True):
        for one in row:
            generated = [*one.tokens, *([END] if one.ended else [])]
            logits = model.apply(params, jnp.array([[*prompt, *generated]])[:, :-1])
            logs = jax.nn.log_softmax(logits, -1)[0, len(prompt) - 1 :]
            expected = logs[jnp.arange(len(generated)), jnp.array(generated)].sum()
            assert one.log_probability == pytest.approx(float(expected), abs=1e-3)


@pytest.mark.parametrize("vocab_size", [90, 6000, 6007])
def test_top_k_equals_a_sort(vocab_size):
    """Ties go to the lower ids."""
    x = np.random.default_rng(0).integers(0, vocab_size // 8, (3, 2, vocab_size)).astype(np.float32)
    values, ids = jax.jit(top_k, static_argnums=1)(x, 8)
    expected = np.argsort(-x, axis=-1, kind="stable")[..., :8]
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(x, expected, -1))


@pytest.mark.slow
def test_beam_search_continues_prompts_of_a_causal_model():
    model = CausalLM(CONFIG.replace(**{"embedding.source_vocab_size": None}))
    params = jax.jit(model.init)(jax.random.key(1), jnp.zeros((1, 2), jnp.int32))["params"]
    prompts = [[3, 1, 4], [7]]
    found = beam_search(model, params, prompts=prompts, eos_id=None, max_new_tokens=6, beam=Beam(size=1))
    greedy = generate(model, params, prompts, max_new_tokens=6, sampling=GREEDY)
    assert [row[0].tokens for row in found] == greedy
    with pytest.raises(ValueError, match="max_new_tokens"):
        beam_search(model, params, prompts=prompts, eos_id=None)
    with pytest.raises(ValueError, match="learned position table has only 13 positions"):
        beam_search(model, params, prompts=prompts, eos_id=None, max_new_tokens=11)


@pytest.mark.slow
def test_suppressed_tokens_are_not_generated_and_use_no_beam():
    banned = {token for row in search(FOUR, max_new_tokens=5) for one in row for token in one.tokens[:1]}
    all_but_the_end = [token for token in range(29) if token != END]
    found = search(
        FOUR, max_new_tokens=5, suppress=(sorted(banned) * 28)[:28]
    )  # the same number of ids for both calls, so that one program serves both
    assert not banned & {token for row in found for one in row for token in one.tokens}
    for source, row in zip(SOURCES, found, strict=True):
        expected = log_probability(source, [1], row[0].tokens, [END] if row[0].ended else [])
        assert row[0].log_probability == pytest.approx(expected, abs=1e-4)
    nothing = search(FOUR, suppress=all_but_the_end)
    assert [[(one.tokens, one.ended) for one in row] for row in nothing] == [[([], True)]] * 3


def test_many_sources_keep_their_order():
    model, params = translator()
    sources = [[1 + (i * j) % 6 for j in range(1 + (5 * i) % 13)] for i in range(7)]
    options = {"eos_id": RARE, "beam": Beam(length_ratio=0.5, length_extra=3)}
    found = beam_search_all(model, params, sources, begin=[1], batch_tokens=39, **options)  # three, three, one
    each = [beam_search(model, params, [source], bos_id=1, **options)[0] for source in sources]
    assert [row[0].tokens for row in found] == [row[0].tokens for row in each]
    assert len({tuple(row[0].tokens) for row in found}) > 4
    assert beam_search_all(model, params, [], begin=[1], **options) == []
    with pytest.raises(ValueError, match="source 1 has id 7"):
        beam_search_all(model, params, [[1], [7]], begin=[1], **options)
    with pytest.raises(ValueError, match=r"batch_tokens.*1.*got 0"):
        beam_search_all(model, params, [[1]], begin=[1], batch_tokens=0, **options)
    with pytest.raises(ValueError, match=r"Seq2Seq.*CausalLM"):
        beam_search_all(
            CausalLM(CONFIG.replace(**{"embedding.source_vocab_size": None})), {}, [[1]], begin=[1], **options
        )
    speech = CONFIG.replace(input=Speech(mel_bins=3), **{"embedding.source_vocab_size": None})
    with pytest.raises(ValueError, match=r"Seq2Seq.*SpeechToText"):
        beam_search_all(SpeechToText(speech), {}, [[1]], begin=[1], **options)


@pytest.mark.cpu_only("needs eight devices")
def test_multi_process_batches_are_searched_in_a_fixed_order(monkeypatch):
    """With several processes, and under a mesh, which is active in one thread only."""
    seen = []

    def searching(*args, **kwargs):
        seen.append((threading.get_ident(), jax.sharding.get_abstract_mesh().axis_names))
        return [[] for _ in args[2]]

    monkeypatch.setattr(batches, "beam_search", searching)
    model, params = translator()
    options = {"begin": [1], "eos_id": RARE, "batch_tokens": 39}
    with jax.set_mesh(jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))):
        beam_search_all(model, params, [[1]] * 7, **options)
    assert seen == [(threading.get_ident(), ("data",))] * 3
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    beam_search_all(model, params, [[1]] * 7, **options)
    assert seen[3:] == [(threading.get_ident(), ())] * 3
    monkeypatch.setattr(jax, "process_count", lambda: 1)
    for cores, number in ((1, 1), (3, 3), (64, batches.MAX_PARALLEL_BATCHES)):
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        assert batches._num_parallel_batches() == number


def test_batches_use_few_shapes():
    rows = [np.zeros(length, int) for length in (40, 3, 16, 1, 90, 2, 5)]
    assert _batches(rows, None, 64) == [([3, 5, 1, 6], 4), ([2], 1), ([0], 1), ([4], 1)]
    assert _batches(rows[:4], 10, 1000) == [([3, 1, 2, 0], 4)]
    assert _batches(rows[1:4], None, 1000) == [([2, 0, 1], 4)]


def test_few_programs_are_compiled():
    """Another length, penalty, end token or limit compiles nothing: these are arrays."""
    search()
    before = start_search._cache_size(), continue_search._cache_size()
    search(Beam(alpha=0.1), [[1, 2], [3], [1, 2, 3, 4, 5]], eos_id=0)
    search(Beam(length_extra=51), eos_id=2, max_new_tokens=12)
    assert (start_search._cache_size(), continue_search._cache_size()) == before


def test_logits_that_are_not_finite_are_named():
    model, params = translator()
    kernel, table = np.copy(params["output"]["kernel"]), np.copy(params["decoder"]["position_table"])
    kernel[0, 2] = table[2] = np.nan
    broken = params | {"output": {**params["output"], "kernel": kernel}}
    with pytest.raises(ValueError, match=r"0.*1.*output/kernel.*NaN"):
        beam_search(model, broken, SOURCES, bos_id=1, eos_id=END)
    # NaN at the third position, which rows with two tokens never reach.
    late = params | {"decoder": {**params["decoder"], "position_table": table}}
    with pytest.raises(ValueError, match=r"3 \(after 1.*2.*tokens\)"):
        beam_search(model, late, SOURCES, bos_id=1, eos_id=NEVER)
    found = beam_search(model, late, SOURCES, bos_id=1, eos_id=NEVER, max_new_tokens=2)
    assert [len(row[0].tokens) for row in found] == [2, 2, 2]


@pytest.mark.parity
@pytest.mark.parametrize("size", [2, 5])
def test_results_equal_the_reference(size, tmp_path):
    """Hugging Face's beam search gives the same for a tiny Marian, without length penalty and with both stopping rules:
    the same finished and cut hypotheses, in the same order, with the same log-probabilities.
    """
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from golden import case as golden_case
    from golden import reference

    case = next(iter(golden_case.cases("marian").values()))
    theirs, _ = reference.fill(reference.build(case), case, tmp_path)
    loaded = load_pretrained(tmp_path)
    given = loaded.model, loaded.params
    start, compared = theirs.config.decoder_start_token_id, set()
    sources = golden_case.tokens(1, theirs.config.vocab_size, 4, 7).tolist()
    for end, early_stop in itertools.product((7, 12, 23, 28), (True, False)):
        out = theirs.generate(
            torch.tensor(sources),
            num_beams=size,
            num_return_sequences=size,
            length_penalty=0.0,
            early_stopping=early_stop,
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=end,
            return_dict_in_generate=True,
            output_scores=True,
        )
        beam = Beam(size=size, n_best=size, alpha=0.0, early_stop=early_stop)
        found = beam_search(*given, sources, bos_id=start, eos_id=end, beam=beam, max_new_tokens=12)
        ours = [one for row in found for one in row]
        rows = out.sequences[:, 1:].tolist()  # padded after the end
        ended = [end in tokens for tokens in rows]
        assert [one.ended for one in ours] == ended
        assert [one.tokens for one in ours] == [
            tokens[: tokens.index(end)] if end in tokens else tokens for tokens in rows
        ]
        np.testing.assert_allclose([one.score for one in ours], out.sequences_scores.tolist(), atol=1e-4)
        compared |= {tuple(ended[row * size : (row + 1) * size]) for row in range(len(sources))}
    assert {(True,) * size, (True, *[False] * (size - 1)), (False,) * size} <= compared, "choose other end tokens"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"size": 0}, r"size.*1.*got 0"),
        ({"size": True}, "size must be"),
        ({"alpha": -0.1}, r"alpha.*0"),
        ({"alpha": math.nan}, "alpha must be"),
        ({"n_best": 5}, r"n_best.*1.*\(4\).*got 5"),
        ({"length_ratio": math.inf}, r"length_ratio"),
        ({"length_extra": -1}, r"length_extra.*0"),
        ({"length_ratio": 0.0, "length_extra": 0}, "both 0: no target could have a token"),
    ],
)
def test_rejects_invalid_beam_options(fields, message):
    with pytest.raises(ConfigError, match=message):
        Beam(**fields)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sources": None}, "sources is missing"),
        ({"bos_id": None}, r"bos_id"),
        ({"eos_id": 29}, r"eos_id.*0.*28"),
        ({"suppress": [29]}, r"suppress.*0.*28"),
        ({"max_new_tokens": 0}, r"max_new_tokens.*1"),
        ({"prompts": [[1]]}, "as many prompts as sources, got 1 and 3"),
        ({"prompts": [[1] * 13] * 3}, "learned position table has only 13 positions"),
        ({"sources": [[1] * 14]}, "source 0 has 14 tokens"),
    ],
)
def test_invalid_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        search(**options)
