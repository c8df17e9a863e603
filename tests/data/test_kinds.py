"""Data kinds: validation with helpful messages, and saving and loading of every kind."""

import ast
import dataclasses
import itertools
from pathlib import Path

import pytest

from transformer import data
from transformer.config import ConfigError
from transformer.data import (
    DATA,
    JsonLines,
    NumberWords,
    ParallelText,
    TextFile,
    TinyShakespeare,
    TokenizerConfig,
    kinds,
)
from transformer.data.kinds import PLACES


def born(kind: type, fields: dict):
    """Create an instance as the command line does: without the type checks of these tests, but with its own checks."""
    config = object.__new__(kind)
    for field in dataclasses.fields(kind):
        object.__setattr__(config, field.name, fields.get(field.name, field.default))
    assert set(fields) <= {field.name for field in dataclasses.fields(kind)}
    config.__post_init__()
    return config


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (TokenizerConfig, {"kind": "words"}, r"tokenizer\.kind must be one of .* got 'words'\. Did you mean 'word'\?"),
        (TokenizerConfig, {"vocab_size": 80}, r"vocab_size \(80\) can't be set for a char tokenizer"),
        (TokenizerConfig, {"kind": "bpe", "vocab_size": 258}, "vocab_size must be .* at least 259, got 258"),
        (TokenizerConfig, {"kind": "word", "vocab_size": 4}, "at least 5, got 4"),
        (TinyShakespeare, {"sequence_length": 0}, "sequence_length must be an integer of at least 1, got 0"),
        (TinyShakespeare, {"batch_size": 1.5}, "batch_size must be an integer of at least 1, got 1.5"),
        (TinyShakespeare, {"eval_batch_size": True}, "eval_batch_size must be .* got True"),
        (TextFile, {"path": ""}, "path must be a file name, got ''"),
        (TextFile, {"path": "x", "validation_share": 1.0}, "validation_share must be above 0 and below 1, got 1.0"),
        (JsonLines, {"path": "x", "validation_share": None}, "validation_share must be above 0 and below 1, got None"),
        (NumberWords, {"source_language": "eng"}, r"source_language must be one of .* got 'eng'\. Did you mean 'en'\?"),
        (NumberWords, {"target_language": "en"}, "are both 'en'. Use two different ones"),
        (NumberWords, {"max_digits": 1}, "max_digits must be an integer of at least 2, got 1"),
        (NumberWords, {"max_digits": 7}, "max_digits must be from 2 to 6"),
        (NumberWords, {"train_examples": 10}, "train_examples must be an integer of at least 200, got 10"),
        (NumberWords, {"target_language": "de"}, "writes a number as one word.* Use tokenizer.kind char, byte or bpe"),
        (NumberWords, {"max_target_length": 1}, "max_target_length must be .* at least 2, or None, got 1"),
        (ParallelText, {"source_path": "a", "max_source_length": 0}, "max_source_length must be .* or None, got 0"),
        (
            ParallelText,
            {"source_path": "a", "target_path": "b", "validation_source_path": "c"},
            "Use validation files in the format of the training files",
        ),
        (ParallelText, {"source_path": "a", "validation_target_path": "c"}, "validation_target_path is 'c', but"),
    ],
)
def test_impossible_data_says_what_to_change(kind, fields, message):
    with pytest.raises(ConfigError, match=message):
        born(kind, fields)


def test_kinds_by_tag():
    assert {kind: config.kind for kind, config in DATA.items()} == {kind: kind for kind in DATA}
    for task, expected in {
        "causal_lm": {"tiny_shakespeare", "text_file", "text_files", "json_lines"},
        "seq2seq": {"number_words", "parallel_text", "multi30k", "tfds_translation"},
        "classifier": {"labeled_text", "sst2", "sst2_sentences"},
        "masked_lm": {"masked_text", "masked_sst2"},
        "sft": {"conversations"},
    }.items():
        assert {kind for kind, config in DATA.items() if config.task == task} >= expected
    fields = {field.name for config in DATA.values() for field in dataclasses.fields(config)}
    validation = {"validation_path", "validation_paths", "validation_source_path", "validation_target_path"}
    places = {"cache_dir", "data_dir", "manual_dir", "path", "paths", "source_path", "target_path", "template_path"}
    assert places | validation == PLACES
    assert fields > PLACES


def test_every_file_of_a_kind_is_in_the_registry():
    """Every kind is exported: a new kind needs a file, a line in the registry and an export."""
    files = {path.stem.removeprefix("_") for path in Path(kinds.__file__).parent.glob("_[a-z]*.py")}
    assert {config.__module__.rpartition("._")[2] for config in DATA.values()} == files
    assert {config.__name__ for config in DATA.values()} <= set(data.__all__)
    assert all(getattr(data, config.__name__) is config for config in DATA.values())


def test_every_field_is_told_to_the_user():
    """The docstring of a field is its text in --help: none may be missing."""
    folder = Path(kinds.__file__).parent
    files = [*folder.glob("*.py"), *folder.parent.glob("*.py")]
    for kind in [node for file in files for node in ast.parse(file.read_text(encoding="utf-8")).body]:
        if not isinstance(kind, ast.ClassDef) or "kw_only" not in "".join(map(ast.unparse, kind.decorator_list)):
            continue
        for field, text in itertools.pairwise([*kind.body, ast.Pass()]):
            if isinstance(field, ast.AnnAssign) and "ClassVar" not in ast.unparse(field.annotation):
                told = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
                assert told, f"{kind.name}.{ast.unparse(field.target)} has no docstring"
