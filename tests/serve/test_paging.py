"""Pages in the engine: few pages, preempted requests and shared prefixes change no text."""

import queue
import random
import time

import pytest
from serve_parts import answers, started_engine, tiny_parts

from transformer.config import RotaryScaling
from transformer.config._checks import ConfigError
from transformer.generate import OutOfPagesError, Sampling, generate
from transformer.generate._prompts import _warn_once
from transformer.inference import Grammars
from transformer.serve import Engine, Request
from transformer.serve._slots import PAGE_SIZE, SlotPages

POSITIONS = 160  # chunks of 128 tokens
SAMPLINGS = [
    Sampling(temperature=0.0),
    Sampling(temperature=0.9),
    Sampling(temperature=1.2, top_k=9, top_p=0.8),
    Sampling(temperature=1.0, presence_penalty=0.5, repetition_penalty=1.2),
]


@pytest.fixture(scope="module")
def parts():
    return tiny_parts(num_layers=1)


@pytest.fixture(scope="module")
def roomy(parts):
    """An engine that never preempts."""
    with started_engine(parts, POSITIONS, warm=True) as made:
        yield made
    assert made.metrics.preemptions == 0


@pytest.fixture(scope="module")
def tight(parts):
    """An engine whose pool holds one request of full length, or a few short ones."""
    with started_engine(parts, POSITIONS, cache_tokens=POSITIONS + 2 * PAGE_SIZE, warm=True) as made:
        yield made


def drawn_request(draw, grammars):
    """A request that may share the prefix of others, with any sampling, limit, stop string and constraint."""
    prefix = [11 + i % 200 for i in range(128)] if draw.random() < 0.4 else []
    prompt = [*prefix, *(draw.randrange(5, 290) for _ in range(draw.choice([1, 3, 15, 16, 17, 20])))]
    given = {"sampling": draw.choice(SAMPLINGS), "seed": draw.randrange(9), "top": draw.choice([0, 0, 2])}
    if draw.random() < 0.2:
        given["stop"] = (draw.choice(["e", "a", " t"]),)
    pattern = draw.choice([None, None, None, "[a-z]{8,40}"])
    limit = draw.randint(1, POSITIONS - len(prompt))

    def make():
        constraint = None if pattern is None else grammars.regex(pattern)
        return Request(prompt=prompt, max_tokens=limit, eos_ids=(7,), constraint=constraint, **given)

    return make


