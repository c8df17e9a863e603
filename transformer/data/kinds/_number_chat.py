"""Questions about numbers, for a small language model: running text, conversations, preferences and prompts.

All four kinds of data share one generator, `questions`. A question asks about one whole number below 1,000, or about
two of them. The numbers asked about decide its split: if a test question asks about a number, or about a pair, no
training question of any of the four kinds asks about the same number or the same pair.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from transformer.config._checks import check_whole
from transformer.data._chat_tokenizer import with_markers
from transformer.data._config import TokenizerConfig
from transformer.data._conversations import ConversationConfig
from transformer.data._texts import DocumentDataset, Documents, TextConfig, TextDataset
from transformer.data._turns import Conversation
from transformer.data.kinds._number_words import basic_numbers, role, words
from transformer.data.kinds._preferences import Preference, PreferenceConfig
from transformer.data.kinds._prompts import Prompt, PromptConfig
from transformer.data.tokenizers._base import Tokenizer
from transformer.data.tokenizers._kinds import tokenizer_of_splits

LIMIT = 1000
"""numbers in questions are below this one"""
SUM_LIMIT = 100
"""numbers to add are below this one"""
BYTES = TokenizerConfig(kind="byte")
"""default tokenizer: bytes, so that every message can be encoded"""

Write = Callable[[int], str]
"""function that writes a number, in digits or in words"""
Made = TypeVar("Made")


@dataclass(frozen=True)
class Question:
    """A question about numbers, with its answer."""

    topic: str
    """one of `TOPICS`"""
    numbers: tuple[int, ...]
    """the numbers asked about; they decide the split"""
    result: int
    """the answer as a number"""
    text: str
    answer: str
    fact: str
    """question and answer as a statement"""


@functools.cache
def in_words(number: int) -> str:
    """Return a number in English words."""
    return words(number, "en")


TOPICS = ("words", "digits", "after", "before", "larger", "sum")
"""what questions ask for"""
TRAINING_SHARE = {"sum": 3}
"""training questions of a topic for each question of another topic (1 if not listed): sums are harder to learn"""
TWO_FORMS = ("after", "before", "larger")
"""topics whose answer is right in digits and in words; it has the form of the question"""


def split_of(numbers: Sequence[int]) -> str:
    """Return the split of the questions about one number, or about two numbers in any order, by a hash (`role`).

    0 to 20 and d x 10^k, the vocabulary of numbers, are always `"train"`.
    """
    if len(numbers) == 1:
        return "train" if numbers[0] in _basics() else role(numbers[0])
    low, high = sorted(numbers)
    return role(low * LIMIT + high)


@functools.cache
def _basics() -> frozenset[int]:
    return frozenset(basic_numbers(len(str(LIMIT - 1))))


def questions(split: str, count: int, topics: Sequence[str] = TOPICS) -> list[Question]:
    """Draw questions of a split in random order; of each topic the same number, in training by `TRAINING_SHARE`.

    The same arguments give the same questions. Questions of a held-out split ask about different numbers. If there are
    not enough (about 90 for a topic with one number, 500 sums), the result is shorter. Training questions can repeat.
    The count is rounded down for each topic, to at least one of each.
    """
    found: list[Question] = []
    shares = {topic: TRAINING_SHARE.get(topic, 1) if split == "train" else 1 for topic in topics}
    for topic, share in shares.items():
        if topic not in TOPICS:
            raise ValueError(f"topic must be one of {', '.join(TOPICS)}, got {topic!r}. Correct it.")
        draw = random.Random(f"questions {topic} {split}")
        drawn = itertools.islice(_asked_about(topic, split, draw), max(count * share // sum(shares.values()), 1))
        found += [_question(topic, numbers, draw.choice((str, in_words))) for numbers in drawn]
    random.Random(f"order {split} {count}").shuffle(found)
    return found


def _asked_about(topic: str, split: str, draw: random.Random) -> Iterator[tuple[int, ...]]:
    """Yield the numbers of the questions of a topic: endlessly for training, otherwise each combination once."""
    if topic == "larger":  # too many pairs to list
        seen = set()
        for _ in itertools.count() if split == "train" else range(LIMIT * LIMIT // 2):
            first, second = (draw.randrange(LIMIT if draw.random() < 0.75 else LIMIT // 10) for _ in range(2))
            pair = min(first, second), max(first, second)
            if first != second and split_of(pair) == split and (split == "train" or pair not in seen):
                seen.add(pair)
                yield first, second
        return
    if topic == "sum":
        supply = list(itertools.combinations_with_replacement(range(SUM_LIMIT), 2))
    else:
        supply = [(number,) for number in range(topic == "before", LIMIT)]  # nothing comes before 0
    supply = [numbers for numbers in supply if split_of(numbers) == split]
    while supply:
        draw.shuffle(supply)
        for numbers in supply:
            yield numbers[:: draw.choice((1, -1))]
        if split != "train":
            return


def _question(topic: str, numbers: tuple[int, ...], write: Write) -> Question:
    """Return the question about these numbers; `write` applies to `TWO_FORMS`."""
    first, last = numbers[0], numbers[-1]
    match topic:
        case "words":
            result, text, answer = first, f"Write {first} in words.", in_words(first)
            fact = f"{first} is {answer}."
        case "digits":
            result, text, answer = first, f"Write {in_words(first)} in digits.", str(first)
            fact = f"{in_words(first)} is {first}."
        case "after" | "before":
            result = first + (1 if topic == "after" else -1)
            asked, answer = write(first), write(result)
            text, fact = f"What comes {topic} {asked}?", f"{topic.capitalize()} {asked} comes {answer}."
        case "larger":
            result = max(numbers)
            text, answer = f"Which is larger, {write(first)} or {write(last)}?", write(result)
            fact = f"Of {write(first)} and {write(last)}, {answer} is larger."
        case _:
            result = sum(numbers)
            text, answer = f"What is {first} plus {last}?", str(result)
            fact = f"{first} plus {last} is {answer}."
    return Question(topic, numbers, result, text, answer, fact)


@dataclass(frozen=True, kw_only=True)
class _Drawn:
    """Numbers of questions."""

    train_examples: int = 20_000
    """number of training questions, drawn at random with repetitions"""
    validation_examples: int = 300
    """number of different questions for evaluation during training; their numbers occur in no training question"""
    test_examples: int = 500
    """number of different test questions; their numbers occur in no question for training or validation"""

    def __post_init__(self):
        super().__post_init__()
        check_whole(self, "train_examples", "validation_examples", "test_examples", least=20)

    def _questions(self, topics: Sequence[str] = TOPICS) -> dict[str, list[Question]]:
        return {
            split: questions(split, getattr(self, f"{split}_examples"), topics)
            for split in ("train", "validation", "test")
        }

    def _each(self, make: Callable[[str, Question], Made], topics: Sequence[str] = TOPICS) -> dict[str, list[Made]]:
        """Return what a function makes of each question and its name in error messages, by split."""
        return {
            split: [make(f"{split} question {number}", one) for number, one in enumerate(found, 1)]
            for split, found in self._questions(topics).items()
        }


def _asked(question: Question) -> dict[str, str]:
    return {"role": "user", "content": question.text}


def _answered(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@dataclass(frozen=True, kw_only=True)
class NumberText(_Drawn, TextConfig):
    """Running text about numbers, generated without files: 21 is twenty-one. After 99 comes 100. ...

    Its tokenizer has the markers of a chat template, so that `number_chat` can continue from the trained model.
    """

    kind: ClassVar[str] = "number_text"

    train_examples: int = 60_000
    """number of training sentences, drawn at random with repetitions"""
    tokenizer: TokenizerConfig = BYTES
    """tokenizer, to which the markers of a chat template are added"""

    def read(self) -> Documents:
        """Return the text of each split."""
        return Documents(
            {split: ["".join(f"{one.fact}\n" for one in found)] for split, found in self._questions().items()}
        )

    def prepare(self, tokenizer: Tokenizer | None = None) -> TextDataset | DocumentDataset:
        tokenizer = tokenizer or with_markers(tokenizer_of_splits(self.tokenizer, self.read().splits), None)
        return super().prepare(tokenizer)


@dataclass(frozen=True, kw_only=True)
class NumberChat(_Drawn, ConversationConfig):
    """Conversations about numbers, generated without files: a question of the user and the answer of the assistant."""

    kind: ClassVar[str] = "number_chat"

    sequence_length: int = 128
    """context length: tokens per row"""
    tokenizer: TokenizerConfig = BYTES
    """tokenizer, to which the markers of the template are added; ignored with an initial model"""

    def read(self) -> dict[str, list[Conversation]]:
        """Return the conversations by split."""
        return self._each(lambda place, one: Conversation(place, [_asked(one), _answered(one.answer)], given=1))


@dataclass(frozen=True, kw_only=True)
class NumberPreferences(_Drawn, PreferenceConfig):
    """Preferences about numbers, generated without files: the chosen answer has words, the rejected one digits.

    Both answers are right. The questions are those of `TWO_FORMS`.
    """

    kind: ClassVar[str] = "number_preferences"

    train_examples: int = 4_000
    """number of training pairs, drawn at random with repetitions"""
    max_length: int = 128
    """maximum length of a question with an answer, in tokens"""
    tokenizer: TokenizerConfig = BYTES
    """tokenizer; ignored, because the initial model has its own"""

    def read(self) -> dict[str, list[Preference]]:
        """Return the preferences by split."""
        return self._each(_preference, TWO_FORMS)


def _preference(place: str, question: Question) -> Preference:
    forms = [
        Conversation(place, [_asked(question), _answered(write(question.result))], given=1) for write in (in_words, str)
    ]
    return Preference(place, question.text, *forms)


@dataclass(frozen=True, kw_only=True)
class NumberPrompts(_Drawn, PromptConfig):
    """Prompts about numbers, generated without files: sums. The column `answer` has the right answer for the reward."""

    kind: ClassVar[str] = "number_prompts"

    train_examples: int = 4_000
    """number of training prompts, drawn at random with repetitions"""
    max_prompt_length: int = 64
    """longest prompt in tokens"""
    tokenizer: TokenizerConfig = BYTES
    """tokenizer; ignored with an initial model"""

    def read(self) -> dict[str, list[Prompt]]:
        """Return the prompts by split."""
        return self._each(lambda place, one: Prompt([_asked(one)], {"answer": one.answer}, place), ("sum",))
