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
        (TokenizerConfig, {"kind": "words"}, r"tokenizer\.kind.*got 'words'.*'word'\?"),
        (TokenizerConfig, {"vocab_size": 80}, r"vocab_size \(80\)"),
        (TokenizerConfig, {"kind": "bpe", "vocab_size": 258}, r"vocab_size.*259.*got 258"),
        (TokenizerConfig, {"kind": "word", "vocab_size": 4}, "at least 5, got 4"),
        (TinyShakespeare, {"sequence_length": 0}, r"sequence_length.*1.*got 0"),
        (TinyShakespeare, {"batch_size": 1.5}, r"batch_size.*1.*got 1.5"),
        (TinyShakespeare, {"eval_batch_size": True}, r"eval_batch_size"),
        (TextFile, {"path": ""}, r"path.*got ''"),
        (TextFile, {"path": "x", "validation_share": 1.0}, r"validation_share.*0.*1.*got 1.0"),
        (JsonLines, {"path": "x", "validation_share": None}, r"validation_share.*0.*1"),
        (NumberWords, {"source_language": "eng"}, r"source_language.*got 'eng'.*'en'\?"),
        (NumberWords, {"target_language": "en"}, "are both 'en'. Use two different ones"),
        (NumberWords, {"max_digits": 1}, r"max_digits.*2.*got 1"),
        (NumberWords, {"max_digits": 7}, r"max_digits.*2.*6"),
        (NumberWords, {"train_examples": 10}, r"train_examples.*200.*got 10"),
        (NumberWords, {"target_language": "de"}, r"tokenizer.kind"),
        (NumberWords, {"max_target_length": 1}, r"max_target_length.*2.*got 1"),
        (ParallelText, {"source_path": "a", "max_source_length": 0}, r"max_source_length.*got 0"),
        (
            ParallelText,
            {"source_path": "a", "target_path": "b", "validation_source_path": "c"},
            "Use validation files in the format of the training files",
        ),
        (ParallelText, {"source_path": "a", "validation_target_path": "c"}, r"validation_target_path.*'c'"),
    ],
)
def test_invalid_data_names_the_field_to_change(kind, fields, message):
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


def test_every_field_is_documented():
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
