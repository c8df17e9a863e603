"""Images in files: folders of classes, and files with pairs of images and texts."""

import csv
import io
import json
import zlib

import numpy as np
import pytest
from PIL import Image

from transformer.config import ConfigError
from transformer.data import CaptionFile, ImageFolder, ImageTextFile, prepare
from transformer.media import ImageProcessor

SMALL = ImageProcessor(height=8, width=6)


def photo(seed=0, size=(11, 9)):
    pixels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3)).astype(np.uint8)
    return Image.fromarray(pixels)


def write_folder(folder, classes=("cat", "dog"), each=6):
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for i in range(each):
            photo(100 * number + i).save(folder / name / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def pets(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("pets"), each=30)


def folder_config(path, **fields):
    return ImageFolder(path=str(path), processor=SMALL, **{"batch_size": 4, "eval_batch_size": 8} | fields)


def pairs_file(folder, rows, name="pairs.jsonl"):
    if name.endswith(".jsonl"):
        (folder / name).write_text("".join(json.dumps({"image": image, "text": text}) + "\n" for image, text in rows))
    else:
        with open(folder / name, "w", newline="") as file:
            csv.writer(file).writerows([("image", "text"), *rows])
    return folder / name


def text_config(path, kind=ImageTextFile, **fields):
    more = {"image_tokens": 4} if kind is CaptionFile else {}
    return kind(path=str(path), processor=SMALL, **{"batch_size": 4, "eval_batch_size": 4} | more | fields)


@pytest.fixture
def pairs(tmp_path):
    for i in range(20):
        photo(i).save(tmp_path / f"{i}.png")
    return pairs_file(tmp_path, [(f"{i % 20}.png", f"number {i}") for i in range(40)])


def test_pixels_follow_the_preprocessing_and_classes_follow_the_folders(pets):
    data = prepare(folder_config(pets))
    assert data.labels == ("cat", "dog")
    assert data.processor == SMALL
    found = {}
    for split in data.splits:
        for batch in data.eval_batches(split):
            for pixels, target, weight in zip(batch["values"], batch["targets"], batch["weights"], strict=True):
                found |= {pixels.tobytes(): data.labels[target]} if weight else {}
    expected = {SMALL([path])[0].tobytes(): path.parent.name for path in pets.glob("*/*.png")}
    assert found == expected
    assert len(expected) == 60


def test_duplicate_images_share_a_split_and_the_seed_sets_the_order(pets, tmp_path):
    copied = write_folder(tmp_path / "copied", each=30)
    for path in (copied / "cat").glob("*.png"):
        (path.parent / f"again-{path.name}").write_bytes(path.read_bytes())
    images = folder_config(copied).read()
    parts = [set(images.splits[name][0].digests) for name in images.splits]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 60
    data = prepare(folder_config(pets))
    first, again = (next(data.train_batches(seed=3)) for _ in range(2))  # read by several threads
    np.testing.assert_array_equal(first["values"], again["values"])
    assert prepare(folder_config(pets)).fingerprint == data.fingerprint
    assert prepare(folder_config(copied)).fingerprint != data.fingerprint
    other = ImageProcessor(height=8, width=6, resample="nearest")
    assert prepare(ImageFolder(path=str(pets), processor=other)).fingerprint != data.fingerprint


def test_a_second_folder_is_used_for_evaluation(pets, tmp_path):
    write_folder(tmp_path / "held")
    data = prepare(folder_config(pets, validation_path=str(tmp_path / "held")))
    assert data.splits == ("train", "validation")
    assert "60 train, 12 validation images of 8 x 6 x 3, 2 classes (cat, dog)" in data.describe()
    (tmp_path / "held" / "cat").rename(tmp_path / "held" / "cats")
    with pytest.raises(ValueError, match="held/cats"):
        prepare(folder_config(pets, validation_path=str(tmp_path / "held")))


def damage(folder, kind):
    path = folder / "cat" / "3.jpg"
    if kind == "truncated":
        photo(1, (90, 90)).save(path)
        path.write_bytes(path.read_bytes()[:900])
    elif kind == "animated":
        path = path.with_suffix(".gif")
        photo(1).save(path, save_all=True, append_images=[photo(2)])
    elif kind == "huge":
        small = io.BytesIO()
        Image.new("1", (5, 5)).save(small, "png")
        header = b"IHDR" + (50_000).to_bytes(4, "big") * 2 + small.getvalue()[24:29]
        chunk = header + zlib.crc32(header).to_bytes(4, "big")  # only the header says that the image is large
        path.with_suffix(".png").write_bytes(small.getvalue()[:12] + chunk + small.getvalue()[33:])
    elif kind == "text":
        path.write_text("no image")
    elif kind == "other":
        path.with_suffix(".txt").write_text("notes")
    elif kind == "link":
        photo().save(folder.parent / "outside.png")
        path.with_suffix(".png").unlink()
        path.with_suffix(".png").symlink_to(folder.parent / "outside.png")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("truncated", r"cat/3\.jpg"),
        ("animated", r"cat/3\.gif.*2"),
        ("huge", r"cat/3\.png"),
        ("text", r"cat/3\.jpg"),
        ("other", r"cat/3\.txt"),
        ("link", r"cat/3\.png"),
    ],
)
def test_an_invalid_image_is_reported_before_training(tmp_path, kind, message):
    folder = write_folder(tmp_path / "pets")
    damage(folder, kind)
    with pytest.raises(ValueError, match=message) as caught:
        prepare(folder_config(folder))
    assert "\n" not in str(caught.value)


