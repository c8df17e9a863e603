"""The model that `transformer.open` returns: a loaded model with methods for text in and text out."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from transformer.chat._chat import Chat
from transformer.chat._image_prompts import ImagePrompts
from transformer.chat._template import ChatTemplate
from transformer.chat._template_files import find_template
from transformer.config._checks import ConfigError
from transformer.generate._prompts import check_text_model
from transformer.generate._sampling import Sampling
from transformer.inference._classify import Class, classify, classify_series
from transformer.inference._embed import embed
from transformer.inference._generate import continue_texts, translate
from transformer.inference._load import load_model
from transformer.inference._loaded_model import LoadedModel
from transformer.inference._sentences import sentence_settings
from transformer.inference._translate import translate_lines


class OpenedModel(LoadedModel):
    """A loaded model with methods for text in and text out; which of them it supports depends on its kind."""

    def generate(
        self,
        prompt: str,
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        parse_special: bool = True,
    ) -> str:
        """Return the text that a causal model generates after the prompt; an encoder-decoder translates the prompt.

        The result is that of the command `generate` with the same options.

        Args:
            prompt: text to continue.
            max_new_tokens: maximum number of new tokens; None: 200 for a continuation, and for a translation the limit
                in generation_config.json, or 128.
            temperature: sampling temperature; 0 is greedy. An encoder-decoder decodes greedily, unless its
                generation_config.json recommends a beam search.
            top_k: sample from the k most likely tokens; None: all.
            top_p: sample from the smallest set of most likely tokens with this total probability; None: all.
            seed: random seed.
            parse_special: the name of a special token in the prompt, such as `<|im_end|>`, is that token; False: it is
                text. For an encoder-decoder it always is text.

        Raises:
            ValueError: the model generates no text, or the prompt is empty or too long.
        """
        sampling = Sampling(temperature=0.0 if self.kind.source else temperature, top_k=top_k, top_p=top_p)
        check_text_model("generate", self.model, self.params)
        if self.kind.source:
            (found,) = translate(self, [prompt], max_new_tokens=max_new_tokens, sampling=sampling, seed=seed)
            return found.output
        limits = {"max_new_tokens": 200 if max_new_tokens is None else max_new_tokens, "parse_special": parse_special}
        return continue_texts(self, [prompt], sampling=sampling, seed=seed, **limits)[0].output

    def chat(self, messages: str | Sequence[dict[str, Any]], **options: Any) -> str:
        """Return the reply of a chat model.

        Args:
            messages: the message of the user, or the messages of a conversation, each with `role` and `content`.
            **options: options of `transformer.chat.Chat.stream`, such as `max_new_tokens`.

        Raises:
            ConfigError: the model is not a causal model, or it has no chat template.
        """
        given = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        return open_chat(self).reply(given, **options).text

    def translate(self, texts: str | Sequence[str], **options: Any) -> str | list[str]:
        """Return the translation of a text, or those of a list of texts, by beam search.

        Args:
            texts: one text, or several.
            **options: options of `transformer.inference.translate_lines`.

        Raises:
            ConfigError: the model does not translate text.
        """
        chunks = translate_lines(self, [texts] if isinstance(texts, str) else texts, **options)
        found = [line.best[0].text for chunk in chunks for line in chunk]
        return found[0] if isinstance(texts, str) else found

    def embed(self, texts: str | Sequence[str]) -> np.ndarray:
        """Return the vector (D,) of a text, or the vectors (n, D) of n texts, pooled as the model's files say.

        Raises:
            ConfigError, ValueError: see `transformer.inference.embed`.
        """
        settings = None if self.pretrained is None else sentence_settings(self.directory)
        return _apply(lambda given: embed(self, given, settings), texts)

    def classify(self, texts: str | Sequence[str] | np.ndarray) -> Class | list[Class]:
        """Return the most probable class of a text, or those of a list of texts.

        For a classifier of time series, pass one series (context_length, channels), or n of them (n, context_length,
        channels), instead of texts.

        Raises:
            ConfigError, ValueError: see `transformer.inference.classify` and `classify_series`.
        """
        compute = classify_series if self.kind.classifies == "series" else classify
        return _apply(lambda given: compute(self, given), texts)


def open_model(
    source: str | os.PathLike, *, step: Literal["best", "newest"] | int = "best", **options: Any
) -> OpenedModel:
    """Load a model from the workdir of a training run, or from pretrained weights.

    Args:
        source: a workdir, or a source for `zoo.load_pretrained`.
        step: which checkpoint of a workdir to load.
        **options: options of `zoo.load_pretrained`.

    Raises:
        FileNotFoundError: the directory does not exist, or it has no checkpoint.
        ConfigError: the directory is neither a workdir nor a directory of weights, or the options do not apply to it.
        ValueError: a file is invalid or not supported.
    """
    return OpenedModel(**vars(load_model(source, step=step, **options)))


def open_chat(opened: LoadedModel, template: ChatTemplate | None = None, images: ImagePrompts | None = None) -> Chat:
    """Return the chat of a model with its chat template, or with this one; `images`: how it reads images."""
    if opened.kind.writes != "continuation":
        kind = type(opened.model).__name__
        raise ConfigError(
            f"a conversation needs a causal model; {opened.directory} contains a model of type {kind}. Pass the "
            "directory of a model trained for conversations."
        )
    if template is None:
        template = find_template(getattr(opened.tokenizer, "files", {}), place=str(opened.directory))
    # Without special tokens, `Chat` adds those of the tokenizer.
    options = {"context": opened.context, "suppress": opened.suppressed, "images": images}
    return Chat(opened.model, opened.params, opened.tokenizer, template=template, **options)


def _apply(compute: Callable[[Any], Any], inputs: Any) -> Any:
    """Return the results for several inputs, or the result for a single text or series."""
    single = isinstance(inputs, str) or getattr(inputs, "ndim", 3) == 2
    return compute([inputs])[0] if single else compute(inputs)
