"""Tests of `generate` with slots, a draft model and 8-bit weights, and of options that are invalid with any model."""

import contextlib
import io
import json

import pytest
from chat_parts import write_chat_model
from inference_parts import write_models
from tokenizers import processors
from training_recipes import record_drawn_run, text_recipe

from transformer.__main__ import main
from transformer.generate._streaming import Piece, TokenStream
from transformer.inference import _generate as generating
from transformer.inference import open_model


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs on the same text, `large` and `small`, with different parameters."""
    root = tmp_path_factory.mktemp("runs")
    recipe = text_recipe(root, model={"dropout_rate": 0.0})
    for seed, name in enumerate(("large", "small")):
        record_drawn_run(recipe, root / name, [4], seed=seed)
    return root


def words_for(runs, *words):
    prompts = ("--prompt", "line", "--prompt", "no more", "--prompt", "of 4")
    return ["generate", str(runs / "large"), *prompts, "--json", "--step", "newest", "--max-new-tokens", "7", *words]


def texts(printed):
    return [one["output"] for one in json.loads(printed)["results"]]


@pytest.fixture(scope="module")
def plain(runs):
    """The texts without further options."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(words_for(runs)) == 0
    return texts(out.getvalue())


@pytest.fixture
def written(runs, capsys):
    """Return the texts of `generate` with these options, and its stderr."""

    def call(*words):
        assert main(words_for(runs, *words)) == 0
        printed = capsys.readouterr()
        return texts(printed.out), printed.err

    return call


@pytest.mark.parametrize("words", [("--slots", "2"), ("--draft", "small", "--draft-tokens", "2"), ("--lookup", "3")])
def test_slots_and_a_draft_model_do_not_change_the_text(written, runs, plain, words):
    assert written(*(str(runs / word) if word == "small" else word for word in words))[0] == plain


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("words", [("--quantize", "int8"), ("--quantize", "int4", "--group-size", "64")])
@pytest.mark.programs(70, reason="the report of quantized weights is computed outside of jit")
def test_reports_the_memory_saved_by_quantization(written, words):
    _, printed = written(*words)
    assert "embedding/embedding: 1 arrays" in printed
    assert "relative error" in printed


class Terminal(io.StringIO):
    """A terminal that records the pieces that are printed."""

    def __init__(self):
        super().__init__()
        self.pieces = []

    def isatty(self):
        return True

    def write(self, text):
        self.pieces.append(text)
        return super().write(text)


@pytest.mark.programs(10, reason="a stream has own programs, and makes its cache outside of jit")
@pytest.mark.parametrize(
    ("words", "appears"),
    [
        ((), True),
        (("--temperature", "0"), True),
        (("--samples", "2"), True),
        (("--prompt", "no more"), False),
        (("--slots", "1"), False),
        (("--json",), False),
    ],
)
def test_a_text_appears_on_a_terminal_while_it_is_generated(words, appears, runs, capsys, monkeypatch):
    """The text is the one in a pipe, where it is printed at once."""
    monkeypatch.setattr("transformer.generate._streaming.MOST_STEPS", 2)
    given = ("generate", str(runs / "large"), "--prompt", "line", "--step", "newest", "--max-new-tokens", "9", *words)
    assert main(given) == 0
    piped = capsys.readouterr().out
    terminal = Terminal()
    with contextlib.redirect_stdout(terminal):
        assert main(given) == 0
    assert terminal.getvalue() == piped
    assert (len([piece for piece in terminal.pieces if piece.strip()]) > 3) == appears


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--slots", "0"), "--slots must be at least 1, got 0"),
        (("--draft", "x", "--draft-tokens", "0"), "--draft-tokens must be at least 1, got 0"),
        (("--lookup", "0"), "--lookup must be at least 1, got 0"),
        (("--lookup", "2", "--draft", "x"), "--draft and --lookup can't be used together. Remove one of them"),
        (("--lookup", "2", "--stream"), "--lookup and --stream can't be used together. Remove one of them"),
        (("--no-parse-special", "--image", "x"), "--no-parse-special can't be used with --image"),
        (("--draft", "x", "--slots", "2"), "--slots and --draft can't be used together. Remove one of them"),
    ],
)
def test_rejects_invalid_options_before_loading_the_model(words, message, capsys):
    assert main(["generate", "no-such-directory", "--prompt", "x", *words]) == 2
    assert message in capsys.readouterr().err


RENDERED = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def prompts_of(monkeypatch):
    """Return the ids of the prompts that reach the decoding loops; each generates one token."""
    seen = []

    def generated(model, params, prompts, **options):
        seen.extend(map(list, prompts))
        return [[7]] * len(prompts)

    def streamed(self, prompt, **options):
        seen.append(list(prompt))
        yield Piece([7], [0.0], ended=True)

    monkeypatch.setattr(generating, "generate", generated)
    monkeypatch.setattr(TokenStream, "generate", streamed)
    return seen


@pytest.mark.parametrize("words", [(), ("--stream",), ("--slots", "2")])
def test_special_tokens_in_a_prompt_are_parsed_on_request(words, prompts_of, tmp_path, capsys):
    """They are tokens, as in a conversation, unless the option makes them text."""
    model = write_chat_model(tmp_path / "smollm")
    tokenizer = open_model(model).tokenizer
    for switch, parsed in (((), True), (("--no-parse-special",), False)):
        prompts_of.clear()
        assert main(["generate", str(model), "--prompt", RENDERED, *words, *switch]) == 0
        assert prompts_of == [tokenizer.encode_prompt(RENDERED, parse_special=parsed)]
    assert tokenizer.encode_prompt(RENDERED) != tokenizer.encode_source(RENDERED)


def test_special_tokens_in_a_prompt_are_parsed_on_request_in_python(prompts_of, tmp_path):
    opened = open_model(write_chat_model(tmp_path / "smollm"))
    for parsed in (True, False):
        prompts_of.clear()
        opened.generate(RENDERED, parse_special=parsed, max_new_tokens=1)
        assert prompts_of == [opened.tokenizer.encode_prompt(RENDERED, parse_special=parsed)]


def test_warns_about_a_prompt_with_two_start_tokens(tmp_path):
    opened = open_model(write_chat_model(tmp_path / "mistral", "mistral"))
    library = opened.tokenizer._parsing_library
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", opened.tokenizer.bos_id)]
    )
    with pytest.warns(UserWarning, match="begins with <s>, which the tokenizer also adds"):
        generating.encode_prompt(opened, "<s>Hello")
    assert generating.encode_prompt(opened, "Hello")[0] == opened.tokenizer.bos_id


def test_special_tokens_in_a_source_stay_text(tmp_path, capsys):
    model = write_models(tmp_path)["translator"]
    assert main(["generate", str(model), "--prompt", "a dog", "--no-parse-special"]) == 2
    assert "--no-parse-special needs a causal model" in capsys.readouterr().err
    opened = open_model(model)
    text = f"a {opened.tokenizer.special_tokens[0]} dog"
    assert generating.encode_prompt(opened, text) == opened.tokenizer.encode_source(text)
