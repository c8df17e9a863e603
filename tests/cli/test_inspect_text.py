"""Tests of `inspect text --html`: the page of a model, generated text, comparison of two checkpoints, and errors."""

import functools
import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_page_parts import data_of, group_of, weights_of
from chat_parts import drawn_params

from transformer.__main__ import main
from transformer.cli._models import ModelCommand
from transformer.config import Execution, OutputOptions, Patches, TransformerConfig
from transformer.config._invocation import program
from transformer.data.tokenizers._vocabularies import CharTokenizer
from transformer.generate import Sampling, generate
from transformer.inference import LoadedModel
from transformer.nn.models import CausalLM, MaskedLM, Seq2Seq, VisionClassifier
from transformer.viz import _attention_page as attention_page

TEXT = "abc de<$>"
LETTERS, OTHERS = CharTokenizer(sorted(set(TEXT))), CharTokenizer(sorted(set("XYZ" + TEXT)))
SIZES = {"d_model": 8, "num_heads": 2, "num_layers": 1, "feed_forward.d_ff": 8}


def opened(kind, tokenizer=LETTERS, *, seed=0, step=7, directory="runs/tiny", attention="blockwise", **changes):
    """Return a run with random parameters, trained with a kernel that does not store attention weights."""
    config = TransformerConfig(vocab_size=tokenizer.vocab_size, **SIZES | changes)
    model = kind(config, Execution(scan=False, attention=attention))
    params = drawn_params(model, 0.4, seed)
    run = SimpleNamespace(recipe=SimpleNamespace(name="tiny"), step=step)
    return LoadedModel(model, params, Path(directory), tokenizer, 12, tokenizer.bos_id, run=run)


@pytest.fixture
def runs(monkeypatch):
    """Runs by directory and step, which commands load instead of files."""
    available = {}

    def load(command, **options):
        found = available.get((str(command.directory), command.step), available.get(str(command.directory)))
        if found is None:
            raise FileNotFoundError(f"no checkpoint of step {command.step}")
        return found

    monkeypatch.setattr(ModelCommand, "load", load)
    return available


@pytest.fixture
def inspect(capsys, tmp_path):
    """Write a page; return its data and the JSON on stdout."""

    def call(*words):
        path = tmp_path / "new" / "page.html"
        code = main(["inspect", "text", *words, "--html", str(path), "--json"])
        out, err = capsys.readouterr()
        assert (code, err) == (0, "")
        found = json.loads(out)
        assert found["page"] == str(path)
        return data_of(path.read_text()), found

    return call


@pytest.fixture
def fails(capsys):
    """Run `inspect text` with arguments that must fail with one line; return that line."""

    def call(*words):
        code = main(["inspect", "text", *words])
        out, err = capsys.readouterr()
        assert (code, out, err.count("\n")) == (2, "", 1), err
        return err.removeprefix("error: ").rstrip("\n")

    return call


def weights_when_read(run, *rows):
    """Return the attention weights of a model, computed with the reference kernel."""
    model = run.model.clone(execution=Execution(scan=False, attention="reference", sow_weights=True))
    tokens = [np.array([row]) for row in rows]
    apply = jax.jit(functools.partial(model.apply, mutable=["intermediates"]))
    return jax.device_get(apply({"params": run.params}, *tokens)[1]["intermediates"])


@pytest.mark.programs(16, reason="masks and maps of attention are computed outside of jit")
def test_shows_a_prompt_and_its_generated_text(runs, inspect):
    """Works with any training kernel; generated tokens are distinguished from the prompt."""
    run = runs["runs/tiny"] = opened(CausalLM)
    data, found = inspect("runs/tiny", "--prompt", "ab <$>", "--max-new-tokens", "4")
    ids = LETTERS.encode("ab <$>")
    (new,) = generate(run.model, run.params, [ids], max_new_tokens=4, sampling=Sampling(temperature=0.0), eos_id=2)
    assert data["words"] == {"encoder": [], "decoder": LETTERS.tokens([*ids, *new])}
    assert data["writtenFrom"] == len(ids)
    assert dict(data["texts"]) == {"Prompt": "ab <$>", "Generated": LETTERS.decode(new)}
    assert (found["prompt"], found["target"], found["paths"]) == ("ab <$>", LETTERS.decode(new), [])
    sown = weights_when_read(run, [*ids, *new])["decoder"]["layers"]["slot_0"]["self_attention"]["weights"][0]
    shown = np.nan_to_num(weights_of(data, "decoder", "self", 0))
    np.testing.assert_allclose(shown, sown[0, 0], atol=1 / 400)
    facts = dict(data["facts"])
    assert "reference" in facts["Kernel"]
    assert "blockwise" in facts["Kernel"]
    assert facts["Model"].startswith("tiny, step 7: CausalLM in runs/tiny; layers: 1, heads: 2, d_model: 8, ")
    words = shlex.split(facts["Command"])
    assert words[:7] == [*shlex.split(program("inspect text")), "runs/tiny", "--prompt"]
    assert words[7] == "ab <$>"
    assert data["title"] == "Attention of tiny"


