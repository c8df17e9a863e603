"""Data prepared by TFDS: Tiny Shakespeare with and without network, damaged data, no TensorFlow, no output."""

import shutil
import subprocess
import sys

import numpy as np
import pytest

from transformer import data
from transformer.data import NumberWords, TinyShakespeare
from transformer.data.files import _tfds as prepared
from transformer.data.files._tfds import Prepared

SMALL = {"max_digits": 2, "train_examples": 200, "test_examples": 3, "validation_examples": 2}


@pytest.fixture(scope="module")
def shakespeare_dir(test_data, tmp_path_factory):
    """A folder in which the builder of this package prepared Tiny Shakespeare from a local file."""
    folder = tmp_path_factory.mktemp("tfds")
    data.prepare(TinyShakespeare(data_dir=str(folder), manual_dir=str(test_data / "data" / "manual")))
    return folder


def test_tiny_shakespeare_is_complete_and_split_like_nanogpt(test_data, shakespeare_dir):
    text = (test_data / "data" / "manual" / "input.txt").read_text()
    dataset = data.prepare(TinyShakespeare(data_dir=str(shakespeare_dir), sequence_length=64))
    assert dataset.tokenizer.vocab_size == 65 + 3
    tokens = [int(t) for batch in dataset.eval_batches() for t in batch["targets"][batch["weights"] > 0]]
    assert dataset.tokenizer.decode(tokens) == text[int(len(text) * 0.9) + 1 :]
    assert "1,003,854 train tokens, 111,540 validation tokens" in dataset.describe()


def test_reads_data_prepared_by_tfds(test_data, shakespeare_dir):
    ours = data.prepare(TinyShakespeare(data_dir=str(shakespeare_dir)))
    theirs = data.prepare(TinyShakespeare(data_dir=str(test_data / "tfds")))
    assert ours.fingerprint == theirs.fingerprint


def test_without_network_the_error_names_the_file_and_its_folder(tmp_path, monkeypatch):
    import requests

    def no_network(*_, **__):
        raise requests.ConnectionError("no route")

    monkeypatch.setattr(requests, "head", no_network)
    with pytest.raises(OSError, match=r"https://.*ConnectionError.*--data\.manual-dir FOLDER") as error:
        data.prepare(TinyShakespeare(data_dir=str(tmp_path)))
    for part in ("input.txt", "1,115,394 bytes", "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"):
        assert part in str(error.value)


def test_rejects_a_missing_or_wrong_manual_file(tmp_path):
    config = TinyShakespeare(data_dir=str(tmp_path / "tfds"), manual_dir=str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"input\.txt.*input\.txt \(1,115,394"):
        data.prepare(config)
    (tmp_path / "input.txt").write_text("To be")
    with pytest.raises(ValueError, match=r"got 5.*SHA-256 [0-9a-f]{64}"):
        data.prepare(config)


@pytest.fixture
def small(tmp_path):
    config = NumberWords(data_dir=str(tmp_path), **SMALL)
    data.prepare(config)
    (folder,) = (tmp_path / "number_words").glob("*/1.0.0")
    return config, folder


def test_records_equal_those_decoded_by_tfds(small, monkeypatch):
    config, _ = small
    plain = config.read()
    monkeypatch.setattr(prepared, "_plain", lambda feature: None)
    assert config.read() == plain
    assert len(plain.splits["train"]) == config.train_examples


def test_only_uncompressed_features_skip_decoding():
    import tensorflow_datasets as tfds

    kinds = {
        "a text": (tfds.features.Text(), "bytes_list"),
        "a text as ids": (tfds.features.Text(encoder=tfds.deprecated.text.ByteTextEncoder()), None),
        "an integer": (tfds.features.Scalar(dtype=np.int32), "int64_list"),
        "a fraction": (tfds.features.Scalar(dtype=np.float32), None),
        "a truth": (tfds.features.Scalar(dtype=np.bool_), None),
        "several numbers": (tfds.features.Tensor(shape=(2,), dtype=np.int64), None),
    }
    assert {name: prepared._plain(feature) for name, (feature, _) in kinds.items()} == {
        name: kind for name, (_, kind) in kinds.items()
    }


def small_dataset(name, features, examples):
    """Return a dataset whose examples are the result of a function, called when it is prepared."""
    return Prepared(
        name=name, description="", features=features, examples=lambda _: {"train": iter(enumerate(examples()))}
    )


def test_uses_data_prepared_by_another_process_meanwhile(tmp_path):
    faster = [None]  # stands for a process that prepares the same data at the same time

    def examples():
        if faster:
            faster.pop()
            assert len(slow.records(str(tmp_path))["train"]) == 3
        return [{"name": str(number)} for number in range(3)]

    slow = small_dataset("slow", lambda features: {"name": features.Text()}, examples)
    assert {row["name"] for row in slow.records(str(tmp_path))["train"]} == {b"0", b"1", b"2"}
    assert [folder.name for folder in (tmp_path / "slow").iterdir()] == ["1.0.0"], "no incomplete files remain"


def test_encoded_features_are_decoded(tmp_path):
    def features(kinds):
        return {"name": kinds.Text(), "half": kinds.Scalar(dtype=np.float64)}

    halves = small_dataset("halves", features, lambda: [{"name": str(n), "half": n / 2} for n in range(3)])
    rows = halves.records(str(tmp_path))["train"]
    assert {(row["name"], row["half"]) for row in rows} == {(b"0", 0.0), (b"1", 0.5), (b"2", 1.0)}


@pytest.mark.parametrize("damage", ["truncated", "shard missing", "no JSON", "another format"])
def test_reports_broken_prepared_data(small, damage):
    config, folder = small
    (shard,) = folder.glob("number_words-test.array_record*")
    info = folder / "dataset_info.json"
    if damage == "truncated":
        shard.write_bytes(shard.read_bytes()[:1000])
    elif damage == "shard missing":
        shard.unlink()
    elif damage == "no JSON":
        info.write_text("{")
    else:
        info.write_text(info.read_text().replace("array_record", "tfrecord"))
    with pytest.raises(ValueError, match="number_words"):
        data.prepare(config)


def test_rejects_prepared_data_of_another_dataset(shakespeare_dir, tmp_path):
    shutil.copytree(shakespeare_dir, tmp_path / "copy")
    folder = tmp_path / "copy" / "tiny_shakespeare" / "1.0.0"
    shutil.copy(next(folder.glob("*-validation.*")), next(folder.glob("*-test.*")))
    with pytest.raises(ValueError, match=r"1,115,394.*SHA-256"):
        data.prepare(TinyShakespeare(data_dir=str(tmp_path / "copy")))


def test_reports_a_read_only_data_dir(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match=r"number_words.*\(--data\.data-dir\)"):
        data.prepare(NumberWords(data_dir=str(tmp_path / "file"), **SMALL))


def test_preparing_is_silent_and_needs_no_tensorflow(tmp_path):
    program = (
        "import sys\n"
        "from transformer import data\n"
        "loaded = {'grain', 'tensorflow_datasets', 'num2words', 'tokenizers'} & set(sys.modules)\n"
        "assert not loaded, f'importing transformer.data loads {loaded}'\n"
        f"dataset = data.prepare(data.NumberWords(**{SMALL}))\n"
        "next(dataset.train_batches(0))\n"
        "assert 'tensorflow' not in sys.modules\n"
    )
    environment = {"TFDS_DATA_DIR": str(tmp_path / "from_environment"), "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "from_environment" / "number_words").is_dir()
