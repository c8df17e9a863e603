"""Images: splits, shifts, image files, and training, resuming and evaluating a vision classifier."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from training_recipes import assert_equals_resumed_run, evaluation_of, six_steps

from transformer.config import ConfigError, Execution, FeedForwardOptions, Patches, TransformerConfig
from transformer.data import Digits, ImageFile, prepare
from transformer.data._images import ImageDataset, Images
from transformer.nn._sharding import ParallelConfig
from transformer.nn.models import VisionClassifier
from transformer.training._loop import train
from transformer.training._parallel import place
from transformer.training._recipe import from_json, to_json
from transformer.training.metrics._summary import read_summary, render
from transformer.training.plan import step_flops, without_data
from transformer.training.tasks._table import TASKS
from transformer.training.workdir._runs import load_run

HEIGHT, WIDTH = 4, 6


def bars(count=90, seed=0):
    """Return noisy images with a bright row (class 0) or a bright column (class 1)."""
    random = np.random.default_rng(seed)
    images, labels = random.integers(0, 60, (count, HEIGHT, WIDTH)), random.integers(0, 2, count)
    for image, label in zip(images, labels, strict=True):
        if label:
            image[:, random.integers(WIDTH)] = 255
        else:
            image[random.integers(HEIGHT)] = 255
    return images.astype(np.uint8), labels


def image_recipe(folder, **groups):
    """Return a recipe of six steps with shifted images."""
    path = folder / "bars.npz"
    if not path.exists():
        images, labels = bars()
        np.savez(path, images=images, labels=labels)
    patches = Patches(image_height=HEIGHT, image_width=WIDTH, patch_size=2, channels=1)
    model = TransformerConfig(
        d_model=6, num_heads=3, num_layers=1, feed_forward=FeedForwardOptions(d_ff=5), dropout_rate=0.2, input=patches
    )
    data = ImageFile(path=str(path), max_shift=1, batch_size=8, eval_batch_size=16)
    return six_steps("bars", model, data, **groups)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folder and recipe of a finished run."""
    folder = tmp_path_factory.mktemp("images")
    recipe = image_recipe(folder)
    train(recipe, folder / "run")
    return folder, recipe


def numbered(count=5, **fields):
    """Return images whose pixels are all different."""
    pixels = 1 + np.arange(count * HEIGHT * WIDTH, dtype=np.float32).reshape(count, HEIGHT, WIDTH, 1)
    part = (pixels, np.arange(count, dtype=np.int32) % 2)
    splits = dict.fromkeys(("train", "validation", "test"), part)
    return pixels, ImageDataset(ImageFile(path="unread.npz", **fields), Images(splits, ("0", "1")))


