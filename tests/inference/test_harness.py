"""Evaluation on tasks of lm-evaluation-harness, and bits per byte of texts."""

import dataclasses
import functools
import json
import math
import re
import sys
from types import SimpleNamespace

import harness_parts
import jax
import numpy as np
import pytest

from transformer.__main__ import run_command
from transformer.config._checks import ConfigError
from transformer.data import TextFile, TokenizerConfig, prepare
from transformer.inference import open_model, score_text
from transformer.inference._harness import HarnessModel, evaluate_tasks, harness_model, rolling_windows
from transformer.nn._sharding import make_mesh, state_shardings
from transformer.training.tasks._evaluation import evaluate_loss

PROMPT = "Hello world, how are you"


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """Return the models of `harness_parts.MODELS` by name, loaded at first use."""
    made = {}

    def load(name):
        if name not in made:
            made[name] = open_model(harness_parts.write_model(tmp_path_factory.mktemp(name), name))
        return made[name]

    return load


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    return harness_parts.write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def manager(tasks):
    """The index of all tasks. The harness reads 13,000 files for it, which takes 6 seconds."""
    return pytest.importorskip("lm_eval.tasks").TaskManager(include_path=str(tasks))


def reuse(manager, monkeypatch):
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda include_path: manager)


def requests(*arguments):
    return [SimpleNamespace(args=one) for one in arguments]


@functools.cache
def applied(model):
    return jax.jit(model.apply)


def by_hand(opened, ids, count):
    """Return log-probability and greedy flag of the last `count` tokens, from the logits of one plain call."""
    padded = np.array([ids[:-1] + [0] * (48 - len(ids) + 1)])  # one shape; a causal model does not see the padding
    logits = np.asarray(applied(opened.model)({"params": opened.params}, padded), np.float64)[0, : len(ids) - 1]
    table = (logits - np.logaddexp.reduce(logits, -1, keepdims=True))[-count:]
    targets = np.array(ids[-count:])
    return float(table[np.arange(count), targets].sum()), bool((table.argmax(-1) == targets).all())


class TestLoglikelihood:
    @pytest.mark.programs(9, reason="the model is opened in the test, and scores have a program per length")
    def test_equals_the_logits_of_one_call(self, opened):
        """Contexts with and without spaces at the end, empty contexts, shared contexts, and truncation on the left."""
        one = opened("bytes_with_start")
        model, encode, begin = HarnessModel(one), one.tokenizer.encode, one.tokenizer.bos_id
        cases = [
            (("Hello", " world"), [begin, *encode("Hello world")], len(encode("Hello world")) - len(encode("Hello"))),
            (("Hello ", "world"), [begin, *encode("Hello world")], len(encode("Hello world")) - len(encode("Hello"))),
            (("", "Hello"), [begin, *encode("Hello")], len(encode("Hello"))),
            *((("Hello", letter), [begin, *encode("Hello" + letter)], 1) for letter in "!?ABC"),
            (("tool " * 60, "A"), encode("tool " * 60 + "A")[-49:], 1 + 1),  # the space belongs to the continuation
        ]
        found = model.loglikelihood(requests(*(arguments for arguments, _, _ in cases)))
        for (total, greedy), (arguments, ids, count) in zip(found, cases, strict=True):
            assert (pytest.approx(total, abs=1e-4), greedy) == by_hand(one, ids, count), arguments

    def test_generates_the_greedy_continuation(self, opened):
        """What greedy decoding generates is greedy, and with another last token it is not."""
        one = opened("bytes_with_start")
        model = HarnessModel(one)
        ids = model._generate([{"ids": [one.tokenizer.bos_id], "seed": 0}], [[]], 4, model._options({})[0])[0]
        other = [*ids[:-1], (ids[-1] + 1) % one.tokenizer.vocab_size]
        found = model._scores([([one.tokenizer.bos_id], ids), ([one.tokenizer.bos_id], other)])
        assert [greedy for _, greedy in found] == [True, False]

    def test_a_context_of_spaces_is_an_empty_context(self, opened):
        """The spaces are predicted too, even if the tokenizer adds no start token."""
        model = HarnessModel(opened("bytes_without_start"))
        assert model._text.encode_pair("  ", "Hello") == model._text.encode_pair("", "  Hello")

    @pytest.mark.parametrize("length", [1, 2, 3, 7])
    def test_windows_predict_each_token_once(self, length):
        """Every window of a long text has the full length, and its context is the text before its predictions."""
        for size in range(23):
            tokens, text = list(range(100, 100 + size)), [0, *range(100, 100 + size)]
            windows = list(rolling_windows(tokens, 0, length))
            assert [token for _, part in windows for token in part] == tokens
            for context, part in windows:
                whole = context + part
                assert len(context) >= 1
                assert len(whole) == min(length, size) + 1
                assert whole in [text[start : start + len(whole)] for start in range(len(text))]

    def test_reports_truncated_requests(self, opened):
        with pytest.raises(ValueError, match="continuation 0 has 60 tokens: expected 1 to 48"):
            HarnessModel(opened("bytes_with_start")).loglikelihood(requests(("a", "@" * 60)))


