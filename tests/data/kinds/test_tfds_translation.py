"""Translation datasets of TFDS, prepared by a builder of this test and read without TensorFlow, and their recipes."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds

from transformer import data
from transformer.config import ConfigError
from transformer.data import TFDSTranslation, TokenizerConfig
from transformer.data._pipeline import check_batch
from transformer.data.kinds._tfds_translation import BLOCK, PreparedPairs
from transformer.data.tokenizers._kinds import build_tokenizer
from transformer.training._overrides import load_recipe_file, override
from transformer.training.plan import batch_shapes, without_data

ROOT = Path(__file__).resolve().parents[3]
PAIRS = {"train": 240, "validation": 9, "newstest": 7}
WORDS = {
    "en": ["zero", "one", "two", "three", "four", "five", "six"],
    "de": ["null", "eins", "zwei", "drei", "vier", "fünf", "sechs"],
}


class TinyTranslate(tfds.core.GeneratorBasedBuilder):
    """A builder with the features of TFDS translation datasets: digits as words, and a feature that is not text."""

    name = "tiny_translate"
    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name="de-en"), tfds.core.BuilderConfig(name="counted")]  # noqa: RUF012

    def _info(self):
        texts = tfds.features.Translation(languages=("de", "en"))
        if self.builder_config.name == "counted":
            texts = tfds.features.FeaturesDict(
                {"en": tfds.features.Text(), "de": tfds.features.Text(), "id": tfds.features.Scalar(np.int32)}
            )
        return tfds.core.DatasetInfo(builder=self, features=texts)

    def _split_generators(self, dl_manager):
        del dl_manager
        return {split: self._generate_examples(split) for split in PAIRS}

    def _generate_examples(self, split):
        for number in range(PAIRS[split]):
            digits = [int(digit) for digit in base7(number)]
            row = {language: f" {' '.join(words[d] for d in digits)} {split}" for language, words in WORDS.items()}
            yield number, row | ({"id": number} if self.builder_config.name == "counted" else {})


def base7(number):
    """Return the base-7 digits of an integer."""
    return base7(number // 7) + str(number % 7) if number >= 7 else str(number)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder in which the builder of this test prepared its pairs."""
    place = tmp_path_factory.mktemp("tfds")
    tfds.disable_progress_bar()
    for variant in ("de-en", "counted"):
        TinyTranslate(data_dir=place, config=variant, file_format="array_record").download_and_prepare()
    return place


@pytest.fixture
def copy(folder, tmp_path):
    """A copy of the folder that a test may damage."""
    return shutil.copytree(folder, tmp_path / "tfds")


def config(place, **fields):
    usual = {"name": "tiny_translate/de-en", "source_language": "en", "target_language": "de", "data_dir": str(place)}
    usual |= {"test_split": "newstest", "tokenizer": TokenizerConfig(kind="word"), "batch_size": 4}
    return TFDSTranslation(**usual | fields)


def expected(split, language):
    words = WORDS[language]
    return {f"{' '.join(words[int(d)] for d in base7(n))} {split}" for n in range(PAIRS[split])}


# Reading


def test_reads_all_pairs_of_a_named_dataset(folder):
    dataset = data.prepare(config(folder))
    assert dataset.splits == ("train", "validation", "test")
    for split, named in (("train", "train"), ("validation", "validation"), ("test", "newstest")):
        pairs = dataset.examples(split)
        assert len(pairs) == PAIRS[named]
        assert {pair.source for pair in pairs} == expected(named, "en"), "stripped, and all of them"
        assert {pair.target for pair in pairs} == expected(named, "de")
        digits = [[WORDS["en"].index(word) for word in pair.source.split()[:-1]] for pair in pairs]
        assert digits == [[WORDS["de"].index(word) for word in pair.target.split()[:-1]] for pair in pairs]
    batch = next(dataset.train_batches(seed=0))
    assert batch["source"].shape == (4, dataset.max_source_length)
    check_batch(batch, dataset.tokenizer.vocab_size)
    assert "tfds_translation: 240 train, 9 validation, 7 test pairs" in dataset.describe()


