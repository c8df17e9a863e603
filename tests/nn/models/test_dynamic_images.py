"""The decoder that reads images of any size between its tokens."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numeric_parts import random_params

from transformer.config import (
    DynamicImageTokens,
    FeedForwardOptions,
    LayerKind,
    NormOptions,
    ParameterOptions,
    RotaryOptions,
    TransformerConfig,
)
from transformer.nn import make_mesh, state_shardings
from transformer.nn._caches import next_positions, set_cache_length
from transformer.nn._masks import Mask
from transformer.nn.models import CausalLM, VisionLanguageModel
from transformer.nn.models._dynamic_images import ImagePatches, TokenPlaces

ENCODER = TransformerConfig(
    d_model=8,
    num_layers=2,
    num_heads=2,
    feed_forward=FeedForwardOptions(d_ff=6, activation="silu", gated=True),
    norm=NormOptions(kind="rms_norm"),
    position=RotaryOptions(sections=(1, 1), restart_frequencies=True),
    **{"stack.period": (LayerKind(within_segments=True), LayerKind())},
)
IMAGES = DynamicImageTokens(token_id=10, encoder=ENCODER, patch_size=2, window_size=8)
CONFIG = TransformerConfig(
    vocab_size=11,
    d_model=16,
    num_layers=2,
    num_heads=2,
    feed_forward=FeedForwardOptions(d_ff=6),
    position=RotaryOptions(),
    input=IMAGES,
    parameters=ParameterOptions(initializer_range=0.5),
    **{"position.sections": (1, 2, 1)},
)
M = IMAGES.token_id


def image(seed, rows, columns):
    """Return a random image with this number of tokens."""
    side = IMAGES.multiple
    return np.random.RandomState(seed).standard_normal((rows * side, columns * side, 3)).astype(np.float32)


ROWS = [[image(1, 2, 3), image(2, 1, 1)], [image(3, 3, 1)]]
TOKENS = jax.device_put(np.asarray([[1, *[M] * 6, 3, M, 4, 5, 6], [2, 3, *[M] * 3, 5, 6, 7, 8, 9, 1, 2]], np.int32))


@functools.cache
def made():
    """Return the model and its parameters."""
    model = VisionLanguageModel(CONFIG)
    return model, {"params": random_params(model, TOKENS)["params"]}


@functools.cache
def compiled():
    model, variables = made()
    return jax.jit(lambda tokens, images, mask: model.apply(variables, tokens, images=images, mask=mask))


def run(tokens, images, mask=None):
    return np.asarray(compiled()(tokens, ImagePatches.of(images, IMAGES), mask))


def run_checked(tokens, images):
    """Without jit, where values are compared, too."""
    model, variables = made()
    return model.apply(variables, tokens, images=ImagePatches.of(images, IMAGES))


def run_pixels(pixels):
    model, variables = made()
    return jax.jit(lambda tokens: model.apply(variables, tokens, images=pixels))(TOKENS)


def test_patches_are_in_the_order_of_the_tokens():
    whole = np.arange(12 * 8 * 3, dtype=np.float32).reshape(12, 8, 3)
    got = ImagePatches.of([[whole]], IMAGES)
    assert got.grid.tolist() == [[[6, 4]]]
    assert got.values.shape == (1, 1, 64, 12)
    order = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 0)]
    for patch, (row, column) in zip(got.values[0, 0].reshape(-1, 2, 2, 3), order, strict=False):
        np.testing.assert_array_equal(patch, whole[2 * row : 2 * row + 2, 2 * column : 2 * column + 2])
    assert not got.values[0, 0, 24:].any()


def slow_places(is_image, grids):
    """Return the vector numbers and coordinates of one row, token by token."""
    position, number, inside, vectors, coordinates = 0, 0, 0, [], []
    sizes = [(rows, columns) for rows, columns in grids if rows]
    for one in is_image:
        if not one:
            vectors.append(None)
            coordinates.append([position] * 3)
            position += 1
            continue
        rows, columns = sizes[number]
        vectors.append((number, inside))
        coordinates.append([position, position + inside // columns, position + inside % columns])
        inside += 1
        if inside == rows * columns:
            position, number, inside = position + max(rows, columns), number + 1, 0
    return vectors, coordinates


TOKENS_AT_MOST, IMAGES_AT_MOST = 72, 6


@functools.cache
def compiled_places():
    """Examples are padded to one shape, so that one program computes the places of all."""
    return jax.jit(lambda *given: dataclasses.astuple(TokenPlaces.of(*given, merge=2, vectors=20)))


@settings(deadline=None, max_examples=25)
@given(
    st.lists(
        st.lists(st.one_of(st.none(), st.tuples(st.integers(1, 3), st.integers(1, 4))), min_size=1, max_size=6),
        min_size=1,
        max_size=3,
    ),
)
def test_positions_equal_a_walk_through_the_tokens(rows):
    """An entry of a row is a token of text (None), or an image of rows x columns tokens."""
    sizes = [[one for one in row if one is not None] for row in rows]
    is_image = np.zeros((3, TOKENS_AT_MOST), bool)
    for flags, row in zip(is_image, rows, strict=False):
        at = 0
        for one in row:
            count = 1 if one is None else one[0] * one[1]
            flags[at : at + count] = one is not None
            at += count
    grid = np.zeros((3, IMAGES_AT_MOST, 2), np.int32)
    for i, row in enumerate(sizes):
        grid[i, : len(row)] = np.reshape(row, (-1, 2))
    found_vectors, found_coordinates = jax.device_get(compiled_places()(is_image, 2 * grid))
    for i, flags in enumerate(is_image):  # rows that are shorter than the shape end with text
        vectors, coordinates = slow_places(flags, grid[i].tolist())
        np.testing.assert_array_equal(found_coordinates[i], coordinates)
        for t, place in enumerate(vectors):
            assert place is None or found_vectors[i, t] == 20 * place[0] + place[1]


def test_a_row_does_not_depend_on_other_rows_or_padding():
    together = run(TOKENS, ROWS)
    for i, images in enumerate(ROWS):
        padded = ImagePatches.of([images], IMAGES)
        spare = 3 - len(images)  # both rows have the same shapes, so that one program computes them
        values = np.pad(
            padded.values, [(0, 0), (0, spare), (0, 76 - padded.values.shape[2]), (0, 0)], constant_values=9.0
        )
        wider = dataclasses.replace(padded, values=values, grid=np.pad(padded.grid, [(0, 0), (0, spare), (0, 0)]))
        alone = compiled()(np.asarray(TOKENS)[i : i + 1], wider, None)
        np.testing.assert_allclose(together[i], np.asarray(alone)[0], atol=2e-5)


def test_images_affect_the_output_in_token_order():
    expected = run(TOKENS, ROWS)
    other = run(TOKENS, [[image(7, 2, 3), ROWS[0][1]], ROWS[1]])
    assert np.abs(other[0, 1:] - expected[0, 1:]).max() > 1e-3
    np.testing.assert_array_equal(other[0, 0], expected[0, 0])
    turned = run(TOKENS, [[image(1, 3, 2), ROWS[0][1]], ROWS[1]])  # as many tokens, but another shape
    assert np.abs(turned[0] - expected[0]).max() > 1e-3


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("parts", [(8, 1, 3), (7, 5), (12,)])
def test_cached_is_uncached(parts):
    """One call reads the image, and the later ones continue after its positions."""
    tokens, images = np.array(TOKENS)[:1], [ROWS[0][:1]]
    tokens[0, 8] = 2
    expected = run(tokens, images)
    model, variables = made()
    step = jax.jit(lambda tokens, cache, images: model.apply(variables, tokens, cache=cache, images=images))
    cache, start, results = jax.jit(lambda: model.init_cache(1, 16))(), 0, []
    for count in parts:
        given = ImagePatches.of(images, IMAGES) if start == 0 else None
        logits, cache = step(tokens[:, start : start + count], cache, given)
        results.append(logits)
        start += count
    np.testing.assert_allclose(np.concatenate(results, 1), expected, atol=2e-5)

    @jax.jit
    def positions(cache):
        return [next_positions(cache), *(next_positions(set_cache_length(cache, jnp.asarray([n]))) for n in (1, 0))]

    assert [one.tolist() for one in positions(cache)] == [[12 - 6 + 3], [1], [0]]


def test_image_vectors_replace_their_tokens():
    model, variables = made()
    images = ImagePatches.of(ROWS, IMAGES)
    embed = jax.jit(functools.partial(model.apply, method="embed_images"))
    vectors = np.asarray(embed(variables, images))
    assert vectors.shape == (4, 16, CONFIG.d_model)
    alone = np.asarray(embed(variables, ImagePatches.of([[ROWS[0][1]]], IMAGES)))
    np.testing.assert_allclose(vectors[1, 0], alone[0, 0], atol=2e-5)
    with pytest.raises(ValueError, match="attention to images of any size is causal"):
        jax.jit(model.apply)(variables, TOKENS, images=images, prefix_lengths=np.asarray([1, 1]))


def test_right_padding_changes_nothing():
    padded = np.pad(TOKENS, [(0, 0), (0, 3)], mode="edge")
    got = run(padded, ROWS, mask=Mask.lengths(jax.device_put(np.asarray([12, 12]))))
    np.testing.assert_allclose(got[:, :12], run(TOKENS, ROWS), atol=2e-5)


def test_text_only_input_equals_the_decoder():
    model, variables = made()
    text = np.asarray([[1, 2, 3, 4]])
    params = {name: value for name, value in variables["params"].items() if name not in ("image", "projector")}
    decoder = CausalLM(CONFIG.replace(input=None, **{"position.sections": None}))
    expected = jax.jit(decoder.apply)({"params": params}, text)
    np.testing.assert_allclose(jax.jit(model.apply)(variables, text), expected, atol=2e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        pytest.param(
            lambda: run_checked(TOKENS, [ROWS[0][:1], ROWS[1]]),
            "row 0 has 7 image tokens, but its images need 6",
            marks=pytest.mark.programs(10, reason="tokens are compared with images only outside of jit"),
        ),
        (
            lambda: run(TOKENS, ROWS[:1]),
            r"ImagePatches.*\(batch 2.*\(1",
        ),
        (lambda: run_pixels(jax.device_put(np.zeros((2, 1, 4, 4, 3)))), "got ArrayImpl"),
        (lambda: ImagePatches.of([[np.zeros((4, 6, 3))]], IMAGES), r"multiples of 4, got shape \(4, 6, 3\)"),
        (lambda: ImagePatches.of([[np.zeros((3, 4, 4))]], IMAGES), "with 3 channels"),
        (lambda: ImagePatches.of([[]], IMAGES), "there are no images"),
    ],
)
def test_wrong_inputs_are_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.slow
def test_gradients_reach_all_parameters():
    model, variables = made()
    images = ImagePatches.of(ROWS, IMAGES)

    def loss(params):
        return (jax.nn.log_softmax(model.apply({"params": params}, TOKENS, images=images)) ** 2).mean()

    gradients = jax.jit(jax.grad(loss))(variables["params"])
    flat = jax.tree_util.tree_leaves_with_path(gradients)
    assert all(np.isfinite(one).all() for _, one in flat)
    zero = [jax.tree_util.keystr(path) for path, one in flat if not np.asarray(one).any()]
    assert zero == []


@pytest.mark.slow
def test_sharded_is_unsharded():
    model, variables = made()
    compute = jax.jit(lambda variables, images: model.apply(variables, TOKENS, images=images))
    images = ImagePatches.of(ROWS, IMAGES)
    expected = compute(variables, images)
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": -1})
    places = state_shardings(jax.eval_shape(lambda: variables), mesh)
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(compute(jax.device_put(variables, places), images), expected, atol=2e-5)
