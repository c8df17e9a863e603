"""Labeled texts: which of them are held out, and classes that a split lacks."""

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transformer.config import ConfigError
from transformer.data import ImageFile, LabeledText, TokenizerConfig, prepare
from transformer.data._labels import hold_out

WORDS = TokenizerConfig(kind="word")


def table(path, rows):
    path.write_text("sentence\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in rows))
    return str(path)


SORTED = [(f"good {i}", "yes") for i in range(50)] + [(f"bad {i}", "no") for i in range(30)]


def test_a_file_sorted_by_class_is_evaluated_on_all_classes(tmp_path):
    """Each class loses the same share; the order of the file decides nothing."""
    splits = LabeledText(path=table(tmp_path / "a.tsv", SORTED)).read().splits
    assert [text.split()[0] for text, _ in splits["validation"]] == ["good"] * 5 + ["bad"] * 3
    assert len(splits["train"]) == 72
    shuffled = random.Random(0).sample(SORTED, len(SORTED))
    other = LabeledText(path=table(tmp_path / "b.tsv", shuffled)).read().splits
    assert {split: sorted(rows) for split, rows in other.items()} == {k: sorted(rows) for k, rows in splits.items()}
    assert other["train"] == [row for row in [(t, int(k == "yes")) for t, k in shuffled] if row in splits["train"]]


def test_the_end_of_the_file_is_held_out_on_request(tmp_path):
    config = LabeledText(path=table(tmp_path / "a.tsv", SORTED), hold_out="end", tokenizer=WORDS)
    assert [text for text, _ in config.read().splits["validation"]] == [f"bad {i}" for i in range(22, 30)]
    with pytest.warns(UserWarning, match=r"the validation split has no example of the class 'yes', so the results"):
        assert prepare(config).config.hold_out == "end"
    with pytest.raises(ConfigError, match=r"hold_out must be one of by_class, end, got 'random'"):
        dataclasses.replace(config, hold_out="random")


ROWS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=2, max_size=60)


@given(rows=ROWS, share=st.floats(0.01, 0.99))
def test_the_stratified_choice_has_its_documented_properties(rows, share):
    texts, labels = [str(text) for text, _ in rows], [str(label) for _, label in rows]
    chosen = hold_out(texts, labels, share)
    assert 0 < sum(chosen) < len(rows)
    held_out = {(text, label) for text, label, one in zip(texts, labels, chosen, strict=True) if one}
    kept = {(text, label) for text, label, one in zip(texts, labels, chosen, strict=True) if not one}
    for label in set(labels):
        own = [text for text, other in zip(texts, labels, strict=True) if other == label]
        if len(own) > 1:
            assert any(other == label for _, other in held_out)
            assert any(other == label for _, other in kept)
        if len(set(own)) > 1:
            assert not {text for text, other in held_out if other == label} & {t for t, other in kept if other == label}
    order = list(range(len(rows)))
    random.Random(len(rows)).shuffle(order)
    again = hold_out([texts[i] for i in order], [labels[i] for i in order], share)
    if len(set(rows)) == len(rows):
        assert again == [chosen[i] for i in order]


def test_reports_a_class_missing_from_a_split(tmp_path):
    train, held_out = table(tmp_path / "a.tsv", SORTED), table(tmp_path / "b.tsv", [("good 1", "yes")])
    config = LabeledText(path=train, validation_path=held_out, tokenizer=WORDS)
    with pytest.warns(UserWarning, match=r"the validation split has no example of the class 'no'"):
        prepare(config)
    yes = table(tmp_path / "c.tsv", [row for row in SORTED if row[1] == "yes"])
    config = LabeledText(path=yes, validation_path=train, labels=("no", "yes"), tokenizer=TokenizerConfig(kind="byte"))
    with pytest.warns(UserWarning, match=r"the train split has no example of the class 'no', so the model can't learn"):
        prepare(config)


def test_reports_an_image_class_missing_from_a_split(tmp_path):
    numbers = np.array([0, 1] * 40 + [2])
    images = np.random.RandomState(0).rand(81, 4, 4)
    np.savez(tmp_path / "a.npz", images=images, labels=numbers)
    with pytest.warns(UserWarning, match=r"split has no example of the class '2'"):
        prepare(ImageFile(path=str(tmp_path / "a.npz")))
