"""Texts and images in one space: embeddings, and classification with labels."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import case as golden_case
from golden import ours
from PIL import Image
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from transformer.__main__ import main
from transformer.config import ConfigError
from transformer.inference import classify_with_labels, embed, embed_images, embed_texts, open_model
from transformer.inference._dual import BATCH, canonical_text
from transformer.media import ImageProcessor
from transformer.nn import Mask

NAMED = ("a", "the", "photo", "of", "cat", "dog", "red", "blue", "house", "tree")
WORDS = ["[PAD]", *NAMED, *(f"w{i}" for i in range(23))]
LABELS = ("a photo of a cat", "the red house", "blue tree")
KINDS = {"clip": "CLIPImageProcessor", "siglip": "SiglipImageProcessor"}


def photo(seed=0, height=14, width=21):
    small = np.random.default_rng(seed).integers(0, 256, (7, 5, 3)).astype(np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def write_tokenizer(directory, begin):
    """Write a tokenizer of words in lower case, with an end token and, for CLIP, a start token; its size is 37."""
    words = [*WORDS, "[UNK]", "[BOS]", "[EOS]"]
    library = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    library.normalizer = normalizers.Lowercase()
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.add_special_tokens(["[PAD]", "[UNK]", "[BOS]", "[EOS]"])
    special = [("[BOS]", 35), ("[EOS]", 36)]
    library.post_processor = processors.TemplateProcessing(
        single="[BOS] $A [EOS]" if begin else "$A [EOS]", special_tokens=special
    )
    library.save(str(directory / "tokenizer.json"))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "[EOS]"} | (
        {"bos_token": "[BOS]"} if begin else {}
    )
    (directory / "tokenizer_config.json").write_text(json.dumps(names | {"tokenizer_class": "PreTrainedTokenizerFast"}))


@pytest.fixture(scope="module", params=KINDS)
def directory(request, tmp_path_factory):
    """A directory with a tiny CLIP or SigLIP, its tokenizer, its preprocessing and two images."""
    path = ours.write(tmp_path_factory.mktemp(request.param), golden_case.golden(request.param)["dual"])
    write_tokenizer(path, begin=request.param == "clip")
    settings = {"image_processor_type": KINDS[request.param], "size": {"height": 9, "width": 9}}
    (path / "preprocessor_config.json").write_text(json.dumps(settings | {"do_center_crop": False}))
    for seed in range(2):
        photo(seed).save(path / f"{seed}.png")
    return path


@pytest.fixture(scope="module")
def opened(directory):
    return open_model(directory)


def test_probabilities_are_those_of_the_logits(directory, opened):
    images = [photo(seed) for seed in range(3)]
    found = classify_with_labels(opened, images, LABELS)
    clip = "clip" in directory.name
    rows = [opened.tokenizer.encode_source(text) for text in LABELS]
    tokens = np.zeros((3, 11), np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    mask = Mask.lengths(jnp.asarray([len(ids) for ids in rows])) if clip else None
    settings = {"resample": "bicubic"}
    if clip:
        mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
        settings |= {"mean": mean, "std": std}
    pixels = ImageProcessor(height=9, width=9, **settings)(images)
    logits = jax.jit(opened.model.apply)({"params": opened.params}, jnp.asarray(tokens), jnp.asarray(pixels), mask)
    expected = jax.nn.softmax(logits) if clip else jax.nn.sigmoid(logits)
    got = np.array([[one.probabilities[label] for label in LABELS] for one in found])
    np.testing.assert_allclose(got, expected, atol=1e-5)
    assert [one.label for one in found] == [LABELS[i] for i in np.argmax(expected, 1)]
    np.testing.assert_allclose(got.sum(1), 1.0, rtol=1e-5) if clip else np.testing.assert_array_less(got, 1.0)
    assert np.ptp(got, axis=0).max() > 1e-3  # images make a difference


def test_a_vector_does_not_depend_on_the_other_texts_and_images(opened):
    texts = [*LABELS, *(f"w{i} tree" for i in range(20))] * 3
    assert len(texts) > BATCH
    vectors = embed(opened, texts)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, rtol=1e-5)
    np.testing.assert_allclose(embed_texts(opened, texts[-1:])[0], vectors[-1], atol=1e-5)
    images = [photo(seed) for seed in range(18)]
    vectors = embed_images(opened, images)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, rtol=1e-5)
    np.testing.assert_allclose(embed_images(opened, images[-1:])[0], vectors[-1], atol=1e-5)


def test_long_texts_keep_their_end_token(opened):
    with pytest.warns(UserWarning, match="text 0 has .* tokens and is truncated"):
        long = embed_texts(opened, ["cat " * 30])
    with pytest.warns(UserWarning, match="truncated"):
        longer = embed_texts(opened, ["cat " * 40])
    np.testing.assert_allclose(long, longer, atol=1e-6)


def test_commands(directory, opened, capsys):
    files = [str(directory / "0.png"), str(directory / "1.png")]
    assert main(["embed", str(directory), "--image", *files]) == 0
    vectors = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    np.testing.assert_allclose(vectors, embed_images(opened, files), atol=1e-6)
    assert main(["embed", str(directory), "--text", "a cat", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["pooling"], report["normalize"]) == ("last", True)
    np.testing.assert_allclose(report["results"][0]["vector"], embed(opened, ["a cat"])[0], atol=1e-6)
    assert main(["classify", str(directory), "--image", *files, "--labels", *LABELS, "--top-k", "2"]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    found = classify_with_labels(opened, files, LABELS)
    expected = [[label, f"{p:.4f}", name] for name, one in zip(files, found, strict=True) for label, p in one.top(2)]
    assert lines == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--image", "0.png"], "compares images with texts: pass labels (--labels)"),
        (["--labels", "a"], "--labels are compared with images"),
        (["--image", "0.png", "--labels", "a", "a"], "labels must be different texts"),
        (["--text", "a"], "which is not a classifier"),
    ],
)
def test_mistakes_are_one_line(directory, capsys, words, message):
    words = [str(directory / word) if word.endswith(".png") else word for word in words]
    assert main(["classify", str(directory), *words]) == 2
    assert message in capsys.readouterr().err


def test_other_models_do_not_compare(tmp_path):
    opened = open_model(ours.write(tmp_path, golden_case.golden("vit")["classifier"]))
    with pytest.raises(ConfigError, match="a model of the class VisionClassifier, which does not compare images with"):
        classify_with_labels(opened, [photo()], LABELS)


def test_texts_of_siglip_are_in_lower_case_without_punctuation(tmp_path):
    assert canonical_text("  A photo,\tof a\n(Cat)! ") == "a photo of a cat"
    path = ours.write(tmp_path, golden_case.golden("siglip")["dual"])
    write_tokenizer(path, begin=False)
    plain = embed_texts(open_model(path), ["the red house", "The red, house!"])
    assert np.abs(plain[0] - plain[1]).max() > 1e-3
    (path / "tokenizer_config.json").write_text(
        json.dumps({"pad_token": "[PAD]", "tokenizer_class": "SiglipTokenizer"})
    )
    same = embed_texts(open_model(path), ["the red house", "The red, house!"])
    np.testing.assert_allclose(same[1], same[0], atol=1e-6)
    np.testing.assert_allclose(same[0], plain[0], atol=1e-6)


@pytest.mark.parity
def test_probabilities_equal_those_of_transformers(directory, opened, torch, transformers):
    clip = "clip" in directory.name
    model = (transformers.CLIPModel if clip else transformers.SiglipModel).from_pretrained(directory).eval()
    kind = transformers.CLIPImageProcessorPil if clip else transformers.SiglipImageProcessorPil
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    images = [photo(seed, height, 40) for seed, height in enumerate((9, 31, 80))]
    padding = {"padding": True} if clip else {"padding": "max_length", "max_length": 11}
    texts = tokenizer(list(LABELS), return_tensors="pt", **padding)
    texts = {name: texts[name] for name in (("input_ids", "attention_mask") if clip else ("input_ids",))}
    with torch.no_grad():
        logits = model(**texts, **kind.from_pretrained(directory)(images, return_tensors="pt")).logits_per_image
    expected = (logits.softmax(-1) if clip else logits.sigmoid()).numpy()
    found = classify_with_labels(opened, images, LABELS)
    got = [[one.probabilities[label] for label in LABELS] for one in found]
    np.testing.assert_allclose(got, expected, atol=1e-4)
