"""Options of the command line reach the function or the object where they act. Nothing is generated."""

import contextlib
import io
import json
import sys
from types import SimpleNamespace

import pytest
from chat_parts import write_chat_model
from inference_parts import write_models
from scripted_slots import ScriptedSlots

from transformer.__main__ import main
from transformer.chat import Chat
from transformer.cli._models import ModelCommand
from transformer.cli._sampling import FILTERS, PENALTIES
from transformer.generate import PromptLookup, Sampling
from transformer.inference._generate import StreamedText
from transformer.serve._bodies import MOST_CHOICES
from transformer.serve._slots import PAGE_SIZE

FIELDS = {"temperature": 0.5, "top_k": 3, "top_p": 0.7, "min_p": 0.1}
FIELDS |= {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_chat_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("weights"))["translator"]


def words_of(**options):
    """Return options as words: top_k=3 is --top-k 3."""
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]


class Recorder:
    """Stands in for a function and keeps the arguments of its last call."""

    def __init__(self, result):
        self.result = result

    def __call__(self, *given, **named):
        self.given, self.named = given, named
        return self.result


# serve and batch


@pytest.fixture
def served(model, monkeypatch):
    """Run `serve` with these options up to the start of the server; return (service, host, port)."""
    monkeypatch.setattr("transformer.serve._engine.Slots", ScriptedSlots)

    def call(*words, path=model):
        run = Recorder(None)
        monkeypatch.setattr("transformer.serve._server.run", run)
        assert main(["serve", str(path), *words]) == 0
        return run.given[:3]

    return call


def test_server_sizes_reach_the_engine(served):
    options = words_of(slots=3, max_tokens=96, cache_tokens=160, host="127.0.0.2", port=8123, api_key="a-secret-key")
    service, host, port = served(*options)
    engine = service.engine
    assert (engine.slots, engine.positions, engine.pages * PAGE_SIZE) == (3, 96, 160)
    assert (host, port, service.api_key, service.local_only) == ("127.0.0.2", 8123, "a-secret-key", False)
    service, host, port = served()
    engine = service.engine
    assert (engine.slots, engine.positions, engine.pages * PAGE_SIZE) == (8, 2048, 8 * 2048)
    assert (host, port, service.api_key, service.local_only) == ("127.0.0.1", 8000, None, True)
    assert engine._device.draft is engine._device.mesh is None


def test_speculation_options_reach_the_server(served, model):
    lookup = served(*words_of(lookup=3))[0].engine._device.draft
    assert isinstance(lookup, PromptLookup)
    assert lookup.tokens == 3
    draft = served(*words_of(draft=model, draft_tokens=2))[0].engine._device.draft
    assert (draft.tokens, draft.model.config.d_model) == (2, 16)
    assert served(*words_of(draft=model))[0].engine._device.draft.tokens == 4


def test_model_files_reach_the_server(served, tmp_path):
    """The sampling, the end tokens and the suppressed tokens of generation_config.json."""
    recommended = {"do_sample": True, "temperature": 0.4, "top_k": 9, "suppress_tokens": [30], "eos_token_id": 31}
    service = served(path=write_chat_model(tmp_path / "tiny", **recommended))[0]
    assert service.sampling == Sampling(temperature=0.4, top_k=9)
    assert service.engine._device.suppressed.tolist() == [30]
    assert 31 in service.eos_ids
    plain = served()[0]
    assert plain.sampling == Sampling(temperature=0.0)
    turns = served(path=write_chat_model(tmp_path / "turns", "phi3"))[0]
    end = turns.engine.tokenizer.special_tokens.index("<|end|>")
    assert sorted(turns.engine.tokenizer.special_ids)[end] in turns.eos_ids, "the end of a turn, not of a document"


def test_batch_sizes_reach_the_engine(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("transformer.serve._engine.Slots", ScriptedSlots)
    answer = Recorder(None)
    monkeypatch.setattr("transformer.serve._batch.answer_batch", answer)
    body = {"prompt": "a", "max_tokens": 1}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "requests.jsonl").write_text(json.dumps(line) + "\n")
    assert main(["batch", str(model), str(tmp_path / "requests.jsonl"), *words_of(slots=3, max_tokens=48)]) == 0
    engine = answer.given[0].engine
    assert (engine.slots, engine.positions) == (3, 48)
    assert engine.queue_size >= answer.named["at_once"] * MOST_CHOICES, "else a call with n texts would be refused"


# generate and chat


@pytest.fixture
def written(model, monkeypatch):
    """Run `generate` with these options; return the arguments of the function that generates the texts."""

    def call(*words, function="continue_texts", path=model, prompt="Hello", result=()):
        recorder = Recorder(result)
        monkeypatch.setattr(f"transformer.inference._generate.{function}", recorder)
        with contextlib.redirect_stdout(io.StringIO()):
            assert main(["generate", str(path), "--prompt", prompt, *words]) == 0
        return recorder

    return call


STREAMED = StreamedText("", "", True, [], [], "end")


def test_every_sampling_option_is_in_the_table():
    assert set(FIELDS) == {"temperature", *FILTERS, *PENALTIES}


