"""Text in, text out: continuations and translations of prompts, with the limits of the model."""

from __future__ import annotations

import dataclasses
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformer.chat._chat import ReplyStream
from transformer.chat._image_prompts import ImagePrompts
from transformer.chat._pieces import Detokenizer
from transformer.config._checks import ConfigError
from transformer.data.tokenizers._base import Tokenizer
from transformer.generate._batches import beam_search_all
from transformer.generate._beam import Beam
from transformer.generate._generation import generate
from transformer.generate._lookup import PromptLookup
from transformer.generate._sampling import Sampling
from transformer.generate._speculative import Draft
from transformer.generate._streaming import Piece, TokenStream
from transformer.inference._generation_settings import longest_target, recommended_beam
from transformer.inference._image_prompts import encode_with_images
from transformer.inference._loaded_model import LoadedModel

UNBOUNDED = 2**30
"""context length of a model without a limit"""
MOST_SOURCE_TOKENS = 16_384
"""maximum number of source tokens; a tiny model takes 15 s for such a source on two cores"""
USUAL_TARGET = 128
"""maximum number of tokens of a translation, if neither the caller nor generation_config.json limits it"""
MOST_PROMPTS = 10_000
"""maximum number of prompts in one call of `translate`"""


@dataclass(frozen=True)
class GeneratedText:
    """A prompt, and the text that the model generated for it (`output`)."""

    prompt: str
    output: str
    ended: bool
    """the model generated an end token; False: it reached max_new_tokens"""


def encode_prompt(opened: LoadedModel, prompt: str, *, parse_special: bool = True) -> list[int]:
    """Return the token ids of a prompt of a causal model, or of a source of an encoder-decoder.

    With `parse_special`, the name of a special token in a prompt is that token. In a source it is always text. Raises
    ValueError for a prompt that is empty, too long for the model, or that the tokenizer can't encode.
    """
    ids = encode(opened, prompt, "prompt", parse_special=parse_special)
    if not ids:
        left = "" if not prompt.strip() else f" (nothing is left of {prompt!r} after normalization)"
        raise ValueError(f"the prompt is empty{left}. Pass at least one word or character.")
    return ids


def encode(opened: LoadedModel, text: str, what: str, *, parse_special: bool = True) -> list[int]:
    """Return the token ids of a text, which may be empty; errors and `parse_special` are those of `encode_prompt`.

    `what` is the name of the text in error messages; "prompt" encodes it as a prompt or source.
    """
    tokenizer = opened.tokenizer
    try:
        if what != "prompt":
            ids = tokenizer.encode(text)
        elif opened.kind.source:
            ids = tokenizer.encode_source(text)
        else:
            ids = tokenizer.encode_prompt(text, parse_special=parse_special)
            _warn_of_two_starts(tokenizer, ids)
    except ValueError as error:
        raise ValueError(f"the {what} can't be encoded: {error}") from error
    config, is_source = opened.model.config, what == "prompt" and opened.kind.source
    if is_source and len(ids) > MOST_SOURCE_TOKENS:
        raise ValueError(
            f"the prompt is too long: expected at most {MOST_SOURCE_TOKENS:,} source tokens, because the time grows "
            f"with the square of the length, got {len(ids):,}. Shorten it, or pipe it line by line into `translate`."
        )
    limit = config.longest_source if is_source else config.max_length
    if limit is not None and len(ids) > limit:
        raise ValueError(
            f"the {what} is too long: expected at most {limit} tokens, the size of the model's learned position table "
            f"(model.position.max_length), got {len(ids)}. Shorten it."
        )
    return ids


def _warn_of_two_starts(tokenizer: Tokenizer, ids: Sequence[int]) -> None:
    """Warn of a prompt that begins with the start token, which the tokenizer adds as well."""
    if tokenizer.bos_id is not None and list(ids[:2]) == [tokenizer.bos_id] * 2:
        (name,) = tokenizer.tokens([tokenizer.bos_id])
        warnings.warn(
            f"the prompt begins with {name}, which the tokenizer also adds: the model reads it twice. Remove it from "
            "the prompt.",
            stacklevel=4,
        )