def test_folders_without_classes_are_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no folder .*pets"):
        prepare(folder_config(tmp_path / "pets"))
    write_folder(tmp_path / "pets", ("cat",))
    with pytest.raises(ValueError, match="has 1 sub-folders: expected at least two"):
        prepare(folder_config(tmp_path / "pets"))
    with pytest.raises(ConfigError, match="processor must give all images one size"):
        ImageFolder(path="pets", processor=ImageProcessor(shortest_edge=9))


@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.csv"])
def test_images_are_paired_with_their_captions(pairs, name):
    path = pairs_file(pairs.parent, [(f"{i % 20}.png", f"number, {i}") for i in range(40)], name)
    data = prepare(text_config(path))
    found = {}
    for split in data.splits:
        for batch in data.eval_batches(split):
            for pixels, ids, weight in zip(batch["values"], batch["tokens"], batch["weights"], strict=True):
                found |= {data.tokenizer.decode(ids): pixels.tobytes()} if weight else {}
    expected = {f"number, {i}": SMALL([path.parent / f"{i % 20}.png"])[0].tobytes() for i in range(40)}
    assert found == expected
    parts = [set(part.pixels.digests) for part in text_config(path).read().values()]
    assert not set.intersection(*parts)  # both texts of an image are in one split


def test_evaluation_writes_captions_of_image_files(pairs, tmp_path):
    data = prepare(text_config(pairs, CaptionFile, prompt="a", max_length=10))
    batch = next(data.train_batches(seed=0))
    assert batch["values"].shape == (4, 8, 6, 3)
    counted = batch["targets"][0][batch["weights"][0] > 0]
    assert data.tokenizer.decode(counted[:-1]).startswith("number ")
    place = data.places("validation", 1)[0]
    assert data.picture_file("validation", place, tmp_path / "none").parent == pairs.parent
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("row", "error", "message"),
    [
        (("missing.png", "a"), FileNotFoundError, r"pairs.jsonl.*3.*missing.png"),
        (("../outside.png", "a"), ValueError, r"pairs.jsonl.*3"),
        (("/etc/hostname", "a"), ValueError, r"pairs.jsonl.*3.*/etc/hostname"),
        (("1.png", ""), ValueError, r"pairs.jsonl.*3.*'text'.*got ''"),
        (("pairs.jsonl", "a"), ValueError, r"pairs.jsonl.*3"),
    ],
)
def test_an_invalid_row_is_named(pairs, row, error, message):
    photo().save(pairs.parent.parent / "outside.png")
    path = pairs_file(pairs.parent, [("1.png", "a"), ("2.png", "b"), row])
    with pytest.raises(error, match=message) as caught:
        prepare(text_config(path))
    assert "\n" not in str(caught.value)


def test_invalid_tables_are_rejected(pairs):
    (pairs.parent / "a.csv").write_text("image,caption\n1.png,a\n")
    with pytest.raises(ValueError, match=r"a.csv.*2.*'text'"):
        prepare(text_config(pairs.parent / "a.csv"))
    (pairs.parent / "a.csv").write_text("image,text\n1.png,a,b\n")
    with pytest.raises(ValueError, match=r"a.csv.*2.*2.*got 3"):
        prepare(text_config(pairs.parent / "a.csv"))
    with pytest.raises(ConfigError, match="must be two different columns"):
        text_config(pairs, text_column="image")
