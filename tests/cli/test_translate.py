"""Tests of the command translate: one output line per input line, equal to beam search of that line alone."""

import contextlib
import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import tokenizers
from golden import case as golden_case
from golden import ours
from tokenizers import models, pre_tokenizers, processors
from training_recipes import few_number_words, short_recipe

from transformer.__main__ import main
from transformer.config import ConfigError, FeedForwardOptions, SinusoidalOptions, TransformerConfig
from transformer.generate import Beam, Hypothesis, beam_search
from transformer.inference import _translate as translating
from transformer.inference import open_model, translate_lines
from transformer.training._loop import train

ROOT = Path(__file__).resolve().parents[2]
WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "under"]
TWO = Beam(size=2, length_extra=1)
AS_TWO = ("--beam-size", 2, "--max-extra", 1)
SPEED = re.compile(r"(\d+) lines in [\d.]+ s, [\d.]+ lines/s(; \d+ truncated at the maximum length)?\n$")


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """Workdir of a short run."""
    root = tmp_path_factory.mktemp("runs")
    recipe = short_recipe(
        "pairs",
        TransformerConfig(d_model=8, num_heads=2, num_layers=1, feed_forward=FeedForwardOptions(d_ff=8)),
        few_number_words(root / "prepared", eval_batch_size=5, max_source_length=3),
        training={"steps": 12},
        optimizer={"learning_rate": 3e-2, "warmup_steps": 5},
        evaluation={"every": None, "samples": 0, "batches": 1, "exact_match_examples": 0},
        logging={"progress": "none"},
    )
    with contextlib.redirect_stdout(io.StringIO()):
        train(recipe, root / "pairs")
    return root / "pairs"


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Weights of a tiny BART with a learned position table, and a word tokenizer that ends a text with [SEP]."""
    record = golden_case.golden("bart")[next(iter(golden_case.cases("bart")))]
    directory = ours.write(tmp_path_factory.mktemp("weights") / "bart", record)
    special = ["[CLS]", "[PAD]", "[SEP]", "[UNK]"]
    library = tokenizers.Tokenizer(
        models.WordLevel({token: i for i, token in enumerate(special + WORDS)}, unk_token="[UNK]")
    )
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="$A $B", special_tokens=[("[CLS]", 0), ("[SEP]", 2)]
    )
    library.save(str(directory / "tokenizer.json"))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "bos_token": "[CLS]", "eos_token": "[SEP]"}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    return directory


@pytest.fixture
def translate(capsys, monkeypatch):
    """Run the command with these bytes on stdin; return its exit code, stdout and stderr."""

    def call(directory, content, *words, terminal=False):
        stdin = io.TextIOWrapper(io.BytesIO(content))
        stdin.isatty = lambda: terminal
        monkeypatch.setattr(sys, "stdin", stdin)
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            code = main(["translate", *(str(word) for word in (directory, *words))])
        return code, *capsys.readouterr()

    return call


def alone(directory, text, beam=TWO):
    """Return the best translation of a text, by beam search of its ids."""
    opened = open_model(directory)
    [[best, *_]] = beam_search(
        opened.model,
        opened.params,
        [opened.tokenizer.encode_source(text)],
        prompts=[opened.target_start],
        eos_id=opened.eos_ids,
        beam=beam,
        suppress=opened.suppressed,
    )
    return opened.tokenizer.decode(best.tokens)


def test_prints_one_line_per_input_line(translate, weights):
    """For any length and any position in chunks and batches; blank lines stay blank."""
    content = b"\xef\xbb\xbfthe cat sat\n\na dog\r\n   \nran\n\nunder the dog"
    code, out, err = translate(weights, content, *AS_TWO)
    assert code == 0
    assert SPEED.match(err)[1] == "7"
    lines = out.split("\n")
    assert len(lines) == 8
    assert lines[1] == lines[3] == lines[5] == lines[7] == ""
    for line, text in {0: "the cat sat", 2: "a dog", 6: "under the dog"}.items():
        assert lines[line] == alone(weights, text)
    for sizes in (("--chunk-lines", 2), ("--batch-tokens", 1)):
        assert translate(weights, content, *AS_TWO, *sizes)[1] == out


def test_prints_several_translations_per_line(translate, weights):
    content, options = b"cat\n\na dog\nran\n", (*AS_TWO, "--n-best", 2)
    code, out, _ = translate(weights, content, *options)
    assert code == 0
    rows = [line.split("\t") for line in out.splitlines()]
    assert [number for number, _, _ in rows] == ["1", "1", "2", "3", "3", "4", "4"]
    assert rows[2] == ["2", "0.0000", ""]
    code, out, _ = translate(weights, content, *options, "--json")
    found = [json.loads(line) for line in out.splitlines()]
    assert [one["line"] for one in found] == [1, 2, 3, 4]
    assert [one["source"] for one in found] == ["cat", "", "a dog", "ran"]
    several = [(f"{one['score']:.4f}", one["text"]) for row in found for one in row["translations"]]
    assert several == [(score, text) for _, score, text in rows]
    assert {"text", "score", "log_probability", "ended"} == found[0]["translations"][0].keys()


def test_at_most_one_chunk_is_read_ahead(weights):
    read = []

    def lines():
        for number in range(7):
            read.append(number)
            yield "" if number % 2 else "cat"

    opened = open_model(weights)
    chunks = translate_lines(opened, lines(), beam=TWO, chunk_lines=2)
    assert [one.number for one in next(chunks)] == [1, 2]
    assert read == [0, 1]
    assert [[one.number for one in chunk] for chunk in chunks] == [[3, 4], [5, 6], [7]]
    with pytest.raises(ConfigError, match=r"chunk_lines.*1.*got 0"):
        translate_lines(opened, [], chunk_lines=0)
    with pytest.raises(ValueError, match="max_new_tokens"):
        next(translate_lines(opened, ["cat"], max_new_tokens=0))


@pytest.mark.slow
def test_the_default_target_limit_is_source_length_plus_50(translate, weights):
    lines = [translate(weights, b"the cat sat\n", *words)[1] for words in ((), ("--max-extra", 50), ("--max-extra", 1))]
    assert lines[0] == lines[1] == alone(weights, "the cat sat", Beam()) + "\n"
    assert lines[0] != lines[2]


@pytest.mark.slow
def test_truncating_a_long_line_prints_a_warning(translate, weights):
    room = open_model(weights).model.config.longest_source
    long = " ".join((WORDS * room)[: room + 3])
    code, out, err = translate(weights, f"the cat\n{long}\na dog ran\n".encode(), *AS_TWO, "--batch-tokens", 1)
    assert code == 0, err
    assert (
        f"warning: line 2 has {room + 5} tokens and is truncated to {room}, the size of the model's position table"
        in err
    )
    lines = out.split("\n")
    assert len(lines) == 4
    assert lines[1] == alone(weights, " ".join((WORDS * room)[: room - 2]))  # [CLS] and [SEP] remain


@pytest.mark.slow
def test_reports_invalid_lines_with_their_line_number(translate, workdir):
    content, options = b"two\nsevn\n,-\ntwenty one two three\n", AS_TWO
    code, out, err = translate(workdir, content, *options)
    assert code == 0
    lines = out.split("\n")
    assert len(lines) == 5
    assert lines[0] == alone(workdir, "two")
    assert lines[1] == lines[2] == ""
    assert len(lines[3].split()) <= 5
    messages = err.splitlines()
    assert messages[0].startswith(
        "warning: line 2 can't be encoded, so its translation is empty: the text has word 'sevn'"
    )
    assert messages[1].startswith("warning: line 3 has no tokens after preprocessing")
    assert messages[2].startswith("warning: line 4 has 4 tokens, but the model was trained on at most 3")
    assert SPEED.match(messages[3] + "\n")[1] == "4"
    assert translate(workdir, content, *options, "--step", "newest")[1] == out


@pytest.fixture
def echoed(monkeypatch):
    """Replace beam search by a function that returns each source as its translation."""

    def found(model, params, sources, **options):
        return [[Hypothesis(ids, 0.0, 0.0, ended=True)] for ids in sources]

    monkeypatch.setattr(translating, "beam_search_all", found)


@pytest.mark.usefixtures("echoed")
def test_reports_invalid_utf8_and_overlong_lines(translate, weights):
    """Both keep their lines, with a warning, and the other lines are translated."""
    content = b"a dog\nthr\xc3\xa9\xe9e\n" + b"cat " * 8 + b"\nran\n"
    code, out, err = translate(weights, content, "--max-source-tokens", 5)
    assert (code, out) == (0, "a dog\n\ncat cat cat\nran\n")
    messages = err.splitlines()
    assert messages[0].startswith("warning: line 2 is not valid UTF-8 at byte 5, so its translation is empty. Convert")
    assert messages[1].startswith(
        "warning: line 3 has 10 tokens and is truncated to 5, the value of max_source_tokens: increase it"
    )
    assert SPEED.match(messages[2] + "\n")[1] == "4"
    found = [json.loads(line) for line in translate(weights, content, "--json")[1].splitlines()]
    assert [one["translations"][0]["text"] for one in found] == ["a dog", "", "cat " * 7 + "cat", "ran"]


@pytest.mark.usefixtures("echoed")
@pytest.mark.parametrize(("trained", "most"), [(None, 1024), (3, 1024), (2000, 2000)])
def test_reads_a_bounded_part_of_each_line(weights, trained, most):
    opened = dataclasses.replace(open_model(weights), context=trained)
    plain = opened.model.config.replace(position=SinusoidalOptions())
    opened = dataclasses.replace(opened, model=opened.model.clone(config=plain))
    with pytest.warns(UserWarning, match=rf"1.*3002.*{most}.*max_source_tokens"):
        [[line]] = translate_lines(opened, ["cat " * 3000])
    assert line.best[0].text.count("cat") == most - 2


def test_reports_invalid_input(translate, weights, tmp_path):
    assert translate(weights, b"", terminal=True)[2].startswith(
        "error: stdin is a terminal, so there is nothing to translate. Pipe lines"
    )
    code, _, err = translate(weights, b"", "--n-best", 5)
    assert code == 2
    assert re.fullmatch(r"error: --n-best .*1 to --beam-size \(4\), got 5\b.*\n", err)
    code, _, err = translate(weights, b"", "--max-ratio", 0, "--max-extra", 0)
    assert code == 2
    assert err.startswith("error: --max-ratio and --max-extra are both 0: no target could have a token.")
    code, _, err = translate(weights, b"", "--batch-tokens", 0)
    assert code == 2
    assert re.fullmatch(r"error: --batch-tokens .* 1, got 0\b.*\n", err)
    assert SPEED.match(translate(weights, b"")[2])[1] == "0"
    (tmp_path / "gpt2").mkdir()
    writer = ours.write(tmp_path / "gpt2", golden_case.golden("gpt2")["lm"])
    code, _, err = translate(writer, b"two\n")
    assert code == 2
    assert "contains a CausalLM, which does not translate text" in err


@pytest.mark.slow
def test_a_closed_stdout_ends_translation_quietly(workdir):
    """There is no traceback and no message, only the exit code of SIGPIPE."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as nobody:
        done = subprocess.run(
            [sys.executable, "-m", "transformer", "translate", workdir, "--max-extra", "1"],
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
            input="two\n",
            stdout=nobody,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (141, "")
