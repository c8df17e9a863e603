"""Random command lines and random files in workdirs: the program works, or exits with code 2 and a one-line error."""

import contextlib
import dataclasses
import io
import json
import sys
import types
import warnings
from pathlib import Path

import pytest
from fuzz_parts import BYTE_EDITS, Fuzz, damaged, files_of, fuzz
from hypothesis import strategies as st
from training_recipes import record_drawn_run, text_recipe, tiny_recipe

from transformer.cli import _generate as generate
from transformer.cli import _texts as texts
from transformer.cli._arguments import parse
from transformer.config import Patches, RotaryOptions, TransformerConfig
from transformer.data import ImageFile, JsonLines, Multi30k, NumberWords
from transformer.generate import Sampling
from transformer.inference import _generate as generating
from transformer.inference import open_model
from transformer.training import Recipe, from_json, load_recipe, to_json
from transformer.training._overrides import find_recipe, override
from transformer.training._serial import flatten
from transformer.training.lora import LoRA

__all__ = ["fuzz"]  # a fixture

MODEL = TransformerConfig(d_model=12, num_layers=2, num_heads=3, position=RotaryOptions())
RECIPES = [
    tiny_recipe(),
    tiny_recipe("seq2seq"),
    Recipe(name="numbers", model=MODEL, data=NumberWords(), lora=LoRA()),
    Recipe(name="lines", model=MODEL, data=JsonLines(path="a.jsonl", field="body")),
    Recipe(name="pairs", model=MODEL, data=Multi30k()),
    Recipe(
        name="images",
        model=dataclasses.replace(MODEL, position=None, input=Patches(image_height=8, image_width=8, patch_size=4)),
        data=ImageFile(path="a.npz"),
    ),
]
WORDS = st.one_of(
    st.sampled_from(["", "0", "-1", "1", "3", "nan", "inf", "-inf", "1e999", "9" * 400, "0x10", "1_0", "None", "True"]),
    st.sampled_from(
        ["rms_norm", "rotary", "cosine", "a/b", "..", "/etc/passwd", "\0", "\ud800", "[1, 2]", "--", "-", "=", "é"]
    ),
    st.sampled_from(
        ["__import__('os').system('x')", "$(touch x)", "`id`", "{}", "%s", "@file", "a b", "1 2", "--help=x"]
    ),
    st.text(max_size=6),
    st.integers(-3, 2**40).map(str),
    st.floats().map(str),
)


def options(recipe: Recipe) -> st.SearchStrategy[list[str]]:
    """Return a strategy of recipe options: correct, misspelled or unknown, with random values."""
    known = st.sampled_from([f"--{name.replace('_', '-')}" for name in flatten(recipe)])
    wrong = st.sampled_from(
        ["--model", "--model.", "--.", "--data.nothing", "--lora.rank", "--workdir", "-x", "---", "--\0"]
    )
    pair = st.tuples(known | known | known | wrong, WORDS)
    part = pair.map(list) | pair.map(lambda two: ["=".join(two)]) | WORDS.map(lambda one: [one])
    return st.lists(part, max_size=3).map(lambda parts: [word for part in parts for word in part])


ARGUMENTS = st.integers(0, len(RECIPES) - 1).flatmap(
    lambda number: st.tuples(st.just(number), options(RECIPES[number]))
)


@contextlib.contextmanager
def quiet():
    """Suppress output, and accept an exit with code 0, as after --help."""
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            yield
        except SystemExit as stop:
            code = stop.code
        else:
            code = None
        assert code in (None, 0)


def test_fuzzed_overrides(fuzz: Fuzz):
    """Accepted options give a recipe that can be saved and loaded."""

    def read(folder: Path, value: tuple) -> None:
        with quiet():
            recipe = override(RECIPES[value[0]], value[1], program="train.py")
            assert from_json(json.loads(json.dumps(to_json(recipe), allow_nan=False))) == recipe

    fuzz("recipe overrides", 2000, ARGUMENTS, read)