def test_every_field_selects_the_data_that_is_read(folder, monkeypatch):
    whole = config(folder).read().splits
    turned = config(folder, source_language="de", target_language="en").read().splits
    assert [(pair.target, pair.source) for pair in turned["test"]] == [(p.source, p.target) for p in whole["test"]]
    other = config(folder, train_split="newstest", test_split="train").read().splits
    assert (len(other["train"]), len(other["test"])) == (7, 240)
    assert config(folder, test_split=None).read().splits.keys() == {"train", "validation"}
    parts = {"train_split": "train[:60%]", "validation_split": "train[60%:]"}
    parted = config(folder, **parts).read().splits
    assert (len(parted["train"]), len(parted["validation"])) == (144, 96)
    assert [*parted["train"], *parted["validation"]] == [*whole["train"]]
    assert [*config(folder, name="tiny_translate/counted").read().splits] == [*whole]
    assert data.prepare(config(folder)).fingerprint != data.prepare(config(folder, **parts)).fingerprint
    assert data.prepare(config(folder, tokenizer=TokenizerConfig(kind="char"))).tokenizer.kind == "char"
    monkeypatch.setenv("TFDS_DATA_DIR", str(folder))
    assert len(config(folder, data_dir=None).read().splits["train"]) == 240


def test_reads_the_newest_or_the_named_version(copy):
    place = copy / "tiny_translate" / "de-en"
    for version in ("1.2.0", "1.10.0"):
        shutil.copytree(place / "1.0.0", place / version)
        info = json.loads((place / version / "dataset_info.json").read_text())
        (place / version / "dataset_info.json").write_text(json.dumps(info | {"version": version}))
    read = [
        config(copy, name=f"tiny_translate/de-en{version}").read().splits["train"].folder.name
        for version in ("", ":1.0.0", ":1.2.0")
    ]
    assert read == ["1.10.0", "1.0.0", "1.2.0"]


class Rows:
    """Records in memory that count how many are requested."""

    def __init__(self, count):
        self.count, self.asked = count, []

    def __len__(self):
        return self.count

    def __getitems__(self, places):
        self.asked.append(len(places))
        return [{"a": f"s{place}".encode(), "b": f"t{place}".encode()} for place in places]


def test_pairs_are_read_from_disk_on_demand():
    rows = Rows(2 * BLOCK + 5)
    pairs = PreparedPairs(rows, ("a", "b"), Path("folder"))
    assert rows.asked == []
    assert (pairs[3].source, pairs[-1].target) == ("s3", f"t{len(rows) - 1}")
    assert [pair.source for pair in pairs[4:8:2]] == ["s4", "s6"]
    assert rows.asked == [1, 1, 2]
    assert [pair.source for pair in pairs] == [f"s{place}" for place in range(len(rows))]
    assert rows.asked[3:] == [BLOCK, BLOCK, 5], "iteration reads in blocks"
    with pytest.raises(IndexError):
        pairs[len(rows)]


