"""Texts and images in one space: embeddings, and classification with labels."""

import json

import jax
import numpy as np
import pytest
from golden import case as golden_case
from golden import ours
from PIL import Image
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from transformer.__main__ import main
from transformer.config import ConfigError
from transformer.inference import classify_with_labels, embed, embed_images, embed_texts, open_model
from transformer.inference._embed import BATCH, canonical_text
from transformer.media import ImageProcessor
from transformer.nn import ImagePatches, Mask

NAMED = ("a", "the", "photo", "of", "cat", "dog", "red", "blue", "house", "tree")
WORDS = ["[PAD]", *NAMED, *(f"w{i}" for i in range(23))]
LABELS = ("a photo of a cat", "the red house", "blue tree")
SQUARE = {"size": {"height": 9, "width": 9}, "do_center_crop": False}
KINDS = {
    "clip": {"image_processor_type": "CLIPImageProcessor"} | SQUARE,
    "siglip": {"image_processor_type": "SiglipImageProcessor"} | SQUARE,
    "siglip2": {"image_processor_type": "Siglip2ImageProcessor", "patch_size": 3, "max_num_patches": 7},
}


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
    """A directory with a tiny CLIP, SigLIP or SigLIP 2, its tokenizer, its preprocessing and two images."""
    path = ours.write(tmp_path_factory.mktemp(request.param), golden_case.golden(request.param)["dual"])
    write_tokenizer(path, begin=request.param == "clip")
    (path / "preprocessor_config.json").write_text(json.dumps(KINDS[request.param]))
    for seed in range(2):
        photo(seed).save(path / f"{seed}.png")
    return path


@pytest.fixture(scope="module")
def opened(directory):
    return open_model(directory)


def test_probabilities_follow_from_the_logits(directory, opened):
    images = [photo(seed, height) for seed, height in enumerate((14, 4, 30))]
    found = classify_with_labels(opened, images, LABELS)
    clip = "clip" in directory.name
    rows = [opened.tokenizer.encode_source(text) for text in LABELS]
    tokens = np.zeros((3, 11), np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    lengths = np.array([len(ids) for ids in rows])
    settings = {"resample": "bicubic"}
    if clip:
        mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
        settings |= {"mean": mean, "std": std}
    if "siglip2" in directory.name:
        pixels = ImagePatches(*ImageProcessor(multiple=3, max_patches=7).flat_patches(images))
        assert pixels.grid.tolist() == [[2, 3], [1, 6], [3, 2]]
    else:
        pixels = np.asarray(ImageProcessor(height=9, width=9, **settings)(images))

    @jax.jit
    def apply(params, tokens, pixels, lengths):
        return opened.model.apply({"params": params}, tokens, pixels, Mask.lengths(lengths) if clip else None)

    logits = apply(opened.params, tokens, pixels, lengths)
    odds = np.exp(np.asarray(logits, np.float64))
    expected = odds / odds.sum(-1, keepdims=True) if clip else odds / (1 + odds)
    got = np.array([[one.probabilities[label] for label in LABELS] for one in found])
    np.testing.assert_allclose(got, expected, atol=1e-5)
    assert [one.label for one in found] == [LABELS[i] for i in np.argmax(expected, 1)]
    np.testing.assert_allclose(got.sum(1), 1.0, rtol=1e-5) if clip else np.testing.assert_array_less(got, 1.0)
    assert np.ptp(got, axis=0).max() > 1e-3  # images make a difference


def test_a_vector_does_not_depend_on_its_batch(opened):
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


def test_commands_print_probabilities_and_vectors(directory, opened, capsys):
    files = [str(directory / "0.png"), str(directory / "1.png")]
    assert main(["embed", "image", str(directory), *files]) == 0
    vectors = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    np.testing.assert_allclose(vectors, embed_images(opened, files), atol=1e-6)
    assert main(["embed", "text", str(directory), "--text", "a cat", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["pooling"], report["normalize"]) == ("last", True)
    np.testing.assert_allclose(report["results"][0]["vector"], embed(opened, ["a cat"])[0], atol=1e-6)
    assert main(["classify", "image", str(directory), *files, "--labels", *LABELS, "--top-k", "2"]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    found = classify_with_labels(opened, files, LABELS)
    expected = [[label, f"{p:.4f}", name] for name, one in zip(files, found, strict=True) for label, p in one.top(2)]
    assert lines == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["image", "0.png"], "compares images with texts: pass labels (--labels)"),
        (["image", "--labels", "a"], "IMAGE is missing: image files"),
        (["image", "0.png", "--labels", "a", "a"], "labels must be different texts"),
        (["text", "--text", "a"], "which is not a classifier"),
    ],
)
def test_invalid_calls_are_one_line_errors(directory, capsys, words, message):
    words = [str(directory / word) if word.endswith(".png") else word for word in words]
    assert main(["classify", words[0], str(directory), *words[1:]]) == 2
    assert message in capsys.readouterr().err


