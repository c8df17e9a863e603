"""Questions about numbers: right answers by another computation, disjoint splits, and the four kinds of data."""

import re

import pytest

from transformer.config import ConfigError
from transformer.data import NumberChat, NumberPreferences, NumberPrompts, NumberText, prepare
from transformer.data.kinds._number_chat import TOPICS, TWO_FORMS, questions, split_of

SPLITS = ("train", "validation", "test")
FEW = {"train_examples": 120, "validation_examples": 60, "test_examples": 60}
WORDS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen"""
ONES = WORDS.split()
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def number_in(text):
    """Return a number in digits or English words below 1,001 (written without the code under test)."""
    if text.isdecimal():
        return int(text)
    if text == "one thousand":
        return 1000
    hundreds, _, rest = text.rpartition(" hundred")
    total = 100 * ONES.index(hundreds) if hundreds else 0
    rest = rest.removeprefix(" and ")
    for part in filter(None, rest.split("-")):
        total += 10 * (2 + TENS.index(part)) if part in TENS else ONES.index(part)
    return total


def answer_to(text):
    """Return the topic, the numbers asked about and the answer as a number, from the text of a question alone."""
    for topic, pattern, answer in (
        ("words", r"Write (\d+) in words\.", lambda a: a),
        ("digits", r"Write (.+) in digits\.", lambda a: a),
        ("after", r"What comes after (.+)\?", lambda a: a + 1),
        ("before", r"What comes before (.+)\?", lambda a: a - 1),
        ("larger", r"Which is larger, (.+) or (.+)\?", max),
        ("sum", r"What is (\d+) plus (\d+)\?", lambda a, b: a + b),
    ):
        if match := re.fullmatch(pattern, text):
            numbers = tuple(map(number_in, match.groups()))
            return topic, numbers, answer(*numbers)
    raise AssertionError(text)


@pytest.mark.parametrize("split", SPLITS)
def test_every_answer_is_right(split):
    found = questions(split, 1200)
    for one in found:
        assert answer_to(one.text) == (one.topic, one.numbers, one.result)
        assert number_in(one.answer) == one.result
        # The answer has the form of the question, or the one that it asks for.
        in_digits = one.topic != "words" if re.search(r"\d", one.text) else one.topic == "digits"
        assert one.answer.isdecimal() == in_digits
        assert one.answer in one.fact
        assert one.fact.endswith(".")
    assert {one.topic for one in found} == set(TOPICS)
    assert questions(split, 1200) == found


def test_each_number_occurs_in_only_one_split():
    asked = {split: {tuple(sorted(one.numbers)) for one in questions(split, 3000)} for split in SPLITS}
    assert not asked["train"] & asked["validation"]
    assert not asked["train"] & asked["test"]
    assert not asked["validation"] & asked["test"]
    assert split_of((3, 40)) == split_of((40, 3))
    assert {split_of((number,)) for number in (0, 20, 90, 700)} == {"train"}
    assert all(split_of(one.numbers) == "test" for one in questions("test", 600))


@pytest.mark.parametrize("split", ["validation", "test"])
def test_held_out_questions_are_different(split):
    found = questions(split, 600)
    assert len({one.text for one in found}) == len(found)
    counts = {topic: sum(one.topic == topic for one in found) for topic in TOPICS}
    assert counts["larger"] == counts["sum"] == 100
    assert min(counts.values()) > 80  # about a tenth of the numbers below 1,000


def test_all_question_kinds_use_numbers_of_their_split():
    chat, prompts, preferences = (kind(**FEW).read() for kind in (NumberChat, NumberPrompts, NumberPreferences))
    for split in SPLITS:
        for one in chat[split]:
            asked, answered = one.messages
            assert (asked["role"], answered["role"], one.given) == ("user", "assistant", 1)
            assert number_in(answered["content"]) == answer_to(asked["content"])[2]
            assert split_of(answer_to(asked["content"])[1]) == split
        for one in prompts[split]:
            topic, numbers, result = answer_to(one.prompt[0]["content"])
            assert (topic, one.columns) == ("sum", {"answer": str(result)})
            assert split_of(numbers) == split
        for one in preferences[split]:
            topic, numbers, result = answer_to(one.prompt)
            chosen, rejected = (each.messages[-1]["content"] for each in (one.chosen, one.rejected))
            assert topic in TWO_FORMS
            assert split_of(numbers) == split
            assert number_in(chosen) == number_in(rejected) == result
            assert rejected.isdecimal()
            assert not chosen.isdecimal()


def test_conversations_use_the_tokenizer_of_the_text_run():
    text = prepare(NumberText(**FEW, sequence_length=32))
    chat = prepare(NumberChat(**FEW), text.tokenizer)
    assert chat.tokenizer.state() == text.tokenizer.state()
    assert chat.tokenizer.vocab_size == 3 + 256 + 4  # bytes, and the markers of system, user, assistant and tool
    prompt, trained = chat.example
    assert re.fullmatch(r"<\|user\|>.*<\|assistant\|>", prompt[0])
    assert trained[0].endswith("<eos>")
    assert trained[1]
    ids = next(text.train_batches(0))["tokens"]
    assert ids.max() < 3 + 256  # running text contains no markers
    assert text.tokenizer.decode(ids[0]) in text._texts["train"][0]


def test_too_few_questions_are_refused():
    with pytest.raises(ConfigError, match=r"test_examples.*20.*got 3"):
        NumberChat(test_examples=3)
    with pytest.raises(ValueError, match=r"topic.*got 'product'"):
        questions("train", 20, ["product"])
