"""Texts for a model, from the command line or stdin, and texts by it."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformer.cli._streams import decode_argument
from transformer.config._checks import ConfigError
from transformer.generate._generation import generate
from transformer.generate._sampling import Sampling
from transformer.nn.models._seq2seq import Seq2Seq

if TYPE_CHECKING:
    from transformer.data._tokenizer import Tokenizer
    from transformer.inference._loading import LoadedModel


UNBOUNDED = 2**30
"""context of a model that reads any number of tokens"""

MOST_SOURCE_TOKENS = 16_384
"""tokens of a source that is translated whole: a tiny model takes 15 s for them on two cores"""
MOST_PROMPTS = 10_000
"""prompts that are translated as one batch"""
MOST_NAMED = 5
"""words or characters that a warning names"""


@dataclass(frozen=True)
class GeneratedText:
    """What a model made of a prompt: `output` is the text it wrote."""

    prompt: str
    output: str
    ended: bool
    """it ended by itself, rather than at max_new_tokens"""


def read_prompts(given: Sequence[str], *, lines: bool, option: str = "--prompt") -> list[str]:
    """The prompts given; "-" stands for stdin, and so does nothing when stdin is no terminal.

    Of stdin every line is a prompt where `lines` (a translation), and all of it (but for its last line end) is one
    prompt else. ConfigError when there is none, ValueError when stdin is no text.
    """
    check_prompts(given, option)
    prompts: list[str] = []
    for prompt in given or ["-"]:
        prompts += _stdin_prompts(lines, option) if prompt == "-" else [decode_argument(prompt)]
    return prompts


def check_prompts(given: Sequence[str], option: str = "--prompt") -> None:
    """ConfigError where there is neither a prompt nor a stdin to read one from."""
    if not given and (sys.stdin is None or sys.stdin.isatty()):
        raise ConfigError(f'there is no {option[2:]}. Give {option} "...", or pipe a text into this command.')


def _stdin_prompts(lines: bool, option: str) -> list[str]:
    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"stdin is not UTF-8 text: byte {error.start} can't be read. Convert it to UTF-8.") from None
    text = text.replace("\r\n", "\n").removesuffix("\n")
    if not text.strip():
        what = option[2:]
        raise ValueError(f'the {what} is empty: nothing came from stdin. Give {option} "...", or pipe a text.')
    return [line for line in text.split("\n") if line.strip()] if lines else [text]


class UnknownParts:
    """The words and characters of texts that a model's tokenizer does not know, collected for one warning."""

    def __init__(self, run: LoadedModel):
        self._run = run
        self.counts: Counter[str] = Counter()

    def add(self, text: str, *, normalize: bool = True) -> None:
        """Look at one more text, which the model reads as a source or prompt, or as it is."""
        try:
            text = self._run.tokenizer.normalize(text) if normalize else text
            self.counts.update(self._run.tokenizer.unknown_parts(text))
        except ValueError:  # said when it is encoded
            return

    def warn(self) -> None:
        """Warn of what was found: at most `MOST_NAMED` of it by name."""
        if not self.counts:
            return
        named = [f"{part!r:.40}{f' ({n:,} times)' if n > 1 else ''}" for part, n in self.counts.most_common(MOST_NAMED)]
        more = f" and {len(self.counts) - MOST_NAMED:,} more" if len(self.counts) > MOST_NAMED else ""
        total = self.counts.total()
        what = f"{total:,} words or characters" if total > 1 else "a word or character"
        warnings.warn(
            f"the tokenizer does not know {what} of the input, which the model reads as an unknown token or not at "
            f"all: {', '.join(named)}{more}.",
            stacklevel=2,
        )


def warn_of_unknown(run: LoadedModel, texts: Iterable[str], *, normalize: bool = True) -> None:
    """Warn once of all that the tokenizer does not know in the texts."""
    found = UnknownParts(run)
    for text in texts:
        found.add(text, normalize=normalize)
    found.warn()


def encode_prompt(run: LoadedModel, prompt: str) -> list[int]:
    """Token ids of a prompt.

    Raises:
        ValueError: nothing in it, text that the tokenizer doesn't know, or more than a learned position table holds.
    """
    ids = encode(run, prompt, "prompt")
    if not ids:
        left = "" if not prompt.strip() else f" (nothing of {prompt!r} is left as the model reads it)"
        raise ValueError(f"the prompt is empty{left}: give at least one word or character.")
    return ids


def encode(run: LoadedModel, text: str, what: str) -> list[int]:
    """Token ids of a text; `what` names it in errors. ValueError as `encode_prompt`, but an empty text is fine."""
    tokenizer = run.tokenizer
    try:
        ids = tokenizer.encode_source(text) if what == "prompt" else tokenizer.encode(text)
    except ValueError as error:
        raise ValueError(f"the {what} can't be read: {error}") from error
    config = run.model.config
    if what == "prompt" and isinstance(run.model, Seq2Seq) and len(ids) > MOST_SOURCE_TOKENS:
        raise ValueError(
            f"the prompt is too long: {len(ids):,} tokens, but at most {MOST_SOURCE_TOKENS:,} of a source are read at "
            "once, because time grows with the square of them. Shorten it, or pipe it line by line into `translate`."
        )
    limit = config.longest_source if what == "prompt" and isinstance(run.model, Seq2Seq) else config.max_length
    if limit is not None and len(ids) > limit:
        raise ValueError(
            f"the {what} is too long: {len(ids)} tokens, but the model's learned position table has {limit} "
            f"(model.max_length). Shorten it."
        )
    return ids


