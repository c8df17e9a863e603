"""Tests of the command line: output, exit codes and error messages of the commands."""

import contextlib
import dataclasses
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from training_recipes import few_number_words

from transformer.__main__ import COMMANDS, main
from transformer.config import Execution, LayerKind, LearnedOptions, TransformerConfig
from transformer.data import TextFile
from transformer.nn._sharding import ParallelConfig
from transformer.training import EvaluationConfig, LoggingConfig, OptimizerConfig, Recipe, TrainingConfig
from transformer.training._loop import train
from transformer.training._recipe import load_recipe

ROOT = Path(__file__).resolve().parents[2]
LINE = "ROMEO: But soft, what light for $5 through yonder window breaks?\n"
PNG = b"\x89PNG\r\n\x1a\n"


SIZES = {"d_model": 8, "num_heads": 2, "num_layers": 1, "feed_forward.d_ff": 8}


def _trained(root, name, model, data):
    """Train a short run in a folder, and return its workdir."""
    recipe = Recipe(
        name=name,
        model=model,
        data=data,
        training=TrainingConfig(steps=40),
        optimizer=OptimizerConfig(learning_rate=3e-2, warmup_steps=5),
        evaluation=EvaluationConfig(every=None, samples=0, sample_tokens=4, batches=1, exact_match_examples=0),
        logging=LoggingConfig(tensorboard=False, progress="none"),
        execution=Execution(scan=False),  # fast to compile, as one device is
        parallel=ParallelConfig(devices=1),
    )
    with contextlib.redirect_stdout(io.StringIO()):
        train(recipe, root / name)
    return root / name


@pytest.fixture(scope="session")
def pairs_run(tmp_path_factory):
    """The workdir of a short run that translates number words."""
    root = tmp_path_factory.mktemp("runs")
    return _trained(root, "pairs", TransformerConfig(**SIZES), few_number_words(root / "prepared", eval_batch_size=10))


@pytest.fixture(scope="session")
def text_run(tmp_path_factory):
    """The workdir of a short run of a causal character model."""
    root = tmp_path_factory.mktemp("runs")
    (root / "text.txt").write_text(LINE * 40)
    text = TextFile(path=str(root / "text.txt"), sequence_length=24, batch_size=8, eval_batch_size=4)
    return _trained(root, "text", TransformerConfig(position=LearnedOptions(max_length=24), **SIZES), text)


@pytest.fixture
def pairs(pairs_run):
    return str(pairs_run)


@pytest.fixture
def text(text_run):
    return str(text_run)


@pytest.fixture
def run(capsys):
    """Run a command line; return its exit code, stdout and stderr."""

    def call(*words):
        code = main([str(word) for word in words])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def fails(run):
    """Run a command line that must fail with one line on stderr and no stdout; return that line."""

    def call(*words, code=2):
        got, out, err = run(*words)
        assert (got, out) == (code, ""), err
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert err.endswith("\n")
        return err.removeprefix("error: ").rstrip("\n")

    return call


def pipe(monkeypatch, content, *, terminal=False):
    """Replace stdin by a pipe with these bytes."""
    stdin = io.TextIOWrapper(io.BytesIO(content))
    stdin.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stdin", stdin)


