"""Generated pictures: sentences that describe them, and splits that share no scene."""

import hashlib
import random

import numpy as np
import pytest

from transformer.config import ConfigError
from transformer.data import Shapes, prepare
from transformer.data.kinds._shapes import COLORS, picture, sentence

SMALL = {"train_examples": 400, "validation_examples": 60, "test_examples": 90, "batch_size": 8, "max_length": 20}


@pytest.fixture(scope="module")
def found():
    return Shapes(**SMALL).read()


def test_no_picture_or_sentence_is_in_two_splits(found):
    pictures, sentences = ([set(read(part)) for part in found.values()] for read in (digests, captions))
    assert [len(part) for part in pictures] == [400, 60, 90]
    assert [len(part) for part in sentences][1:] == [60, 90]
    for parts in (pictures, sentences):
        assert sum(map(len, parts)) == len(set.union(*parts))


def digests(part):
    return [hashlib.sha256(pixels).hexdigest() for pixels in part.pixels]


def captions(part):
    return part.captions


def test_pictures_do_not_change(found):
    """A run resumes with the same pictures on another machine and with another version of NumPy."""
    assert found["test"].captions[0] == "a large yellow square at the bottom left"
    assert digests(found["test"])[0][:16] == "752f7c0a7e1e9dc9"


def test_only_the_seed_changes_the_pictures(found):
    again, other = Shapes(**SMALL).read(), Shapes(**SMALL, seed=1).read()
    np.testing.assert_array_equal(again["train"].pixels, found["train"].pixels)
    assert not np.array_equal(other["train"].pixels, found["train"].pixels)
    assert prepare(Shapes(**SMALL)).fingerprint != prepare(Shapes(**SMALL, seed=1)).fingerprint


@pytest.mark.parametrize("cell", [0, 5, 7])
def test_a_sentence_describes_its_picture(cell):
    scene = [(cell, "large", "red", "square")]
    assert sentence(scene).startswith("a large red square")
    pixels = picture(scene, 33, random.Random(0)).astype(int)
    red = np.argwhere(np.abs(pixels - COLORS["red"]).max(-1) <= 8)
    row, column = divmod(cell, 3)
    assert np.abs(red.mean(0) - [11 * row + 5, 11 * column + 5]).max() <= 1.5  # at the center of the cell
    assert len(red) > 90  # a square of 11 x 11, at most partly outside of the picture
    ring = picture([(cell, "small", "red", "ring")], 33, random.Random(0)).astype(int)
    assert 0 < (np.abs(ring - COLORS["red"]).max(-1) <= 8).sum() < len(red) / 3


def test_batches_have_normalized_pixels_and_padded_sentences():
    data = prepare(Shapes(**SMALL))
    batch = data.eval_batches("validation")[0]
    assert batch["values"].shape == (100, 32, 32, 3)
    assert -1 <= batch["values"].min() < -0.5 < 0.5 < batch["values"].max() <= 1
    assert batch["tokens"].shape == (100, 20)
    assert batch["weights"].sum() == 60
    ids = batch["tokens"][3, : batch["lengths"][3]]
    assert data.tokenizer.decode(ids) == data.examples("validation")[3].source
    assert (batch["tokens"][3, batch["lengths"][3] :] == data.tokenizer.pad_id).all()


def test_held_out_pairs_are_divided_evenly():
    """A last batch of 5 pairs would make retrieval easy."""
    data = prepare(Shapes(**SMALL | {"eval_batch_size": 55}))
    assert [batch["weights"].sum() for batch in data.eval_batches("validation")] == [30, 30]
    assert [batch["weights"].sum() for batch in data.eval_batches("test")] == [45, 45]
    assert len(data.eval_batches("test", limit=1)) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image_size": 16}, r"image_size.*24"),
        ({"test_examples": 50_000}, r"test_examples.*20,000.*got 50,000"),
        ({"batch_size": 1}, r"batch_size.*2"),
        ({"seed": -1}, r"seed.*0"),
    ],
)
def test_invalid_options_are_errors(fields, message):
    with pytest.raises(ConfigError, match=message):
        Shapes(**SMALL | fields)
