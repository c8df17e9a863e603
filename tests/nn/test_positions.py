"""Position schemes: comparison with float64, dependence on distances only, published scaling rules."""

import itertools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numeric_parts import random_params

from transformer.config import ConfigError, RotaryOptions, RotaryScaling, TransformerConfig
from transformer.nn._attention import MultiHeadAttention
from transformer.nn._caches import KVCache
from transformer.nn._masks import Mask
from transformer.nn._paged import PagedKVCache
from transformer.nn._positions import ALiBi, Learned, NoPosition, Rotary, Sinusoidal, SinusoidalHalves, T5Bias, angles


def positions(*values) -> np.ndarray:
    return np.asarray(values, np.int32)[None, :]


def random(*shape, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def rotated(scheme, *arrays) -> np.ndarray:
    return np.asarray(jax.jit(scheme.rotate)(*arrays))


def turned(heads, angle) -> np.ndarray:
    """Rotate pairs of halves of the last axis, in float64."""
    first, second = np.split(heads.astype(np.float64), 2, axis=-1)
    return np.concatenate(
        [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)], -1
    )


def test_sinusoids_equal_the_paper():
    encoding = np.asarray(jax.jit(lambda row: Sinusoidal().encoding(row, 6))(positions(0, 1, 2, 7)))[0]
    for row, position in zip(encoding, (0, 1, 2, 7), strict=True):
        for i in range(3):
            angle = position / 10_000 ** (2 * i / 6)
            np.testing.assert_allclose(row[2 * i : 2 * i + 2], [math.sin(angle), math.cos(angle)], atol=1e-6)


def test_sinusoids_in_halves_are_the_same_numbers():
    @jax.jit
    def both(row):
        return SinusoidalHalves().encoding(row, 6), SinusoidalHalves().add(jnp.zeros((1, 3, 6)), row)

    encoding, added = (np.asarray(leaf)[0] for leaf in both(positions(0, 1, 7)))
    angle = np.array([[0], [1], [7]]) / 10_000 ** (np.arange(0, 6, 2) / 6)
    np.testing.assert_allclose(encoding, np.concatenate([np.sin(angle), np.cos(angle)], -1), atol=1e-6)
    np.testing.assert_array_equal(added, encoding)


def test_angles_stay_exact_at_any_length():
    frequencies = 10_000.0 ** (-np.arange(0, 64, 2) / 64)
    far = np.array([[0, 1, 99_999, 100_000, 2_000_003, -5]])
    exact = far[..., None] * frequencies
    got = np.asarray(jax.jit(lambda row: angles(row, frequencies))(far.astype(np.int32)), np.float64)
    error = np.abs(np.exp(1j * got) - np.exp(1j * exact)).max(-1)[0]
    assert (error <= np.abs(far[0]) * 7.4e-10 + 5e-7).all()
    naive = np.abs(
        np.exp(1j * (far[..., None].astype(np.float32) * frequencies.astype(np.float32))) - np.exp(1j * exact)
    )
    assert naive.max() > 10 * error.max()


def test_only_additive_schemes_change_embeddings():
    x = np.ones((1, 3, 4), np.float32)
    table = np.arange(20.0, dtype=np.float32).reshape(5, 4)
    add = jax.jit(Learned(max_length=5, features=4).add)
    np.testing.assert_array_equal(np.asarray(add(x, positions(4, 0, 2), table))[0], 1 + table[[4, 0, 2]])
    assert np.isnan(np.asarray(add(x, positions(0, 1, 5), table))[0, 2]).all()
    np.testing.assert_allclose(np.asarray(jax.jit(Sinusoidal().add)(x, positions(0, 0, 0)))[0, 0], [1, 2, 1, 2])
    x, row = jax.device_put((x, positions(0, 1, 2)))
    for scheme in (NoPosition(), Rotary(), ALiBi(num_heads=2), T5Bias(num_heads=2)):
        assert scheme.add(x, row) is x