def translate(
    run: LoadedModel, prompts: Sequence[str], *, max_new_tokens: int, sampling: Sampling, seed: int
) -> list[GeneratedText]:
    """The target that an encoder-decoder writes for each source.

    Raises:
        ConfigError: nothing says what a target begins with.
        ValueError: a source that can't be read, or more than `MOST_PROMPTS`.
    """
    if len(prompts) > MOST_PROMPTS:
        raise ValueError(
            f"{len(prompts):,} prompts are too many for one batch: expected at most {MOST_PROMPTS:,}. Pipe the lines "
            "into `translate`, which reads them chunk by chunk."
        )
    begin = run.target_start
    tokenizer, limit = run.tokenizer, run.model.config.max_length
    sources = [encode_prompt(run, prompt) for prompt in prompts]
    most = max_new_tokens if limit is None else min(max_new_tokens, limit - len(begin))
    rows = generate(
        run.model,
        run.params,
        [begin] * len(sources),
        sources=sources,
        eos_id=run.eos_ids,
        max_new_tokens=most,
        sampling=dataclasses.replace(sampling, suppress=run.suppressed),
        seed=seed,
    )
    return [
        GeneratedText(prompt, tokenizer.decode(row), len(row) < most) for prompt, row in zip(prompts, rows, strict=True)
    ]


@dataclass(frozen=True)
class _Text:
    """A text that grows."""

    prompt: str
    ids: list[int]
    left: int
    """tokens still to be written"""
    new: list[int] = dataclasses.field(default_factory=list)
    ended: bool = False

    def piece(self, context: int) -> tuple[list[int], int]:
        """What the model is shown next, and how many tokens it writes after that."""
        if len(self.ids) < context:
            return self.ids, min(self.left, context - len(self.ids))
        half = max(context // 2, 1)
        return self.ids[-half:], min(self.left, context - half or 1)

    def grown(self, row: list[int], wanted: int) -> _Text:
        ended = len(row) < wanted
        left = 0 if ended else self.left - len(row)
        return dataclasses.replace(self, ids=self.ids + row, new=self.new + row, left=left, ended=ended)


def continue_texts(
    run: LoadedModel, prompts: Sequence[str], *, max_new_tokens: int, sampling: Sampling, seed: int, **ways: Any
) -> list[GeneratedText]:
    """How a causal model goes on with each prompt; `ways` are the `draft` or `slots` of `generate`.

    A model trained on windows of n tokens doesn't know later positions: what doesn't fit one window is written in
    pieces, each after the last half window of the text so far. A prompt longer than a window is read from its end,
    with a warning.
    """
    context, tokenizer = run.context or UNBOUNDED, run.tokenizer
    texts = [_Text(prompt, encode_prompt(run, prompt), max_new_tokens) for prompt in prompts]
    if any(len(text.ids) >= context for text in texts):
        warnings.warn(
            f"a prompt fills the {context} tokens that the model was trained to read at once: only its last "
            f"{max(context // 2, 1)} tokens are read.",
            stacklevel=2,
        )
    while any(text.left for text in texts):
        groups: dict[int, list[int]] = defaultdict(list)
        for number, text in enumerate(texts):
            if text.left:
                groups[text.piece(context)[1]].append(number)
        for wanted, numbers in groups.items():
            rows = generate(
                run.model,
                run.params,
                [texts[number].piece(context)[0] for number in numbers],
                eos_id=run.eos_ids,
                max_new_tokens=wanted,
                sampling=dataclasses.replace(sampling, suppress=run.suppressed),
                seed=[(seed + 7919 * number + 104_729 * len(texts[number].new)) % 2**32 for number in numbers],
                **ways,
            )
            for number, row in zip(numbers, rows, strict=True):
                texts[number] = texts[number].grown(row, wanted)
    return [GeneratedText(text.prompt, went_on(tokenizer, text.ids, len(text.new)), text.ended) for text in texts]


def went_on(tokenizer: Tokenizer, ids: Sequence[int], new: int) -> str:
    """The text of the last `new` ids, as it stands behind the others: of a text alone some decoders take the first
    blank away.
    """
    prompt = len(ids) - new
    before, whole = tokenizer.decode(ids[:prompt]), tokenizer.decode(ids)
    # Where the prompt ends within a character, the two don't begin alike.
    return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(ids[prompt:])


def shown(text: str) -> str:
    """The text, on a terminal without codes that it would obey."""
    if not sys.stdout.isatty():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