class TestGenerateUntil:
    def test_batch_size_does_not_change_results(self, opened, monkeypatch):
        """Sampled texts that are generated in many calls of `generate` equal those of one; each has its own seed."""
        options = {"max_gen_toks": 7, "do_sample": True, "temperature": 0.9}
        asked = requests((PROMPT, options), (PROMPT, options))
        whole = HarnessModel(opened("pieces")).generate_until(asked)
        monkeypatch.setattr("transformer.inference._harness.FIRST_ROUND", 2)
        assert HarnessModel(opened("pieces")).generate_until(asked) == whole
        assert whole[0] != whole[1]

    def test_stops_before_the_first_stop_string(self, opened):
        model = HarnessModel(opened("bytes_with_start"))
        (text,) = model.generate_until(requests((PROMPT, {"max_gen_toks": 9})))
        (stopped,) = model.generate_until(requests((PROMPT, {"max_gen_toks": 9, "until": text[3:5]})))
        assert len(text) > 5
        assert stopped == text.split(text[3:5])[0]

    @pytest.mark.parametrize(
        ("options", "message"),
        [({"max_gen_toks": 48}, "asks for 48 new tokens: expected fewer than 48"), ({"num_beams": 2}, "num_beams=2")],
    )
    def test_rejects_invalid_arguments(self, opened, options, message):
        with pytest.raises(ValueError, match=message):
            HarnessModel(opened("pieces")).generate_until(requests((PROMPT, options)))


@pytest.mark.slow
def test_scores_on_a_mesh_equal_one_device(opened):
    """Sharded parameters and rows give the same results; the rows are not a multiple of the devices."""
    one = opened("bytes_with_start")
    mesh = make_mesh({"fsdp": -1})
    params = jax.device_put(one.params, state_shardings(one.params, mesh))
    asked = requests(*((PROMPT[:i], PROMPT[i:]) for i in (1, 5, 9)), ("tool " * 60, "A"))
    plain, sharded = HarnessModel(one), HarnessModel(dataclasses.replace(one, params=params), mesh=mesh)
    assert jax.device_count() > 1
    np.testing.assert_allclose(sharded.loglikelihood(asked), plain.loglikelihood(asked), atol=1e-4)
    asked = requests((PROMPT, {"max_gen_toks": 5}))
    assert sharded.generate_until(asked) == plain.generate_until(asked)


def test_the_chat_template_is_applied(opened):
    model = HarnessModel(opened("bytes_without_start"))
    messages = [{"role": "user", "content": "Hi"}]
    text = model.apply_chat_template(messages)
    assert text.endswith("<|im_start|>assistant\n")
    assert "im_start" in model.chat_template(True)
    assert model.chat_template(False) is None
    # The markers of the template are special tokens.
    ids = model._text.encode(text)
    assert ids[0] in opened("bytes_without_start").tokenizer.special_ids


