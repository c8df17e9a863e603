"""Batches of similar token counts: widths with minimal padding, every pair once per pass, few shapes."""

import itertools

import numpy as np
import pytest

from transformer.config import ConfigError, RotaryOptions, SinusoidalOptions, T5BiasOptions
from transformer.data import ParallelText, TokenizerConfig, prepare
from transformer.data._buckets import TokenBatches, bucket_bounds
from transformer.data._dataset import padding


def lengths_of(count=400, seed=0):
    random = np.random.default_rng(seed)
    source = random.integers(3, 40, count)
    return source, np.clip(source + random.integers(-3, 4, count), 2, None)


def token_batches(**changes):
    settings = {"batch_tokens": 512, "buckets": 5, "row_multiple": 4} | changes
    return TokenBatches(*lengths_of(), **settings)


def places(lengths, bounds):
    return bounds[np.searchsorted(bounds, lengths)].sum()


@pytest.mark.parametrize("buckets", [1, 2, 3, 4, 9])
def test_the_chosen_widths_minimize_padding(buckets):
    lengths = np.random.default_rng(buckets).choice([2, 3, 5, 8, 9, 14, 30], 60)
    found = bucket_bounds(lengths, buckets)
    assert len(found) <= buckets
    assert found[-1] == lengths.max()
    widths = np.unique(lengths)[:-1]
    choices = (
        np.array([*chosen, lengths.max()])
        for count in range(min(buckets, len(widths) + 1))
        for chosen in itertools.combinations(widths, count)
    )
    assert places(lengths, found) == min(places(lengths, choice) for choice in choices)


def test_very_many_lengths_are_rounded_up():
    lengths = np.random.default_rng(0).integers(1, 5000, 3000)
    found = bucket_bounds(lengths, 6)
    assert len(found) == 6
    assert found[-1] == lengths.max()
    assert places(lengths, found) < 1.3 * lengths.sum()


def test_each_epoch_has_every_pair_once_in_a_new_order():
    batches = token_batches()
    orders = []
    for number in range(3):
        items = [batches[number * batches.per_pass + i] for i in range(batches.per_pass)]
        members = np.concatenate([chosen[:filled] for _, chosen, filled in items])
        np.testing.assert_array_equal(np.sort(members), np.arange(400))
        orders.append(members.tolist())
    assert orders[0] != orders[1] != orders[2]
    again = token_batches().seeded(0)
    np.testing.assert_array_equal(again[7][1], batches[7][1])
    assert any((token_batches().seeded(1)[i][1][:4] != batches[i][1][:4]).any() for i in range(3))


def test_a_batch_fits_its_pairs_within_the_token_limit():
    batches = token_batches()
    source, target = lengths_of()
    for i in range(batches.per_pass):
        bucket, chosen, filled = batches[i]
        assert len(chosen) == bucket.rows
        assert bucket.rows % 4 == 0
        assert 0 < filled <= bucket.rows
        assert bucket.rows * max(bucket.source_length, bucket.target_length) <= 512
        assert source[chosen].max() <= bucket.source_length
        assert target[chosen].max() <= bucket.target_length
    assert len({(b.rows, b.source_length, b.target_length) for b in batches.buckets}) <= 5


def test_more_buckets_waste_less():
    used = sum(lengths.sum() for lengths in lengths_of())

    def waste(count):
        found = token_batches(buckets=count).buckets
        return 1 - used / sum(b.batches * b.rows * (b.source_length + b.target_length) for b in found)

    assert waste(1) > waste(3) > waste(8)
    assert f"{100 * waste(8):.1f} % padding" in token_batches(buckets=8).describe()


def test_a_pair_longer_than_a_batch_is_refused():
    with pytest.raises(ValueError, match=r"batch_tokens \(100\).*row_multiple \(4\).*1"):
        token_batches(batch_tokens=100)


