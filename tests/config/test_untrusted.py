"""Untrusted files: every reader stays inside the directory, limits the size, and parses JSON strictly."""

import json
import os
from pathlib import Path

import pytest
from training_recipes import tiny_recipe

from transformer.config import ConfigError
from transformer.config._untrusted import MAX_DEPTH, parse_json, read_bounded, regular_file
from transformer.data import load_tokenizer
from transformer.data.tokenizers._pretrained import load_pretrained_tokenizer
from transformer.data.tokenizers._vocabularies import ByteTokenizer
from transformer.training import load_recipe, to_json
from transformer.training._overrides import find_recipe
from transformer.training._recipe import save_recipe


@pytest.mark.parametrize("name", ["/etc/hostname", "../a.json", "b/../../a.json", "b\\a.json", "a.json\0", ".."])
def test_rejects_a_name_that_leaves_the_directory(tmp_path, name):
    with pytest.raises(ValueError, match="must be the name of a file in the directory"):
        regular_file(tmp_path, name)


def test_accepts_links_inside_the_directory(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "a.json").write_text("{}")
    (tmp_path / "link.json").symlink_to("b/a.json")
    (tmp_path / "seen").symlink_to(tmp_path)  # the directory itself may be a link
    for name in ("b/a.json", "link.json"):
        assert read_bounded(tmp_path, name) == read_bounded(tmp_path / "seen", name) == b"{}"
    with pytest.raises(ValueError, match=r"link\.json.*1.*got 2"):
        read_bounded(tmp_path, "link.json", limit=1)


def nested(depth: int, one: str = "[", other: str = "]") -> bytes:
    return (one * depth + "1" + other * depth).encode()


@pytest.mark.parametrize("brackets", [("[", "]"), ('{"a":', "}"), ('[{"b":', "}]")])
def test_rejects_json_nested_too_deeply(brackets):
    size = sum(map(brackets[0].count, "[{"))
    assert json.dumps(parse_json(nested(MAX_DEPTH // size, *brackets)))
    for depth in (MAX_DEPTH // size + 1, 300, 100_000):
        with pytest.raises(ValueError, match="nested too deeply"):
            parse_json(nested(depth, *brackets))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1, "a": 1}', "duplicate key 'a'"),
        (b'{"a": {"b": 1, "c": 2, "b": 3}}', "duplicate key 'b'"),
        (b'{"\xff": 1}', r"2.*UTF-8"),
        (b"{", "Expecting property name"),
        (b"", "Expecting value"),
        (b"9" * 5000, "Exceeds the limit"),
    ],
)
def test_rejects_json_that_is_not_strict(content, message):
    with pytest.raises(ValueError, match=message):
        parse_json(content)


READERS = [
    (load_recipe, "recipe.json"),
    (load_tokenizer, "tokenizer.json"),
    (load_pretrained_tokenizer, "tokenizer.json"),
    (load_pretrained_tokenizer, "tokenizer_config.json"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files of all readers."""
    inside = tmp_path / "inside"
    ByteTokenizer().save(inside)
    save_recipe(tiny_recipe(), inside)
    return inside


@pytest.mark.parametrize(("read", "name"), READERS)
def test_every_reader_stays_inside_its_directory(folder, read, name):
    outside = folder.parent / "outside.json"
    outside.write_text("{}")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(outside)
    with pytest.raises(ValueError, match=rf"{name}.*outside\.json"):
        read(folder)
    (folder / name).unlink()
    (folder / name).symlink_to(name)
    with pytest.raises(ValueError, match="a broken link"):
        read(folder)


@pytest.mark.parametrize(("read", "name"), READERS)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_no_reader_waits_for_a_pipe(folder, read, name, make):
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    with pytest.raises(ValueError, match=f"{name}"):
        read(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"class": []}, r"recipe\.json.*\[\]"),
        ({"class": {"class": 1}}, "which is not one of Recipe"),
        ({"model": {"class": ["TransformerConfig"]}}, r"recipe\.json\.model.*\['TransformerConfig'\]"),
        ({"name": [1] * 500}, r"recipe\.json\.name must be of type str, got \[1, 1, .{70,80}$"),
        ({"x" * 9000: 1}, r"has an unknown field 'x{70,80}\.$"),
    ],
)
def test_rejects_a_recipe_with_invalid_values(folder, change, message):
    values = to_json(tiny_recipe())
    (folder / "recipe.json").write_text(json.dumps(values | {"recipe": values["recipe"] | change}))
    with pytest.raises(ConfigError, match=message):
        load_recipe(folder)


def test_rejects_a_number_outside_the_float_range(folder):
    values = to_json(tiny_recipe())
    values["recipe"]["optimizer"]["learning_rate"] = 10**400
    (folder / "recipe.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=r"optimizer\.learning_rate.*got 10{70,80}"):
        load_recipe(folder)


@pytest.mark.parametrize("kind", [[], {}, ["byte"], 3])
def test_rejects_a_tokenizer_kind_that_is_not_a_string(folder, kind):
    state = ByteTokenizer().state() | {"kind": kind}
    (folder / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(ValueError, match="kind must be one of char, byte, word, bpe, got"):
        load_tokenizer(folder)


@pytest.mark.parametrize("name", ["a" * 300, "\0", "x/" * 3000])
def test_rejects_a_name_that_cannot_be_a_file_name(tmp_path, name):
    with pytest.raises(ConfigError, match="there is no recipe"):
        find_recipe(name, tmp_path)
