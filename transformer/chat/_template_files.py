"""Find the chat template among the files of a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from transformer.chat._template import ChatTemplate, ChatTemplateError
from transformer.config._checks import nearest
from transformer.config._untrusted import parse_json
from transformer.data.tokenizers._pretrained import TEMPLATE_FILES, TEMPLATE_FOLDER

TEMPLATE_FILE, JSON_FILE = TEMPLATE_FILES
CONFIG_FILE = "tokenizer_config.json"
_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
"""special tokens that a template reads as `bos_token` and so on"""


def has_template(files: Mapping[str, bytes]) -> bool:
    """Return whether the files of a tokenizer contain a chat template; `find_template` finds it."""
    return bool(_templates(files, ""))


def find_template(
    files: Mapping[str, bytes], name: str | None = None, *, tools: bool = False, place: str = ""
) -> ChatTemplate:
    """Return the chat template among the files of a tokenizer.

    A template can be in chat_template.jinja (further ones in additional_chat_templates/), in chat_template.json or in
    tokenizer_config.json. The first of these files that has one is used.

    Args:
        files: contents by file name.
        name: name of the template; None: "default", or "tool_use" if there are tools and a template of this name.
        tools: whether tools are offered.
        place: directory of the files, for error messages.

    Raises:
        ChatTemplateError: there is no such template, or it does not parse.
    """
    prefix = f"{place}/" if place else ""
    templates = {key: (f"{prefix}{file}", source) for key, (file, source) in _templates(files, prefix).items()}
    if not templates:
        raise ChatTemplateError(
            f"{place or 'the tokenizer'} has no chat template ({TEMPLATE_FILE}, {JSON_FILE}, or chat_template in "
            f"{CONFIG_FILE}): expected a model trained for conversations. Use `generate` instead, or pass a template "
            "(--template FILE)."
        )
    if name is None:
        name = "tool_use" if tools and "tool_use" in templates else "default"
    if name not in templates:
        raise ChatTemplateError(
            f"{place or 'the tokenizer'} has no chat template {name!r}.{nearest(name, templates)} It has: "
            f"{', '.join(sorted(templates))}. Pass one of these names."
        )
    file, source = templates[name]
    return ChatTemplate(source, file, tuple(special_tokens(files).items()))


def _templates(files: Mapping[str, bytes], prefix: str) -> dict[str, tuple[str, str]]:
    """Return {name: (file, template)}."""
    templates: dict[str, tuple[str, str]] = {}
    for file in sorted(name for name in files if name.startswith(f"{TEMPLATE_FOLDER}/") or name == TEMPLATE_FILE):
        name = "default" if file == TEMPLATE_FILE else file.removeprefix(f"{TEMPLATE_FOLDER}/").removesuffix(".jinja")
        try:
            templates[name] = file, files[file].decode("utf-8")
        except UnicodeDecodeError as error:
            raise ChatTemplateError(f"{prefix}{file} is not UTF-8: byte {error.start}. Convert it.") from None
    for file in (JSON_FILE, CONFIG_FILE):
        if not templates and file in files:
            value = json_object(files, file, prefix).get("chat_template")
            templates = {key: (file, source) for key, source in _named(value, f"{prefix}{file}").items()}
    return templates


def _named(value: object, file: str) -> dict[str, str]:
    """Return the templates of a JSON value by name: a text, a list of named templates, or a dict of them."""
    if value is None:
        return {}
    if isinstance(value, list):
        entries = [one if isinstance(one, dict) else {} for one in value]
        value = {one.get("name"): one.get("template") for one in entries}
    templates = {"default": value} if isinstance(value, str) else value
    pairs = templates.items() if isinstance(templates, dict) else ()
    if not pairs or not all(isinstance(name, str) and isinstance(source, str) for name, source in pairs):
        raise ChatTemplateError(
            f'chat_template in {file} must be a text, or a list of {{"name": ..., "template": ...}}, got '
            f"{json.dumps(value, default=str)[:80]}. Download the file again."
        )
    return dict(pairs)


def special_tokens(files: Mapping[str, bytes]) -> dict[str, str]:
    """Return the names of special tokens that a template may use: {"bos_token": "<s>", ...}."""
    tokens = {}
    for file in ("special_tokens_map.json", CONFIG_FILE):
        values = json_object(files, file, "")
        for role in _ROLES:
            token = values.get(f"{role}_token")
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                tokens[f"{role}_token"] = token
    return tokens


def json_object(files: Mapping[str, bytes], file: str, prefix: str) -> dict[str, Any]:
    """Return the JSON object of a file; {} if the file is missing or holds something else."""
    try:
        value = parse_json(files.get(file, b"{}"))
    except ValueError as error:
        raise ChatTemplateError(f"{prefix}{file} is not valid JSON: {error}. Download the file again.") from None
    return value if isinstance(value, dict) else {}