def test_rejects_models_that_are_not_dual_encoders(tmp_path):
    opened = open_model(ours.write(tmp_path, golden_case.golden("vit")["classifier"]))
    with pytest.raises(ConfigError, match="VisionClassifier"):
        classify_with_labels(opened, [photo()], LABELS)


def test_siglip_texts_are_lower_cased_without_punctuation(tmp_path):
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
def test_probabilities_equal_transformers(directory, opened, torch, transformers):
    clip, family = "clip" in directory.name, directory.name.rstrip("0").capitalize().replace("Clip", "CLIP")
    model = getattr(transformers, f"{family}Model").from_pretrained(directory).eval()
    kind = getattr(transformers, f"{family}ImageProcessorPil")
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


def write_gemma_tokenizer(directory, kind):
    """Write a tokenizer as Gemma's: letters and a few merges, spaces as "▁", an end token; its case is kept."""
    letters = [chr(i) for i in (*range(65, 91), *range(97, 123))]
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *letters, "▁", ".", ",", "!", "ca", "cat", "▁cat"]
    merges = [("c", "a"), ("ca", "t"), ("▁", "cat")]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    library = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True))
    library.normalizer = normalizers.Replace(" ", "▁")
    library.add_special_tokens(["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"])
    library.post_processor = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 1)])
    library.save(str(directory / "tokenizer.json"))
    names = {f"{name}_token": f"<{name}>" for name in ("pad", "eos", "bos", "unk", "mask")}
    settings = {"tokenizer_class": kind, "padding_side": "right", "add_bos_token": False, "add_eos_token": True}
    (directory / "tokenizer_config.json").write_text(json.dumps(names | settings | {"model_max_length": 64}))
    return len(pieces)


GEMMA_TEXTS = ("A photo of a Cat", "the cat, a CAT!", "x")


@pytest.mark.parametrize("family", ["siglip", "siglip2"])
def test_siglip_2_texts_are_lower_cased(tmp_path, family):
    """Published files name the tokenizer of Gemma, which keeps the case; padding is on the side that they give."""
    path = ours.write(tmp_path, golden_case.golden(family)["dual"])
    write_tokenizer(path, begin=False)
    content = json.loads((path / "tokenizer.json").read_text()) | {"normalizer": None}
    (path / "tokenizer.json").write_text(json.dumps(content))
    for kind in ("GemmaTokenizer", "GemmaTokenizerFast"):
        settings = {"pad_token": "[PAD]", "tokenizer_class": kind, "padding_side": "right"}
        (path / "tokenizer_config.json").write_text(json.dumps(settings))
        found = embed_texts(open_model(path), ["a cat", "A Cat", "a cat w1"])
        np.testing.assert_allclose(found[1], found[0], atol=1e-6)
        assert np.abs(found[2] - found[0]).max() > 1e-3
    (path / "tokenizer_config.json").write_text(json.dumps(settings | {"padding_side": "left"}))
    assert np.abs(embed_texts(open_model(path), ["a cat"]) - found[:1]).max() > 1e-3


@pytest.mark.parity
@pytest.mark.parametrize("family", ["Siglip", "Siglip2"])
def test_siglip_2_inputs_equal_transformers(tmp_path, torch, transformers, family):
    """A directory that transformers wrote: the texts are padded to 64 tokens, which the model reads as tokens."""
    vocab_size = write_gemma_tokenizer(tmp_path, "GemmaTokenizer")
    sizes = {"hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 5, "intermediate_size": 28}
    grid = {"num_patches": 9} if family == "Siglip2" else {"image_size": 12}
    config = getattr(transformers, f"{family}Config")(
        text_config=sizes | {"vocab_size": vocab_size, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0},
        vision_config=sizes | {"patch_size": 4} | grid,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}Model")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    kind, fields = f"{family}ImageProcessorPil", {"size": {"height": 12, "width": 12}}
    if family == "Siglip2":
        fields = {"patch_size": 4, "max_num_patches": 11}
    processor = getattr(transformers, kind)(**fields)
    processor.save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)

    texts = [text.lower() for text in GEMMA_TEXTS]  # the tokenizer of fixed-resolution models keeps the case
    ids = tokenizer(texts, padding="max_length", max_length=64, truncation=True, return_tensors="pt")["input_ids"]
    assert ids.shape == (3, 64)
    assert ids[2].tolist()[1:] == [1, *[0] * 62]
    images = [photo(seed, height, 40) for seed, height in enumerate((9, 31, 80))]
    with torch.no_grad():
        result = model(input_ids=ids, **processor(images, return_tensors="pt"))
    opened = open_model(tmp_path)
    np.testing.assert_allclose(embed(opened, list(GEMMA_TEXTS)), result.text_embeds, atol=1e-4)
    np.testing.assert_allclose(embed_images(opened, images), result.image_embeds, atol=1e-4)
    found = classify_with_labels(opened, images, list(GEMMA_TEXTS))
    got = [[one.probabilities[text] for text in GEMMA_TEXTS] for one in found]
    np.testing.assert_allclose(got, result.logits_per_image.sigmoid(), atol=1e-4)