class TestBitsPerByte:
    def test_equals_loglikelihood(self, opened):
        """For a text in one window, with a start token: all bytes count."""
        one, text = opened("bytes_with_start"), "é 🙂 Hello"
        ((total, _),) = HarnessModel(one).loglikelihood(requests(("", text)))
        found = score_text(one, text)
        assert found.num_bytes == len(text.encode())
        assert found.bits_per_byte == pytest.approx(-total / math.log(2) / len(text.encode()), rel=1e-5)

    def test_windows_and_batches(self, opened, monkeypatch):
        """It does not depend on the context length if all texts fit, or on the size of batches."""
        one, text = opened("bytes_without_start"), "é 🙂 Hello world"
        expected = score_text(one, text).bits_per_byte
        for context in (40, 200, None):
            found = score_text(dataclasses.replace(one, context=context), text)
            assert found.bits_per_byte == pytest.approx(expected, rel=1e-5)
        long = score_text(one, text * 20)
        monkeypatch.setattr("transformer.inference._text_batches.TOKENS", {"cpu": 64})
        assert score_text(one, text * 20).bits_per_byte == pytest.approx(long.bits_per_byte, rel=1e-5)

    def test_first_token_without_a_start_token(self, opened):
        one, text = opened("bytes_without_start"), "Hello world"
        first = one.tokenizer.decode(one.tokenizer.encode(text)[:1])
        assert score_text(one, text).num_bytes == len(text) - len(first) < len(text)


class TestHeldOutText:
    TEXT = "é 🙂 Hello world, how are you?\n" * 9

    def dataset(self, tmp_path, **tokenizer):
        (tmp_path / "train.txt").write_text(self.TEXT, encoding="utf-8")
        config = TextFile(
            path=str(tmp_path / "train.txt"),
            validation_path=str(tmp_path / "train.txt"),
            sequence_length=7,
            eval_batch_size=3,
            tokenizer=TokenizerConfig(**tokenizer),
        )
        return prepare(config)

    @pytest.mark.parametrize(
        "tokenizer", [{"kind": "byte"}, {"kind": "char"}, {"kind": "bpe", "vocab_size": 290}, {"kind": "word"}]
    )
    def test_bytes_of_all_targets(self, tmp_path, tokenizer):
        """All bytes of the text but those of its first token, which is no target."""
        dataset = self.dataset(tmp_path, **tokenizer)
        first = {"byte": 1, "char": 2, "bpe": 2, "word": 2}[tokenizer["kind"]]
        assert dataset.target_bytes() == len(self.TEXT.encode()) - first

    def test_bytes_of_some_batches(self, tmp_path):
        """With bytes as tokens, each target is one byte; a loss per target then becomes bits per byte by 1 / ln 2."""
        dataset = self.dataset(tmp_path, kind="byte")
        for limit in (1, 2, None):
            batches = dataset.eval_batches(limit=limit)
            targets = sum(batch["weights"].sum() for batch in batches)
            assert dataset.target_bytes(limit=limit) == targets

            def step(params, batch):
                return {"loss_sum": 1.5 * batch["weights"].sum(), "weight": batch["weights"].sum()}

            found = evaluate_loss(step, {}, batches, num_bytes=dataset.target_bytes(limit=limit))
            assert found.measures["bits_per_byte"] == pytest.approx(found.loss / math.log(2))
        assert dataset.target_bytes(limit=1) < dataset.target_bytes()

    def test_reports_an_unknown_argument(self, tmp_path):
        """Bytes of a part are not known if the tokenizer omits spaces."""
        assert self.dataset(tmp_path, kind="word").target_bytes(limit=1) is None


