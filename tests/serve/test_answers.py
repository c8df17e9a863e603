"""Answers as JSON: numbers of tokens and of choices, for any number of prompts and of texts per prompt."""

import itertools

import pytest
from chat_parts import tokenizer

from transformer.serve._answers import Answer
from transformer.serve._requests import Delta, Token


@pytest.mark.parametrize(("prompts", "n"), [([5], 1), ([5], 3), ([5, 7], 2), ([1, 2, 3], 4)])
@pytest.mark.parametrize("is_chat", [True, False])
def test_each_prompt_counts_once_and_each_text_by_its_tokens(prompts, n, is_chat):
    answer = Answer("m", tokenizer("smollm"), is_chat=is_chat, prompts=prompts, n=n, top=None)
    for number, choice in enumerate(answer.choices):
        choice.add(Delta("a", [Token(40, -1.0, [])] * number))
        choice.add(Delta("b", [Token(41, -1.0, [])], finish="length"))
    whole = answer.whole()
    count = len(prompts) * n
    generated = sum(range(count)) + count
    usage = {"prompt_tokens": sum(prompts), "completion_tokens": generated, "total_tokens": sum(prompts) + generated}
    assert whole["usage"] == answer.usage_part()["usage"] == usage
    assert [choice["index"] for choice in whole["choices"]] == list(range(count))
    assert {choice["finish_reason"] for choice in whole["choices"]} == {"length"}
    assert all(choice["logprobs"] is None for choice in whole["choices"])


def test_parts_of_several_texts_do_not_mix():
    """Interleaved parts of two texts are, joined by their index, the texts of the whole answer."""
    answer = Answer("m", tokenizer("smollm"), is_chat=False, prompts=[5], n=2, top=1)
    joined, tokens = ["", ""], [[], []]
    for number, step in itertools.product(range(2), range(3)):
        number = (number + step) % 2
        delta = Delta(f"{number}{step} ", [Token(40 + 2 * step + number, -float(step), [(60 + number, -0.5)])])
        answer.choices[number].add(delta)
        (choice,) = answer.part(number, delta)["choices"]
        joined[choice["index"]] += choice["text"]
        tokens[choice["index"]] += choice["logprobs"]["token_logprobs"]
    whole = answer.whole()["choices"]
    assert [choice["text"] for choice in whole] == joined
    assert [choice["logprobs"]["token_logprobs"] for choice in whole] == tokens
