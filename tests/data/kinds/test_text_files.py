"""Text files of any size: formats, shards that are tokenized once, exact mixtures, and runs that resume bit for bit."""

import dataclasses
import errno
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import chex
import numpy as np
import pyarrow
import pytest
import tensorflow_datasets as tfds
from pyarrow import parquet
from training_recipes import tiny_recipe

from transformer.config import ConfigError
from transformer.data import JsonLines, TextFiles, TokenizerConfig, prepare
from transformer.data._packed_rows import chunks
from transformer.data.corpus import _files as files
from transformer.data.corpus import _shard as shard
from transformer.data.corpus._mixture import Mixture
from transformer.data.corpus._rows import sequences
from transformer.data.tokenizers._bpe import BPETokenizer
from transformer.data.tokenizers._word_cache import WordCache
from transformer.training import EvaluationConfig, LoggingConfig
from transformer.training._loop import train

ROOT = Path(__file__).resolve().parents[3]
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def documents(count, seed=0):
    """Return documents of 1 to 60 words, each with a different number."""
    random = np.random.default_rng(seed)
    return [f"{seed}.{n}: {' '.join(random.choice(WORDS, random.integers(1, 61)))}\n." for n in range(count)]


def write_json(path, texts, field="text"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"id": 7, field: text}) + "\n" for text in texts), encoding="utf-8")


def config(folder, *patterns, **options):
    """Return a config with small rows, and its cache in the folder."""
    options = {"tokenizer": TokenizerConfig(kind="byte"), "validation_share": 0.1} | options
    paths = tuple(pattern if pattern.startswith("tfds:") else str(folder / pattern) for pattern in patterns)
    sizes = {"sequence_length": 61, "batch_size": 4, "eval_batch_size": 4}
    return TextFiles(paths=paths, cache_dir=str(folder / "cache"), **(sizes | options))


def rows(dataset, batches, seed=0):
    found = dataset.train_batches(seed=seed)
    return [next(found) for _ in range(batches)]


@pytest.fixture
def small_shards(monkeypatch):
    """Shards of 4,000 bytes, all tokenized in this process."""
    monkeypatch.setattr(files, "LEAST_SHARD", 4000)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)


class TinyText(tfds.core.GeneratorBasedBuilder):
    """A builder with texts and another feature."""

    name = "tiny_text"
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = {"text": tfds.features.Text(), "id": tfds.features.Scalar(np.int32)}
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
        del dl_manager
        return {"train": self._generate_examples(90), "extra": self._generate_examples(11)}

    def _generate_examples(self, count):
        for number, text in enumerate(documents(count)):
            yield number, {"text": text, "id": number}


@pytest.mark.parametrize("packing", [True, False])
def test_every_format_gives_the_same_rows(tmp_path, packing):
    texts = documents(90)
    for part in range(3):
        some = texts[30 * part : 30 * part + 30]
        table = pyarrow.table({"id": range(30), "text": some})
        write_json(tmp_path / f"a{part}.jsonl", some)
        parquet.write_table(table, tmp_path / f"a{part}.parquet", row_group_size=7)
        with pyarrow.OSFile(str(tmp_path / f"a{part}.arrow"), "wb") as file:
            opened = (pyarrow.ipc.new_stream, pyarrow.ipc.new_file)[part % 2](file, table.schema)
            with opened as writer:
                writer.write_table(table, max_chunksize=11)
        for number, text in enumerate(some):
            (tmp_path / f"a{part}-{number:02d}.txt").write_text(text.replace("\n", "\r\n"), encoding="utf-8-sig")
    made = [prepare(config(tmp_path, f"a*.{kind}", packing=packing)) for kind in ("jsonl", "parquet", "arrow", "txt")]
    for dataset in made[1:]:
        chex.assert_trees_all_equal(rows(dataset, 9), rows(made[0], 9))
        chex.assert_trees_all_equal(list(dataset.eval_batches()), list(made[0].eval_batches()))
        assert dataset.fingerprint == made[0].fingerprint
    assert "90" not in made[0].describe(), "some documents are held out"
    held_out = [text for text in texts if shard.held_out(text, 0.1)]
    assert f"{90 - len(held_out)} train documents" in made[0].describe()
    assert f"{len(held_out)} validation documents" in made[0].describe()
    # All bytes but the first of each document (packed), or of the text (windows).
    assert made[0].target_bytes() == sum(map(len, held_out)) - (len(held_out) if packing else 1)