def translate(
    opened: LoadedModel, prompts: Sequence[str], *, max_new_tokens: int | None, sampling: Sampling, seed: int
) -> list[GeneratedText]:
    """Translate each prompt with an encoder-decoder.

    Without sampling and penalties, the text is that of the beam search and the rules that generation_config.json
    recommends, otherwise greedy. `max_new_tokens` of None is the limit in that file, or `USUAL_TARGET`.
    """
    if len(prompts) > MOST_PROMPTS:
        raise ValueError(
            f"too many prompts: expected at most {MOST_PROMPTS:,}, got {len(prompts):,}. Pipe them as lines into "
            "`translate`, which reads them in chunks."
        )
    begin = opened.target_start
    tokenizer, limit = opened.tokenizer, opened.model.config.max_length
    sources = [encode_prompt(opened, prompt) for prompt in prompts]
    beam = recommended_beam(opened, size=1)
    if beam != Beam(size=1) and sampling.temperature == 0 and not sampling.penalties:
        if max_new_tokens is not None or beam.length_ratio > 0:
            most = longest_target(opened, max_new_tokens or USUAL_TARGET)
            beam = dataclasses.replace(beam, length_ratio=0.0, length_extra=most)
        options = {"begin": begin, "eos_id": opened.eos_ids, "suppress": opened.suppressed, "beam": beam}
        found = [row[0] for row in beam_search_all(opened.model, opened.params, sources, **options)]
        pairs = zip(prompts, found, strict=True)
        return [GeneratedText(prompt, tokenizer.decode(one.tokens), one.ended) for prompt, one in pairs]
    max_new_tokens = max_new_tokens or USUAL_TARGET
    most = max_new_tokens if limit is None else min(max_new_tokens, limit - len(begin))
    rows = generate(
        opened.model,
        opened.params,
        [begin] * len(sources),
        sources=sources,
        eos_id=opened.eos_ids,
        max_new_tokens=most,
        sampling=dataclasses.replace(sampling, suppress=opened.suppressed),
        seed=seed,
    )
    pairs = zip(prompts, rows, strict=True)
    return [GeneratedText(prompt, tokenizer.decode(row), len(row) < most) for prompt, row in pairs]


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
    opened: LoadedModel,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int,
    parse_special: bool = True,
    slots: int | None = None,
    draft: Draft | PromptLookup | None = None,
) -> list[GeneratedText]:
    """Continue each prompt with a causal model; `slots` and `draft` are those of `generate`.

    With `parse_special`, the name of a special token in a prompt is that token, otherwise text.

    A model with a context of n tokens can't use later positions. A longer text is generated in pieces, each from the
    last half context of the text so far. If a prompt fills the context, only its end is used, with a warning. Presence
    and frequency penalties count the tokens of one piece only.
    """
    context, tokenizer = opened.context or UNBOUNDED, opened.tokenizer
    encoded = [encode_prompt(opened, prompt, parse_special=parse_special) for prompt in prompts]
    texts = [_Text(prompt, ids, max_new_tokens) for prompt, ids in zip(prompts, encoded, strict=True)]
    _warn_of_full_context(texts, context)
    while any(text.left for text in texts):
        # Texts that generate the same number of tokens next form one batch.
        groups: dict[int, list[int]] = defaultdict(list)
        for number, text in enumerate(texts):
            if text.left:
                groups[text.piece(context)[1]].append(number)
        for wanted, numbers in groups.items():
            rows = generate(
                opened.model,
                opened.params,
                [texts[number].piece(context)[0] for number in numbers],
                eos_id=opened.eos_ids,
                max_new_tokens=wanted,
                sampling=dataclasses.replace(sampling, suppress=opened.suppressed),
                # Distinct primes give each text, and each of its pieces, another seed.
                seed=[(seed + 7919 * number + 104_729 * len(texts[number].new)) % 2**32 for number in numbers],
                slots=slots,
                draft=draft,
            )
            for number, row in zip(numbers, rows, strict=True):
                texts[number] = texts[number].grown(row, wanted)
    return [GeneratedText(text.prompt, continuation(tokenizer, text.ids, len(text.new)), text.ended) for text in texts]