class TestCommands:
    def test_help_lists_every_command_with_a_summary(self, run):
        code, out, err = run("--help")
        assert (code, err) == (0, "")
        lines = [" ".join(line.split()) for line in out.splitlines()]
        assert {f"{name} {summary}" for name, summary in COMMANDS.items()} <= set(lines)

    def test_help_of_a_group(self, run):
        code, out, err = run("inspect", "--help")
        assert (code, err) == (0, "")
        assert [line.split()[1] for line in out.splitlines() if line.startswith("  ")] == [
            name.split()[1] for name in COMMANDS if name.startswith("inspect ")
        ]

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (
                (),
                "missing command. Use one of train, generate, answer, chat, serve, batch, translate, transcribe, ",
            ),
            (("generat", "x"), "unknown command 'generat'. Did you mean 'generate'?"),
            (("evaluate", "runs/x"), "unknown command 'evaluate runs/x'."),
            (("inspect", "txt", "x"), "unknown command 'inspect txt'. Did you mean 'inspect text'?"),
            (("study",), "missing command after study. Use one of study scale, study positions, study memory; "),
            (("inspect", "--prompt", "x"), "missing command after inspect. Use one of inspect text, inspect chat"),
            (("generate",), "DIR is missing"),
            (("inspect", "text", "x"), "--prompt is missing: input text of the model"),
            (("generate", "x", "y"), "unexpected argument: y"),
            (("generate", "x", "--promt", "y"), "generate has no option --promt. Did you mean '--prompt'?"),
            (("generate", "x", "--prompt", "--xyz"), "starts with dashes as --prompt='--xyz'"),
            (("generate", "x", "--top-k", "many"), "--top-k: expected INT, got 'many'"),
            (("generate", "x", "--step", "last"), "--step: expected {best,newest}|INT, got 'last'"),
            (("generate", "x", "--top-k", "0"), "--top-k must be an integer of at least 1"),
            (("generate", "x", "--top-p", "1.5"), "--top-p must be above 0 and at most 1"),
            (("generate", "x", "--min-p", "-1"), "--min-p must be at least 0 and at most 1"),
            (("generate", "x", "--temperature", "-1"), "--temperature must be a number from 0 to 1000"),
            (("generate", "x", "--temperature", "nan"), "--temperature must be a number from 0 to 1000"),
            (("generate", "x", "--max-new-tokens", "0"), "--max-new-tokens must be at least 1, got 0"),
            (("generate", "x", "--seed", "-1"), "--seed must be from 0"),
            (("generate", "x", "--group-size", "64"), "--group-size 64 needs --quantize int4, got no --quantize."),
            (
                ("convert", "x", "y", "--quantize", "int8", "--group-size", "32"),
                "got --quantize int8. Pass",
            ),
            (("evaluate", "run", "x", "--examples", "-1"), "--examples must be at least 0, got -1"),
            (
                ("generate", "x", "--prompt", "a", "--draft-tokens", "3"),
                "--draft-tokens needs --draft",
            ),
            (("classify", "text", "x", "--text", "--qqqqqq"), "starts with dashes as --text='--qqqqqq'"),
            (("average", "x", "--qqqqqq"), "average has no option --qqqqqq. --help lists all options."),
        ],
    )
    def test_reports_unknown_commands_and_arguments(self, words, message, fails):
        assert message in fails(*words)

    @pytest.mark.parametrize("command", ["generate", "evaluate run", "inspect text"])
    def test_reports_a_directory_that_is_not_a_workdir(self, command, fails, tmp_path, pairs_run):
        prompt = ("--prompt", "one") if command != "evaluate run" else ()
        missing, empty, bare = tmp_path / "missing", tmp_path / "empty", tmp_path / "bare"
        words = command.split()
        assert f"directory {missing} not found. Pass the workdir" in fails(*words, missing, *prompt)
        empty.mkdir()
        assert "contains neither a run (recipe.json) nor weights (config.json)" in fails(
            *command.split(), empty, *prompt
        )
        bare.mkdir()
        shutil.copy(pairs_run / "recipe.json", bare)
        shutil.copytree(pairs_run / "tokenizer", bare / "tokenizer")
        assert "No checkpoint in" in fails(*words, bare, *prompt)

    def test_reports_a_broken_recipe(self, fails, tmp_path):
        (tmp_path / "recipe.json").write_text('{"format"')
        assert "recipe.json is damaged" in fails("generate", tmp_path, "--prompt", "one")

    def test_help_imports_no_command(self):
        """Listing the commands must not wait for their imports."""
        code = (
            "import sys; from transformer.__main__ import main; main(['--help'])\n"
            "print(sorted({'tyro', 'orbax', 'matplotlib', 'grain', 'optax'} & set(sys.modules)), file=sys.stderr)"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        assert done.stderr == "[]\n"
        assert "\x1b" not in done.stdout

    @pytest.mark.parametrize("command", ["generate", "evaluate run", "inspect text"])
    def test_help_of_a_command(self, command, capsys):
        with pytest.raises(SystemExit) as stop:
            main([*command.split(), "--help"])
        assert not stop.value.code
        out, err = capsys.readouterr()
        assert "DIR" in out
        assert "--step" in out
        assert "None" not in out
        assert "\x1b" not in out
        assert err == ""


class TestGenerate:
    def test_one_line_for_each_translation(self, run, pairs):
        code, out, err = run("generate", pairs, "--prompt", "Forty-two", "--prompt", "and one", "--max-new-tokens", 9)
        assert (code, err) == (0, "")
        assert len(out.splitlines()) == 2

    def test_prints_json(self, run, pairs):
        words = ("generate", pairs, "--prompt", "nine", "--prompt", "Thirty Two", "--max-new-tokens", 9)
        code, out, err = run(*words, "--json")
        found = json.loads(out)
        assert (code, err) == (0, "")
        assert (found["workdir"], found["step"]) == (pairs, 40)
        assert [one["prompt"] for one in found["results"]] == ["nine", "Thirty Two"]
        assert [one["output"] for one in found["results"]] == run(*words)[1].splitlines()

    def test_the_seed_determines_the_samples(self, run, pairs):
        words = ("generate", pairs, "--prompt", "nine", "--max-new-tokens", 9, "--temperature", 5, "--seed")
        once, again, other = (run(*words, seed)[1] for seed in (3, 3, 4))
        assert once == again != other

    @pytest.mark.slow
    def test_the_default_temperature_depends_on_the_options(self, run, pairs, text):
        numbers = ("one", "two", "three", "four", "five", "six", "seven", "eight")
        prompts = [word for number in numbers for word in ("--prompt", number)]
        words = ("generate", pairs, *prompts, "--max-new-tokens", 9)
        greedy = run(*words)[1]
        assert run(*words, "--temperature", 0)[1] == greedy
        assert run(*words, "--top-k", 1)[1] == greedy
        assert run(*words, "--top-p", 1.0, "--seed", 5)[1] != greedy
        words = ("generate", text, "--prompt", "soft", "--max-new-tokens", 20)
        assert run(*words)[1] == run(*words, "--temperature", 0.8)[1] != run(*words, "--temperature", 0)[1]

    def test_lines_of_stdin_are_sentences(self, run, pairs, monkeypatch):
        pipe(monkeypatch, b"one\r\n\n  \ntwo\n")
        found = json.loads(run("generate", pairs, "--json", "--max-new-tokens", 9)[1])
        assert [one["prompt"] for one in found["results"]] == ["one", "two"]
        pipe(monkeypatch, b"three")
        found = json.loads(
            run("generate", pairs, "--json", "--max-new-tokens", 9, "--prompt", "six", "--prompt", "-")[1]
        )
        assert [one["prompt"] for one in found["results"]] == ["six", "three"]

    def test_stdin_is_one_prompt_to_continue(self, run, text, monkeypatch):
        pipe(monkeypatch, b"ROMEO:\nBut\n")
        code, out, _ = run("generate", text, "--max-new-tokens", 4)
        assert code == 0
        assert out.startswith("ROMEO:\nBut")
        assert len(out) == len("ROMEO:\nBut") + 4 + 1

    def test_a_text_grows_beyond_the_context(self, run, text):
        """A model with a learned table of 24 positions generates 70 tokens; a shorter text is a prefix of them."""
        # At 0.8, a model after 40 steps sometimes samples <bos>, which is no character of the text.
        words = ("generate", text, "--prompt", "soft", "--prompt", "what light for", "--json", "--temperature", 0.5)
        words += ("--max-new-tokens",)
        long, short = (json.loads(run(*words, wanted)[1])["results"] for wanted in (70, 9))
        for one, part in zip(long, short, strict=True):
            assert len(one["output"]) == 70
            assert not one["ended"]
            assert one["output"].startswith(part["output"])

    def test_a_prompt_alone_gives_the_same_text_as_in_a_batch(self, run, text):
        """The first of several texts equals the text generated alone."""
        words = ("generate", text, "--json", "--max-new-tokens", 40, "--prompt", "soft")
        alone, first = (
            json.loads(run(*words, *more)[1])["results"][0]["output"] for more in ((), ("--prompt", "what light for"))
        )
        assert alone == first

    @pytest.mark.programs(12, reason="a stream has own programs, and makes its cache outside of jit")
    @pytest.mark.parametrize("options", [(), ("--stream",)])
    def test_reports_a_truncated_prompt_that_fills_the_context(self, run, text, options):
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            code, out, err = run("generate", text, "--prompt", LINE[:24], "--max-new-tokens", 3, *options)
        assert code == 0
        assert out.startswith(LINE[:24])
        assert re.fullmatch(r"warning: .*prompt.* 24 tokens.* last 12 tokens.*\n", err)

    def test_reports_invalid_prompts(self, fails, pairs, text, monkeypatch):
        assert fails("generate", pairs, "--prompt", "").startswith("the prompt is empty. Pass at least one word")
        assert "nothing is left of ',-'" in fails("generate", pairs, "--prompt", ",-")
        message = fails("generate", pairs, "--prompt", "sevn")
        assert message.startswith("the prompt can't be encoded: the text has word 'sevn'")
        assert "Did you mean 'seven'?" in message
        assert "character 'é' that this tokenizer does not know" in fails("generate", text, "--prompt", "é")
        message = fails("generate", text, "--prompt", LINE[:25])
        assert message.startswith("the prompt is too long: expected at most 24 tokens, the size of the model's learned")
        pipe(monkeypatch, b"", terminal=True)
        assert fails("generate", pairs).startswith('--prompt is missing. Pass --prompt "..."')
        pipe(monkeypatch, b"\n")
        assert fails("generate", pairs).startswith("the prompt from stdin is empty")
        pipe(monkeypatch, b"caf\xe9")
        assert fails("generate", pairs).startswith("stdin is not UTF-8 text: byte 3")

    def test_generates_from_a_given_checkpoint_step(self, run, fails, pairs):
        words = ("generate", pairs, "--prompt", "one", "--json", "--max-new-tokens", 9, "--step")
        assert json.loads(run(*words, 40)[1])["step"] == json.loads(run(*words, "newest")[1])["step"] == 40
        assert "No checkpoint of step 7" in fails(*words, 7)

    def test_a_closed_stdout_ends_generation_quietly(self, text):
        """There is no traceback and no message, only the exit code of SIGPIPE."""
        read, write = os.pipe()
        os.close(read)
        with os.fdopen(write, "wb") as nobody:
            done = subprocess.run(
                [sys.executable, "-m", "transformer", "generate", text, "--prompt", "soft", "--max-new-tokens", "2"],
                cwd=ROOT,
                env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
                stdout=nobody,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
        assert (done.returncode, done.stderr) == (141, "")


class TestEvaluate:
    def test_evaluates_translation_pairs(self, run, pairs):
        code, out, err = run("evaluate", "run", pairs, "--json")
        found = json.loads(out)
        assert (code, err) == (0, "")
        assert (found["split"], found["step"]) == ("test", 40)
        assert found["loss"] > 0
        assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
        assert found["exact_match"]["all"] == found["exact_match"]["2"]
        assert found["exact_match"]["all"]["total"] == 7

    def test_evaluates_another_split_and_prints_a_sentence(self, run, fails, pairs):
        code, out, err = run("evaluate", "run", pairs, "--split", "validation", "--examples", 3)
        assert (code, err) == (0, "")
        first, second, third, fourth, *files = out.splitlines()
        assert first.startswith(f"{pairs}, step 40, split validation: ")
        assert re.fullmatch(r"loss: \d+\.\d{4} nats, perplexity [\d.]+, accuracy [\d.]+ %", second)
        assert re.fullmatch(r"exact match: [0-3] of 3 \([\d.]+ %\)", third)
        assert re.fullmatch(r"  digits 2: [0-3] of 3 \([\d.]+ %\)", fourth)
        assert files == [f"{name}: {pairs}/{name}.validation.txt" for name in ("hypotheses", "references")]
        assert "split must be one of" in fails("evaluate", "run", pairs, "--split", "tset")

    def test_evaluates_text(self, run, text):
        found = json.loads(run("evaluate", "run", text, "--json")[1])
        assert (found["split"], found["exact_match"]) == ("validation", {})
        assert found["targets"] == len(LINE) * 4 - 1

    def test_reports_data_that_no_longer_exists(self, fails, text_run, tmp_path):
        moved = tmp_path / "moved"
        moved.mkdir()
        for name in ("tokenizer", "checkpoints"):
            (moved / name).symlink_to(text_run / name)
        recipe = (text_run / "recipe.json").read_text()
        (moved / "recipe.json").write_text(recipe.replace("text.txt", "gone.txt"))
        assert "gone.txt" in fails("evaluate", "run", moved)


@pytest.mark.programs(36, reason="masks and maps of attention are computed outside of jit")
class TestInspect:
    def test_inspects_a_translation(self, run, pairs, tmp_path):
        words = ("inspect", "text", pairs, "--prompt", "Forty-two", "--output", tmp_path / "maps", "--target")
        code, out, err = run(*words, "cuarenta y dos")
        assert (code, err) == (0, "")
        first, *paths = out.splitlines()
        assert first == "Forty-two -> cuarenta y dos"
        assert [Path(path).name for path in paths] == [
            "encoder_self_layer1.png",
            "decoder_self_layer1.png",
            "decoder_cross_layer1.png",
        ]
        assert all(Path(path).read_bytes().startswith(PNG) for path in paths)

    def test_inspect_generates_a_missing_target(self, run, pairs):
        found = json.loads(run("inspect", "text", pairs, "--prompt", "one", "--json")[1])
        written = json.loads(run("generate", pairs, "--prompt", "one", "--json")[1])
        assert found["target"] == written["results"][0]["output"]
        assert {Path(path).parent for path in found["paths"]} == {Path(pairs) / "attention"}

    def test_inspects_a_causal_model(self, run, fails, text):
        found = json.loads(run("inspect", "text", text, "--prompt", "what $5", "--json")[1])
        assert [Path(path).name for path in found["paths"]] == ["decoder_self_layer1.png"]
        assert found["target"] is None
        assert "--target needs an encoder-decoder" in fails(
            "inspect", "text", text, "--prompt", "what", "--target", "x"
        )

    @pytest.mark.slow
    def test_prints_the_sizes_of_a_model(self, run, pairs, tmp_path):
        words = ("inspect", "text", pairs, "--prompt", "one", "--target", "uno", "--sizes", "--output", tmp_path)
        code, out, err = run(*words)
        assert (code, err) == (0, "")
        assert "source, 1 tokens: one\ntarget, 2 tokens: <bos> uno\n" in out
        assert "  cross_attention:\n" in out
        assert out.endswith("decoder_cross_layer1.png\n")
        found = json.loads(run(*words, "--json")[1])["sizes"]
        assert [size["shape"] for size in found if size["axes"] == "B N T S"][-1] == [1, 2, 2, 1]

    def test_reports_a_model_without_attention(self, run, fails, text, tmp_path):
        """There are no attention maps to draw, but sizes can be printed."""
        recipe = load_recipe(text)
        model = recipe.model.replace(**{"stack.period": (LayerKind(self_attention=False),)}, vocab_size=None)
        with contextlib.redirect_stdout(io.StringIO()):
            brief = {"training": TrainingConfig(steps=2), "optimizer": OptimizerConfig(warmup_steps=1)}
            train(dataclasses.replace(recipe, model=model, **brief), tmp_path / "blind")
        message = fails("inspect", "text", tmp_path / "blind", "--prompt", "what")
        assert "has no attention layer" in message
        assert "Use --sizes to print the shapes" in message
        code, out, _ = run("inspect", "text", tmp_path / "blind", "--prompt", "what", "--sizes")
        assert code == 0
        assert "x W_1" in out
        assert "query" not in out

    def test_reports_invalid_texts(self, fails, pairs, text):
        assert "the prompt is empty" in fails("inspect", "text", pairs, "--prompt", " ")
        assert "the target can't be encoded" in fails(
            "inspect", "text", pairs, "--prompt", "one", "--target", "uno zwei"
        )
        assert "(model.position.max_length), got 25" in fails("inspect", "text", text, "--prompt", LINE[:25])