@pytest.mark.parametrize("field", ["batch_tokens", "buckets", "row_multiple"])
def test_rejects_values_that_are_not_counts(field):
    with pytest.raises(ConfigError, match=f"{field}"):
        ParallelText(source_path="pairs.txt", **{field: 0})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"batch_tokens": 512, "batch_size": 7},
            r"batch_size \(7\).*batch_tokens \(512\).*,.*--data.batch-tokens",
        ),
        (
            {"batch_tokens": 512, "packed_length": 50, "buckets": 7},
            r"\(7\).*packed_length \(50\)",
        ),
    ],
)
def test_rejects_a_field_without_effect(fields, message):
    with pytest.raises(ConfigError, match=message):
        ParallelText(source_path="pairs.txt", **fields)


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "pairs.txt"
    lines = (f"{'ab ' * (1 + n % 17)}{n}\t{'c ' * (1 + n % 11)}{n * n}" for n in range(300))
    path.write_text("\n".join(lines) + "\n")

    def made(**changes):
        settings = {"batch_tokens": 600, "row_multiple": 2} | changes
        return prepare(ParallelText(source_path=str(path), tokenizer=TokenizerConfig(kind="char"), **settings))

    return made


def rows_of(batch):
    """Return the pairs of a batch with nonzero weight, as tuples of ids."""
    return [
        (*source[:length].tolist(), -1, *target[weights > 0].tolist())
        for source, length, target, weights in zip(
            batch["source"], batch["source_lengths"], batch["targets"], batch["weights"], strict=True
        )
        if weights.any()
    ]


def test_bucketing_keeps_the_pairs_of_a_dataset(pairs):
    dataset = pairs()
    iterator = dataset.train_batches(seed=3)
    seen = [row for _ in range(dataset._batches.per_pass) for row in rows_of(next(iterator))]
    whole = next(pairs(batch_tokens=None, batch_size=270).train_batches(seed=3))
    assert sorted(seen) == sorted(rows_of(whole))


def test_the_iterator_resumes_at_its_position(pairs):
    first = pairs().train_batches(seed=1)
    for _ in range(5):
        next(first)
    state, expected = first.get_state(), [next(first) for _ in range(40)]
    second = pairs().train_batches(seed=1)
    second.set_state(state)
    for batch in expected:
        for name, array in next(second).items():
            np.testing.assert_array_equal(array, batch[name])


def test_processes_share_each_batch(pairs):
    dataset = pairs()
    whole = dataset.train_batches(seed=2)
    parts = [
        dataset.train_batches(seed=2, rows=lambda total, part=part: np.split(np.arange(total), 2)[part])
        for part in (0, 1)
    ]
    for _ in range(2 * dataset._batches.per_pass):
        halves = [next(part) for part in parts]
        for name, array in next(whole).items():
            np.testing.assert_array_equal(np.concatenate([half[name] for half in halves]), array)


def test_padding_is_counted_as_positions_without_tokens(pairs):
    batch = {
        "source": np.ones((3, 5), np.int32),
        "source_lengths": np.array([5, 2, 4]),
        "tokens": np.ones((3, 4), np.int32),
        "weights": np.array([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0.0]]),
    }
    assert padding(batch) == (27 - 7 - 4, 27)  # the last row fills up the batch
    labeled = {"tokens": np.ones((2, 6), np.int32), "lengths": np.array([3, 6]), "weights": np.array([1.0, 0.0])}
    assert padding(labeled) == (9, 12)
    assert padding(labeled | {"weights": np.eye(2, 6) * [[0], [1]]}) == (3, 12)  # no token of the first row is masked
    assert padding({"tokens": np.ones((2, 6)), "weights": np.ones((2, 6))}) is None
    dataset = pairs()
    iterator = dataset.train_batches(seed=0)
    padded, every = np.sum([padding(next(iterator)) for _ in range(dataset._batches.per_pass)], axis=0)
    assert f"{100 * padded / every:.1f} % padding" in dataset.describe()