def test_generate_options_reach_the_continuation(written):
    got = written(*words_of(seed=7, max_new_tokens=9, slots=2, temperature=0.5, top_k=3, top_p=0.7, min_p=0.1)).named
    assert got["sampling"] == Sampling(temperature=0.5, top_k=3, top_p=0.7, min_p=0.1)
    assert (got["seed"], got["max_new_tokens"], got["slots"]) == (7, 9, 2)
    assert written(*words_of(**FIELDS)).named["sampling"] == Sampling(**FIELDS)
    assert written(*words_of(lookup=2)).named["draft"].tokens == 2
    assert written("--min-p", "0.2").named["sampling"] == Sampling(temperature=1.0, min_p=0.2)
    got = written().named
    assert (got["sampling"], got["seed"], got["max_new_tokens"]) == (Sampling(temperature=0.8), 0, 200)


def test_translate_options_reach_the_translation(written, translator):
    call = {"function": "translate", "path": translator, "prompt": "the cat"}
    got = written(*words_of(seed=7, max_new_tokens=9, **FIELDS), **call).named
    assert (got["sampling"], got["seed"], got["max_new_tokens"]) == (Sampling(**FIELDS), 7, 9)
    got = written(**call).named
    assert (got["sampling"], got["seed"], got["max_new_tokens"]) == (
        Sampling(temperature=0.0),
        0,
        None,
    )  # the limit of the model


@pytest.mark.programs(10, reason="the stream makes its cache outside of jit")
def test_generate_options_reach_the_stream(written):
    call = {"function": "stream_text", "result": STREAMED}
    options = words_of(seed=7, max_new_tokens=9, **FIELDS)
    got = written("--stream", "--stop", "a", "--stop", "bc", *options, **call).named
    assert (got["sampling"], got["seed"], got["max_new_tokens"]) == (Sampling(**FIELDS), 7, 9)
    assert got["stop"] == ("a", "bc")


@pytest.mark.programs(10, reason="the stream makes its cache outside of jit")
def test_each_sample_of_each_prompt_has_a_seed(written, monkeypatch):
    seeds = []

    def record(self, *given, seed, **named):
        seeds.append(seed)
        return self.result

    monkeypatch.setattr(Recorder, "__call__", record)
    written("--prompt", "b", *words_of(samples=3, seed=2**32 - 1), function="stream_text", result=STREAMED)
    assert seeds[:3] == [2**32 - 1, 0, 1]
    assert len(set(seeds)) == 6


@pytest.mark.programs(10, reason="the stream makes its cache outside of jit")
def test_weight_bits_reach_the_loader(written, monkeypatch, capsys):
    quantize = Recorder(("params", []))
    monkeypatch.setattr("transformer.nn.quantization._int8.quantize", quantize)
    got = written(*words_of(quantize="int4", group_size=64))
    assert quantize.named == {"bits": 4, "group_size": 64}
    assert got.given[0].params == "params"
    written("--quantize", "int8")
    assert quantize.named["bits"] == 8


@pytest.fixture
def replied(model, monkeypatch):
    """Run `chat` or `answer` with these options; return the arguments of `Chat.stream`."""

    class Reply:
        reply = SimpleNamespace(text="", finish="end", tokens=[], log_probabilities=[], message={})

        def __iter__(self):
            return iter(())

    def call(*words, chat=False):
        recorder = Recorder(Reply())
        monkeypatch.setattr(Chat, "stream", lambda self, *given, **named: recorder(*given, **named))
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hello\n")))
        with contextlib.redirect_stdout(io.StringIO()):
            command = ["chat", str(model)] if chat else ["answer", str(model), "--prompt", "Hello"]
            assert main([*command, *words]) == 0
        return recorder

    return call


@pytest.mark.programs(10, reason="the stream makes its cache outside of jit")
@pytest.mark.parametrize("chat", [False, True])
def test_chat_options_reach_the_conversation(replied, tmp_path, chat):
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}")
    options = words_of(seed=7, max_new_tokens=9, system="Be brief", **FIELDS)
    words = ["--stop", "a", "--stop", "bc", "--switch", "mood=true", "--switch", "name=x", *options]
    got = replied(*words, "--template", str(tmp_path / "own.jinja"), chat=chat)
    system, user = got.given[0]
    assert (system["role"], system["content"], user["content"]) == ("system", "Be brief", "Hello")
    given = {"sampling": Sampling(**FIELDS), "seed": 7, "max_new_tokens": 9, "stop": ("a", "bc")}
    assert got.named == given | {"mood": True, "name": "x"}
    got = replied(chat=chat)
    assert got.named == {"sampling": Sampling(temperature=0.0), "seed": 0, "stop": ()}
    assert replied("--top-p", "0.5", chat=chat).named["sampling"] == Sampling(temperature=1.0, top_p=0.5)


# Which weights


def test_weight_options_select_the_loaded_weights(tmp_path, monkeypatch):
    """Checkpoint, tokenizer and adapter."""
    seen = []

    class Opened:
        def add_adapter(self, path, name):
            seen.append((path, name))
            return self

        def with_adapter(self, name):
            seen.append(name)
            return self

        def merged(self):
            return "merged"

    open_model = Recorder(Opened())
    monkeypatch.setattr("transformer.inference._opened_model.open_model", open_model)
    command = ModelCommand(directory=tmp_path, step=3, tokenizer=tmp_path / "words", adapter=tmp_path)
    assert command.load(dtype="float32") == "merged"
    assert open_model.given == (tmp_path,)
    assert open_model.named == {"step": 3, "tokenizer": tmp_path / "words", "dtype": "float32"}
    assert seen == [(tmp_path, "adapter"), "adapter"]
    assert isinstance(ModelCommand(directory=tmp_path).load(), Opened)
    assert open_model.named == {"step": "best"}