HEADS = random(1, 5, 4, 8)


@pytest.mark.parametrize(
    "scheme",
    [Rotary(), Rotary(base=50.0, size=4), Rotary(scaling=RotaryScaling(kind="linear", factor=4.0)), NoPosition()],
)
def test_rotated_dot_products_depend_only_on_distance(scheme):
    rotate = jax.jit(scheme.rotate)

    def products(shift):
        turned = np.asarray(rotate(HEADS, positions(*range(5)) + np.int32(shift)))
        return np.einsum("btnh,bsnh->bnts", turned, turned)

    np.testing.assert_allclose(products(0), products(1003), atol=2e-5)


def test_rotary_rotates_pairs_by_position_times_frequency():
    scheme = Rotary(base=100.0, size=4)
    turned = rotated(scheme, HEADS, positions(0, 1, 2, 3, 4))
    np.testing.assert_array_equal(turned[..., 4:], HEADS[..., 4:])
    pair = HEADS[0, 3, 1, 1] + 1j * HEADS[0, 3, 1, 3]
    expected = pair * np.exp(1j * 3 * 100.0 ** (-2 / 4))
    np.testing.assert_allclose([turned[0, 3, 1, 1], turned[0, 3, 1, 3]], [expected.real, expected.imag], rtol=1e-5)


@pytest.mark.parametrize(("size", "dtype"), [(None, jnp.float32), (4, jnp.float32), (None, jnp.bfloat16)])
def test_rotary_on_tpu_gives_the_same_values_and_gradients(size, dtype, monkeypatch):
    """TPUs run another form of the same formula, without halves of heads."""
    heads, weights = random(2, 1, 5, 3, 6).astype(dtype)
    scheme = Rotary(base=7.0, size=size)

    def both():
        @jax.jit
        def function(heads, weights):
            rotated, back = jax.vjp(lambda x: scheme.rotate(x, jnp.asarray(positions(0, 3, 1, 70, 5))), heads)
            return rotated, back(weights)[0]

        return [np.asarray(leaf, np.float32) for leaf in function(heads, weights)]

    expected = both()
    monkeypatch.setattr("transformer.nn._positions.platform", lambda: "tpu")
    tolerance = 1e-6 if dtype == jnp.float32 else 2**-6
    for got, value in zip(both(), expected, strict=True):
        np.testing.assert_allclose(got, value, atol=tolerance)


def test_linear_scaling_stretches_positions():
    scaled = Rotary(scaling=RotaryScaling(kind="linear", factor=4.0))
    np.testing.assert_allclose(
        rotated(scaled, HEADS, positions(0, 4, 8, 12, 16)),
        rotated(Rotary(), HEADS, positions(0, 1, 2, 3, 4)),
        atol=1e-5,
    )


def test_llama3_scaling_keeps_high_frequencies_and_divides_low_ones():
    scaling = RotaryScaling(kind="llama3", factor=8.0, original_length=8192)
    plain, scaled = Rotary(base=500_000.0), Rotary(base=500_000.0, scaling=scaling)
    wavelength = 2 * np.pi / plain.frequencies(128)
    ratio = scaled.frequencies(128) / plain.frequencies(128)
    np.testing.assert_allclose(ratio[wavelength < 8192 / 4], 1.0)
    np.testing.assert_allclose(ratio[wavelength > 8192 / 1], 1 / 8)
    middle = (wavelength > 8192 / 4) & (wavelength < 8192)
    # Llama 3.1's formula: smooth = (original / wavelength - low) / (high - low)
    smooth = (8192 / wavelength[middle] - 1) / 3
    np.testing.assert_allclose(ratio[middle], smooth + (1 - smooth) / 8)
    assert middle.sum() > 3