def packed_pair_batch(pairs, packed):
    """Return a packed batch, and a batch with the same pairs, one per row."""
    iterator = pairs(packed_length=60, batch_tokens=240).train_batches(seed=4)
    batch = next(iterator)
    rows = []
    for row in range(len(batch["weights"])):
        for segment in range(1, batch["segment_ids"][row].max() + 1):
            source = batch["source"][row][batch["source_segment_ids"][row] == segment]
            inside = batch["segment_ids"][row] == segment
            rows.append((source, batch["tokens"][row][inside], batch["targets"][row][inside]))
    if packed:
        return batch
    width = max(max(len(part) for part in row) for row in rows)

    def padded(side):
        return np.stack([np.pad(row[side], (0, width - len(row[side]))) for row in rows])

    return {
        "source": padded(0),
        "source_lengths": np.array([len(row[0]) for row in rows]),
        "tokens": padded(1),
        "targets": padded(2),
        "weights": (np.arange(width) < np.array([[len(row[1])] for row in rows])).astype(np.float32),
    }


@pytest.mark.parametrize(
    "position",
    [SinusoidalOptions(), *(pytest.param(one, marks=pytest.mark.slow) for one in (RotaryOptions(), T5BiasOptions()))],
)
def test_packed_pairs_have_the_loss_and_gradient_of_separate_pairs(pairs, position):
    import jax
    from numeric_parts import random_params

    from transformer.config import Execution, FeedForwardOptions, TransformerConfig
    from transformer.nn.models import Seq2Seq
    from transformer.training.tasks._losses import cross_entropy
    from transformer.training.tasks._table import TASKS

    vocabulary = pairs().tokenizer.vocab_size
    config = TransformerConfig(
        vocab_size=vocabulary,
        d_model=8,
        num_heads=2,
        num_layers=1,
        feed_forward=FeedForwardOptions(d_ff=8),
        position=position,
    )
    model = Seq2Seq(config, Execution(scan=False))
    one = np.ones((1, 1), np.int32)
    params = random_params(model, one, one)["params"]

    def loss(params, batch):
        logits = TASKS["seq2seq"].forward(model, {"params": params}, batch, deterministic=True)
        total, weight = cross_entropy(logits, batch["targets"], batch["weights"])
        return total / weight, weight

    slope = jax.jit(jax.value_and_grad(loss, has_aux=True))
    results = [slope(params, packed_pair_batch(pairs, packed)) for packed in (True, False)]
    (((packed, weight), gradient), ((apart, same_weight), wanted)) = results
    assert weight == same_weight > 100
    np.testing.assert_allclose(packed, apart, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), gradient, wanted)


def test_packing_reduces_padding_and_resumes_at_its_position(pairs):
    settings = {"packed_length": 150, "batch_tokens": 1200}
    first = pairs(**settings).train_batches(seed=1)
    seen = [next(first) for _ in range(7)]
    plain = pairs(batch_tokens=None, batch_size=30).train_batches(seed=1)
    (padded, every), (more, of) = (
        np.sum([padding(batch) for batch in some], axis=0) for some in (seen, [next(plain) for _ in range(10)])
    )
    assert padded / every < 0.75 * more / of
    assert {batch["tokens"].shape for batch in seen} == {(8, 150)}
    state, expected = first.get_state(), [next(first) for _ in range(9)]
    second = pairs(**settings).train_batches(seed=1)
    second.set_state(state)
    for batch in expected:
        for name, array in next(second).items():
            np.testing.assert_array_equal(array, batch[name])


def test_a_row_too_short_to_pack_is_refused(pairs):
    with pytest.raises(ConfigError, match=r"packed_length \(60\).*batch_tokens.*row_multiple \(2\)"):
        pairs(packed_length=60, batch_tokens=100)
    with pytest.raises(ValueError, match=r"packed_length \(9\).*\d+"):
        pairs(packed_length=9)
