"""Properties of every model, tested on random configs: causality, padding, packing, batch order, cache, jit."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from property_parts import LONGEST, VOCABULARY, Case, assert_close, cases, often, pack_rows, reader, rounding

from transformer.config import Execution
from transformer.nn._caches import set_cache_length
from transformer.nn._masks import Mask
from transformer.nn._sharding import AXES, make_mesh, place_batch, state_shardings

LENGTH, SOURCE_LENGTH = 6, 5


def reach(case: Case, layers: int, causal: bool) -> np.ndarray:
    """Return (T, T): which inputs each output of a stack depends on, computed layer by layer."""
    config, seen = case.config, np.eye(LENGTH, dtype=bool)
    repeats = (layers - len(config.stack.prefix) - len(config.stack.suffix)) // len(config.stack.period)
    distance = np.arange(LENGTH)[:, None] - np.arange(LENGTH)[None, :]
    for kind in (*config.stack.prefix, *config.stack.period * repeats, *config.stack.suffix):
        if kind.self_attention:
            layer = np.abs(distance) < (LENGTH if kind.window is None else kind.window)
            seen = (layer & (distance >= 0 if causal else True)) @ seen
    return seen


@often(1, 10, st.tuples(cases(), st.integers(0, LENGTH - 1)))
def test_an_output_depends_exactly_on_its_unmasked_inputs(drawn):
    """Check the Jacobian of a random mixture of the logits at t with respect to the embeddings at s.

    For dependencies without a derivative, also change the embeddings after t.
    """
    case, place = drawn
    if case.config.attention.softcap is None:  # without a softcap, small attention weights may round to 0
        case = Case(case.kind, case.config.replace(**{"attention.softcap": 10.0}), case.seed)
    model, params, random = case.model(), case.params, np.random.default_rng(case.seed)
    both = case.kind == "encoder-decoder"
    causal = case.kind != "encoder" or case.config.attention.causal
    lengths = (LENGTH, SOURCE_LENGTH) if both else (LENGTH,)
    embedded = [random.normal(size=(1, n, case.config.d_model)).astype(np.float32) for n in lengths]
    mixture = random.normal(size=VOCABULARY).astype(np.float32)

    def run(model, x, source=None):
        if both:
            mask = Mask.lengths(jnp.array([SOURCE_LENGTH - 1]))
            context = model.encoder(source, mask=mask, deterministic=False)[0]
            return model.head(model.decoder(x, context, context_mask=mask, deterministic=False)[0])
        return model.head((model.encoder if case.kind == "encoder" else model.decoder)(x, deterministic=False)[0])

    def mixed(*embedded):
        logits = model.apply({"params": params}, *embedded, method=run)[0]
        return logits @ mixture, logits

    slopes = jax.jit(jax.jacrev(mixed, argnums=tuple(range(len(lengths))), has_aux=True))
    (by_input, *by_source), logits = jax.device_get(slopes(*embedded))
    seen = reach(case, case.config.decoder_layers if both else case.config.num_layers, causal)
    depends = np.abs(by_input[:, 0]).max(-1) > 0
    assert not (depends & ~seen).any()
    # Without residual connections, all hidden units of a layer may be zero or a softmax saturated, so nothing is
    # checked.
    if case.config.norm.position != "pre_without_residual":
        np.testing.assert_array_equal(depends, seen)
        assert all((np.abs(by[:, 0, :-1]).max(-1) > 0).all() for by in by_source)
    assert all((by[:, 0, -1] == 0).all() for by in by_source)
    if causal:
        later = (np.arange(LENGTH) > place)[None, :, None]
        changed = np.where(later, 3 - embedded[0], embedded[0])
        _, others = jax.device_get(slopes(changed, *embedded[1:]))
        assert_close(others[: place + 1], logits[: place + 1])


@often(1, 10, st.tuples(cases(), st.sampled_from(["lengths", "right", "left"]), st.integers(1, 3)))
def test_padding_changes_nothing(drawn):
    """Masked tokens at either end change neither logits nor router losses, with any ids."""
    case, way, more = drawn
    run = jax.jit(reader(case))

    def batch(extra):
        made = {}
        for side, length in {"": LENGTH, "source_": SOURCE_LENGTH}.items():
            real = np.ones((2, length), np.int32)
            rows = {"tokens": case.tokens(2, length, source=bool(side)), "segments": real}
            rows["positions"] = np.cumsum(real, 1) - 1
            widths = ((0, 0), (extra, 0) if way == "left" else (0, extra))
            padded = {name: np.pad(array, widths, constant_values=0) for name, array in rows.items()}
            padded["tokens"] = np.where(padded["segments"] == 0, 1 + np.arange(length + extra) % 7, padded["tokens"])
            made |= {side + name: array.astype(np.int32) for name, array in padded.items()}
            if way == "lengths":
                made[side + "lengths"] = np.array([length, length])
        return made

    expected, aux = jax.device_get(run(case.params, batch(0)))
    logits, padded_aux = jax.device_get(run(case.params, batch(more)))
    got = (logits[:, more:] if way == "left" else logits[:, :LENGTH], padded_aux)
    assert_close(got, (expected, aux), noise=rounding(run, case.params, batch(0)))


def weighed(read: Callable) -> Callable:
    """Return a loss function (params, batch) -> (weighted sum of the logits of `read` plus router losses, logits)."""

    def loss(params, batch):
        logits, aux = read(params, batch)
        return (logits * batch["weights"]).sum() + sum(loss.sum() for loss in aux.values()), logits

    return loss


@st.composite
def packings(draw):
    """Generate lengths of three texts and their sources, and which two of them share a row."""
    lengths = draw(st.tuples(*[st.tuples(st.integers(1, LENGTH), st.integers(1, LENGTH))] * 3))
    first, second, third = draw(st.permutations(range(3)))
    return lengths, [[first, second], [third], []]


@often(1, 10, st.tuples(cases(), packings()))
def test_packed_texts_equal_separate_texts(drawn):
    """Compare logits, router losses, and gradients of their sum."""
    case, (lengths, packed) = drawn
    read, random = reader(case), np.random.default_rng(case.seed)
    weights = random.normal(size=(3, LENGTH, VOCABULARY))

    def batch(groups):
        made = {}
        for side, place in {"": 0, "source_": 1}.items():
            tokens = np.asarray(case.tokens(3, LENGTH, source=bool(side)))
            rows = [row[: length[place]] for row, length in zip(tokens, lengths, strict=True)]
            made |= {side + name: array for name, array in pack_rows(rows, groups, LONGEST).items()}
        made["weights"] = np.zeros((3, LONGEST, VOCABULARY), np.float32)
        for text, row, start in places(groups):
            made["weights"][row, start : start + lengths[text][0]] = weights[text, : lengths[text][0]]
        return made

    def places(groups):
        for row, members in enumerate(groups):
            start = 0
            for text in members:
                yield text, row, start
                start += lengths[text][0]

    run = jax.jit(jax.value_and_grad(weighed(read), has_aux=True))
    (expected, logits), gradients = jax.device_get(run(case.params, batch([[0], [1], [2]])))
    (total, logits_packed), gradients_packed = jax.device_get(run(case.params, batch(packed)))
    noise = rounding(run, case.params, batch(packed))
    for text, row, start in places(packed):
        length = lengths[text][0]
        assert_close(logits_packed[row, start : start + length], logits[text, :length], noise=noise)
    assert_close((total, gradients_packed), (expected, gradients), 1e-4, noise)


def full_batch(case: Case, rows: int, lengths: tuple[int, int] = (LENGTH, SOURCE_LENGTH)) -> dict[str, jax.Array]:
    """Return rows of one text each without padding, except for two padding tokens in the last row."""
    made = {}
    for side, length in zip(("", "source_"), lengths, strict=True):
        tokens = list(np.asarray(case.tokens(rows, length, source=bool(side))))
        tokens[-1] = tokens[-1][:-2]
        found = pack_rows(tokens, [[row] for row in range(rows)], length)
        made |= {side + name: array for name, array in found.items()}
    weights = np.random.default_rng(case.seed).normal(size=(rows, lengths[0], VOCABULARY))
    return made | {"weights": weights.astype(np.float32)}


@often(1, 10, st.tuples(cases(), st.sampled_from([(1, 2, 0), (2, 0, 1)])))
def test_rows_of_a_batch_are_independent(drawn):
    """A permutation of the rows permutes the outputs."""
    case, order = drawn
    run, batch, order = jax.jit(reader(case)), full_batch(case, 3), np.array(order)
    moved = run(case.params, jax.tree.map(lambda array: np.asarray(array)[order], batch))
    expected = jax.tree.map(lambda array: np.asarray(array)[order], run(case.params, batch))
    assert_close(moved, expected, noise=rounding(run, case.params, batch))


EXECUTIONS = [
    Execution(scan=scan, remat=remat) for scan in (False, True) for remat in ("none", "dots", "names", "full")
]


@often(
    1,
    8,
    st.tuples(
        cases("decoder", "encoder", repeats=2),
        st.sampled_from(EXECUTIONS[:4] + EXECUTIONS[5:]),
        st.booleans(),
    ),
)
def test_scan_unroll_and_remat_change_nothing(drawn):
    """Values and gradients are the same, also with dropout."""
    case, execution, drops = drawn
    if drops:
        case = Case(case.kind, case.config.replace(dropout_rate=0.3, **{"attention.dropout_rate": 0.2}), case.seed)
    batch = full_batch(case, 2)

    def run(execution):
        def loss(params, batch):
            rngs = {"dropout": jax.random.key(case.seed)}
            return weighed(reader(case, execution, rngs=rngs))(params, batch)

        return jax.jit(jax.value_and_grad(loss, has_aux=True))

    plain = run(Execution())
    noise = rounding(plain, case.params, batch)
    assert_close(run(execution)(case.params, batch), plain(case.params, batch), 1e-4, noise)


@st.composite
def chunks(draw):
    """Generate the prompt length of each row, and the number of tokens to read in each later call."""
    prompts = draw(st.tuples(*[st.integers(1, LENGTH - 2)] * 2))
    rest = LENGTH - max(prompts)
    one = draw(st.sampled_from([1, rest]))
    return prompts, [one] * (rest // one)


@often(1, 10, st.tuples(cases("decoder", "encoder-decoder"), chunks()))
def test_cached_is_uncached(drawn):
    """Read padded prompts of different lengths, then single tokens or all remaining tokens in one call."""
    case, (prompts, widths) = drawn
    model, params, tokens, ends = case.model(), case.params, np.asarray(case.tokens(2, LENGTH)), np.array(prompts)
    source = case.tokens(2, SOURCE_LENGTH, source=True)

    @jax.jit
    def run(params, source, tokens, cache=None, lengths=None):
        cache = cache if lengths is None else set_cache_length(cache, lengths)
        if case.kind == "decoder":
            return model.apply({"params": params}, tokens, cache=cache)
        mask = Mask.lengths(jnp.array([SOURCE_LENGTH, SOURCE_LENGTH - 2]))
        return model.apply({"params": params}, source, tokens, cache=cache, source_mask=mask)

    whole, rows = np.asarray(run(params, source, tokens)), np.arange(2)[:, None]
    noise = rounding(run, params, source, tokens)
    cache = jax.jit(lambda: model.init_cache(2, LENGTH + 1))()
    logits, cache = run(params, source, tokens[:, : max(prompts)], cache)
    for row, end in enumerate(ends):
        assert_close(np.asarray(logits)[row, :end], whole[row, :end], 1e-4, noise)
    for width in widths:
        places = ends[:, None] + np.arange(width)
        logits, cache = run(params, None, tokens[rows, places], cache, ends)
        assert_close(logits, whole[rows, places], 1e-4, noise)
        ends = ends + width


@pytest.mark.programs(110, reason="compares jit with the single operations")
@often(1, 8, cases())
def test_compiled_equals_eager(case):
    read, batch = reader(case), full_batch(case, 2)
    run = jax.jit(read)
    assert_close(run(case.params, batch), read(case.params, batch), noise=rounding(run, case.params, batch))


@often(0, 8, st.tuples(cases(), st.lists(st.sampled_from(AXES), min_size=3, max_size=3)))
def test_eight_devices_equal_one_device(drawn):
    """Values and gradients are the same if a mesh splits rows, length, heads, parameters or experts."""
    case, axes = drawn
    mesh = make_mesh({axis: 2 ** axes.count(axis) for axis in AXES})
    params, batch = case.params, full_batch(case, 8, (8, 8))
    run = jax.value_and_grad(weighed(reader(case)), has_aux=True)
    alone = jax.jit(run)
    expected, noise = alone(params, batch), rounding(alone, params, batch)
    with jax.set_mesh(mesh):
        got = jax.jit(run)(jax.device_put(params, state_shardings(params, mesh)), place_batch(batch, mesh))
    assert_close(got, expected, 1e-4, noise)
