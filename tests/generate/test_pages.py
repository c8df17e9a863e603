"""Pages in generation: the same text as without, and the allocator against a model that is too simple to be wrong."""

import collections
import functools

import jax
import numpy as np
import pytest
from chat_parts import drawn_params
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer.config import (
    AttentionOptions,
    EmbeddingOptions,
    Execution,
    ParameterOptions,
    RotaryOptions,
    TransformerConfig,
)
from transformer.generate import Sampling, _decoding, generate
from transformer.generate._loop import decode
from transformer.generate._pages import OutOfPagesError, PageAllocator
from transformer.generate._prompts import pad
from transformer.generate._sampling import SamplerParams
from transformer.nn.models import CausalLM

ROWS = st.lists(st.integers(0, 1), max_size=13)  # few ids, so that rows often begin alike


def test_allocates_pages_for_a_row():
    pages = PageAllocator(6, 4)
    assert [pages.pages_for(tokens) for tokens in (0, 1, 4, 5)] == [0, 1, 1, 2]
    row = pages.allocate(2)
    assert (len(set(row)), pages.num_free, [pages.users(page) for page in row]) == (2, 4, [1, 1])
    pages.release(row)
    assert pages.num_free == 6


def test_rows_with_a_common_prefix_share_full_pages():
    pages = PageAllocator(6, 4)
    row = pages.allocate(3)
    pages.register(range(10), row)
    assert pages.match([*range(8), 77]) == row[:2]  # the third page is not full
    assert [pages.users(page) for page in row] == [2, 2, 1]
    assert pages.match(range(8)) == row[:1]  # the last token must be read
    assert pages.match([1, *range(1, 10)]) == []  # the second page depends on the first one
    assert pages.match([0, 1, 2, 3, 9, 5, 6, 7, 8]) == row[:1]


def test_released_pages_are_reusable_until_reallocated():
    pages = PageAllocator(3, 2)
    row = pages.allocate(2)
    pages.register([1, 2, 3, 4], row)
    pages.release(row)
    assert pages.num_free == 3
    assert pages.match([1, 2, 3, 4, 5]) == row
    pages.release(row)
    first = pages.allocate(1)
    assert first not in ([row[0]], [row[1]])  # a page without known contents goes first
    assert pages.allocate(1) == row[1:]  # then the end of the row
    assert pages.match([1, 2, 3, 4, 5]) == row[:1]


def test_rejects_invalid_page_requests():
    pages = PageAllocator(2, 2, first_page=10)
    row = pages.allocate(1)
    with pytest.raises(OutOfPagesError, match=r"2 pages are needed, but only 1 of 2 are free\. Release"):
        pages.allocate(2)
    assert pages.num_free == 1
    for wrong in (row * 2, [3], [11]):
        with pytest.raises(ValueError, match=r"page \d+ has [01] users, but [12] are released"):
            pages.release(wrong)
    with pytest.raises(ValueError, match="4 tokens fill 2 pages of 2, got 1 pages"):
        pages.register([1, 2, 3, 4], row)
    pages.release(row)
    with pytest.raises(ValueError, match="page 10 has 0 users"):
        pages.register([1, 2], row)
    with pytest.raises(ValueError, match="at least 1 page"):
        PageAllocator(0, 1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), ROWS, st.integers(0, 9)), max_size=25), st.integers(1, 3))
def test_counts_users_and_finds_registered_contents(steps, size):
    """Rows begin and end in any order; each page's contents are followed in a dictionary."""
    pages = PageAllocator(9, size, first_page=4)
    rows, contents = [], {}
    for begins, tokens, number in steps:
        if not begins and rows:
            pages.release(rows.pop(number % len(rows)))
        elif begins:
            known = pages.match(tokens)
            assert [contents[page] for page in known] == [
                tuple(tokens[: (index + 1) * size]) for index in range(len(known))
            ]
            try:
                row = known + pages.allocate(pages.pages_for(len(tokens)) - len(known))
            except OutOfPagesError:
                pages.release(known)
                continue
            for index in range(len(known), len(row)):
                assert pages.users(row[index]) == 1
                contents[row[index]] = tuple(tokens[: (index + 1) * size])
            pages.register(tokens, row)
            rows.append(row)
        used = collections.Counter(page for row in rows for page in row)
        assert all(pages.users(page) == used[page] for page in range(4, 13))
        assert pages.num_free == 9 - len(used)


CONFIG = TransformerConfig(
    vocab_size=31,
    d_model=32,
    num_layers=2,
    num_heads=4,
    attention=AttentionOptions(num_kv_heads=2),
    position=RotaryOptions(),
    embedding=EmbeddingOptions(tie=False),
    parameters=ParameterOptions(initializer_range=0.4),
)


@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_greedy_text_with_pages_equals_text_without_pages(monkeypatch, scan):
    model = CausalLM(CONFIG, Execution(scan=scan))
    params = drawn_params(model, 0.4, seed=1)
    prompts, new = [[3, 1, 4, 1, 5, 9, 2], [6], [5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8]], 8
    greedy = Sampling(temperature=0.0)
    text = generate(model, params, prompts, max_new_tokens=new, sampling=greedy)
    monkeypatch.setattr(_decoding, "uses_unstacked_layers", lambda *given: not scan)  # as on a TPU
    monkeypatch.setattr(_decoding, "PAGE_SIZE", 3)
    how = SamplerParams.of(greedy, 31), np.array([-1]), np.int32(new)
    own = jax.jit(functools.partial(decode.__wrapped__, model, cache_slots=20, new_slots=new, paged=True))
    rows = pad([np.array(row) for row in prompts], 11)
    result = own(params, rows, None, jax.random.split(jax.random.key(0), 3), *how)
    assert result.tokens.tolist() == text