def test_reads_datasets_of_tfds(tmp_path):
    builder = TinyText(data_dir=tmp_path / "tfds", file_format="array_record")
    builder.download_and_prepare()
    place = {"data_dir": str(tmp_path / "tfds")}
    dataset = prepare(config(tmp_path, "tfds:tiny_text", **place))
    write_json(tmp_path / "same.jsonl", [row["text"].decode() for row in builder.as_data_source("train")])
    assert dataset.fingerprint == prepare(config(tmp_path, "same.jsonl")).fingerprint
    extra = config(tmp_path, "tfds:tiny_text:1.0.0@train[:50%]", validation_paths=("tfds:tiny_text@extra",), **place)
    assert "45 train documents" in prepare(extra).describe()
    for wrong, message in {
        "tfds:tiny_text@trian": "has no split 'trian'.*it has train, extra|has no split 'trian'.*Did you mean 'train'",
        "tfds:tiny_text@train[:x]": "not a split or a slice",
        "tfds:other_text": "other_text is not prepared in",
        "tfds:!": "must name a TFDS dataset",
    }.items():
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            prepare(config(tmp_path, wrong, **place))
    with pytest.raises(ValueError, match="'body'"):
        prepare(config(tmp_path, "tfds:tiny_text", text_field="body", **place))


def test_packed_rows_from_disk_equal_rows_in_memory(tmp_path):
    """With the held-out documents in a separate file, as `JsonLines` reads them."""
    write_json(tmp_path / "train.jsonl", documents(80))
    write_json(tmp_path / "held.jsonl", documents(20, seed=1))
    held = {"validation_paths": (str(tmp_path / "held.jsonl"),)}
    made = prepare(config(tmp_path, "train.jsonl", packing=True, **held))
    one = {"path": str(tmp_path / "train.jsonl"), "validation_path": str(tmp_path / "held.jsonl"), "packing": True}
    sizes = {"sequence_length": 61, "batch_size": 4, "eval_batch_size": 4, "tokenizer": TokenizerConfig(kind="byte")}
    memory = prepare(JsonLines(**one, **sizes))
    assert made._size("train") == memory._size("train")
    every = np.arange(memory._size("train"))
    chex.assert_trees_all_equal(made._assemble("train", every), memory._assemble("train", every))
    chex.assert_trees_all_equal(rows(made, 7), rows(memory, 7))
    order = np.argsort(made._eval_rows("validation"))
    assert np.array_equal(np.sort(made._eval_rows("validation")), memory._eval_rows("validation")), order
    assert f"{100 * memory._rows['train'].padding:.1f} % padding" in made.describe()


def test_windows_contain_each_token_once(tmp_path, small_shards):
    write_json(tmp_path / "a.jsonl", documents(80))
    dataset = prepare(config(tmp_path, "a.jsonl"))
    found = dataset._rows["train"][0]
    assert len(found.tokens.facts) > 2
    stream = [found.tokens.read(n, 0, facts.tokens) for n, facts in enumerate(found.tokens.facts)]
    batch = dataset._assemble("train", np.arange(dataset._size("train")))
    targets = batch["targets"][batch["weights"] > 0]
    assert np.array_equal(targets, np.concatenate([tokens[1:] for tokens in stream]))
    tokenizer = dataset.tokenizer
    kept = [text for text in documents(80) if not shard.held_out(text, 0.1)]
    assert np.concatenate(stream).tolist() == [i for text in kept for i in [*tokenizer.encode(text), tokenizer.eos_id]]


def test_sequences_are_consecutive_chunks():
    random = np.random.default_rng(0)
    lengths = [*random.integers(1, 40, 50), 1, 7, 8, 14, 15]
    ends = np.cumsum(lengths)
    expected = [
        (int(end - length) + part.start, len(part))
        for length, end in zip(lengths, ends, strict=True)
        for part in chunks(range(length), 7)
    ]
    assert list(map(tuple, sequences(ends, 7).tolist())) == expected