@pytest.mark.parametrize("kind", ["char", "byte", "word", "bpe"])
def test_batch_encoding_equals_single_encoding(kind):
    texts = ["Two Dogs  run.", "", "a \n b\tc é 犬 🐕", "run", "two dogs"] * 3
    normalized = [*texts, *(text.lower() for text in texts), "two dogs run", "a b c"]
    size = 280 if kind == "bpe" else None
    tokenizer = build_tokenizer(TokenizerConfig(kind=kind, vocab_size=size), normalized, normalization="number_words")
    assert tokenizer.encode_all(texts) == [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_sources(texts[3:5]) == [tokenizer.encode_source(text) for text in texts[3:5]]
    assert tokenizer.encode_sources(["Two Dogs"]) == [tokenizer.encode("two dogs")]
    assert tokenizer.encode_all([]) == []


def test_names_an_invalid_text_in_a_batch():
    tokenizer = build_tokenizer(TokenizerConfig(kind="bpe", vocab_size=280), ["some text"])
    with pytest.raises(ValueError, match="lone surrogate"):
        tokenizer.encode_all(["some", "te\ud800xt"])


# Missing data


def test_unprepared_data_names_the_folder_and_command(folder, monkeypatch):
    with pytest.raises(FileNotFoundError, match="tiny_translate/fr-en") as error:
        config(folder, name="tiny_translate/fr-en").read()
    message = str(error.value)
    assert f"{folder} (--data.data-dir; default: $TFDS_DATA_DIR, else ~/tensorflow_datasets)" in message
    assert (
        'Run this once on a machine with TensorFlow (the folder may then be copied): python -c "import '
        "tensorflow_datasets as "
        f"tfds; tfds.builder('tiny_translate/fr-en', data_dir='{folder}', file_format='array_record')"
        '.download_and_prepare()"'
    ) in message
    with pytest.raises(FileNotFoundError, match=r"tiny_translate/counted.*tiny_translate/de-en"):
        config(folder, name="tiny_translate").read()
    with pytest.raises(FileNotFoundError, match=r"tiny_translate/de-en:1\.0\.0"):
        config(folder, name="tiny_translate/de-en:2.0.0").read()
    monkeypatch.setenv("TFDS_DATA_DIR", "/nowhere")
    with pytest.raises(FileNotFoundError, match=r"/nowhere \(--data"):
        config(folder, data_dir=None).read()


def test_tfrecord_data_explains_how_to_prepare_it_again(copy):
    place = copy / "tiny_translate" / "de-en" / "1.0.0"
    info = place / "dataset_info.json"
    info.write_text(info.read_text().replace('"array_record"', '"tfrecord"'))
    for path in place.glob("*.array_record*"):
        path.rename(str(path).replace("array_record", "tfrecord"))
    with pytest.raises(ValueError, match="file_format='array_rec"):
        config(copy).read()


@pytest.mark.parametrize("damage", ["truncated", "no JSON"])
def test_reports_broken_files(copy, damage):
    place = copy / "tiny_translate" / "de-en" / "1.0.0"
    (shard,) = place.glob("*-train.array_record*")
    if damage == "truncated":
        shard.write_bytes(shard.read_bytes()[:500])
    else:
        (place / "dataset_info.json").write_text("{")
    with pytest.raises(ValueError, match=r"the prepared data in .*de-en/1\.0\.0 can't be read: .* prepare it again"):
        data.prepare(config(copy))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"source_language": "eng"}, r"'eng' \(source_language\).*'en'\?"),
        ({"name": "tiny_translate/counted", "target_language": "id"}, r"'id' \(target_language\)"),
        ({"train_split": "trains"}, r"'trains' \(train_split\).*'train'\?"),
        ({"test_split": "test"}, r"'test' \(test_split\)"),
        ({"validation_split": "dev[:5]"}, r"'dev' \(validation_split\)"),
        ({"train_split": "train[:50%"}, r"train_split 'train\[:50%'"),
        ({"train_split": "train[:0]"}, r"train_split 'train\[:0\]'"),
        ({"validation_split": "train[99%:]"}, r"validation_split 'train\[99%:\]'.*train_split 'train'"),
    ],
)
def test_reports_missing_languages_and_splits(folder, fields, message):
    with pytest.raises(ValueError, match=message):
        config(folder, **fields).read()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": ""}, r"name.*TFDS.*wmt14_translate/de-en.*got ''"),
        ({"name": "../secret"}, r"name.*got '\.\./secret'"),
        ({"name": "a/../b"}, r"name.*got 'a/\.\./b'"),
        ({"name": "a/b:1"}, r"name.*got 'a/b:1'"),
        ({"source_language": ""}, r"source_language.*got ''"),
        ({"target_language": "en"}, r"are both 'en'\. Use two different ones"),
        ({"test_split": "train"}, r"must be different, got train, validation, train\. Use slices such as"),
    ],
)
def test_invalid_data_names_the_field_to_change(fields, message):
    with pytest.raises(ConfigError, match=message):
        config("-", **fields)