def test_yarn_scaling_ramps_by_turns_and_raises_the_magnitude():
    scheme = Rotary(scaling=RotaryScaling(kind="yarn", factor=16.0, original_length=4096))
    ratio = scheme.frequencies(128) / Rotary().frequencies(128)
    turns = 4096 * Rotary().frequencies(128) / (2 * np.pi)
    assert (ratio[turns > 40] == 1.0).all()
    np.testing.assert_allclose(ratio[turns < 0.8], 1 / 16)
    assert (np.diff(ratio) <= 0).all()
    assert scheme.magnitude == pytest.approx(0.1 * math.log(16) + 1)
    turned = rotated(scheme, HEADS, positions(0, 3, 50, 700, 9000))
    norms = np.linalg.norm(HEADS, axis=-1)
    np.testing.assert_allclose(np.linalg.norm(turned, axis=-1), norms * scheme.magnitude, rtol=1e-5)


def test_yarn_accepts_a_magnitude_and_an_unrounded_ramp():
    """The ramp starts and ends at pairs with 32 and 1 rotations in 4,096 positions: pairs 20.95 and 45.03 of 64."""
    scaling = RotaryScaling(kind="yarn", factor=16.0, original_length=4096, attention_factor=1.5, truncate=False)
    scheme = Rotary(scaling=scaling)
    assert scheme.magnitude == 1.5
    first, last = (128 * math.log(4096 / (2 * math.pi * turns)) / (2 * math.log(10_000)) for turns in (32, 1))
    assert (first, last) == pytest.approx((20.95, 45.03), abs=0.01)
    keep = 1 - np.clip((np.arange(64) - first) / (last - first), 0, 1)
    ratio = scheme.frequencies(128) / Rotary().frequencies(128)
    np.testing.assert_allclose(ratio, keep + (1 - keep) / 16)
    rounded = Rotary(scaling=RotaryScaling(kind="yarn", factor=16.0, original_length=4096)).frequencies(128)
    keep = 1 - np.clip((np.arange(64) - 20) / (46 - 20), 0, 1)
    np.testing.assert_allclose(rounded / Rotary().frequencies(128), keep + (1 - keep) / 16)


def test_alibi_slopes_equal_the_published_code():
    np.testing.assert_allclose(ALiBi(num_heads=8).slopes, 2.0 ** -np.arange(1, 9))
    np.testing.assert_allclose(ALiBi(num_heads=6).slopes, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])
    bias = np.asarray(jax.jit(ALiBi(num_heads=2).bias)(positions(3, 9), positions(0, 3, 5)))
    np.testing.assert_allclose(bias[0, 0], [[-3 / 16, 0, -2 / 16], [-9 / 16, -6 / 16, -4 / 16]])


def test_t5_buckets_equal_the_published_formula():
    """The formula of the T5 paper's code, in float64: one bucket per small distance, then logarithmic buckets."""
    distances = np.arange(-300, 300, dtype=np.int32)
    buckets = {
        both: np.asarray(jax.jit(T5Bias(num_heads=1, bidirectional=both).bucket)(distances)) for both in (True, False)
    }
    for bidirectional, distance in itertools.product((True, False), range(-300, 300)):
        side, start, far = 32, 0, max(-distance, 0)
        if bidirectional:
            side, start, far = 16, 16 * (distance > 0), abs(distance)
        exact = side // 2
        expected = far
        if far >= exact:
            steps = math.log(far / exact) / math.log(128 / exact) * (side - exact)
            expected = min(exact + int(steps + 1e-9), side - 1)
        assert buckets[bidirectional][distance + 300] == start + expected, (bidirectional, distance)


@pytest.mark.parametrize("scheme", [ALiBi(num_heads=3), T5Bias(num_heads=3), T5Bias(num_heads=3, bidirectional=False)])
def test_biases_depend_only_on_distance(scheme):
    table = None if scheme.table_shape is None else random(*scheme.table_shape)
    bias = jax.jit(scheme.bias)
    near = np.asarray(bias(positions(0, 5), positions(0, 1, 200), table))
    far = np.asarray(bias(positions(1000, 1005), positions(1000, 1001, 1200), table))
    assert near.shape == (1, 3, 2, 3)
    np.testing.assert_array_equal(near, far)
    assert len(np.unique(near)) > 3


