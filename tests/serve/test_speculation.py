"""Speculative decoding in the engine: proposals change no text, with any other texts, preemptions and rejections."""

import random

import jax
import numpy as np
import pytest
from chat_parts import drawn_params, write_chat_model
from inference_parts import write_models
from serve_parts import answers, prompts, started_engine, tiny_parts
from starlette.testclient import TestClient

from transformer.__main__ import main
from transformer.cli._services import ServiceSettings, make_service
from transformer.cli._speculation import SpeculationOptions
from transformer.config import ConfigError, LearnedOptions
from transformer.generate import Draft, PromptLookup, Sampling
from transformer.generate._row_steps import advance
from transformer.generate._rows import read_part
from transformer.inference import Grammars, open_model
from transformer.nn.models import CausalLM
from transformer.serve import Engine, Request
from transformer.serve._slots import PAGE_SIZE

POSITIONS = 160  # chunks of 128 tokens
SAMPLINGS = [
    Sampling(temperature=0.0),
    Sampling(temperature=0.3),
    Sampling(temperature=0.4, top_k=9, top_p=0.8),
    Sampling(temperature=0.0, repetition_penalty=1.2, presence_penalty=0.3),
]
TOKENS = 3


@pytest.fixture(scope="module")
def parts():
    """A tiny model whose greedy texts repeat themselves, because the layers change little of the embedding."""
    model, params, tokenizer = tiny_parts(num_layers=1)
    layers = {name: jax.tree.map(lambda leaf: np.float32(0.3) * leaf, one) for name, one in params["decoder"].items()}
    return model, {**params, "decoder": {**layers, "final_norm": params["decoder"]["final_norm"]}}, tokenizer


@pytest.fixture(scope="module")
def plain(parts):
    with started_engine(parts, POSITIONS) as made:
        yield made
    assert made.metrics.proposed_tokens == 0


def similar(model, params):
    """A draft that often agrees with the model: its parameters with noise."""
    random = np.random.default_rng(7)
    noisy = jax.tree.map(lambda leaf: (leaf * (1 + 0.02 * random.normal(size=leaf.shape))).astype(leaf.dtype), params)
    return Draft(model=model, params=noisy, tokens=TOKENS)


@pytest.fixture(scope="module", params=["lookup", "draft"])
def tight(parts, request):
    """An engine with proposals, and with pages for one request of full length or a few short ones."""
    draft = PromptLookup(tokens=TOKENS) if request.param == "lookup" else similar(*parts[:2])
    with started_engine(parts, POSITIONS, cache_tokens=POSITIONS + 4 * PAGE_SIZE, draft=draft) as made:
        yield made


def drawn_requests(count, grammars):
    """Functions that make a request: of any sampling, some with a shared prefix, a stop string or a constraint."""
    draw, makers = random.Random(1), []
    for number in range(count):
        prefix = [11 + i % 7 for i in range(128)] if number % 3 == 0 else []
        prompt = prefix + [draw.randrange(5, 290) for _ in range(draw.randint(1, 15))] * draw.choice([1, 2])
        given = {"sampling": SAMPLINGS[number % 4], "seed": number % 3, "top": 2 * (number % 2), "eos_ids": (7,)}
        given |= {"stop": ("e",)} if number % 5 == 4 else {}
        limit = draw.choice([1, 3, *[POSITIONS - len(prompt)] * 3])
        pattern = "[a-z]{8,20}" if number % 6 == 1 else None

        def make(prompt=prompt, limit=limit, pattern=pattern, given=given):
            constraint = None if pattern is None else grammars.regex(pattern)
            return Request(prompt=prompt, max_tokens=limit, constraint=constraint, **given)

        makers.append(make)
    return makers


@pytest.fixture(scope="module")
def makers(parts):
    pytest.importorskip("llguidance")
    return drawn_requests(15, Grammars(parts[2], parts[2].vocab_size))


@pytest.fixture(scope="module")
def without_proposals(plain, makers):
    return answers(plain, [make() for make in makers])


def test_speculative_texts_equal_single_requests_without_proposals(tight, without_proposals, makers):
    """With requests of all kinds together, preemptions and shared prefixes."""
    together, tokens_together = answers(tight, [make() for make in makers])
    assert tight.metrics.preemptions > 0
    assert tight.metrics.shared_tokens > 0
    proposed, accepted = tight.metrics.proposed_tokens, tight.metrics.accepted_tokens
    assert 0.1 * proposed < accepted < proposed
    wanted, tokens_plain = without_proposals
    assert together == wanted
    for mine, theirs in zip(tokens_together, tokens_plain, strict=True):
        assert [[one for one, _ in token.top] for token in mine] == [[one for one, _ in token.top] for token in theirs]
        np.testing.assert_allclose(*([token.log_probability for token in row] for row in (mine, theirs)), atol=1e-4)
    for number in range(0, len(makers), 3):
        alone, tokens_alone = answers(tight, [makers[number]()])
        assert (alone[0], tokens_alone[0]) == (together[number], tokens_together[number])  # bit by bit