def test_shards_do_not_change_the_documents(tmp_path, monkeypatch):
    """A file that is cut into ranges of bytes, at any place, has the same documents."""
    texts = documents(40)
    write_json(tmp_path / "a.jsonl", texts)
    (tmp_path / "long.txt").write_text("".join(f"line {n} of ünïcode\n" for n in range(500)) + "x" * 3000)
    monkeypatch.setattr(files, "LONGEST", 500)
    whole = (tmp_path / "long.txt").read_text()
    for size in (1, 17, 401, 10_000):
        monkeypatch.setattr(files, "LEAST_SHARD", size)
        monkeypatch.setattr(files, "MOST_SHARDS", 10**9)
        source = files.find_source(str(tmp_path / "a.jsonl"), "text", None)
        assert list(files.read_documents(source.segments, "text")) == texts
        source = files.find_source(str(tmp_path / "long.txt"), "text", None)
        parts = list(files.read_documents(source.segments, "text"))
        assert "".join(parts) == whole
        assert all(part.endswith("\n") for part in parts if "x" not in part), "cut at line ends"
        assert source.size == (tmp_path / "long.txt").stat().st_size


@pytest.mark.parametrize(
    "weights", [(0.7, 0.3), (1,), (0.5, 0.3, 0.2), (0.6, 0.1, 0.1, 0.1, 0.1), (1, 1, 1, 1, 1, 1, 1), (0.123, 3, 47.7)]
)
def test_each_source_keeps_its_share_at_any_step(weights):
    mixture, counts, shares = Mixture(weights), np.zeros(len(weights), int), np.array(weights) / sum(weights)
    for number in range(3000):
        source, before = mixture[number]
        assert before == counts[source]
        counts[source] += 1
        assert np.abs(counts - shares * (number + 1)).max() < 1


def test_grain_s_mixture_deviates_by_several_rows():
    """The reason for a mixture of our own."""
    import grain

    mixed = grain.MapDataset.mix([grain.MapDataset.source([i]).repeat() for i in range(2)], weights=[0.7, 0.3])
    assert abs(sum(mixed[n] == 0 for n in range(20_000)) - 14_000) > 4


def test_mixed_rows_resume_bit_for_bit(tmp_path):
    write_json(tmp_path / "a.jsonl", documents(50))
    write_json(tmp_path / "b.jsonl", documents(30, seed=1))
    dataset = prepare(config(tmp_path, "a.jsonl", "b.jsonl", weights=(0.7, 0.3), packing=True, batch_size=5))
    first = dataset.train_batches(seed=3)
    for _ in range(13):
        next(first)
    state = first.get_state()
    expected = [next(first) for _ in range(40)]
    later = dataset.train_batches(seed=3)
    later.set_state(state)
    chex.assert_trees_all_equal([next(later) for _ in range(40)], expected)
    assert state == {"next_index": 13}, "independent of the number of processes"
    # Each process reads its rows of the same batch.
    parts = [dataset.train_batches(seed=3, rows=lambda n, k=k: np.arange(n)[k::2]) for k in range(2)]
    batch, halves = rows(dataset, 1, seed=3)[0], [next(part) for part in parts]
    for k in range(2):
        chex.assert_trees_all_equal(halves[k], {name: array[k::2] for name, array in batch.items()})


def test_sources_keep_their_shares_over_several_passes(tmp_path):
    for letter, count in (("a", 50), ("b", 300)):
        write_json(tmp_path / f"{letter}.jsonl", [letter * (n + 1) for n in range(count)])
    dataset = prepare(config(tmp_path, "a.jsonl", "b.jsonl", weights=(0.7, 0.3), packing=True))
    letters = [dataset.tokenizer.decode(row[:1]) for batch in rows(dataset, 150) for row in batch["tokens"]]
    assert len(dataset._rows["train"][0]) < 100, "several passes of the first source"
    for n in range(1, 601):
        assert abs(letters[:n].count("a") - 0.7 * n) < 1
    assert dataset.describe().count("mixture of 70 % ") == 1


def test_changed_files_are_tokenized_again(tmp_path):
    write_json(tmp_path / "a.jsonl", documents(40))
    options = config(tmp_path, "a.jsonl")
    before = prepare(options).fingerprint
    manifests = sorted((tmp_path / "cache").glob("*/*.json"))
    assert prepare(options).fingerprint == before
    assert sorted((tmp_path / "cache").glob("*/*.json")) == manifests
    write_json(tmp_path / "a.jsonl", [*documents(39), "changed"])
    assert prepare(options).fingerprint != before
    # The run knows the text, not the place: the same files in another folder are the same data.
    write_json(tmp_path / "moved" / "b.jsonl", documents(40))
    assert prepare(config(tmp_path, "moved/*.jsonl")).fingerprint == before
    other = [{"weights": (1.0,)}, {"packing": True}, {"sequence_length": 60}, {"validation_share": 0.2}]
    assert before not in {prepare(config(tmp_path, "moved/*.jsonl", **one)).fingerprint for one in other}


