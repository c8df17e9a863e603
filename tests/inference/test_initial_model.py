"""Classifiers of the user's images that start from ViT, DINOv2, SigLIP or CLIP: heads, sizes, preprocessing."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from golden import case as golden_case
from golden import ours
from PIL import Image
from training_recipes import six_steps
from vision_parts import picture, write_vision_model

from transformer.config import ConfigError, FeedForwardOptions, ImageTokens, LearnedOptions, Patches, TransformerConfig
from transformer.data import CaptionFile, ImageFolder
from transformer.inference import classify_images, encode_with_images, open_model, start_from
from transformer.media import ImageProcessor, image_processor
from transformer.training._loop import train
from transformer.training.workdir._runs import open_run

pytestmark = pytest.mark.filterwarnings("ignore:the validation split has no example:UserWarning")
SETTINGS = {"image_processor_type": "ViTImageProcessor", "size": {"height": 9, "width": 9}, "image_std": [0.25] * 3}
MODELS = {
    "vit": ("vit", "classifier"),
    "embedder": ("vit", "base"),
    "dinov2": ("dinov2", "base"),
    "siglip": ("siglip", "dual"),
    "clip": ("clip", "dual"),
}


def write_model(directory, name, labels=(), size=9):
    family, case = MODELS[name]
    record = golden_case.golden(family)[case]
    named = {"id2label": {str(i): label for i, label in enumerate(labels)}} if labels else {}
    ours.write(directory, record | {"config": record["config"] | named})
    settings = SETTINGS | {"size": {"height": size, "width": size}}
    (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    return directory


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    for number, name in enumerate("abcde"):
        (folder / name).mkdir()
        for i in range(9):
            pixels = np.random.default_rng(100 * number + i).integers(0, 256, (14, 12, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
    return folder


def recipe_for(photos, **fields):
    data = ImageFolder(path=str(photos), batch_size=8, eval_batch_size=8, **fields)
    model = TransformerConfig(
        d_model=8, num_layers=1, num_heads=2, input=Patches(image_height=8, image_width=8, patch_size=4)
    )
    return six_steps("photos", model, data)


@pytest.mark.parametrize("name", MODELS)
def test_different_classes_get_a_new_head_and_keep_the_encoder(tmp_path, photos, name):
    directory = write_model(tmp_path / name, name)
    start = start_from(directory, recipe_for(photos))
    recipe, data = open_run(recipe_for(photos), tmp_path / "run", say=print, start=start)
    assert recipe.model.output.num_classes == 5
    new = {path.partition("/")[0] for path in recipe.origin.new}
    assert new == {"output"}
    given = flatten_dict(open_model(directory).params, sep="/")
    prefix = "image/" if name in ("siglip", "clip") else ""
    for path, leaf in flatten_dict(start.params, sep="/").items():
        np.testing.assert_array_equal(leaf, given[prefix + path])
    assert len(start.params) > 2
    assert data.processor == recipe.data.processor == image_processor(directory)
    assert next(data.train_batches(seed=0))["values"].shape == (8, 9, 9, 3)


@pytest.mark.programs(16, reason="the classes of the head are sorted outside of jit")
def test_the_head_of_the_same_classes_is_kept_in_the_order_of_the_folders(tmp_path, photos):
    """Before training, the classifier has the logits of the model, in the order of its own classes."""
    directory = write_model(tmp_path / "vit", "vit", labels="cbaed")
    start = start_from(directory, recipe_for(photos))
    recipe, _ = open_run(recipe_for(photos), tmp_path / "run", say=print, start=start)
    assert recipe.origin.new == ()
    opened = open_model(directory)
    files = [str(path) for path in sorted(photos.glob("*/0.png"))]
    pixels = np.asarray(image_processor(directory)(files))
    theirs = np.asarray(jax.jit(opened.model.apply)({"params": opened.params}, pixels))
    found = np.asarray(jax.jit(type(opened.model)(recipe.model).apply)({"params": start.params}, pixels))
    np.testing.assert_allclose(found, theirs[:, ["cbaed".index(one) for one in "abcde"]], atol=1e-6)
    assert np.abs(found - theirs).max() > 1e-3
    named = recipe_for(photos, labels=tuple("cbaed"))
    np.testing.assert_array_equal(
        start_from(directory, named).params["output"]["kernel"], opened.params["output"]["kernel"]
    )


def test_a_different_image_size_is_an_error_unless_positions_are_interpolated(tmp_path, photos):
    larger = ImageProcessor(height=12, width=12)
    with pytest.raises(ConfigError, match=r"reads images of 9 x 9 pixels .* but its preprocessing gives 12 x 12"):
        start_from(write_model(tmp_path / "vit", "vit"), recipe_for(photos, processor=larger))
    directory = write_model(tmp_path / "dino", "dinov2", size=12)
    start = start_from(directory, recipe_for(photos))
    recipe, data = open_run(recipe_for(photos), tmp_path / "run", say=print, start=start)
    assert (recipe.model.patches.image_height, recipe.model.patches.count) == (12, 16)
    assert start.params["encoder"]["position_table"].shape[0] == 17
    assert next(data.train_batches(seed=0))["values"].shape == (8, 12, 12, 3)


def test_rejects_a_text_model(tmp_path, photos):
    record = golden_case.golden("gpt2")
    case = next(name for name in record if isinstance(record[name], dict) and "config" in record[name])
    ours.write(tmp_path / "gpt2", record[case])
    with pytest.raises(ConfigError, match=r"CausalLM.*VisionClass"):
        start_from(tmp_path / "gpt2", recipe_for(photos))


@pytest.mark.slow
def test_a_run_is_resumed_and_classifies_images(tmp_path, photos):
    """The preprocessing of the model is stored with the run: neither resuming nor classifying needs the model."""
    directory = write_model(tmp_path / "vit", "vit")
    recipe = recipe_for(photos)
    short = dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, steps=3))
    train(short, tmp_path / "run", start=start_from(directory, recipe))
    directory.rename(tmp_path / "moved")
    summary = train(recipe, tmp_path / "run")
    assert (summary.step, summary.split) == (6, "test")
    opened = open_model(tmp_path / "run")
    assert image_processor(tmp_path / "run") == image_processor(tmp_path / "moved")
    found = classify_images(opened, [str(photos / "a" / "0.png")])[0]
    assert found.label in "abcde"


def caption_recipe(folder):
    for i in range(30):
        picture(i).save(folder / f"{i}.png")
    rows = [json.dumps({"image": f"{i}.png", "text": "is it" + " B" * (i % 3)}) for i in range(30)]
    (folder / "pairs.jsonl").write_text("\n".join(rows))
    patches = Patches(image_height=8, image_width=8, patch_size=4, class_token=False)
    encoder = TransformerConfig(
        d_model=8,
        num_layers=1,
        num_heads=2,
        feed_forward=FeedForwardOptions(d_ff=8),
        position=LearnedOptions(),
        input=patches,
    )
    images = ImageTokens(encoder=encoder)
    prompt = "A <image>is"
    data = CaptionFile(path=str(folder / "pairs.jsonl"), image_tokens=4, prompt=prompt, batch_size=4, eval_batch_size=4)
    return six_steps("captions", TransformerConfig(d_model=8, num_layers=1, num_heads=2, input=images), data)


def test_a_llava_model_is_fine_tuned_on_the_prompts_that_it_reads(tmp_path):
    """The tokens before a caption, and the pixels, are those of `generate --image` with the same prompt."""
    recipe = caption_recipe(tmp_path)
    directory = write_vision_model(tmp_path / "llava", "llava")
    start = start_from(directory, recipe)
    recipe, data = open_run(recipe, tmp_path / "run", say=print, start=start)
    assert recipe.origin.new == ()
    place = data.places("validation", 1)[0]
    file = data.picture_file("validation", place, tmp_path)
    ids, pixels = encode_with_images(open_model(directory), "A <image>is", [file])
    assert data.prefix == ids
    np.testing.assert_array_equal(data.values("validation", [place])[0], pixels[0])


def test_rejects_families_with_unsupported_prompts(tmp_path):
    with pytest.raises(ConfigError, match="whose prompts have other tokens around an image"):
        start_from(write_vision_model(tmp_path / "paligemma", "paligemma"), caption_recipe(tmp_path))