def test_every_shift_of_every_training_image_is_a_row():
    pixels, data = numbered(max_shift=1)
    assert data._size("train") == 5 * 9
    assert data._size("validation") == 5
    batch = data._assemble("train", np.arange(45))
    found = set()
    for image, target in zip(batch["values"], batch["targets"], strict=True):
        number = int((image.max() - 1) // (HEIGHT * WIDTH))
        assert target == number % 2
        for down in (-1, 0, 1):
            for right in (-1, 0, 1):
                moved = np.zeros_like(image)
                ys, xs = slice(max(down, 0), HEIGHT + min(down, 0)), slice(max(right, 0), WIDTH + min(right, 0))
                yo, xo = slice(max(-down, 0), HEIGHT + min(-down, 0)), slice(max(-right, 0), WIDTH + min(-right, 0))
                moved[ys, xs] = pixels[number, yo, xo]
                if np.array_equal(moved, image):
                    found.add((number, down, right))
    assert len(found) == 45
    np.testing.assert_array_equal(data._assemble("test", np.arange(5))["values"], pixels)


def test_an_image_s_split_does_not_depend_on_others(tmp_path):
    images, labels = bars(200)
    for name, count in (("few", 120), ("many", 200)):
        np.savez(tmp_path / f"{name}.npz", images=images[:count], labels=labels[:count])
    few, many = (prepare(ImageFile(path=str(tmp_path / f"{name}.npz"))) for name in ("few", "many"))
    seen = {}
    for data in (many, few):
        for split in data.splits:
            for image in data._images[split]:
                assert seen.setdefault(image.tobytes(), split) == split, "no image is in two splits"
    assert sum(map(many._size, many.splits)) == 200
    assert many._images["train"].dtype == np.float32
    assert 0.9 < many._images["train"].max() <= 1.0
    assert few.fingerprint != many.fingerprint


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": np.zeros((3, 4, 4), np.uint8)}, "is not an .npz file with the arrays"),
        ({"images": np.zeros((3, 4), np.uint8), "labels": np.arange(3)}, "must be bytes or floating-point values of"),
        ({"images": np.zeros((3, 4, 4), np.int64), "labels": np.arange(3)}, r"got int64"),
        ({"images": np.zeros((3, 4, 4), np.uint8), "labels": np.arange(2)}, "one for each of the 3 images"),
        (
            {"images": np.zeros((3, 4, 4), np.uint8), "labels": np.arange(3) - 1},
            "has the label -1: expected 0 and above",
        ),
        ({"images": np.zeros((3, 4, 4), np.uint8), "labels": np.zeros(3, int)}, "has only the label"),
        ({"images": np.full((3, 4, 4), np.nan), "labels": np.arange(3)}, "image 0 of .* is not finite"),
        ({"images": np.zeros((3, 4, 4), np.uint8), "labels": np.arange(3)}, "split has no image"),
        ({"images": np.array([{}]), "labels": np.arange(1)}, "is not an .npz file with the arrays"),
    ],
)
def test_a_file_without_images_is_an_error_with_a_reason(tmp_path, arrays, message):
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        prepare(ImageFile(path=str(tmp_path / "bad.npz")))


def test_reports_missing_and_wrong_files(tmp_path):
    (tmp_path / "pictures.npz").write_text("no")
    with pytest.raises(FileNotFoundError, match=r"picture.npz.*'pictures.npz'"):
        prepare(ImageFile(path=str(tmp_path / "picture.npz")))
    np.savez_compressed(tmp_path / "damaged.npz", images=bars()[0], labels=bars()[1])
    content = bytearray((tmp_path / "damaged.npz").read_bytes())
    content[200:240] = b"x" * 40
    (tmp_path / "damaged.npz").write_bytes(content)
    np.save(tmp_path / "array.npy", bars()[0])
    for name in ("pictures.npz", "damaged.npz", "array.npy"):
        with pytest.raises(ValueError, match=r"is not an \.npz file"):
            prepare(ImageFile(path=str(tmp_path / name)))


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (ImageFile, {"path": "x", "max_shift": -1}, r"max_shift.*0.*got -1"),
        (ImageFile, {"path": "x", "labels": ("a",)}, "labels must be at least two"),
        (ImageFile, {"path": "x", "test_share": 0.95}, "must be below 1"),
        (Digits, {"labels": ("a", "b")}, "labels must have ten names"),
        (Digits, {"batch_size": 0}, r"batch_size.*1"),
    ],
)
def test_invalid_settings_name_the_field_to_change(kind, fields, message):
    with pytest.raises(ConfigError, match=message):
        kind(**fields)


def test_a_run_stores_its_classes(trained):
    folder, recipe = trained
    run, summary = load_run(folder / "run"), read_summary(folder / "run")
    assert isinstance(run.model, VisionClassifier)
    assert run.tokenizer is None
    assert run.recipe.data.labels == ("0", "1")
    assert run.recipe.model.output.num_classes == 2
    assert from_json(json.loads(json.dumps(to_json(run.recipe)))) == run.recipe
    assert summary.split == "test"
    assert 0 <= summary.held_out.accuracy <= 1
    assert summary.held_out.targets == prepare(recipe.data)._size("test")
    assert "images/s while training" in render(summary)
    assert f"evaluate run {folder / 'run'}" in render(summary)


