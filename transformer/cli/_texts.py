"""Read prompts from the command line or stdin, encode them, and generate translations and continuations."""

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
"""context length of a model without a limit"""

MOST_SOURCE_TOKENS = 16_384
"""maximum number of source tokens; a tiny model takes 15 s for such a source on two cores"""
MOST_PROMPTS = 10_000
"""maximum number of prompts in one call of `translate`"""
MOST_NAMED = 5
"""maximum number of words or characters that a warning lists"""


@dataclass(frozen=True)
class GeneratedText:
    """A prompt, and the text that the model generated for it (`output`)."""

    prompt: str
    output: str
    ended: bool
    """the model generated an end token; False: it reached max_new_tokens"""


def read_prompts(given: Sequence[str], *, lines: bool, option: str = "--prompt") -> list[str]:
    """Return the prompts of the command line and of stdin.

    Args:
        given: prompts of the command line; "-" reads stdin. If there are none, stdin is read, unless it is a terminal.
        lines: each non-empty line of stdin is a prompt; False: all of stdin, without its last line end, is one prompt.
        option: name of the option, for error messages.

    Raises:
        ConfigError: there is no prompt.
        ValueError: stdin is empty, or is not UTF-8.
    """
    check_prompts(given, option)
    prompts: list[str] = []
    for prompt in given or ["-"]:
        prompts += _stdin_prompts(lines, option) if prompt == "-" else [decode_argument(prompt)]
    return prompts


def check_prompts(given: Sequence[str], option: str = "--prompt") -> None:
    """Raise ConfigError if there is neither a prompt nor a stdin to read one from."""
    if not given and (sys.stdin is None or sys.stdin.isatty()):
        raise ConfigError(f'{option} is missing. Pass {option} "...", or pipe a text into this command.')


def _stdin_prompts(lines: bool, option: str) -> list[str]:
    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"stdin is not UTF-8 text: byte {error.start} can't be read. Convert it to UTF-8.") from None
    text = text.replace("\r\n", "\n").removesuffix("\n")
    if not text.strip():
        what = option[2:]
        raise ValueError(f'the {what} from stdin is empty. Pass {option} "...", or pipe a text into this command.')
    return [line for line in text.split("\n") if line.strip()] if lines else [text]


class UnknownParts:
    """Collect the words and characters of texts that a model's tokenizer does not know, for one warning."""

    def __init__(self, run: LoadedModel):
        self._run = run
        self.counts: Counter[str] = Counter()

    def add(self, text: str, *, normalize: bool = True) -> None:
        """Add the unknown parts of a text; `normalize` applies the tokenizer's normalization of sources and prompts."""
        try:
            text = self._run.tokenizer.normalize(text) if normalize else text
            self.counts.update(self._run.tokenizer.unknown_parts(text))
        except ValueError:  # encoding the text reports the error
            return

    def warn(self) -> None:
        """Warn about the unknown parts, if any; list at most `MOST_NAMED` of them."""
        if not self.counts:
            return
        named = [f"{part!r:.40}{f' ({n:,} times)' if n > 1 else ''}" for part, n in self.counts.most_common(MOST_NAMED)]
        more = f" and {len(self.counts) - MOST_NAMED:,} more" if len(self.counts) > MOST_NAMED else ""
        total = self.counts.total()
        what = f"{total:,} words or characters" if total > 1 else "a word or character"
        warnings.warn(
            f"the tokenizer does not know {what} of the input; each is replaced by the unknown token or removed: "
            f"{', '.join(named)}{more}.",
            stacklevel=2,
        )


def warn_of_unknown(run: LoadedModel, texts: Iterable[str], *, normalize: bool = True) -> None:
    """Warn once about all words and characters of the texts that the tokenizer does not know."""
    found = UnknownParts(run)
    for text in texts:
        found.add(text, normalize=normalize)
    found.warn()


def encode_prompt(run: LoadedModel, prompt: str) -> list[int]:
    """Return the token ids of a prompt.

    Raises:
        ValueError: the prompt is empty, the tokenizer can't encode it, or it is too long for the model.
    """
    ids = encode(run, prompt, "prompt")
    if not ids:
        left = "" if not prompt.strip() else f" (nothing is left of {prompt!r} after normalization)"
        raise ValueError(f"the prompt is empty{left}. Pass at least one word or character.")
    return ids