@pytest.mark.default_cases(1)
@pytest.mark.parametrize(
    "seed", [0, 1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_texts_do_not_depend_on_arrival_order_pages_or_cancellations(roomy, tight, parts, seed):
    """Requests arrive in groups at random times, and some leave: each text is that of its request alone."""
    pytest.importorskip("llguidance")
    draw, grammars = random.Random(seed), Grammars(parts[2], parts[2].vocab_size)
    makers = [drawn_request(draw, grammars) for _ in range(20)]
    events, tickets, got = queue.Queue(), {}, {}
    waiting = list(range(len(makers)))
    texts, tokens = [""] * len(makers), [[] for _ in makers]
    cancelled = set()
    before = tight.metrics.preemptions
    while len(got) < len(makers):
        if waiting and draw.random() < 0.5:
            group = [waiting.pop(0) for _ in range(min(len(waiting), draw.randint(1, 5)))]
            found = tight.submit(
                [makers[i]() for i in group], lambda j, delta, group=group: events.put((group[j], delta))
            )
            tickets |= dict(zip(group, found, strict=True))
        elif not waiting or draw.random() < 0.7:
            try:
                number, delta = events.get(timeout=0.02 if waiting else 60)
            except queue.Empty:
                continue
            texts[number] += delta.text
            tokens[number] += delta.tokens
            if delta.finish:
                got[number] = delta.finish
        elif tickets and len(cancelled) < 3 and draw.random() < 0.2:
            number = draw.choice(list(tickets))
            tickets[number].cancel()
            cancelled.add(number)
        else:
            time.sleep(draw.random() / 100)
    assert tight.metrics.preemptions > before
    for i, make in enumerate(makers):
        ((text, _, finish),), (alone,) = answers(roomy, [make()])
        if got[i] == "cancelled":
            assert i in cancelled
            assert tokens[i] == alone[: len(tokens[i])]
            assert text.startswith(texts[i])
        else:
            assert (texts[i], tokens[i], got[i]) == (text, alone, finish)


def test_all_pages_are_free_at_the_end(tight):
    answers(tight, [Request(prompt=[5 + i], max_tokens=60, seed=i) for i in range(5)])
    assert tight._device.pages.num_free == tight.pages == POSITIONS // PAGE_SIZE + 2
    assert tight.metrics.recomputed_tokens > 0
    text = tight.metrics.text(running=0, waiting=0, slots=4, pages=tight.pages)
    assert "transformer_pages 12\n" in text
    assert "transformer_preemptions_total 0\n" not in text


def test_the_newest_request_is_preempted(tight):
    """The first request is never computed again: its tokens arrive before those of later ones are complete."""
    first_count = 150
    ended, events = [], queue.Queue()
    requests = [Request(prompt=[5 + i], max_tokens=first_count, seed=i) for i in range(3)]
    before = tight.metrics.preemptions
    tight.submit(requests, lambda number, delta: events.put((number, delta.finish)))
    while len(ended) < 3:
        number, finish = events.get(timeout=60)
        ended += [number] if finish else []
    assert tight.metrics.preemptions > before
    assert ended == [0, 1, 2]


def test_too_few_pages_for_one_request_are_refused(parts):
    with pytest.raises(ConfigError, match=r"cache_tokens.*160"):
        Engine(*parts, slots=2, positions=POSITIONS, cache_tokens=POSITIONS - 1)


def test_pages_are_shared_counted_and_evicted():
    """Against a model of the pool: no page belongs to two slots, unless both have the tokens that it contains."""
    draw = random.Random(0)
    chunk, slots, num_pages = 2 * PAGE_SIZE, 4, 14
    pages = SlotPages(slots, 8 * PAGE_SIZE, num_pages, chunk)
    content, prompts, shared, full = {}, {}, 0, 0
    for _ in range(3000):
        slot = draw.randrange(slots)
        if slot in prompts:
            if draw.random() < 0.5:
                pages.release(slot)
                del prompts[slot]
            else:
                size = min(8 * PAGE_SIZE, len(prompts[slot]) + draw.randint(1, 40))
                if pages.missing(slot, size) <= pages.num_free:
                    pages.grow(slot, size)
                else:
                    with pytest.raises(OutOfPagesError):
                        pages.grow(slot, size)
        else:
            prompt = [draw.choice([1, 2])] * draw.choice([5, 40, 64, 65, 100])
            done = pages.admit(slot, prompt, len(prompt) + 1, spare=draw.randint(0, 2))
            full += done is None
            if done is None:
                continue
            assert done % chunk == 0
            assert done < len(prompt)
            shared += done
            row = pages.table[slot]
            for i in range(done // PAGE_SIZE):  # what the slot takes over is what it would have read
                assert content[row[i]] == (prompt[0], i)
            for i in range(done // PAGE_SIZE, pages._allocator.pages_for(len(prompt) + 1)):
                content[row[i]] = (prompt[0], i)
            pages.share(slot, prompt, len(prompt))
            prompts[slot] = prompt
        used = [set(pages._pages[one]) for one in prompts]
        assert pages.num_free == num_pages - len(set().union(*used))
        for one, prompt in prompts.items():
            whole = len(prompt) // chunk * chunk // PAGE_SIZE
            for other in prompts.keys() - {one}:
                assert not set(pages._pages[one][whole:]) & set(pages._pages[other])
    assert shared
    assert full


def test_the_least_recently_used_prefix_is_evicted_first():
    chunk = PAGE_SIZE
    pages = SlotPages(1, 8 * PAGE_SIZE, 6, chunk)
    for token in (1, 2, 3):  # one page of prefix each, and one for the rest
        pages.admit(0, [token] * (chunk + 1), chunk + 2, 0)
        pages.share(0, [token] * (chunk + 1), chunk + 1)
        pages.release(0)
    assert pages.admit(0, [1] * (chunk + 1), chunk + 2, 0) == chunk  # used again: now 2 is the oldest
    pages.release(0)
    assert pages.admit(0, [9] * (3 * chunk), 3 * chunk + 1, 0) == 0  # 4 pages: 3 without contents, and that of 2
    pages.release(0, forget=True)
    found = {token: pages.admit(0, [token] * (chunk + 1), chunk + 2, 0) or pages.release(0) or 0 for token in (2,)}
    assert found == {2: 0}
    for token in (1, 3):
        assert pages.admit(0, [token] * (chunk + 1), chunk + 2, 0) == chunk
        pages.release(0)


def test_evicted_pages_are_not_shared():
    pages = SlotPages(1, 8 * PAGE_SIZE, 6, PAGE_SIZE)
    prompt = [1] * (2 * PAGE_SIZE)
    for forget, found in ((False, 0), (True, PAGE_SIZE), (False, 0)):
        assert pages.admit(0, prompt, len(prompt) + 1, 0) == found
        pages.share(0, prompt, len(prompt))
        pages.release(0, forget=forget)


# Rotary scaling that depends on the length of the text


BY_LENGTH = {
    "dynamic": RotaryScaling(kind="dynamic", factor=4.0, original_length=270),
    "longrope": RotaryScaling(
        kind="longrope",
        factor=2.0,
        original_length=270,
        short_factors=(1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7),
        long_factors=(1.0, 1.3, 1.7, 2.0, 3.0, 4.0, 6.0, 9.0),
    ),
}


@pytest.mark.programs(9, reason="programs of the engine for three widths, and those of generate")
@pytest.mark.default_cases(1)
@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_rotary_scaling_of_a_long_prompt_uses_its_whole_length(kind):
    """Also in its first chunk, in keys of an earlier chunk, and without the padding of its last chunk.

    Prompts with a common prefix share it only if their rotations do not depend on their lengths.
    """
    model, params, tokenizer = tiny_parts(num_layers=2, **{"position.scaling": BY_LENGTH[kind]})
    prefix = [11 + 7 * i % 200 for i in range(256)]  # whole chunks
    # The first two prompts are not longer than `original_length`; the text of the second one becomes longer.
    rows = [[*prefix, *range(20, 20 + more)] for more in (5, 12, 15, 50, 51)]
    greedy = Sampling(temperature=0.0)
    with started_engine((model, params, tokenizer), 400) as engine:
        _warn_once.cache_clear()
        with pytest.warns(UserWarning, match="grew past 270 tokens"):
            got = [answers(engine, [Request(prompt=row, max_tokens=9, sampling=greedy)])[0][0][1] for row in rows]
        shared = engine.metrics.shared_tokens
    assert got == [generate(model, params, [row], max_new_tokens=9, sampling=greedy)[0] for row in rows]
    assert shared == 256, "only the second prompt takes over a prefix"


def test_prompts_beyond_the_original_length_share_no_pages():
    """Nor those of its first chunk, if it is preempted while it is read."""
    pages = SlotPages(1, 8 * PAGE_SIZE, 8, PAGE_SIZE, shared_length=40)
    for length, done, found in ((41, 41, 0), (41, 32, 0), (40, 32, 32), (41, 41, 0)):
        prompt = [7] * length
        assert pages.admit(0, prompt, length, spare=0) == 0
        pages.share(0, prompt, done)
        pages.release(0)
        assert pages.admit(0, [7] * 35, 35, spare=0) == found
        pages.release(0, forget=True)