def _warn_of_full_context(texts: Iterable[_Text], context: int) -> None:
    if any(len(text.ids) >= context for text in texts):
        warnings.warn(
            f"a prompt fills the model's context of {context} tokens: only its last {max(context // 2, 1)} tokens are "
            f"used.",
            stacklevel=3,
        )


def _text_with_images(
    opened: LoadedModel, prompt: str, images: Sequence[str], reader: ImagePrompts, max_new_tokens: int
) -> tuple[_Text, dict[str, Any]]:
    """Return a prompt with images, which is generated in one piece, and the pixels as an option of `generate`."""
    ids, pixels = encode_with_images(opened, prompt, images, reader)
    room = (opened.context or UNBOUNDED) - len(ids)
    if room < 1:
        raise ConfigError(
            f"the prompt and its images have {len(ids):,} tokens: expected fewer than {opened.context:,}, the context "
            f"of the model. Shorten the prompt, or pass fewer images."
        )
    return _Text(prompt, ids, min(max_new_tokens, room)), {"images": pixels}


def continuation(tokenizer: Tokenizer, ids: Sequence[int], new: int) -> str:
    """Return the text of the last `new` ids.

    The whole sequence is decoded and the text of the prompt is removed. Decoding only the new ids would be wrong: some
    tokenizers remove the first space of a text.
    """
    prompt = len(ids) - new
    before, whole = tokenizer.decode(ids[:prompt]), tokenizer.decode(ids)
    # If the prompt ends within a multi-byte character, `whole` does not start with `before`.
    return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(ids[prompt:])


@dataclass(frozen=True)
class StreamedText(GeneratedText):
    """A text that was generated in pieces, with its tokens."""

    tokens: list[str]
    """names of the generated tokens"""
    log_probabilities: list[float]
    """of each token under the model, before penalties, temperature and filters"""
    finish: str
    """why it ended: "end", "stop" or "length"; see `transformer.chat.Reply`"""


def stream_text(
    opened: LoadedModel,
    stream: TokenStream,
    prompt: str,
    *,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int,
    stop: Sequence[str] = (),
    show: Callable[[str], None] = lambda piece: None,
    images: Sequence[str] = (),
    reader: ImagePrompts | None = None,
    parse_special: bool = True,
) -> StreamedText:
    """Continue a prompt with a causal model, and pass each piece of the text to `show` when it is generated.

    With `parse_special`, the name of a special token in the prompt is that token, otherwise text.
    Without stop strings, the text equals that of `continue_texts` for one prompt, up to rounding. A prompt with images
    (paths, and how the model reads them) ends where it fills the context.
    """
    context, more = opened.context or UNBOUNDED, {}
    if reader is None:
        text = _Text(prompt, encode_prompt(opened, prompt, parse_special=parse_special), max_new_tokens)
        _warn_of_full_context([text], context)
    else:
        text, more = _text_with_images(opened, prompt, images, reader, max_new_tokens)

    def generated(text: _Text) -> Iterator[Piece]:
        while text.left:
            ids, wanted = text.piece(context)
            row: list[int] = []
            for piece in stream.generate(
                ids,
                eos_id=opened.eos_ids,
                max_new_tokens=wanted,
                sampling=dataclasses.replace(sampling, suppress=opened.suppressed),
                seed=(seed + 104_729 * len(text.new)) % 2**32,  # as in `continue_texts`
                **more,
            ):
                row += piece.tokens
                yield piece
            text = text.grown(row, wanted)

    pieces = ReplyStream(generated(text), Detokenizer(opened.tokenizer, text.ids), stop)
    for piece in pieces:
        show(piece)
    reply = pieces.reply
    names = opened.tokenizer.tokens(reply.tokens)
    return StreamedText(prompt, reply.text, reply.finish == "end", names, reply.log_probabilities, reply.finish)