LONGROPE = RotaryScaling(
    kind="longrope", factor=4.0, original_length=6, short_factors=(1.0, 1.2, 1.5), long_factors=(1.5, 4.0, 9.0)
)
DYNAMIC = RotaryScaling(kind="dynamic", factor=3.0, original_length=6)


def test_longrope_selects_factors_by_length():
    heads = random(2, 9, 1, 6)
    row = np.tile(np.arange(9, dtype=np.int32), (2, 1))
    got = rotated(Rotary(scaling=LONGROPE), heads, row, np.array([6, 7], np.int32))
    magnitude = np.sqrt(1 + np.log(4.0) / np.log(6.0))
    for text, factors in enumerate((LONGROPE.short_factors, LONGROPE.long_factors)):
        angle = np.arange(9)[:, None] * 10_000.0 ** (-np.arange(3) / 3) / np.array(factors)
        np.testing.assert_allclose(got[text, :, 0], magnitude * turned(heads[text, :, 0], angle), atol=2e-6)


def test_dynamic_scaling_raises_the_base_with_the_length():
    heads = random(3, 5, 2, 8)
    row = np.tile(np.arange(95, 100, dtype=np.int32), (3, 1))
    got = rotated(Rotary(base=50.0, scaling=DYNAMIC), heads, row, np.array([2, 6, 20], np.int32))
    plain = rotated(Rotary(base=50.0), heads, row)
    np.testing.assert_array_equal(got[:2], plain[:2])  # not longer than the original length
    raised = 50.0 * (3.0 * 20 / 6 - 2.0) ** (8 / 6)
    np.testing.assert_allclose(got[2], rotated(Rotary(base=raised), heads, row)[2], atol=1e-4)


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("scaling", [LONGROPE, DYNAMIC])
@pytest.mark.parametrize("paged", [False, True])
def test_cached_keys_are_rotated_by_the_length_of_the_text(scaling, paged):
    """One layer of attention, token by token and past the original length, equals attention without a cache."""
    module = MultiHeadAttention(num_heads=2, head_dim=6, position=Rotary(scaling=scaling))
    x = random(2, 9, 4)
    params = random_params(module, x)
    cache = jax.jit(lambda: KVCache.create(2, 12, 2, 6, 6, jnp.float32))()
    if paged:
        cache = jax.jit(lambda: PagedKVCache.create(8, 4, 2, 3, (2, 6, 6), jnp.float32))()
        cache = replace(cache, page_table=np.arange(6, dtype=np.int32).reshape(2, 3))

    @jax.jit
    def step(x, cache):
        return module.apply(params, x, mask=Mask.causal(), cache=cache)

    @jax.jit
    def prefixes(x):
        """Return the last output of each prefix of x, each computed alone because its length decides the rotation."""
        wholes = (module.apply(params, x[:, :length], mask=Mask.causal())[0] for length in range(1, 10))
        return jnp.stack([whole[:, -1] for whole in wholes], 1)

    whole = np.asarray(prefixes(x))
    for place in range(9):
        got, cache = step(x[:, place : place + 1], cache)
        np.testing.assert_allclose(np.asarray(got)[:, 0], whole[:, place], atol=2e-5)