PREPARE = """
import sys
from pathlib import Path
from transformer.data import TextFiles, TokenizerConfig, prepare
from transformer.data.corpus import _files as files
files.LEAST_SHARD = 4000
if __name__ == "__main__":
    folder = Path(sys.argv[1])
    byte = TokenizerConfig(kind="byte")
    cache = str(folder / sys.argv[2])
    made = prepare(TextFiles(paths=(str(folder / "a.jsonl"),), cache_dir=cache, tokenizer=byte, validation_share=0.1))
    print(made.fingerprint)
"""


@pytest.mark.slow
def test_a_killed_tokenization_resumes(tmp_path):
    """Real processes (spawn): killed after the first shard, it keeps that shard, and the result is the same."""
    write_json(tmp_path / "a.jsonl", documents(6000))
    script = tmp_path / "script.py"
    script.write_text(PREPARE)
    command = [sys.executable, str(script), str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    options = {"env": environment, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([*command, "killed"], **options)
    while process.poll() is None and not list((tmp_path / "killed").glob("*/0*.json")):
        pass
    process.send_signal(signal.SIGKILL)
    process.communicate()  # returns when all tokenizing processes have ended, too: they hold stdout open
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "killed").glob("*/0*.json")}
    resumed = subprocess.run([*command, "killed"], check=True, **options).stdout
    undisturbed = subprocess.run([*command, "whole"], check=True, **options).stdout
    assert 0 < len(kept) < len(list((tmp_path / "whole").glob("*/0*.json")))
    assert resumed == undisturbed
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items()), "finished shards are kept"


def test_an_interrupted_tokenization_resumes(tmp_path, small_shards, monkeypatch):
    write_json(tmp_path / "a.jsonl", documents(200))
    done = []

    def interrupted(job):
        if len(done) == 2:
            (job.folder / f"{job.number:05d}.train.array_record").write_bytes(b"half a shard")
            raise KeyboardInterrupt
        done.append(job.number)
        shard.tokenize_shard(job)

    with monkeypatch.context() as patch:
        patch.setattr("transformer.data.corpus._cache.tokenize_shard", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare(config(tmp_path, "a.jsonl"))
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").glob("*/0*.json")}
    assert len(kept) == 2
    resumed = prepare(config(tmp_path, "a.jsonl"))
    undisturbed = prepare(dataclasses.replace(config(tmp_path, "a.jsonl"), cache_dir=str(tmp_path / "other")))
    assert resumed.fingerprint == undisturbed.fingerprint
    chex.assert_trees_all_equal(rows(resumed, 50), rows(undisturbed, 50))
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items()), "finished shards are kept"


@pytest.mark.parametrize("damage", ["missing", "short", "manifest"])
def test_incomplete_shards_are_tokenized_again(tmp_path, small_shards, damage):
    write_json(tmp_path / "a.jsonl", documents(60))
    options = config(tmp_path, "a.jsonl")
    before = prepare(options).fingerprint
    file = next((tmp_path / "cache").glob("*/00001.train.array_record"))
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage == "short":
        file.write_bytes(content[: len(content) // 2])
    else:
        (file.parent / "00001.json").write_text('{"train": ')
    assert prepare(options).fingerprint == before
    assert file.read_bytes() == content


def test_a_damaged_shard_is_reported(tmp_path):
    write_json(tmp_path / "a.jsonl", documents(60))
    file = None
    dataset = prepare(config(tmp_path, "a.jsonl"))
    file = next((tmp_path / "cache").glob("*/00000.train.array_record"))
    content = bytearray(file.read_bytes())
    content[len(content) // 40] ^= 255
    for place in range(len(content) // 20):
        content[place] ^= 255
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"00000\.train\.array_record"):
        dataset._assemble("train", np.arange(dataset._size("train")))
    file.unlink()
    rows(prepare(config(tmp_path, "a.jsonl")), 5)


def test_a_full_disk_leaves_no_seemingly_complete_files(tmp_path, small_shards):
    write_json(tmp_path / "a.jsonl", documents(200))
    options = config(tmp_path, "a.jsonl")
    old, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (70_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"--data\.cache-dir"):
            prepare(options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, old)
    assert not list((tmp_path / "cache").glob("*/0*.json"))
    assert "train documents" in prepare(options).describe()


def test_too_little_disk_space_is_reported_before_tokenization(tmp_path, monkeypatch):
    write_json(tmp_path / "a.jsonl", documents(20))
    free = type("Usage", (), {"free": 100})
    monkeypatch.setattr("transformer.data.corpus._cache.shutil.disk_usage", lambda folder: free)
    with pytest.raises(OSError, match=r"at least 0\.0 GB of free disk space for the tokens, got 0\.0 GB") as caught:
        prepare(config(tmp_path, "a.jsonl"))
    assert caught.value.errno != errno.ENOENT


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"paths": ()}, "paths must name at least one pattern of files"),
        ({"paths": ("",)}, "paths must name at least one pattern"),
        ({"paths": ("a", "b"), "weights": (1.0,)}, "one number for each of the 2 paths, got 1: 1.0"),
        ({"paths": ("a", "b"), "weights": (1.0, 0.0)}, r"weights.*got 0.0"),
        ({"paths": ("a", "b"), "weights": (1.0, float("nan"))}, "weights must be positive numbers, got nan"),
        ({"paths": ("a", "b"), "weights": (0.1234567, 1.0)}, r"sum.*100,000.*11,234,567"),
        (
            {"paths": ("a",), "tokenizer": TokenizerConfig(kind="word")},
            r"tokenizer.kind.*got 'word'",
        ),
        ({"paths": ("a",), "validation_share": 0.0}, r"validation_share.*0"),
        ({"paths": ("a",), "text_field": ""}, r"text_field"),
    ],
)
def test_rejects_invalid_options(fields, message):
    with pytest.raises(ConfigError, match=message):
        TextFiles(**fields)