def test_batches_resume_at_their_position(tmp_path):
    """Return the order of the images, and the shift of each."""
    data = prepare(image_recipe(tmp_path).data)
    one, two = data.train_batches(3), data.train_batches(3)
    for _ in range(4):
        next(one)
    two.set_state(one.get_state())
    for _ in range(3):
        for ours, theirs in zip(next(one).values(), next(two).values(), strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_run(trained, tmp_path):
    folder, recipe = trained
    assert_equals_resumed_run(folder / "run", recipe, 3, tmp_path / "stopped")


def test_evaluate_and_classify(trained, capsys):
    from transformer.__main__ import main
    from transformer.inference import classify, open_model

    folder, _ = trained
    assert main(["evaluate", "run", str(folder / "run"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["accuracy"] == read_summary(folder / "run").held_out.accuracy
    assert main(["evaluate", "run", str(folder / "run"), "--examples", "5"]) == 2
    assert "--examples, --beam-size and --alpha need a translation model" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="which reads images, not text"):
        classify(open_model(folder / "run"), ["a text"])


@pytest.mark.parametrize("attention", ["all_gather_kv", "cudnn"])
def test_a_model_trained_with_a_mesh_or_gpu_kernel_is_evaluated_without_it(trained, tmp_path, capsys, attention):
    from transformer.__main__ import main

    run, summary = load_run(trained[0] / "run"), read_summary(trained[0] / "run")
    recipe = dataclasses.replace(run.recipe, execution=Execution(scan=False, attention=attention))
    evaluation = evaluation_of(recipe, run.model, run.params, prepare(recipe.data))
    found = TASKS["image_classifier"].report(evaluation, tmp_path)
    assert found.held_out.loss == pytest.approx(summary.held_out.loss, rel=1e-6)
    shutil.copytree(trained[0] / "run", tmp_path / "run")
    (tmp_path / "run" / "recipe.json").write_text(json.dumps(to_json(recipe)))
    assert main(["evaluate", "run", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(summary.held_out.loss, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [ParallelConfig(devices=4, fsdp=2), ParallelConfig(kind="pmap", devices=4)])
def test_a_step_over_several_devices_equals_one_device(tmp_path, parallel):
    recipe = image_recipe(tmp_path)
    recipe = dataclasses.replace(recipe, model=recipe.model.replace(dropout_rate=0.0, **{"output.num_classes": 2}))
    batch = next(prepare(recipe.data).train_batches(0))
    found = []
    for one in (recipe, dataclasses.replace(recipe, parallel=parallel)):
        placement = place(one)
        _, metrics = placement.train_step(placement.spread(placement.new_state()), batch)
        found.append((float(metrics["loss_sum"]), float(metrics["weight"]), float(metrics["grad_norm"])))
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_operation_counts_equal_a_hand_calculation(tmp_path):
    """There are 6 patches of 4 pixels and a class token in each of 8 images."""
    recipe, assumed = without_data(image_recipe(tmp_path))
    assert assumed == ["2 classes (--model.output.num-classes)"]
    each = 7 * (4 * 6 + 4 * 6 * 6 + 2 * 6 * 5)
    assert step_flops(recipe).matrices == 3 * 2 * 8 * each
    assert step_flops(recipe).attention == 3 * 2 * 8 * 7 * 7 * (6 + 6)


@pytest.mark.slow
def test_a_classifier_learns_bars(tmp_path):
    recipe = image_recipe(tmp_path, training={"steps": 250, "ema_decay": None}, evaluation={"every": 125})
    images, labels = bars(600)
    np.savez(tmp_path / "bars.npz", images=images, labels=labels)
    recipe = dataclasses.replace(recipe, model=recipe.model.replace(dropout_rate=0.0, d_model=12))
    assert train(recipe, tmp_path / "run").held_out.accuracy > 0.9


def test_the_split_of_digits_is_fixed():
    pytest.importorskip("sklearn", reason="scikit-learn brings the digits along")
    data = prepare(Digits())
    assert sum(map(data._size, data.splits)) == 1797
    assert [data._size(split) for split in data.splits] == [1261, 202, 334]
    for split in data.splits:
        assert set(data._targets[split]) == set(range(10))
    assert data._images["train"].shape[1:] == (8, 8, 1)
    assert (data._images["train"].min(), data._images["train"].max()) == (0.0, 1.0)