def encode(run: LoadedModel, text: str, what: str) -> list[int]:
    """Return the token ids of a text, which may be empty.

    Args:
        run: the model and its tokenizer.
        text: the text.
        what: name of the text in error messages; "prompt" encodes it as a source.

    Raises:
        ValueError: the tokenizer can't encode the text, or it is too long for the model.
    """
    tokenizer = run.tokenizer
    try:
        ids = tokenizer.encode_source(text) if what == "prompt" else tokenizer.encode(text)
    except ValueError as error:
        raise ValueError(f"the {what} can't be encoded: {error}") from error
    config = run.model.config
    if what == "prompt" and isinstance(run.model, Seq2Seq) and len(ids) > MOST_SOURCE_TOKENS:
        raise ValueError(
            f"the prompt is too long: expected at most {MOST_SOURCE_TOKENS:,} source tokens, because the time grows "
            f"with the square of the length, got {len(ids):,}. Shorten it, or pipe it line by line into `translate`."
        )
    limit = config.longest_source if what == "prompt" and isinstance(run.model, Seq2Seq) else config.max_length
    if limit is not None and len(ids) > limit:
        raise ValueError(
            f"the {what} is too long: expected at most {limit} tokens, the size of the model's learned position table "
            f"(model.max_length), got {len(ids)}. Shorten it."
        )
    return ids


def translate(
    run: LoadedModel, prompts: Sequence[str], *, max_new_tokens: int, sampling: Sampling, seed: int
) -> list[GeneratedText]:
    """Translate each prompt with an encoder-decoder.

    Raises:
        ConfigError: the model defines no start token of targets.
        ValueError: a source can't be encoded, or there are more than `MOST_PROMPTS` prompts.
    """
    if len(prompts) > MOST_PROMPTS:
        raise ValueError(
            f"too many prompts: expected at most {MOST_PROMPTS:,}, got {len(prompts):,}. Pipe them as lines into "
            "`translate`, which reads them in chunks."
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
    """A prompt and its continuation so far."""

    prompt: str
    ids: list[int]
    left: int
    """number of tokens still to generate"""
    new: list[int] = dataclasses.field(default_factory=list)
    ended: bool = False

    def piece(self, context: int) -> tuple[list[int], int]:
        """Return the token ids of the model's next input, and the number of tokens to generate after it.

        If the text fills the context, the input is its last half context, so that there is room for new tokens.
        """
        if len(self.ids) < context:
            return self.ids, min(self.left, context - len(self.ids))
        half = max(context // 2, 1)
        return self.ids[-half:], min(self.left, context - half or 1)

    def grown(self, row: list[int], wanted: int) -> _Text:
        ended = len(row) < wanted
        left = 0 if ended else self.left - len(row)
        return dataclasses.replace(self, ids=self.ids + row, new=self.new + row, left=left, ended=ended)


def continue_texts(
    run: LoadedModel, prompts: Sequence[str], *, max_new_tokens: int, sampling: Sampling, seed: int, **options: Any
) -> list[GeneratedText]:
    """Continue each prompt with a causal model; `options` are the `draft` or `slots` of `generate`.

    A model with a context of n tokens can't use later positions. A longer text is generated in pieces, each from the
    last half context of the text so far. If a prompt fills the context, only its end is used, with a warning.
    """
    context, tokenizer = run.context or UNBOUNDED, run.tokenizer
    texts = [_Text(prompt, encode_prompt(run, prompt), max_new_tokens) for prompt in prompts]
    if any(len(text.ids) >= context for text in texts):
        warnings.warn(
            f"a prompt fills the model's context of {context} tokens: only its last {max(context // 2, 1)} tokens are "
            f"used.",
            stacklevel=2,
        )
    while any(text.left for text in texts):
        # Texts that generate the same number of tokens next form one batch.
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
                # Distinct primes give each text, and each of its pieces, another seed.
                seed=[(seed + 7919 * number + 104_729 * len(texts[number].new)) % 2**32 for number in numbers],
                **options,
            )
            for number, row in zip(numbers, rows, strict=True):
                texts[number] = texts[number].grown(row, wanted)
    return [GeneratedText(text.prompt, continuation(tokenizer, text.ids, len(text.new)), text.ended) for text in texts]


def continuation(tokenizer: Tokenizer, ids: Sequence[int], new: int) -> str:
    """Return the text of the last `new` ids.

    The whole sequence is decoded and the text of the prompt is removed. Decoding only the new ids would be wrong: some
    tokenizers remove the first space of a text.
    """
    prompt = len(ids) - new
    before, whole = tokenizer.decode(ids[:prompt]), tokenizer.decode(ids)
    # If the prompt ends within a multi-byte character, `whole` does not start with `before`.
    return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(ids[prompt:])


def shown(text: str) -> str:
    """Return the text as it is printed: on a terminal, control characters are escaped."""
    if not sys.stdout.isatty():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