def test_invalid_files_are_reported_before_tokenization(tmp_path, monkeypatch):
    write_json(tmp_path / "a.jsonl", documents(9))
    (tmp_path / "b.csv").write_text("a,b")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    write_json(tmp_path / "late.jsonl", documents(9))
    with (tmp_path / "late.jsonl").open("a") as file:
        file.write('\n{"body": "x"}\n')
    (tmp_path / "null.jsonl").write_text('{"text": null}\n{"text": 3}\n')
    parquet.write_table(pyarrow.table({"body": ["x"], "number": [1]}), tmp_path / "a.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    cases = {
        "c*.jsonl": r"no file matches .*c\*\.jsonl.*The folder .* has \d+ entries. Check --data.paths",
        "none/*.jsonl": "No folder .*none",
        "*.csv": r"b\.csv has an unknown extension: expected one of \.txt, \.jsonl, \.parquet, \.arrow",
        "empty.txt": "empty.txt is empty: expected text, got 1 files without any",
        "latin.txt": "latin.txt is not UTF-8 text: byte 3 is 0xe9",
        "late.jsonl": r"late\.jsonl, line 11: expected text in field 'text', got fields body",
        "null.jsonl": r"null\.jsonl, line 2: expected text in field 'text', got int",
        "a.parquet": r"a\.parquet has no column 'text': it has body, number",
        "broken.parquet": "broken.parquet is not a readable Parquet file",
    }
    for pattern, message in cases.items():
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            prepare(config(tmp_path, pattern))
    with pytest.raises(ValueError, match=r"a\.parquet.*'number'.*got int64"):
        prepare(config(tmp_path, "a.parquet", text_field="number"))
    with pytest.raises(ValueError, match=r"a\.jsonl.*--data\.paths.*--data\.validation-paths"):
        prepare(config(tmp_path, "a.jsonl", validation_paths=(str(tmp_path / "*a.jsonl"),)))
    with pytest.raises(ValueError, match=r"the validation set of .* has no document of at least 2 tokens, of 9 doc"):
        prepare(config(tmp_path, "a.jsonl", validation_share=1e-9))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"'transformer-zoo\[dat"):
        prepare(config(tmp_path, "a.parquet"))


def test_a_vocabulary_is_learned_once_from_training_documents(tmp_path, monkeypatch):
    texts = documents(200)
    held_out = next(text for text in texts if shard.held_out(text, 0.1))
    write_json(tmp_path / "a.jsonl", texts)
    options = config(tmp_path, "a.jsonl", tokenizer=TokenizerConfig(kind="bpe", vocab_size=300))
    seen = []
    train = BPETokenizer.train
    learn = lambda texts, *rest: train(seen.extend(texts) or seen, *rest)  # noqa: E731
    monkeypatch.setattr(BPETokenizer, "train", learn)
    dataset = prepare(options)
    assert seen
    assert held_out not in seen
    seen.clear()
    assert prepare(options).fingerprint == dataset.fingerprint
    assert not seen
    assert prepare(options, dataset.tokenizer).fingerprint == dataset.fingerprint
    assert dataset.prompts()
    assert all(any(prompt in text for text in texts) for prompt in dataset.prompts())


