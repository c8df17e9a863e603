"""Options of a request in the slots of a device: end tokens, penalties, suppressed tokens, constraints."""

import pytest
from scripted_slots import Counting
from serve_parts import answers, started_engine, tiny_parts

from transformer.generate import PromptLookup, Sampling, generate
from transformer.serve import Request
from transformer.serve._slots import PAGE_SIZE

POSITIONS = 96
GREEDY = Sampling(temperature=0.0)
PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def parts():
    return tiny_parts(num_layers=1)


@pytest.fixture(scope="module")
def engine(parts):
    """An engine with few pages, so that long texts preempt each other."""
    with started_engine(parts, POSITIONS, cache_tokens=POSITIONS + PAGE_SIZE, suppress=[70]) as made:
        yield made


def tokens_of(engine, *requests):
    return [tokens for _, tokens, _ in answers(engine, list(requests))[0]]


@pytest.mark.parametrize("place", [0, 3, 7])
def test_every_end_token_ends_a_text(engine, place):
    (whole,) = tokens_of(engine, Request(prompt=PROMPT, max_tokens=40, sampling=Sampling(temperature=2.0), seed=1))
    ends = [id for id in range(300) if id not in whole][:8]
    ends[place] = whole[20]
    request = Request(prompt=PROMPT, max_tokens=40, sampling=Sampling(temperature=2.0), seed=1, eos_ids=tuple(ends))
    (((_, tokens, finish),), _) = answers(engine, [request])
    assert (tokens, finish) == (whole[: whole.index(whole[20])], "stop")


@pytest.mark.parametrize("penalty", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_penalties_equal_generate(engine, parts, penalty):
    """The repetition penalty is also for tokens of the prompt: the prompt has all tokens but a few."""
    model, params, _ = parts
    prompt = list(range(5, 65))
    sampling = Sampling(temperature=0.0, suppress=(70,), **{penalty: 6.0})
    (tokens,) = tokens_of(engine, Request(prompt=prompt, max_tokens=12, sampling=sampling))
    assert [tokens] == generate(model, params, [prompt], max_new_tokens=12, sampling=sampling)
    assert tokens != tokens_of(engine, Request(prompt=prompt, max_tokens=12, sampling=GREEDY))[0]


def test_suppressed_tokens_of_the_engine_are_not_generated(engine, parts):
    """At a high temperature, where all others are."""
    model, params, _ = parts
    hot, seeds = Sampling(temperature=50.0), range(8)
    requests = [Request(prompt=PROMPT, max_tokens=80, sampling=hot, seed=seed) for seed in seeds]
    assert 70 not in {token for tokens in tokens_of(engine, *requests) for token in tokens}
    free = generate(model, params, [PROMPT] * 8, max_new_tokens=80, sampling=hot, seed=list(seeds))
    assert 70 in {token for tokens in free for token in tokens}


def test_preempted_constrained_texts_equal_single_requests(engine):
    def request(number):
        constraint = Counting(engine.vocab_size, 60)
        return Request(prompt=[5 + number] * 9, max_tokens=80, seed=number, top=2, constraint=constraint)

    before = engine.metrics.preemptions
    _, together = answers(engine, [request(number) for number in range(3)])
    assert engine.metrics.preemptions > before
    for number in range(3):
        _, (alone,) = answers(engine, [request(number)])
        assert together[number] == alone
        assert len(alone) == 60
        assert all(token.id % 3 == (60 - i) % 3 for i, token in enumerate(alone))


def test_a_constrained_text_uses_no_speculation(parts):
    """What a constraint allows is known for one token only."""
    with started_engine(parts, POSITIONS, draft=PromptLookup(tokens=3)) as engine:
        requests = [Request(prompt=PROMPT * 3, max_tokens=40, seed=1, sampling=GREEDY) for _ in range(2)]
        constrained = [
            Request(prompt=one.prompt, max_tokens=40, sampling=GREEDY, constraint=Counting(engine.vocab_size, 30))
            for one in requests
        ]
        answers(engine, constrained)
        assert engine.metrics.proposed_tokens == 0
        answers(engine, requests)
        assert engine.metrics.proposed_tokens > 0