def test_padding_does_not_count_for_the_length():
    module = MultiHeadAttention(num_heads=2, head_dim=6, position=Rotary(scaling=LONGROPE))
    x = random(1, 9, 4)
    segments, places = np.array([[0] * 4 + [1] * 5]), np.array([[9, 9, 9, 9, 0, 1, 2, 3, 4]], np.int32)

    @jax.jit
    def run(params, x, rolled):
        short, _ = module.apply(params, x[:, :5], mask=Mask.causal())
        right, _ = module.apply(params, x, mask=Mask.causal() & Mask.lengths(jnp.array([5])))
        mask = Mask.causal() & Mask.segments(jnp.asarray(segments))
        left, _ = module.apply(params, rolled, mask=mask, positions=jnp.asarray(places))
        return short, right[:, :5], left[:, 4:]

    short, right, left = run(random_params(module, x), x, np.roll(x, 4, 1))
    np.testing.assert_allclose(right, short, atol=1e-5)
    np.testing.assert_allclose(left, short, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "longrope", "short_factors": (1.0,)}, r"long_factors"),
        ({"kind": "longrope", "short_factors": (1.0,), "long_factors": (1.0, 2.0)}, "same number of factors"),
        ({"kind": "longrope", "short_factors": (-1.0,), "long_factors": (1.0,)}, "above 0"),
        ({"kind": "linear", "short_factors": (1.0,)}, "is empty for other kinds"),
        ({"kind": "dynamic", "attention_factor": 2.0}, r"attention_factor"),
    ],
)
def test_invalid_length_scaling_is_rejected(options, words):
    with pytest.raises(ConfigError, match=words):
        RotaryScaling(factor=2.0, **options)


def test_length_scaling_must_fit_the_head_size():
    sizes = {"d_model": 12, "num_heads": 1, "position": RotaryOptions()}
    TransformerConfig(**sizes, **{"position.dim": 6, "position.scaling": LONGROPE})
    with pytest.raises(ConfigError, match="6 short_factors"):
        TransformerConfig(**sizes, **{"position.scaling": LONGROPE})
    with pytest.raises(ConfigError, match="at least 4 rotated"):
        TransformerConfig(**sizes, **{"position.dim": 2, "position.scaling": DYNAMIC})


def test_equal_coordinates_equal_one_dimensional_positions():
    heads, row = random(2, 5, 3, 8), np.asarray([[0, 1, 2, 3, 4], [3, 9, 9, 1, 7]], np.int32)
    scheme = Rotary(sections=(1, 2, 1))
    plain = rotated(Rotary(), heads, row)
    np.testing.assert_array_equal(rotated(scheme, heads, np.repeat(row[:, :, None], 3, axis=2)), plain)
    np.testing.assert_array_equal(rotated(scheme, heads, row), plain)


def test_each_coordinate_rotates_its_section():
    heads, row = random(1, 2, 1, 8), np.asarray([[4, 7]], np.int32)
    plain = rotated(Rotary(base=10.0), heads, row)
    rotate = jax.jit(Rotary(base=10.0, sections=(1, 2, 1)).rotate)
    pairs = np.repeat([0, 1, 2], [1, 2, 1])
    for axis in range(3):
        got = np.asarray(rotate(heads, np.stack([row * (i == axis) for i in range(3)], -1, dtype=np.int32)))
        turned = np.tile(pairs == axis, 2)
        np.testing.assert_allclose(got[..., turned], plain[..., turned], atol=1e-6)
        np.testing.assert_array_equal(got[..., ~turned], heads[..., ~turned])


def test_sections_with_own_frequencies_equal_separate_heads():
    heads, row = random(1, 2, 1, 8), np.asarray([[[4, 7], [2, 5]]], np.int32)
    got = rotated(Rotary(base=10.0, sections=(2, 2), restart_frequencies=True), heads, row)
    rotate = jax.jit(Rotary(base=10.0).rotate)
    for axis, own in enumerate(([0, 1, 4, 5], [2, 3, 6, 7])):
        expected = rotate(heads[..., own], row[..., axis])
        np.testing.assert_allclose(got[..., own], expected, atol=1e-6)


def test_positions_need_a_section_for_each_coordinate():
    heads = jnp.zeros((1, 2, 1, 8))
    with pytest.raises(ValueError, match="positions of 2 coordinates need as many sections, got 3"):
        Rotary(sections=(1, 2, 1)).rotate(heads, jnp.zeros((1, 2, 2), jnp.int32))