def test_proposals_save_steps(tight, plain):
    """A greedy text that repeats itself, and a draft that agrees mostly: several tokens per step."""
    request = Request(prompt=[11, 12, 13, 14] * 5, max_tokens=120, sampling=Sampling(temperature=0.0))
    before = tight.metrics.steps
    answers(tight, [request])
    assert tight.metrics.steps - before < (45 if tight._device._proposer.draft else 75)
    before = plain.metrics.steps
    answers(plain, [request])
    assert plain.metrics.steps - before == 120
    text = tight.metrics.text(running=0, waiting=0, slots=4)
    assert f"transformer_accepted_tokens_total {tight.metrics.accepted_tokens}\n" in text
    assert f"transformer_proposed_tokens_total {tight.metrics.proposed_tokens}\n" in text


def test_a_draft_equal_to_the_model_samples_its_tokens(parts):
    """It samples with the noise of the model at the same position, so proposals are accepted at any temperature."""
    draft = Draft(model=parts[0], params=parts[1], tokens=TOKENS)
    with started_engine(parts, POSITIONS, cache_tokens=POSITIONS + 4 * PAGE_SIZE, draft=draft) as engine:
        answers(
            engine, [Request(prompt=[11, 12], max_tokens=1 + 15 * (TOKENS + 1), sampling=Sampling(temperature=2.0))]
        )
        assert engine.metrics.accepted_tokens >= 0.95 * engine.metrics.proposed_tokens > 0


def test_after_the_warm_up_nothing_is_compiled(parts):
    engine = Engine(*parts, slots=2, positions=32, draft=PromptLookup(tokens=2))
    engine.warm_up()
    engine.start()
    before = advance._cache_size(), read_part._cache_size()
    answers(engine, [Request(prompt=row, max_tokens=9, sampling=SAMPLINGS[1]) for row in prompts(3, longest=20)])
    engine.close()
    assert (advance._cache_size(), read_part._cache_size()) == before


def test_rejects_a_draft_that_does_not_fit(parts):
    model = parts[0]
    with pytest.raises(ConfigError, match="can propose at most 15 tokens per step, got 16"):
        Engine(*parts, draft=PromptLookup(tokens=16))
    other = CausalLM(model.config.replace(vocab_size=7))
    tiny = drawn_params(other, 0.4)
    with pytest.raises(ValueError, match="the draft must have the vocabulary of the model"):
        Engine(*parts, draft=Draft(model=other, params=tiny))
    short = CausalLM(model.config.replace(position=LearnedOptions(max_length=20)))
    tiny = drawn_params(short, 0.4)
    with pytest.raises(ConfigError, match="the draft's learned position table has 20 positions, got 32 tokens"):
        Engine(*parts, slots=1, positions=32, draft=Draft(model=short, params=tiny))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_chat_model(tmp_path_factory.mktemp("models") / "tiny")


def answer_over_http(opened, draft):
    """Return what a server answers, and the server."""
    body = {"prompt": ["a b", "c"], "max_tokens": 20, "temperature": 0.5, "seed": 3, "logprobs": 2, "stop": "zz"}
    service = make_service(opened, ServiceSettings(slots=2, max_tokens=64, draft=draft))
    service.start()
    client = TestClient(service.application(), base_url="http://localhost")
    choices = client.post("/v1/completions", json=body).json()["choices"]
    assert "transformer_proposed_tokens_total" in client.get("/metrics").text
    service.close()
    return [(one["text"], one["finish_reason"], one["logprobs"]["tokens"]) for one in choices], service


@pytest.fixture(scope="module")
def opened(model):
    return open_model(model)


@pytest.fixture(scope="module")
def answer_without_draft(opened):
    return answer_over_http(opened, None)[0]


def test_speculation_works_over_http(model, opened, answer_without_draft):
    """The options of `serve`: the model as its own draft gives the same answer, in fewer steps."""
    found, service = answer_over_http(opened, SpeculationOptions(draft=str(model)).open_draft())
    assert found == answer_without_draft
    assert service.metrics.steps <= 12
    assert service.metrics.accepted_tokens > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lookup", "0"], "--lookup must be at least 1, got 0"),
        (["--lookup", "2", "--draft", "x"], "--draft and --lookup can't be used together"),
        (["--draft-tokens", "2"], "--draft-tokens needs --draft"),
        (["--lookup", "99"], "a server can propose at most 15 tokens per step, got 99"),
    ],
)
def test_rejects_invalid_options(model, options, message, capsys):
    assert main(["serve", str(model), *options]) == 2
    assert message in capsys.readouterr().err


def test_rejects_an_unsupported_model_kind(tmp_path, capsys):
    assert main(["serve", str(write_models(tmp_path)["encoder"]), "--lookup", "2"]) == 2
    assert "--draft, --lookup and --parallel need a causal model" in capsys.readouterr().err