def test_cached_words_have_the_same_ids():
    tokenizer = BPETokenizer.train(documents(100), 320)
    words, random = WordCache(tokenizer), np.random.default_rng(0)
    special = list("  \n\t'st.!") * 4 + [chr(i) for i in range(1, 0x180)]
    special += list("\u1680\u2003\u2028\u3000\u4e00\u0301\u0661\u00bd\u2160\uac00\U0001f600\u200d\u180e\u200b\ufeff")
    texts = ["".join(random.choice(special, 20)) for _ in range(2000)] + documents(20)
    assert [words.encode(text).tolist() for text in texts] == tokenizer.encode_all(texts)
    with pytest.raises(ValueError, match="lone surrogate"):
        words.encode("a\ud800")


@pytest.mark.slow
def test_the_command_resumes_bit_for_bit(tmp_path):
    """`train.py text_corpus` on a tiny corpus: killed after the second of three steps, and resumed."""
    write_json(tmp_path / "a.jsonl", documents(60))
    write_json(tmp_path / "b.jsonl", documents(30, seed=1))
    options = {
        "model": {"d-model": 8, "num-layers": 1, "num-heads": 2, "feed-forward.d-ff": 8},
        "data": {"sequence-length": 32, "batch-size": 2, "eval-batch-size": 2, "validation-share": 0.1},
        "data.tokenizer": {"kind": "byte", "vocab-size": None},
        "evaluation": {"batches": 2, "samples": 0},
        "logging": {"tensorboard": False, "every": 1},
        "checkpoint": {"every": 1},
        "optimizer": {"warmup-steps": 0},
        "training": {"steps": 3},
        "parallel": {"devices": 1},
    }
    tiny = [
        word
        for group, part in options.items()
        for name, one in part.items()
        for word in (f"--{group}.{name}", str(one))
    ]
    tiny += ["--data.paths", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"), "--data.weights", "0.7", "0.3"]
    tiny += ["--data.cache-dir", str(tmp_path / "cache")]

    def command(workdir):
        return [sys.executable, "train.py", "text_corpus", "--workdir", str(tmp_path / workdir), *tiny]

    def losses(workdir):
        lines = (tmp_path / workdir / "metrics.jsonl").read_text().splitlines()
        return [line["train/loss"] for line in map(json.loads, lines) if "train/loss" in line]

    where = {"cwd": ROOT, "env": os.environ | {"JAX_PLATFORMS": "cpu"}, "stdout": subprocess.DEVNULL}
    process = subprocess.Popen(command("killed"), **where)
    while process.poll() is None and not list((tmp_path / "killed" / "checkpoints").glob("[12]")):
        pass
    process.kill()
    process.wait()
    for workdir in ("killed", "whole"):
        subprocess.run(command(workdir), check=True, timeout=300, **where)
    assert len(losses("whole")) == 3
    assert losses("killed") == losses("whole")


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit(tmp_path):
    write_json(tmp_path / "a.jsonl", documents(60))
    write_json(tmp_path / "b.jsonl", documents(30, seed=1))
    data = config(tmp_path, "a.jsonl", "b.jsonl", weights=(0.7, 0.3), packing=True)
    recipe = dataclasses.replace(
        tiny_recipe(model={"vocab_size": None}, steps=3),
        data=data,
        evaluation=EvaluationConfig(batches=2, samples=0),
        logging=LoggingConfig(every=1, tensorboard=False, progress="none"),
    )

    def losses(workdir, steps):
        training = dataclasses.replace(recipe.training, steps=steps)
        train(dataclasses.replace(recipe, training=training), tmp_path / workdir)
        lines = (tmp_path / workdir / "metrics.jsonl").read_text().splitlines()
        return [line["train/loss"] for line in map(json.loads, lines) if "train/loss" in line]

    assert len(losses("stopped", 2)) == 2
    assert losses("stopped", 3) == losses("whole", 3)
    # A changed corpus can't be resumed.
    write_json(tmp_path / "a.jsonl", documents(61))
    with pytest.raises(ValueError, match="the data has changed since"):
        losses("stopped", 4)
