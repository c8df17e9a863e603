"""Files of the user: accepted formats, and errors with position and remedy."""

import json
import re

import pytest

from transformer import data
from transformer.data import JsonLines, ParallelText, TextFile
from transformer.data.files import _texts as local_files


def write(path, content: bytes | str) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def test_accepts_line_ends_and_byte_order_marks_of_every_system(tmp_path):
    path = write(tmp_path / "a.txt", "\ufeffone\r\ntwo\rthree\n\nfive ñ\n")
    assert local_files.read_text(path) == "one\ntwo\nthree\n\nfive ñ\n"
    odd = "one\u2028still one\x0b\x1cand this\ntwo"
    assert local_files.read_lines(write(tmp_path / "b.txt", odd)) == ["one\u2028still one\x0b\x1cand this", "two"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"a\.txt.*got 0"),
        (b" \n\r\n", r"is empty: expected text, got 4 bytes without any"),
        (b"abc\ndef\0ghi, and more", r"has a NUL byte.*byte 7, in line 2\. Remove.*tr -d '.000'"),
        (b"\x7fELF\x02\x01\x01" + bytes(40), r"has a NUL byte.*byte 7.*binary file"),
        (b"caf\xe9 noir", r"UTF-8.*3.*0xe9.*LATIN1"),
        (b"\xef\xbb\xbfcaf\xe9", "byte 6 is 0xe9"),
        ("text".encode("utf-16"), r"is UTF-16: expected UTF-8.*iconv -f UTF-16 "),
        ("text".encode("utf-32"), r"is UTF-32: expected UTF-8.*iconv -f UTF-32 "),
        (b"\0\0\xfe\xff" + "text".encode("utf-32-be"), r"is UTF-32: .*iconv -f UTF-32 "),
        *(
            ("Some text, without a mark.\n".encode(name), rf"is {name}: .*iconv -f {name} ")
            for name in ("UTF-16LE", "UTF-16BE", "UTF-32LE", "UTF-32BE")
        ),
        (b"short", r"sequence_length \(16\).*got 4"),
        (b"x", "expected at least 2 characters, got 1"),
    ],
)
def test_rejects_unusable_text(tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        data.prepare(TextFile(path=write(tmp_path / "a.txt", content), sequence_length=16))


@pytest.mark.parametrize(
    "make",
    [
        lambda path: TextFile(path=path),
        lambda path: JsonLines(path=path),
        lambda path: ParallelText(source_path=path),
    ],
)
def test_rejects_a_missing_file_and_a_folder(tmp_path, make):
    write(tmp_path / "corpus.txt", "text")
    with pytest.raises(FileNotFoundError, match=r"corpsu\.txt.*'corpus\.txt'\?"):
        data.prepare(make(str(tmp_path / "corpsu.txt")))
    with pytest.raises(FileNotFoundError, match=r"nowhere/corpus\.txt.*--data\.(source-)?path"):
        data.prepare(make(str(tmp_path / "nowhere" / "corpus.txt")))
    with pytest.raises(ValueError, match="is not a file"):
        data.prepare(make(str(tmp_path)))


def test_rejects_a_held_out_text_that_is_too_short(tmp_path):
    config = TextFile(
        path=write(tmp_path / "a.txt", "some text " * 9),
        validation_path=write(tmp_path / "b.txt", "s"),
        sequence_length=8,
    )
    with pytest.raises(ValueError, match="the validation text is too short: expected at least 2 tokens, got 1"):
        data.prepare(config)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n{"text": ', "line 2: expected a JSON object, got '{\"text\":'"),
        ('\n["a"]', r"2.*JSON"),
        ('{"texts": "a", "id": 1}', r"'text'.*'texts'\?"),
        ('{"text": 1}', r"'text', got int\. Correct or remove"),
        ('{"text": null}', r"'text', got null\. Correct or remove"),
        ("null", r"line 1: expected a JSON object, got null\."),
        ('{"text": " "}', r"'text'"),
        ('{"text": "only one"}', r"2.*got 1.*--data\.validation-path"),
        ("[" * 100_000, r"1.*JSON"),
    ],
)
def test_rejects_unusable_json_lines(tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        data.prepare(JsonLines(path=write(tmp_path / "a.jsonl", content), sequence_length=2))


def test_reads_json_lines_with_a_custom_field(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"body": "one\\r\\ntwo"}\r\n{"body": ""}\n{"body": "three"}')
    assert local_files.read_json_lines(path, "body") == ["one\ntwo", "three"]


def test_reads_pairs_from_two_files(tmp_path):
    source = write(tmp_path / "a.en", "one\r\n\r\nthree\r\nfour\r\n")
    target = write(tmp_path / "a.es", "uno\n\ntres\n\n")
    assert local_files.read_pairs(source, target) == ([("one", "uno"), ("three", "tres")], 2)


def test_rejects_files_with_different_line_counts(tmp_path):
    source, target = write(tmp_path / "a.en", "one\ntwo\nthree\n"), write(tmp_path / "a.es", "uno\ndos\n")
    with pytest.raises(ValueError, match=r"the same number of lines: .*a\.en has 3, .*a\.es has 2"):
        data.prepare(ParallelText(source_path=source, target_path=target))
    tabs = write(tmp_path / "a.tsv", "one\tuno\ntwo dos\n")
    with pytest.raises(ValueError, match=r"2.*got 0.*'two dos'"):
        data.prepare(ParallelText(source_path=tabs))
    tabs = write(tmp_path / "b.tsv", "one\tuno\tun\n")
    with pytest.raises(ValueError, match=r"line 1: .* got 2 tabs"):
        data.prepare(ParallelText(source_path=tabs))
    empty = write(tmp_path / "c.tsv", "one\t\n\tdos\n")
    with pytest.raises(ValueError, match=r"\(2.*read\)"):
        data.prepare(ParallelText(source_path=empty))
    single = write(tmp_path / "d.tsv", "one\tuno\n")
    with pytest.raises(ValueError, match="expected at least 2 pairs, got 1"):
        data.prepare(ParallelText(source_path=single))


def test_reads_held_out_pairs_from_separate_files(tmp_path):
    config = ParallelText(
        source_path=write(tmp_path / "a.en", "one\ntwo\n"),
        target_path=write(tmp_path / "a.es", "uno\ndos\n"),
        validation_source_path=write(tmp_path / "b.en", "three\nfour\n"),
        validation_target_path=write(tmp_path / "b.es", "tres\n\n"),
    )
    dataset = data.prepare(config)
    assert [(e.source, e.target) for e in dataset.examples("validation")] == [("three", "tres")]
    assert len(dataset.examples("train")) == 2
    assert "1 skipped" in dataset.describe()


def test_the_encoding_of_a_long_text_is_recognized_from_its_beginning(tmp_path):
    """UTF-8 with NUL bytes is not taken for UTF-16, even if half of its bytes are NUL."""
    path = write(tmp_path / "a.txt", ("One line of text.\n" * 999).encode("utf-16-le"))
    with pytest.raises(ValueError, match="is UTF-16LE"):
        local_files.read_text(path)
    with pytest.raises(ValueError, match=r"has a NUL byte: .* at byte 18, in line 2"):
        local_files.read_text(write(tmp_path / "b.txt", b"One line of text.\n" + bytes(400) + b"text" * 30))


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_null_columns_are_named(tmp_path, form):
    """A row of null is not reported as a file with other columns."""
    kinds = {
        "conversations": ([{"messages": [{"role": "user", "content": "a"}]}, {"messages": None}], "'messages' (null)"),
        "preferences": (
            [{"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "a", "chosen": None, "rejected": "c"}],
            "'prompt', 'rejected', 'chosen' (null)",
        ),
    }
    for name, (rows, message) in kinds.items():
        path = tmp_path / f"{name}.{form}"
        if form == "jsonl":
            write(path, "\n".join(map(json.dumps, rows)))
        else:
            pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
            parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        config = data.Conversations if name == "conversations" else data.Preferences
        expected = rf"(line 2|row 1): .* got {re.escape(message)}\. .*fill in or remove the row"
        with pytest.raises(ValueError, match=expected):
            config(path=str(path)).read()


def test_an_empty_cell_is_named(tmp_path):
    path = write(tmp_path / "a.tsv", "sentence\tlabel\ngood\tyes\n \tno\n")
    with pytest.raises(ValueError, match="line 3: the column 'sentence' is empty"):
        local_files.read_labeled(path, "sentence", "label")
