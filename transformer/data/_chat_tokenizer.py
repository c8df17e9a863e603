"""Tokenizers for conversations: a chat template, and special tokens for the markers that it writes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from transformer.config._checks import ConfigError
from transformer.data._config import TokenizerConfig
from transformer.data._turns import Conversation, template_values
from transformer.data.files._texts import read_text
from transformer.data.tokenizers._base import SPECIAL_TOKENS, Tokenizer
from transformer.data.tokenizers._export import as_pretrained
from transformer.data.tokenizers._kinds import build_tokenizer
from transformer.data.tokenizers._pretrained import TEMPLATE_FILES, TEMPLATE_FOLDER, PretrainedTokenizer

_MARKER = re.compile(r"<\|\w+\|>")
_DEFAULT = """\
{%- set markers = {'system': '<|system|>', 'user': '<|user|>', 'assistant': '<|assistant|>', 'tool': '<|tool|>'} -%}
{{- BEGIN -}}
{%- if tools %}{{ markers.system ~ LINE ~ (tools | tojson) ~ LINE }}{% endif -%}
{%- for message in messages -%}
{%- if message.role not in markers %}{{ raise_exception('a role must be system, user, assistant or tool') }}{% endif -%}
{{- markers[message.role] ~ LINE -}}
{%- set text = message.content | default('', true) -%}
{%- if text is not string and message.role != 'tool' -%}{%- set text = text | map(attribute='text') | join -%}
{%- elif text is not string -%}{%- set text = text | tojson -%}{%- endif -%}
{%- if message.role == 'assistant' -%}
{% generation %}
{{- text -}}
{%- for call in message.tool_calls or [] -%}{{- call.function | default(call) | tojson -}}{%- endfor -%}
{{- END -}}
{% endgeneration %}
{%- if not loop.last -%}{{- LINE -}}{%- endif -%}
{%- else -%}
{{- text ~ LINE -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ markers.assistant ~ LINE }}{% endif -%}
"""


def default_template(end: str, *, begin: str = "", line: str = "") -> str:
    """Return a simple chat template: each message after a marker with its role, the assistant's with an end token.

    With a line feed as `line`, which follows a marker and a message, this is the template of Tulu 2 (Ivison et al.
    2023, arXiv 2311.10702). A call of a tool is written as JSON. `end` and `begin` (of a conversation) name tokens.
    """
    source = _DEFAULT
    for name, text in (("BEGIN", begin), ("END", end), ("LINE", line)):
        source = re.sub(rf"\b{name}\b", lambda _, text=text: json.dumps(text), source)
    return source


def markers_in(template: str) -> list[str]:
    """Return the names of the markers in a template, such as `<|user|>`, in order."""
    return list(dict.fromkeys(_MARKER.findall(template)))


def chat_tokenizer(
    given: Tokenizer | None,
    template_path: str | None,
    options: TokenizerConfig,
    texts: Mapping[str, Sequence[str]],
    conversations: Mapping[str, Sequence[Conversation]],
    date: str,
) -> PretrainedTokenizer:
    """Return a tokenizer with a chat template: that of a model (`given`), or a new one that is built from texts.

    The template writes words of its own between the messages of the conversations, such as names of roles: a new
    vocabulary of characters or words contains these, too. ConfigError if the template does not parse, or there is none
    and no end token for the default one; ValueError if it refuses a conversation.
    """
    template = None
    if template_path is not None:
        from transformer.chat._template import ChatTemplate

        template = ChatTemplate(read_text(template_path), template_path, option="--data.template-path").source
    if given is not None:
        return with_template(given, template)
    if options.kind in ("char", "word"):
        source = default_template(SPECIAL_TOKENS[2]) if template is None else template
        now = datetime.fromisoformat(date)
        texts = {split: [*part, *_written(source, conversations[split], now)] for split, part in texts.items()}
    return with_markers(build_tokenizer(options, texts["train"], texts["validation"]), template)


def _written(source: str, conversations: Sequence[Conversation], now: datetime) -> Iterator[str]:
    """Yield the texts of rendered conversations between their markers and special tokens.

    Each role is rendered in an empty message, too: people will use other roles than the data does.
    """
    from transformer.chat._template import ChatTemplate

    names = zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL_TOKENS[:4], strict=True)
    template = ChatTemplate(source, special_tokens=tuple(names))
    divide = re.compile("|".join(map(re.escape, [*markers_in(source), *SPECIAL_TOKENS]))).split
    for role in ("system", "user", "assistant", "tool"):
        yield from divide(template.attempt({"role": role, "content": ""}) or "")
    for one in conversations:
        try:
            values = template_values(template, one)
            yield from divide(template.run(values, now=now).text)
        except ValueError as error:
            raise ValueError(f"{one.place}: {error}") from None
    yield from divide(template.attempt({"role": "user", "content": ""}, prompt=True) or "")


def with_markers(built: Tokenizer, template: str | None) -> PretrainedTokenizer:
    """Return a tokenizer with a chat template (None: the default one), and a special token for each of its markers."""
    template = default_template(SPECIAL_TOKENS[2]) if template is None else template
    return as_pretrained(built, markers_in(template), template)


def with_template(tokenizer: Tokenizer, template: str | None) -> PretrainedTokenizer:
    """Return the tokenizer of a model with a chat template; None: that of its files, or a default one.

    A model has no free rows of the embedding for new tokens. So in the default template, the markers of roles are
    ordinary text; the end of a message is the end token of the model. Raises ConfigError if it has none.
    """
    from transformer.chat._template_files import find_template

    found = as_pretrained(tokenizer)
    if template is None:
        if _has_template(found.files):
            find_template(found.files)  # an invalid template is an error now
            return found
        if found.eos_id is None:
            raise ConfigError(
                "the tokenizer of the model has neither a chat template nor an end token. Pass a template "
                "(--data.template-path FILE)."
            )
        added = found.bos_id is not None and found.bos_id in found.encode_source("")
        names = dict(zip(("end", "begin"), found.tokens([found.eos_id, *[found.bos_id] * added]), strict=False))
        template = default_template(**names, line="\n")
    # Other templates of the model, such as one for tools, would be used instead of this one.
    names = [name for name in found.files if name not in TEMPLATE_FILES and not name.startswith(f"{TEMPLATE_FOLDER}/")]
    others = {name: found.files[name] for name in names}
    return PretrainedTokenizer({**others, TEMPLATE_FILES[0]: template.encode()}, found.vocab_size)


def _has_template(files: Mapping[str, bytes]) -> bool:
    from transformer.chat._template_files import CONFIG_FILE, json_object

    listed = any(name in files for name in TEMPLATE_FILES)
    return listed or json_object(files, CONFIG_FILE, "").get("chat_template") is not None


def texts_in(value: Any) -> Iterator[str]:
    """Yield the texts in messages and their parts, and calls, results and schemas of tools as JSON, as templates do."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple) and all(map(_is_message, value)):
        for one in value:
            yield from texts_in(one)
    elif _is_message(value):
        for key, one in value.items():
            if key not in ("role", "type"):
                yield from texts_in(one)
    elif value is not None:
        yield json.dumps(value, ensure_ascii=False)


def _is_message(value: Any) -> bool:
    """Return whether a value is a message or a part of one."""
    return isinstance(value, Mapping) and ("role" in value or value.get("type") == "text")
