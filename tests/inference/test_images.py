"""Classification of images, from Python and on the command line."""

import json

import jax
import numpy as np
import pytest
from golden import case as golden_case
from golden import ours
from PIL import Image

from transformer.__main__ import main
from transformer.config import ConfigError
from transformer.inference import classify_images, open_model
from transformer.inference._image_inputs import BATCH
from transformer.media import ImageProcessor

SETTINGS = {"image_processor_type": "ViTImageProcessor", "size": {"height": 9, "width": 9}}


def photo(seed=0, height=14, width=21):
    small = np.random.default_rng(seed).integers(0, 256, (7, 5, 3)).astype(np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    """A directory with a tiny ViT of five classes, its preprocessing, and two images."""
    record = golden_case.golden("vit")["classifier"]
    names = {str(i): f"kind {i}" for i in range(5)}
    directory = ours.write(tmp_path_factory.mktemp("vit"), record | {"config": record["config"] | {"id2label": names}})
    (directory / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    for seed in range(2):
        photo(seed).save(directory / f"{seed}.png")
    return directory


def test_classes_are_the_softmax_of_the_model_s_logits(vit):
    opened = open_model(vit)
    images = [photo(seed) for seed in range(BATCH + 2)]
    found = classify_images(opened, images)
    pixels = ImageProcessor(height=9, width=9)(images)
    logits = jax.jit(opened.model.apply)({"params": opened.params}, pixels)
    exponentials = np.exp(np.asarray(logits, np.float64))
    expected = exponentials / exponentials.sum(1, keepdims=True)
    got = [list(one.probabilities.values()) for one in found]
    np.testing.assert_allclose(got, expected, atol=1e-6)
    assert [one.label for one in found] == [f"kind {i}" for i in np.argmax(expected, 1)]
    assert np.ptp(got, axis=0).max() > 0.01  # images make a difference
    assert found[0].top(2)[0] == (found[0].label, found[0].probability)


def test_the_command_prints_the_best_classes(vit, capsys):
    files = [str(vit / "0.png"), str(vit / "1.png")]
    found = classify_images(open_model(vit), files)
    assert main(["classify", "image", str(vit), *files, "--top-k", "2"]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    expected = [[label, f"{p:.4f}", name] for name, one in zip(files, found, strict=True) for label, p in one.top(2)]
    assert lines == expected
    assert main(["classify", "image", str(vit), files[0], "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["image"] == files[0]
    assert result["label"] == found[0].label


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["image", "none.png"], "image none.png not found"),
        (["image", "https://example.com/a.png"], "URLs are not downloaded"),
        (["image", "a.png", "--text", "a"], "classify image has no option --text"),
        (["text", "--text", "a"], "which reads images, not text. On the command line, use `classify image`"),
        (["image", "a.png", "--top-k", "0"], "--top-k must be at least 1"),
    ],
)
def test_invalid_calls_are_one_line_errors(vit, capsys, words, message):
    assert main(["classify", words[0], str(vit), *words[1:]]) == 2
    assert message in capsys.readouterr().err


def test_preprocessing_must_fit_the_model(vit):
    opened = open_model(vit)
    with pytest.raises(ConfigError, match=r"reads images of 9 x 9 pixels with 3 channels, but .* gives 8 x 9 with 3"):
        classify_images(opened, [photo()], ImageProcessor(height=8, width=9))
    with pytest.raises(ConfigError, match="with 1 channels"):
        classify_images(opened, [photo()], ImageProcessor(height=9, width=9, mean=(0.5,), std=(0.5,)))


def test_rejects_models_that_do_not_classify_images(tmp_path):
    directory = ours.write(tmp_path, golden_case.golden("gpt2")["lm"])
    with pytest.raises(ConfigError, match="CausalLM"):
        classify_images(open_model(directory), [photo()])


@pytest.mark.parity
def test_probabilities_equal_transformers(vit, torch, transformers):
    theirs = transformers.ViTForImageClassification.from_pretrained(vit).eval()
    processor = transformers.ViTImageProcessorPil.from_pretrained(vit)
    images = [photo(seed, height, 40) for seed, height in enumerate((9, 31, 80))]
    with torch.no_grad():
        expected = theirs(**processor(images, return_tensors="pt")).logits.softmax(-1).numpy()
    got = [list(one.probabilities.values()) for one in classify_images(open_model(vit), images)]
    np.testing.assert_allclose(got, expected, atol=1e-4)