KEPT = files_of([to_json(recipe) for recipe in RECIPES])


def test_fuzzed_workdir_recipes(fuzz: Fuzz):
    def put(folder: Path, raw: bytes) -> None:
        (folder / "recipe.json").write_bytes(raw)

    def read(folder: Path, raw: bytes) -> None:
        recipe = load_recipe(folder)
        assert from_json(json.loads(json.dumps(to_json(recipe), allow_nan=False))) == recipe

    fuzz("recipe overrides", 7000, KEPT, read, put=put)


def test_fuzzed_recipe_names(fuzz: Fuzz):
    names = ["number_words", "configs/x", "x.py", "../..", "/etc/passwd", "\0", "~", "." * 300, "a" * 300]

    def read(folder: Path, name: str) -> None:
        find_recipe(name, folder)

    def put(folder: Path, name: str) -> None:
        (folder / "configs").mkdir(exist_ok=True)
        (folder / "configs" / "number_words.py").touch()

    fuzz("recipe overrides", 1000, st.sampled_from(names) | st.text(max_size=9), read, put=put)


def test_fuzzed_generate_options(fuzz: Fuzz):
    flags = [f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(generate.Generate)]
    pair = st.tuples(st.sampled_from(flags), WORDS)
    words = st.lists(pair.map(list) | WORDS.map(lambda one: [one]), max_size=3)

    def read(folder: Path, parts: list[list[str]]) -> None:
        with quiet():
            parse(generate.Generate, "generate", [word for part in parts for word in part])

    fuzz("prompt", 800, words, read)


def test_fuzzed_prompts_from_a_pipe(fuzz: Fuzz, monkeypatch: pytest.MonkeyPatch):
    def read(folder: Path, value: tuple) -> None:
        stdin = types.SimpleNamespace(buffer=io.BytesIO(value[0]), isatty=lambda: False)
        monkeypatch.setattr(sys, "stdin", stdin)
        prompts = texts.read_prompts(value[1], lines=value[2])
        assert all(isinstance(prompt, str) for prompt in prompts)

    piped = st.builds(damaged, st.just("Une phrase.\r\n\ufeffDeux\n\n".encode()), BYTE_EDITS) | st.binary(max_size=30)
    given = st.lists(st.sampled_from(["-", "a", ""]) | st.text(max_size=4), max_size=3)
    fuzz("prompt", 1900, st.tuples(piped, given, st.booleans()), read)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory):
    """A tiny byte-level model from a workdir."""
    root = tmp_path_factory.mktemp("runs")
    recipe = text_recipe(root, model={"dropout_rate": 0.0})
    tokenizer = dataclasses.replace(recipe.data.tokenizer, kind="byte")
    recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, tokenizer=tokenizer))
    return open_model(record_drawn_run(recipe, root / "run", [4]), step="newest")


@pytest.mark.programs(12, reason="prompts of several lengths are generated")
def test_fuzzed_generation(fuzz: Fuzz, opened):
    """Actual generation: each request returns text or a clear error."""

    def read(folder: Path, value: tuple) -> None:
        prompts, tokens, temperature, seed = value
        sampling = Sampling(temperature=temperature)
        with warnings.catch_warnings(action="ignore"):  # about prompts that fill the context of the model
            found = generating.continue_texts(opened, prompts, max_new_tokens=tokens, sampling=sampling, seed=seed)
        assert [one.prompt for one in found] == prompts

    prompt = st.sampled_from(["", "\0", "\ud800", "a" * 999, "<eos>", "é" * 9]) | st.text(max_size=5)
    temperatures = st.sampled_from([0.0, 0.8, -1.0, 1e-9, float("nan")])
    seeds = st.sampled_from([0, -1, 2**32 - 1])
    inputs = st.tuples(st.lists(prompt, min_size=1, max_size=2), st.just(3), temperatures, seeds)
    fuzz("prompt", 300, inputs, read)
