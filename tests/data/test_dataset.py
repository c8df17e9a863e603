"""Batches: shapes, contents, order, resuming, several processes, evaluation and fingerprints."""

import dataclasses
import json

import numpy as np
import pytest

from transformer import data
from transformer.data import Example, JsonLines, NumberWords, ParallelText, TextFile, TokenizerConfig
from transformer.data._pairs import PairDataset, Pairs
from transformer.data._pipeline import check_batch
from transformer.data._texts import TextDataset
from transformer.data.tokenizers._vocabularies import CharTokenizer, WordTokenizer

TEXT = "".join(chr(ord("a") + i % 23) for i in range(211))


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    examples = {"train_examples": 600, "test_examples": 60, "validation_examples": 30}
    folder = str(tmp_path_factory.mktemp("tfds"))
    return data.prepare(NumberWords(max_digits=4, **examples, batch_size=12, eval_batch_size=7, data_dir=folder))


def text_dataset(**changes) -> TextDataset:
    config = TextFile(path="-", sequence_length=7, batch_size=6, eval_batch_size=5)
    config = dataclasses.replace(config, **changes)
    splits = {"train": [TEXT], "validation": [TEXT[:101]]}
    return TextDataset(config, CharTokenizer(sorted(set(TEXT))), splits, separate=False)


def pair_dataset(pairs=(("a b", "c"), ("a", "c d e"), ("d e a", "b")), **changes) -> PairDataset:
    config = dataclasses.replace(ParallelText(source_path="-", batch_size=2, eval_batch_size=2), **changes)
    examples = [Example(*pair) for pair in pairs]
    tokenizer = WordTokenizer(list("abcde"))
    return PairDataset(config, tokenizer, Pairs({"train": examples, "validation": examples}))


def take(batches, count: int) -> list[dict[str, np.ndarray]]:
    return [next(batches) for _ in range(count)]


def assert_same(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])


def test_text_batches_are_windows_with_the_next_tokens_as_targets():
    dataset = text_dataset()
    for batch in take(dataset.train_batches(seed=0), 3):
        assert {name: (array.shape, array.dtype) for name, array in batch.items()} == {
            "tokens": ((6, 7), np.int32),
            "targets": ((6, 7), np.int32),
            "weights": ((6, 7), np.float32),
        }
        np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
        assert batch["weights"].all()
        for tokens, last in zip(batch["tokens"], batch["targets"][:, -1], strict=True):
            assert dataset.tokenizer.decode([*tokens, last]) in TEXT


