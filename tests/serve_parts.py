"""A tiny model with random weights for tests of the server's engine, its answers, and a service without a model."""

import contextlib
import functools
import queue
import random
import time
from types import SimpleNamespace

from chat_parts import drawn_params
from chat_parts import tokenizer as make_tokenizer

from transformer.config import llama_decoder
from transformer.generate import Sampling
from transformer.nn.models import CausalLM
from transformer.serve import Engine
from transformer.serve._metrics import Metrics
from transformer.serve._requests import AnswerText, Delta, Token
from transformer.serve._service import Service


@functools.cache
def tiny_parts(num_layers=2, **changes):
    """Return a model, its parameters, and the tokenizer of a family; `changes` are fields of the config."""
    tokenizer = make_tokenizer("smollm")
    config = llama_decoder(
        vocab_size=tokenizer.vocab_size, d_model=32, num_layers=num_layers, num_heads=2, **{"feed_forward.d_ff": 48}
    )
    model = CausalLM(config.replace(**{"parameters.initializer_range": 0.4}, **changes))
    return model, drawn_params(model, 0.4), tokenizer


@contextlib.contextmanager
def started_engine(parts, positions, warm=False, **options):
    """Yield an engine with four slots that runs, and close it; no request uses a page then."""
    made = Engine(*parts, slots=4, positions=positions, **options)
    if warm:
        made.warm_up()
    made.start()
    yield made
    made.close()
    assert made._device.pages.num_free == made.pages


def answers(engine, requests):
    """Submit requests together, and return (text, tokens, finish) of each."""
    got, events = {}, queue.Queue()
    engine.submit(requests, lambda number, delta: events.put((number, delta)))
    texts, tokens = [""] * len(requests), [[] for _ in requests]
    while len(got) < len(requests):
        number, delta = events.get(timeout=60)
        texts[number] += delta.text
        tokens[number] += delta.tokens
        if delta.finish:
            got[number] = delta.finish
    return [(texts[i], [token.id for token in tokens[i]], got[i]) for i in range(len(requests))], tokens


def prompts(count, seed=0, longest=70):
    """Return prompts of random lengths and tokens."""
    draw = random.Random(seed)
    return [[draw.randrange(5, 290) for _ in range(draw.randint(1, longest))] for _ in range(count)]


def slow_down(monkeypatch, engine, seconds=0.05):
    """Let every decoding call of an engine take at least `seconds`, and generate one token."""
    advance = engine._scheduler.call_advance

    def slowly(steps, *rest):
        time.sleep(seconds)
        return advance(1, *rest)

    monkeypatch.setattr(engine._scheduler, "call_advance", slowly)


def scripted_service(tokenizer, texts, chat=None):
    """Return a service whose engine "generates" given token ids, and the list of the requests that reach the engine.

    Each token has a log-probability of minus its place, and one alternative.
    """
    seen = []

    def submit(requests, deliver):
        seen.extend(requests)
        for number, request in enumerate(requests):
            ids = texts[number]
            text = AnswerText(tokenizer, request)
            tokens = [Token(i, -float(place), [(i + 1, -9.0)][: request.top]) for place, i in enumerate(ids)]
            deliver(number, Delta(text.add(ids) + text.finish(), tokens, finish="stop"))
        return [SimpleNamespace(cancel=lambda: None) for _ in requests]

    engine = SimpleNamespace(
        tokenizer=tokenizer, vocab_size=tokenizer.vocab_size, positions=99, queue_size=9, submit=submit
    )
    engine.metrics = Metrics()
    return Service(engine=engine, name="tiny", sampling=Sampling(), eos_ids=(), chat=chat), seen