class TestCommand:
    def test_prints_a_text_table(self, opened, tmp_path, capsys):
        (tmp_path / "text.txt").write_text("Hello world, é\n", encoding="utf-8")
        one = opened("bytes_with_start")
        run_command(["evaluate", "text", str(one.directory), str(tmp_path / "text.txt"), "--json"])
        values = json.loads(capsys.readouterr().out)
        assert values["bytes"] == 16
        assert values["bits_per_byte"] == pytest.approx(score_text(one, "Hello world, é\n").bits_per_byte)
        run_command(["evaluate", "text", str(one.directory), str(tmp_path / "text.txt")])
        assert f"bits per byte {values['bits_per_byte']:.4f}" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["a", "--split", "test"], r"--split"),
            ([], r"TASK is missing"),
            (["a", "--limit", "0"], r"--limit.*0"),
            (["a", "--num-fewshot", "-1"], r"--num-fewshot.*0"),
        ],
    )
    def test_rejects_invalid_arguments(self, arguments, message):
        with pytest.raises(ConfigError, match=message):
            run_command(["evaluate", "tasks", "nowhere", *arguments])

    def test_harness_not_installed(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "lm_eval", None)
        monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
        with pytest.raises(ConfigError, match=r"'transformer-zoo\[evaluate\]'"):
            run_command(["evaluate", "tasks", "nowhere", "a"])

    @pytest.mark.slow
    def test_lists_the_tasks(self, opened, tasks, manager, tmp_path, monkeypatch, capsys):
        offline(monkeypatch, tmp_path)
        directory = str(opened("bytes_with_start").directory)
        common = ["--include-dir", str(tasks), "--num-fewshot", "1", "--limit", "3"]
        run_command(["evaluate", "tasks", directory, "choices", "texts", "--json", *common])
        values = json.loads(capsys.readouterr().out)
        assert set(values["results"]) == {"choices", "texts"}
        assert values["n-samples"]["choices"]["effective"] == 3
        reuse(manager, monkeypatch)
        run_command(["evaluate", "tasks", directory, "choices", "texts", *common])
        (row,) = [line for line in capsys.readouterr().out.splitlines() if "bits_per_byte" in line]
        shown = [float(cell) for cell in row.split("|") if re.fullmatch(r"\s*\d+\.\d+\s*", cell)]
        assert shown[0] == pytest.approx(values["results"]["texts"]["bits_per_byte,none"], rel=1e-2)  # rounded
        with pytest.raises(ConfigError, match=r"'choice'.*'choices'"):
            run_command(["evaluate", "tasks", directory, "choice", *common])


def offline(monkeypatch, folder):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "datasets")


@pytest.mark.parity
@pytest.mark.parametrize("chat", [False, True], ids=["plain", "chat"])
@pytest.mark.parametrize("name", harness_parts.MODELS)
def test_equals_the_backend_for_transformers(name, chat, opened, tasks, manager, tmp_path, monkeypatch):
    """Every log-likelihood, greedy flag, generated text and measure equals that of the harness's own model."""
    backend = pytest.importorskip("lm_eval.models.huggingface")
    lm_eval = pytest.importorskip("lm_eval")

    offline(monkeypatch, tmp_path)
    reuse(manager, monkeypatch)
    one = opened(name)
    # Rendered conversations are longer than the context of 48 tokens: they are truncated on the left.
    options = {"num_fewshot": 1 if chat else 0, "apply_chat_template": chat}
    ours = evaluate_tasks(
        harness_model(one), list(harness_parts.TASKS), include_path=str(tasks), log_samples=True, **options
    )
    reference = backend.HFLM(pretrained=str(one.directory), device="cpu", dtype="float32", batch_size=3)
    theirs = lm_eval.simple_evaluate(
        reference,
        tasks=list(harness_parts.TASKS),
        task_manager=manager,
        bootstrap_iters=0,
        fewshot_as_multiturn=chat,
        **options,
    )
    compared = 0
    for task, samples in theirs["samples"].items():
        for expected, found in zip(samples, ours["samples"][task], strict=True):
            for (right,), (answer,) in zip(expected["resps"], found["resps"], strict=True):
                if isinstance(right, str):
                    assert answer == right
                else:
                    np.testing.assert_allclose(np.array(answer), np.array(right), rtol=1e-5, atol=1e-4)
                compared += 1
        for measure, value in theirs["results"][task].items():
            if isinstance(value, float) and "stderr" not in measure:
                assert ours["results"][task][measure] == pytest.approx(value, rel=1e-4), (task, measure)
    assert compared == 14 + 4 * 5

    # Continuations that greedy decoding generates, and that a stop string ends.
    contexts = [row["question"] + "?" for row in harness_parts.QUESTIONS]
    asked = requests(*((context, {"max_gen_toks": 6, "until": "st"}) for context in contexts))
    texts = reference.generate_until(asked)
    assert harness_model(one).generate_until(asked) == texts
    asked = requests(*((context, text) for context, text in zip(contexts, texts, strict=True) if text))
    expected, found = reference.loglikelihood(asked), harness_model(one).loglikelihood(asked)
    np.testing.assert_allclose(np.array(found), np.array(expected), rtol=1e-5, atol=1e-4)