def test_an_epoch_of_text_starts_once_at_every_position():
    dataset = text_dataset(batch_size=4)
    starts = len(TEXT) - 7
    assert starts % 4 == 0
    tokens = dataset.tokenizer.encode(TEXT)
    rows = [tuple(row) for batch in take(dataset.train_batches(seed=1), starts // 4) for row in batch["targets"]]
    assert sorted(rows) == sorted(tuple(tokens[start + 1 : start + 8]) for start in range(starts))


def test_evaluation_reads_every_token_once():
    dataset = text_dataset()
    batches = dataset.eval_batches()
    assert [batch["tokens"].shape for batch in batches] == [(5, 7)] * 3, "15 windows of 100 targets"
    targets = [int(t) for b in batches for t, w in zip(b["targets"].flat, b["weights"].flat, strict=True) if w]
    assert dataset.tokenizer.decode(targets) == TEXT[1:101]
    inputs = [int(t) for b in batches for t, w in zip(b["tokens"].flat, b["weights"].flat, strict=True) if w]
    assert dataset.tokenizer.decode(inputs) == TEXT[:100]
    longer = text_dataset(sequence_length=120)
    assert sum(batch["weights"].sum() for batch in longer.eval_batches()) == 100, "held-out text shorter than a window"


def test_pair_batches_are_padded_and_masked():
    batch = pair_dataset().eval_batches()[0]
    np.testing.assert_array_equal(batch["source"], [[3, 4, 0], [3, 0, 0]])
    np.testing.assert_array_equal(batch["source_lengths"], [2, 1])
    np.testing.assert_array_equal(batch["tokens"], [[1, 5, 0, 0], [1, 5, 6, 7]])
    np.testing.assert_array_equal(batch["targets"], [[5, 2, 0, 0], [5, 6, 7, 2]])
    np.testing.assert_array_equal(batch["weights"], [[1, 1, 0, 0], [1, 1, 1, 1]])
    assert {array.dtype for name, array in batch.items() if name != "weights"} == {np.dtype(np.int32)}


def test_the_last_evaluation_batch_has_the_full_shape():
    batches = pair_dataset().eval_batches()
    assert [batch["tokens"].shape for batch in batches] == [(2, 4), (2, 4)]
    np.testing.assert_array_equal(batches[1]["weights"], [[1, 1, 0, 0], [0, 0, 0, 0]])


def test_overlong_pairs_are_skipped_and_counted():
    dataset = pair_dataset(max_source_length=2, max_target_length=3)
    assert [example.source for example in dataset.examples("train")] == ["a b"]
    assert dataset.eval_batches()[0]["tokens"].shape == (2, 3)
    assert "4 skipped" in dataset.describe()
    with pytest.raises(ValueError, match=r"3.*--data.max-source-length"):
        pair_dataset(pairs=[("a b", "c")] * 3, max_source_length=1)


@pytest.mark.parametrize("make", [text_dataset, pair_dataset])
def test_the_state_gives_the_exact_continuation(make):
    dataset = make()
    batches = dataset.train_batches(seed=5)
    take(batches, 37)
    state = json.loads(json.dumps(batches.get_state()))
    after = take(batches, 40)
    fresh = dataset.train_batches(seed=5)
    fresh.set_state(state)
    assert_same(take(fresh, 40), after)
    batches.set_state(state)
    assert_same(take(batches, 40), after)


def test_seeds_and_epochs_differ():
    dataset = text_dataset(batch_size=4)
    epoch = (len(TEXT) - 7) // 4
    first = take(dataset.train_batches(seed=0), 2 * epoch)
    assert_same(first, take(dataset.train_batches(seed=0), 2 * epoch))
    other = take(dataset.train_batches(seed=1), 1)
    assert not np.array_equal(first[0]["tokens"], other[0]["tokens"])
    assert not np.array_equal(first[0]["tokens"], first[epoch]["tokens"])


def test_processes_share_the_global_batch_and_its_state():
    dataset = text_dataset()
    whole = dataset.train_batches(seed=3)
    for count in (2, 3):
        parts = [
            dataset.train_batches(
                seed=3, rows=lambda total, part=part, count=count: np.split(np.arange(total), count)[part]
            )
            for part in range(count)
        ]
        whole.set_state({"next_index": 0})
        for _ in range(3):
            expected = next(whole)
            rows = [next(part) for part in parts]
            for name, array in expected.items():
                np.testing.assert_array_equal(np.concatenate([part[name] for part in rows]), array)
        assert [part.get_state() for part in parts] == [whole.get_state()] * count


def test_the_fingerprint_covers_contents_tokenizer_and_lengths():
    fingerprint = text_dataset().fingerprint
    assert len(fingerprint) == 64
    assert fingerprint == text_dataset().fingerprint
    assert fingerprint == text_dataset(path="elsewhere", batch_size=3).fingerprint, "paths and batch sizes may change"
    assert fingerprint != text_dataset(sequence_length=8).fingerprint
    one = text_dataset()
    changed = TextDataset(one.config, one.tokenizer, {"train": [TEXT], "validation": [TEXT[1:102]]}, separate=False)
    assert fingerprint != changed.fingerprint
    more = CharTokenizer([*sorted(set(TEXT)), "z"])
    assert (
        fingerprint != TextDataset(one.config, more, {"train": [TEXT], "validation": [TEXT[:101]]}, False).fingerprint
    )
    words = WordTokenizer(["a"], unknown=True)
    unknown = [
        TextDataset(one.config, words, {"train": ["a b " * 9], "validation": [end]}, False) for end in ("a b", "a c")
    ]
    assert unknown[0].fingerprint != unknown[1].fingerprint, (
        "texts count, even where the tokenizer can't tell them apart"
    )
    pairs = pair_dataset().fingerprint
    assert pairs == pair_dataset().fingerprint
    assert pairs != pair_dataset(pairs=(("a b", "c"), ("a", "c d e"), ("d e a", "c"))).fingerprint
    assert pairs != pair_dataset(max_target_length=9).fingerprint


def test_examples_are_spread_over_groups():
    examples = [Example("a", "b", "1")] * 2 + [Example("a", "b", "2")] * 50 + [Example("c", "d", "2")] * 50
    found = Pairs({"train": examples, "validation": examples})
    dataset = PairDataset(ParallelText(source_path="-"), WordTokenizer(list("abcd")), found)
    chosen = dataset.examples("validation", 8)
    assert [example.group for example in chosen] == ["1"] * 2 + ["2"] * 6
    assert {example.source for example in chosen[2:]} == {"a", "c"}
    assert dataset.examples("train") == examples
    assert len(dataset.examples("train", 1_000)) == len(examples)


def test_a_repeated_pair_is_encoded_once(monkeypatch):
    seen, encode = [], WordTokenizer.encode
    monkeypatch.setattr(WordTokenizer, "encode", lambda self, text: seen.append(text) or encode(self, text))
    often = pair_dataset(pairs=[("a b", "c")] * 3 + [("d", "c")] + [("a b", "e")])
    assert seen == ["a b", "d", "c", "e"] * 2, "in each of two splits"
    sources = np.concatenate([batch["source"] for batch in often.eval_batches()])[:5].tolist()
    assert sources[0] == sources[1] == sources[2] == sources[4] != sources[3]
    assert [example.target for example in often.examples("train")] == ["c", "c", "c", "c", "e"]


def test_number_words_end_to_end(numbers):
    assert numbers.task == "seq2seq"
    assert numbers.splits == ("train", "validation", "test", "basics")
    sets = {split: {example.source for example in numbers.examples(split)} for split in numbers.splits}
    assert sets["test"].isdisjoint(sets["train"] | sets["validation"])
    assert sets["validation"].isdisjoint(sets["train"])
    assert sets["basics"] <= sets["train"]
    assert len(numbers.examples("train")) == 600
    assert len(sets["test"]) == 60
    assert {example.group for example in numbers.examples("test")} == {"2", "3", "4"}
    assert Example("nineteen", "diecinueve", "2") in numbers.examples("basics")
    assert "600 train, 30 validation, 60 test, 46 basics pairs" in numbers.describe()
    batch = next(numbers.train_batches(seed=0))
    assert batch["source"].shape == (12, numbers.max_source_length)
    assert batch["tokens"].shape == (12, numbers.max_target_length)
    check_batch(batch, numbers.tokenizer.vocab_size)
    assert len(numbers.prompts()) == 3


def test_number_words_accept_every_spelling(numbers):
    encode = numbers.tokenizer.encode_source
    assert encode("Seven hundred, forty two") == encode("seven hundred and forty-two")
    with pytest.raises(ValueError, match=r"text.*'fourty'.*'forty'"):
        encode("fourty two")


def test_a_prepared_set_is_reused_and_accepts_a_given_tokenizer(numbers, monkeypatch, tmp_path):
    from transformer.data.kinds import _number_words as number_words

    monkeypatch.setattr(number_words, "training_numbers", None)  # fails if the data is prepared again
    again = data.prepare(numbers.config)
    assert again.fingerprint == numbers.fingerprint
    numbers.tokenizer.save(tmp_path)
    assert data.prepare(numbers.config, data.load_tokenizer(tmp_path)).fingerprint == numbers.fingerprint
    with pytest.raises(ValueError, match="that this tokenizer does not know"):
        data.prepare(numbers.config, WordTokenizer(["one"]))


def test_languages_without_spaces_are_tokenized_in_parts(tmp_path):
    config = NumberWords(
        source_language="de",
        target_language="it",
        max_digits=3,
        train_examples=200,
        test_examples=10,
        validation_examples=5,
        tokenizer=TokenizerConfig(kind="bpe", vocab_size=320),
        data_dir=str(tmp_path),
    )
    dataset = data.prepare(config)
    assert dataset.tokenizer.vocab_size == 320
    example = dataset.examples("test")[0]
    assert dataset.tokenizer.decode(dataset.tokenizer.encode(example.target)) == example.target


def test_local_files_end_to_end(tmp_path):
    text, lines, pairs = tmp_path / "a.txt", tmp_path / "a.jsonl", tmp_path / "a.tsv"
    text.write_bytes(b"\xef\xbb\xbf" + b"first line\r\n\r\nsecond line\r\n" * 20)
    dataset = data.prepare(TextFile(path=str(text), sequence_length=16))
    assert dataset.task == "causal_lm"
    assert dataset.tokenizer.vocabulary == sorted(set("first line\n\nsecond line\n")), (
        "no carriage return, no byte order mark"
    )
    assert dataset.prompts() == ["first li", "second l"], "at most half of sequence_length"
    text.write_text("a line of text that goes on\n" * 20 + "\n" * 100)
    assert data.prepare(TextFile(path=str(text), sequence_length=64)).prompts() == ["a line of text that goes on"]
    text.write_text("word\n" * 100 + f"     {'_' * 60}\n" * 20)
    words = TextFile(path=str(text), sequence_length=4, tokenizer=TokenizerConfig(kind="word"))
    prompts = data.prepare(words).prompts()
    assert prompts[-1] == "_" * 60, "a prompt is not only the indentation of a line, and words are never cut"
    assert all(prompts)
    with pytest.raises(ValueError, match="that this tokenizer does not know"):
        data.prepare(dataset.config, CharTokenizer(["a"]))
    with pytest.raises(ValueError, match="running text and has no pairs"):
        dataset.examples("validation")
    with pytest.raises(ValueError, match=r"split.*got 'valid'.*'valid"):
        dataset.eval_batches("valid")

    lines.write_text('{"text": "one two"}\n\n{"text": "three"}\n' * 10)
    dataset = data.prepare(JsonLines(path=str(lines), sequence_length=4, tokenizer=TokenizerConfig(kind="byte")))
    tokens = [int(t) for batch in dataset.eval_batches() for t in batch["tokens"][batch["weights"] > 0]]
    assert dataset.tokenizer.tokens(tokens)[-6:] == ["<eos>", "t", "h", "r", "e", "e"], "an end token between documents"
    assert "126 train tokens, 14 validation tokens" in dataset.describe()

    pairs.write_text("a b\tc\n\nd\te f\n" * 6 + "x\t\n")
    dataset = data.prepare(ParallelText(source_path=str(pairs), tokenizer=TokenizerConfig(kind="word")))
    assert "10 train, 2 validation pairs, 7 skipped" in dataset.describe()
    assert dataset.examples("validation") == [Example("a b", "c"), Example("d", "e f")]
    assert dataset.prompts() == ["a b", "d"]


def test_ids_and_labels_out_of_range_are_found():
    batch = pair_dataset().eval_batches()[0]
    check_batch(batch, 8)
    with pytest.raises(ValueError, match=r"7.*tokens\[1.*3\].*0.*6"):
        check_batch(batch, 7)
    check_batch(batch, 8, source_vocab_size=5)
    with pytest.raises(ValueError, match=r"4.*source\[0.*1\].*0.*3"):
        check_batch(batch, 8, source_vocab_size=4)
    batch["targets"][1, 2] = -1
    with pytest.raises(ValueError, match=r"-1.*targets\[1.*2\]"):
        check_batch(batch, 8)
    labels = {"tokens": np.zeros((2, 3), np.int32), "targets": np.array([0, 5], np.int32)}
    check_batch(labels, 1, num_classes=6)
    with pytest.raises(ValueError, match=r"5.*targets\[1\].*0.*4.*num_classes"):
        check_batch(labels, 9, num_classes=5)
    with pytest.raises(ValueError, match="num_classes"):
        check_batch(labels, 9)
    with pytest.raises(ValueError, match=r"tokens.*got float32"):
        check_batch({"tokens": np.zeros((2, 3), np.float32)}, 9)