@pytest.mark.slow
def test_compares_two_checkpoints(runs, inspect, fails, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    runs["runs/tiny", "best"] = opened(CausalLM, **{"attention.num_kv_heads": 1})
    runs["runs/tiny", 500] = other = opened(CausalLM, seed=1, step=500)
    runs["else"] = opened(CausalLM, seed=1, num_heads=4, directory="else")
    data, _ = inspect("runs/tiny", "--prompt", "abc", "--compare", "500")
    assert [panel["name"] for panel in data["panels"]] == ["tiny, step 7", "tiny, step 500"]
    sown = weights_when_read(other, LETTERS.encode("abc"))["decoder"]["layers"]["slot_0"]["self_attention"]["weights"]
    shown = np.nan_to_num(weights_of(data, "decoder", "self", 0, panel=1))
    np.testing.assert_allclose(shown, sown[0][0, 0], atol=1 / 400)
    facts = dict(data["facts"])
    assert "heads: 2, key-value heads: 1" in facts["Model"]
    assert facts["Compared with"].startswith("tiny, step 500: ")
    data, _ = inspect("runs/tiny", "--prompt", "abc", "--compare", "else")
    assert [panel["name"] for panel in data["panels"]] == ["tiny, step 7 (runs/tiny)", "tiny, step 7 (else)"]
    assert group_of(data, "decoder", "self", panel=1)["layers"][0]["heads"] == 4

    page = ("--html", "page.html", "--prompt", "abc", "--compare")
    assert "is the same model as the first one, tiny, step 7. Pass another step" in fails("runs/tiny", *page, "best")
    assert "no checkpoint of step 3" in fails("runs/tiny", *page, "3")
    runs["other"] = opened(CausalLM, OTHERS, directory="other")
    message = fails("runs/tiny", *page, "other")
    assert "other splits this text into different tokens" in message
    assert "Pass a model with the same tokenizer, or write one page per model." in message
    runs["pairs"] = opened(Seq2Seq, directory="pairs")
    assert "models of the same kind, got a CausalLM and a Seq2Seq" in fails("runs/tiny", *page, "pairs")


@pytest.mark.slow
def test_writes_pictures_next_to_the_page_of_a_translation(runs, inspect, tmp_path):
    runs["runs/tiny"] = opened(Seq2Seq, **{"stack.num_encoder_layers": 2, "stack.num_decoder_layers": 1})
    words = ("runs/tiny", "--prompt", "abc", "--target", "de", "--output", str(tmp_path / "maps"))
    data, found = inspect(*words)
    assert data["words"] == {"encoder": list("abc"), "decoder": ["<bos>", "d", "e"]}
    assert (data["writtenFrom"], dict(data["texts"])["Target"]) == (None, "de")
    assert [(one["stack"], one["kind"], one["depth"]) for one in data["panels"][0]["groups"]] == [
        ("encoder", "self", 2),
        ("decoder", "self", 1),
        ("decoder", "cross", 1),
    ]
    assert len(found["paths"]) == len(list((tmp_path / "maps").glob("*.png"))) == 4
    data, found = inspect("runs/tiny", "--prompt", "abc", "--max-new-tokens", "3")
    assert data["writtenFrom"] == 1
    assert len(data["words"]["decoder"]) <= 4
    assert found["paths"] == []


@pytest.mark.slow
def test_inspects_an_encoder(runs, inspect, fails):
    runs["runs/tiny"] = opened(MaskedLM, **{"attention.sinks": True})
    data, found = inspect("runs/tiny", "--prompt", "abc d")
    assert data["words"] == {"encoder": ["a", "b", "c", "␣", "d"], "decoder": []}
    assert found["target"] is None
    assert "the weights of a query sum to less than 1" in dict(data["facts"])["Sinks"]
    assert "a model that generates text, got MaskedLM" in fails("runs/tiny", "--prompt", "abc", "--max-new-tokens", "3")
    assert "--target needs an encoder-decoder" in fails("runs/tiny", "--prompt", "abc", "--target", "x")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--compare", "500"),
            "--compare shows two models on one HTML page and needs --html. Pass a file, such as --html",
        ),
        (("--html", "page"), "--html must name the HTML file to write, such as attention.html, got page."),
        (("--html", "."), "--html must name the HTML file to write"),
        (("--max-new-tokens", "0"), "--max-new-tokens must be at least 1, got 0."),
        (("--max-new-tokens", "3", "--target", "x"), "--target and --max-new-tokens can't be used together"),
    ],
)
def test_rejects_incompatible_options(words, message, fails):
    """Reported before the model is loaded: the directory does not exist."""
    assert message in fails("nowhere", "--prompt", "a", *words)


def test_reports_unsupported_models(runs, fails, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    tokenizer = LETTERS
    model = CausalLM(TransformerConfig(vocab_size=tokenizer.vocab_size, **SIZES))
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    run = SimpleNamespace(recipe=SimpleNamespace(name="tiny"), step=7)
    runs["runs/tiny"] = LoadedModel(model, shapes, Path("runs/tiny"), tokenizer, 12, 1, run=run)
    prompt = ("runs/tiny", "--prompt", "abc de")
    message = fails(*prompt, "--max-new-tokens", "7")
    assert "context of 12 tokens, got 6 prompt tokens and 7 new tokens." in message
    assert "Pass at most --max-new-tokens 6, or shorten the prompt." in message
    assert "Remove --max-new-tokens" in fails(*prompt[:2], "abc" * 4, "--max-new-tokens", "1")
    monkeypatch.setattr(attention_page, "MOST_WEIGHTS", 71)
    message = fails(*prompt, "--html", "page.html")
    assert "too many attention weights for a page: expected at most 71, got 72" in message, "nothing was computed"
    vision = VisionClassifier(
        TransformerConfig(
            output=OutputOptions(num_classes=2), input=Patches(image_height=4, image_width=4, patch_size=2), **SIZES
        )
    )
    runs["seen"] = LoadedModel(vision, {}, Path("seen"), None, None, None, run=run)
    assert "seen contains a model of type VisionClassifier. Use inspect image" in fails("seen", "--prompt", "a")
