"""Tests of the studies: scaling of scores, positions, memory, padding."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer.config import RotaryScaling
from transformer.nn._positions import ALiBi, NoPosition, Rotary, Sinusoidal, T5Bias
from transformer.nn.kernels import KERNELS
from transformer.nn.kernels._reference import masked_softmax
from transformer.viz.studies import _memory as memory
from transformer.viz.studies import _padding as padding
from transformer.viz.studies import _positions as positions
from transformer.viz.studies import _scale as scale


@pytest.fixture(scope="module")
def rows():
    return scale.scale_study((4, 64, 1024), least_rounds=16)


class TestScale:
    def test_the_variance_is_d_k_and_scaling_restores_1(self, rows):
        for row in rows:
            assert row.variance == pytest.approx(1 if row.scaled else row.d_k, rel=0.03)
            assert abs(row.mean) < 0.02 * math.sqrt(row.variance)

    def test_without_scale_the_gradient_vanishes_for_large_heads(self, rows):
        without = [row.gradient for row in rows if not row.scaled]
        scaled = [row.gradient for row in rows if row.scaled]
        assert max(scaled) < 1.05 * min(scaled)
        assert without[-1] < 0.5 * scaled[-1]
        largest = [row.largest_weight for row in rows if not row.scaled]
        assert largest == sorted(largest)
        assert largest[-1] > 0.9

    @pytest.mark.parametrize("factor", [0.1, 1.0, 30.0])
    def test_the_gradient_equals_the_softmax_of_the_package(self, factor):
        scores = (factor * np.random.default_rng(0).normal(size=(5, 7))).astype(np.float32)

        def softmax(row):
            return masked_softmax(row[None, None, None], None)[0, 0, 0]

        run = jax.jit(lambda scores: (jax.vmap(jax.jacobian(softmax))(scores), jax.vmap(softmax)(scores)))
        jacobians, weights = jax.device_get(run(scores))
        expected = np.linalg.norm(jacobians.astype(np.float64), axis=(1, 2))
        np.testing.assert_allclose(scale.softmax_gradient(weights), expected, rtol=1e-4, atol=1e-6)

    @pytest.mark.programs(14, reason="the study computes its statistics outside of jit")
    def test_the_seed_determines_the_result(self):
        once, again, other = (scale.scale_study((3,), 2, seed) for seed in (5, 5, 6))
        assert once == again != other


DISTANCES = np.array([0, 1, 7, 101, 1_009, 10_007, 99_991, 100_000])
YARN = RotaryScaling(kind="yarn", factor=8.0, original_length=4_096)
ROTARY = [Rotary(), Rotary(base=500_000.0), Rotary(scaling=RotaryScaling(kind="linear", factor=8.0))]
ROTARY += [Rotary(scaling=YARN), Rotary(base=500_000.0, scaling=RotaryScaling(kind="llama3", factor=8.0))]


class TestPositions:
    @pytest.mark.parametrize("features", [4, 26])
    def test_sinusoid_similarity_equals_the_mean_cosine(self, features):
        frequencies = 10_000.0 ** (-np.arange(0, features, 2) / features)
        expected = np.cos(DISTANCES[:, None] * frequencies).mean(-1)
        found = positions.encoding_similarity(Sinusoidal(), features, DISTANCES)
        np.testing.assert_allclose(found, expected, atol=1e-4)
        assert found[0] == pytest.approx(1.0)

    @pytest.mark.parametrize("scheme", ROTARY)
    def test_rotary_similarity_equals_the_mean_cosine(self, scheme):
        expected = np.cos(DISTANCES[:, None] * scheme.frequencies(22)).mean(-1)
        found = positions.rotation_similarity(scheme, 22, DISTANCES)
        np.testing.assert_allclose(found, expected, atol=1e-4)
        assert found[0] == pytest.approx(1.0)

    @pytest.mark.programs(25, reason="each call compiles its blocks of distances")
    def test_only_the_distance_matters(self):
        for of in (
            lambda start: positions.encoding_similarity(Sinusoidal(), 26, DISTANCES, start),
            lambda start: positions.rotation_similarity(Rotary(scaling=YARN), 22, DISTANCES, start),
            lambda start: positions.bias_factors(ALiBi(num_heads=3), DISTANCES, start),
        ):
            expected = of(0)
            for start in (13, 4_999):
                np.testing.assert_allclose(of(start), expected, atol=1e-4)

    @pytest.mark.programs(13, reason="studies call the position schemes outside of jit")
    def test_alibi_is_a_factor_of_e_to_the_slope(self):
        scheme = ALiBi(num_heads=8)
        found = positions.bias_factors(scheme, DISTANCES)
        np.testing.assert_allclose(found, np.exp(-scheme.slopes[:, None] * DISTANCES), rtol=1e-6)
        assert (found[:, 0] == 1).all()

    def test_without_positions_all_similarities_are_equal(self):
        np.testing.assert_allclose(positions.rotation_similarity(NoPosition(), 6, DISTANCES), 1.0)

    @pytest.mark.programs(22, reason="studies call the position schemes outside of jit")
    def test_t5_codes_equal_its_buckets(self):
        scheme = T5Bias(num_heads=1, bidirectional=False)
        found = positions.bias_codes(scheme, DISTANCES)
        np.testing.assert_array_equal(found, jax.jit(lambda: scheme.bucket(-jnp.asarray(DISTANCES)))())
        assert len(set(found[DISTANCES >= 128])) == 1

    @pytest.mark.programs(11, reason="studies call the position schemes outside of jit")
    def test_a_learned_table_has_one_code_per_row(self):
        np.testing.assert_array_equal(positions.learned_codes(5, np.arange(7)), [0, 1, 2, 3, 4, -1, -1])

    def test_prints_a_row_of_codes(self):
        row = positions._codes("x", np.array([0, 1, 2, 2, 3, 3, 3, 3]))
        assert (row.codes, row.single_below, row.alike_from) == (4, 2, 4)
        row = positions._codes("none", np.zeros(5))
        assert (row.codes, row.single_below, row.alike_from) == (1, 0, 0)

    def test_finds_where_sinusoids_of_eight_features_repeat(self):
        """The longest of four wavelengths is 6,283 positions; the three others are multiples of each other."""
        curve = positions.encoding_similarity(Sinusoidal(), 8, np.arange(7_000))
        row = positions._repeats(8, curve)
        assert row.longest_wavelength == pytest.approx(2 * math.pi * 1_000)
        assert row.returns_at == 5_655
        assert (curve[6:5_655] < 0.95).all()  # no earlier distance
        assert curve[5_655] >= 0.95
        assert row.highest == curve[row.highest_at] == curve[1_000:].max()

    @pytest.mark.programs(9, reason="each call compiles its blocks of distances")
    def test_wide_sinusoids_do_not_repeat(self):
        row = positions._repeats(64, positions.encoding_similarity(Sinusoidal(), 64, np.arange(20_000)))
        assert row.returns_at is None
        assert row.highest < 0.5


class TestMemory:
    @pytest.mark.slow
    def test_full_attention_memory_quadruples_and_blockwise_memory_doubles(self):
        rows = memory.memory_study((2_048, 4_096))
        growth = {row.kernel: row.growth for row in rows if row.growth is not None}
        assert growth.keys() == KERNELS.keys()
        assert growth["reference"] == pytest.approx(4, rel=0.05)
        assert growth["blockwise"] == pytest.approx(2, rel=0.15)
        assert [row.growth for row in rows if row.length == 2_048] == [None] * len(KERNELS)

    def test_full_attention_memory_is_measured(self):
        """The weights and their gradient, for three heads, exist at the same time."""
        assert memory.temporary_bytes("reference", 512, heads=3, head_dim=2) >= 2 * 3 * 512 * 512 * 4

    def test_the_program_gives_the_three_gradients(self):
        arrays = list(np.random.default_rng(0).normal(size=(3, 2, 3)).astype(np.float32))
        found = memory.forward_and_backward(lambda q, k, v: q * k * v)(*arrays)
        q, k, v = arrays
        for gradient, expected in zip(found, (k * v, q * v, q * k), strict=True):
            np.testing.assert_allclose(gradient, expected, rtol=1e-6)


def skewed(count, seed=0):
    return np.ceil(np.random.default_rng(seed).lognormal(2.0, 1.0, count)).astype(int)


class TestPadding:
    @pytest.mark.parametrize("seed", [0, 1, 2])
    def test_packing_wastes_least_and_global_padding_most(self, seed):
        lengths = skewed(1_009, seed)
        rows = {row.strategy: row for row in padding.padding_study(lengths, batch_rows=13)}
        shares = [row.share for row in rows.values()]
        assert list(rows) == ["longest of all", "longest of the batch", "length buckets", "packing"]
        assert shares == sorted(shares, reverse=True)
        assert all(0 <= share < 1 for share in shares)
        for row in rows.values():
            assert row.places - row.padding == lengths.sum()
            assert row.share == row.padding / row.places
        assert rows["packing"].shapes == rows["longest of all"].shapes == 1
        assert rows["length buckets"].shapes <= padding.BUCKETS
        assert rows["packing"].rows < len(lengths) == rows["length buckets"].rows == rows["longest of all"].rows
        assert rows["packing"].batches < rows["length buckets"].batches < rows["longest of all"].batches

    def test_packing_splits_and_loses_no_sequence(self):
        lengths = skewed(211)
        packed = padding.pack(lengths, int(lengths.max()), rows_at_once=5)
        assert packed.shape[1] == lengths.max()
        assert packed.any(-1).all()
        for number, length in enumerate(lengths, 1):
            rows, columns = np.nonzero(packed == number)
            assert len(rows) == length
            assert len(set(rows)) == 1
            np.testing.assert_array_equal(columns, columns[0] + np.arange(length))
        assert (packed > 0).sum() == lengths.sum()

    def test_equal_lengths_need_no_padding(self):
        for row in padding.padding_study([7] * 30, batch_rows=4):
            assert (row.share, row.rows, row.batches, row.shapes) == (0, 30, 8, 1)

    def test_one_sequence_needs_no_padding(self):
        assert [row.share for row in padding.padding_study([3])] == [0, 0, 0, 0]

    @pytest.mark.parametrize("lengths", [[], [3, 0], [[1, 2]]])
    def test_rejects_invalid_lengths(self, lengths):
        with pytest.raises(ValueError, match=r"lengths must be a vector of at least one integer.*Remove empty"):
            padding.padding_study(lengths)

    def test_reads_lengths_of_number_words(self):
        lengths = padding.number_word_lengths(300)
        assert (len(lengths), lengths.min()) == (300, 3)  # "one"
        np.testing.assert_array_equal(lengths, padding.number_word_lengths(300))

    def test_reads_lengths_of_a_text(self, tmp_path):
        path = tmp_path / "text.txt"
        path.write_bytes("one two\r\n\n  \nthree\tfour  five\nséis".encode())
        assert padding.text_lengths(path).tolist() == [2, 3, 1]
        assert sorted(padding.text_lengths(path, most=2).tolist()) in ([1, 2], [1, 3], [2, 3])