# Recipes


@pytest.mark.parametrize(
    ("name", "steps", "kept", "dropout", "bleu"),
    [("wmt14_base", 100_000, 5, 0.1, "27.3"), ("wmt14_big", 300_000, 20, 0.3, "28.4")],
)
def test_the_recipes_equal_the_settings_of_the_paper(name, steps, kept, dropout, bleu):
    """Sections 5.1 to 5.4 and 6.1, and table 2, of arXiv 1706.03762."""
    recipe, about = load_recipe_file(ROOT / "configs" / f"{name}.py")
    assert recipe.training.steps == steps
    assert (recipe.checkpoint.keep_last, recipe.model.dropout_rate) == (kept, dropout)
    assert recipe.data.tokenizer == TokenizerConfig(kind="bpe", vocab_size=37_000)
    assert (recipe.data.source_language, recipe.data.target_language) == ("en", "de")
    assert recipe.data.batch_tokens == 25_000
    assert (recipe.evaluation.beam_size, recipe.evaluation.beam_alpha) == (4, 0.6)
    assert (recipe.optimizer.weight_decay, recipe.optimizer.clip_norm) == (0.0, None)
    assert bleu in about


def test_a_plan_uses_the_widest_bucket():
    recipe = load_recipe_file(ROOT / "configs" / "wmt14_base.py")[0]
    planned, assumed = without_data(recipe)
    assert batch_shapes(planned)["source"].shape == (96, 256)
    assert "batches of the longest pairs: 96 pairs of 256 tokens (--data.batch-tokens)" in assumed
    shorter = dataclasses.replace(recipe.data, max_source_length=100, max_target_length=60, row_multiple=16)
    planned, _ = without_data(dataclasses.replace(recipe, data=shorter))
    assert batch_shapes(planned)["tokens"].shape == (240, 60)
    crowded = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, batch_tokens=1000))
    with pytest.raises(ConfigError, match=r"batch_tokens \(1,000\).*2,048"):
        without_data(crowded)
    packed = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, packed_length=256))
    with pytest.raises(ConfigError, match=r"--data\.packed-length"):
        without_data(packed)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wmt14_base", "wmt14_big"])
def test_the_recipes_train_and_translate(name, folder, tmp_path):
    """Run the features of the recipes at a small scale: buckets, beam search, averages of the last checkpoints,
    BLEU.
    """
    from transformer.__main__ import main
    from transformer.training import _loop as loop

    small = f"--data.name tiny_translate/de-en --data.test-split newstest --data.data-dir {folder} "
    small += "--data.tokenizer.vocab-size 300 --data.max-source-length 40 --data.max-target-length 40 "
    small += "--data.batch-tokens 400 --data.buckets 2 --data.eval-batch-size 9 --model.d-model 8 --model.num-heads 2 "
    small += "--model.num-layers 1 --model.feed-forward.d-ff 8 --training.steps 6 --evaluation.every 3 "
    small += "--checkpoint.every 2 --checkpoint.keep-last 3 --parallel.devices 1 --logging.tensorboard False "
    small += "--logging.progress none"
    recipe, _ = load_recipe_file(ROOT / "configs" / f"{name}.py")
    recipe = override(recipe, small.split(), program="train.py")
    summary = loop.train(recipe, tmp_path / "run")
    assert (summary.split, summary.corpus.pairs) == ("test", 7)
    main(["average", str(tmp_path / "run"), "--last", "3"])
    main(["evaluate", "run", str(tmp_path / "run-average-3"), "--split", "test"])
    assert len((tmp_path / "run-average-3" / "hypotheses.test.txt").read_text().splitlines()) == 7
