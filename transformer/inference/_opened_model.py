"""Methods of a loaded model with text in and text out; they call the functions of this package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from transformer.config._checks import ConfigError

if TYPE_CHECKING:
    import numpy as np

    from transformer.chat._chat import Chat
    from transformer.chat._image_prompts import ImagePrompts
    from transformer.inference._loading import LoadedModel
    from transformer.inference._text_inputs import Class


class TextMethods:
    """Text in, text out: `generate`, `chat`, `translate`, `embed` and `classify`, for the models that have them."""

    def generate(
        self: LoadedModel,
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
        from transformer.generate._prompts import check_text_model
        from transformer.generate._sampling import Sampling
        from transformer.inference._generate import continue_texts, translate
        from transformer.nn.models._seq2seq import Seq2Seq

        check_text_model("generate", self.model, self.params)
        translates = isinstance(self.model, Seq2Seq)
        sampling = Sampling(temperature=0.0 if translates else temperature, top_k=top_k, top_p=top_p)
        options = {"sampling": sampling, "seed": seed}
        if translates:
            return translate(self, [prompt], max_new_tokens=max_new_tokens, **options)[0].output
        options |= {"max_new_tokens": 200 if max_new_tokens is None else max_new_tokens}
        return continue_texts(self, [prompt], parse_special=parse_special, **options)[0].output

    def chat(self: LoadedModel, messages: str | Sequence[dict[str, Any]], **options: Any) -> str:
        """Return the reply of a chat model.

        Args:
            messages: the message of the user, or the messages of a conversation, each with `role` and `content`.
            **options: options of `transformer.chat.Chat.stream`, such as `max_new_tokens`.

        Raises:
            ConfigError: the model is not a causal model, or it has no chat template.
        """
        given = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        return open_chat(self).reply(given, **options).text

    def translate(self: LoadedModel, texts: str | Sequence[str], **options: Any) -> Any:
        """Return the translation of a text, or those of a list of texts, by beam search.

        Args:
            texts: one text, or several.
            **options: options of `transformer.inference.translate_lines`.

        Raises:
            ConfigError: the model does not translate text.
        """
        from transformer.inference._translate import translate_lines

        given = [texts] if isinstance(texts, str) else list(texts)
        found = [line.best[0].text for chunk in translate_lines(self, given, **options) for line in chunk]
        return found[0] if isinstance(texts, str) else found

    def embed(self: LoadedModel, texts: str | Sequence[str]) -> np.ndarray:
        """Return the vector (D,) of a text, or the vectors (n, D) of n texts, pooled as the model's files say.

        Raises:
            ConfigError, ValueError: see `transformer.inference.embed`.
        """
        from transformer.inference._sentences import sentence_settings
        from transformer.inference._text_inputs import embed

        settings = None if self.pretrained is None else sentence_settings(self.directory)
        vectors = embed(self, [texts] if isinstance(texts, str) else texts, settings)
        return vectors[0] if isinstance(texts, str) else vectors

    def classify(self: LoadedModel, texts: str | Sequence[str] | np.ndarray) -> Class | list[Class]:
        """Return the most probable class of a text, or those of a list of texts.

        For a classifier of time series, pass one series (context_length, channels), or n of them (n, context_length,
        channels), instead of texts.

        Raises:
            ConfigError, ValueError: see `transformer.inference.classify` and `classify_series`.
        """
        from transformer.nn.models._series import SeriesClassifier

        if isinstance(self.model, SeriesClassifier):
            from transformer.inference._series import classify_series

            single = getattr(texts, "ndim", 3) == 2
            found = classify_series(self, texts[None] if single else texts)
            return found[0] if single else found
        from transformer.inference._text_inputs import classify

        found = classify(self, [texts] if isinstance(texts, str) else texts)
        return found[0] if isinstance(texts, str) else found


def open_chat(opened: LoadedModel, template: Any = None, images: ImagePrompts | None = None) -> Chat:
    """Return the chat of a model with its chat template, or with this one; `images`: how it reads images.

    Raises:
        ConfigError: the model is not a causal model, or it has no chat template.
        ValueError: the template is invalid.
    """
    from transformer.chat._chat import Chat
    from transformer.chat._template import find_template
    from transformer.nn.models._causal_lm import CausalLM

    if not isinstance(opened.model, CausalLM):
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
