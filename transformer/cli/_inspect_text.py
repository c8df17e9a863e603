"""`python -m transformer inspect`: attention maps of a trained model."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from transformer.cli import _inspect_audio, _inspect_image
from transformer.cli._arguments import PathText, parse
from transformer.cli._chat import check_chat_options, conversation, open_chat
from transformer.cli._models import ModelCommand
from transformer.cli._sampling import switches
from transformer.cli._streams import decode_argument
from transformer.config._checks import ConfigError
from transformer.config._invocation import program

if TYPE_CHECKING:
    from transformer.chat._template import ChatTemplate
    from transformer.inference._loaded_model import LoadedModel


ROW_SUM = 0.99
"""attention weights of a query that sum to less than this have a sink; 1 minus the rounding error of bfloat16"""


@dataclass(frozen=True, kw_only=True)
class Inspect(ModelCommand):
    """Draw the attention weights of every layer and head for one text, with the tokens on both axes: as PNG files, or
    as one interactive HTML page with --html; or those of an image, drawn on the image, with --image; or
    those of the words of a recording, with --audio.
    """

    prompt: str | None = None
    """input text of the model; - reads stdin"""
    image: PathText | None = None
    """path of an image: for an encoder of images, draw its attention to the patches on the image; for a vision-language
    model, that of the words which it generates after --prompt"""
    audio: PathText | None = None
    """path of an audio file instead of a text, for Whisper: draw the attention of each word over time"""
    target: str | None = None
    """encoder-decoder: target text; None: the text that the model generates"""
    max_new_tokens: int | None = None
    """maximum new tokens to generate (greedily) and to show; None: 128 for a translation or an answer, 32 for a text
    about an image, 0 for a causal model without --chat"""
    chat: bool = False
    """the prompt is a message to a chat model; show the conversation as its template writes it, and the answer"""
    system: str | None = None
    """with --chat: system message before the prompt"""
    template: Path | None = None
    """with --chat: file with the chat template; None: that of the model"""
    switch: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """with --chat: variable of the template as NAME=VALUE, such as enable_thinking=false; repeat for several"""
    html: Path | None = None
    """write one self-contained HTML file instead of PNG files, such as attention.html"""
    compare: PathText | None = None
    """with --html: also show another step of the workdir (500, best, newest) or another DIR with the same tokenizer"""
    sizes: bool = False
    """also print the shape of every array from the tokens to the logits"""
    output: Path | None = None
    """directory for the PNG files; None: DIR/attention"""
    overwrite: bool = False
    """replace files at --html and --output that this program did not write"""


def main(arguments: Sequence[str]) -> None:
    """Draw the attention maps; print the array shapes with --sizes, then the paths of the files."""
    command = parse(Inspect, "inspect", arguments)
    if command.audio is not None:
        _inspect_audio.check(command)
        _inspect_audio.draw(command, arguments)
        return
    if command.image is not None:
        _inspect_image.check(command)
        _inspect_image.draw(command, arguments)
        return
    _check(command)
    run = command.load()
    text = _read(command, run)
    labels = {name: run.tokenizer.tokens(ids) for name, ids in text.rows.items()}
    shown = {_name(run): run}
    if command.compare is not None:
        shown = _side_by_side(command, run, text, labels)
    sown = [_capture(one, text) for one in shown.values()]
    if not sown[0] and (command.html is not None or not command.sizes):
        raise ConfigError(
            f"the model in {command.directory} has no attention layer, so that there are no attention maps to draw. "
            f"Use --sizes to print the shapes of its arrays instead."
        )
    paths = []
    if sown[0] and (command.html is None or command.output is not None):
        from transformer.viz._attention_maps import save_attention_maps
        from transformer.viz._attention_weights import attention_maps

        directory = command.directory / "attention" if command.output is None else command.output
        overwrite = command.overwrite or command.output is None  # this program owns the file names in a workdir
        paths = save_attention_maps(attention_maps(sown[0], run.model.config), directory, overwrite=overwrite, **labels)
    if command.html is not None:
        _save_page(command, arguments, shown, sown, text, labels)
    _report(command, run, text, labels, paths)


def _check(command: Inspect) -> None:
    """Raise ConfigError for option combinations that are invalid with any model, before a model is loaded."""
    if command.prompt is None:
        raise ConfigError(
            "inspect needs an input. Pass --prompt TEXT, or --image FILE for a model of images, or --audio FILE for "
            "Whisper."
        )
    if command.max_new_tokens is not None and command.max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens must be at least 1, got {command.max_new_tokens}.")
    if command.max_new_tokens is not None and command.target is not None:
        raise ConfigError(
            "--target and --max-new-tokens can't be used together: --target replaces the generated text. Remove one "
            "of them."
        )
    if command.chat and command.target is not None:
        raise ConfigError(
            "--target and --chat can't be used together: --chat shows the answer that the model generates. Remove one "
            "of them."
        )
    check_chat_options(command)
    if command.compare is not None and command.html is None:
        raise ConfigError(
            "--compare shows two models on one HTML page and needs --html. Pass a file, such as --html attention.html."
        )
    _inspect_image.check_page(command)


@dataclass(frozen=True)
class _Text:
    """Input of a model: token ids by name ("source" before "target"), and the texts that they encode."""

    prompt: str
    rows: dict[str, list[int]]
    target: str | None = None
    """encoder-decoder: target text; causal model: the continuation or the answer that it generated"""
    written_from: int | None = None
    """index of the first generated token in the target; None: no token was generated"""
    template: ChatTemplate | None = None
    """with --chat: the template that wrote the conversation"""


def _read(command: Inspect, run: LoadedModel) -> _Text:
    from transformer.cli import _texts as texts
    from transformer.generate._sampling import Sampling
    from transformer.inference import _generate as generating

    _check_reader(command, run)
    (prompt,) = texts.read_prompts([command.prompt], lines=False)  # with "-", all of stdin is one text
    target = None if command.target is None else decode_argument(command.target)
    if command.chat:
        return _answered(command, run, prompt)
    texts.warn_of_unknown(run, [prompt])
    ids, new = generating.encode_prompt(run, prompt), command.max_new_tokens
    if not run.kind.source:
        if target is not None:
            raise ConfigError(
                "--target needs an encoder-decoder; this model has one stack and reads one text. Pass it as --prompt."
            )
        if run.kind.writes == "continuation":
            return _Text(prompt, {"target": ids}) if new is None else _continued(run, prompt, ids, new)
        if new is not None:
            raise ConfigError(
                f"--max-new-tokens needs a model that generates text, got {type(run.model).__name__}. Remove it."
            )
        return _Text(prompt, {"source": ids})
    texts.warn_of_unknown(run, [] if target is None else [target], normalize=False)
    if target is None:
        greedy = Sampling(temperature=0.0)
        target = generating.translate(run, [prompt], max_new_tokens=new or 128, sampling=greedy, seed=0)[0].output
    start = run.target_start
    rows = {"source": ids, "target": [*start, *generating.encode(run, target, "target")]}
    return _Text(prompt, rows, target, len(start) if command.target is None else None)


def _check_reader(command: Inspect, run: LoadedModel) -> None:
    """Raise ConfigError for a model that does not read text."""
    if "text" not in run.kind.inspects:
        raise ConfigError(
            f"`inspect` needs a model that reads text; {command.directory} contains a model of type "
            f"{type(run.model).__name__}. Draw its attention maps from Python instead: see docs/inspect.md."
        )


def _continued(run: LoadedModel, prompt: str, ids: list[int], new: int) -> _Text:
    """Return a prompt with its greedy continuation by a causal model.

    Raises:
        ConfigError: prompt and continuation together are longer than the context of the model.
    """
    from transformer.generate._generation import generate
    from transformer.generate._sampling import Sampling
    from transformer.inference import _generate as generating

    if run.context is not None and len(ids) + new > run.context:
        room = run.context - len(ids)
        remedy = f"Pass at most --max-new-tokens {room}" if room > 0 else "Remove --max-new-tokens"
        raise ConfigError(
            f"the prompt and the new tokens must fit the model's context of {run.context} tokens, got {len(ids)} "
            f"prompt tokens and {new} new tokens. {remedy}, or shorten the prompt."
        )
    greedy = Sampling(temperature=0.0, suppress=run.suppressed)
    (row,) = generate(run.model, run.params, [ids], max_new_tokens=new, eos_id=run.eos_ids, sampling=greedy)
    ids = [*ids, *row]
    return _Text(prompt, {"target": ids}, generating.continuation(run.tokenizer, ids, len(row)), len(ids) - len(row))


def _answered(command: Inspect, run: LoadedModel, prompt: str) -> _Text:
    """Return a conversation as its template writes it, with the greedy answer of a chat model.

    Raises:
        ConfigError: the model is not a causal model, has no template, or the conversation fills its context.
    """
    from transformer.generate._sampling import Sampling

    chat = open_chat(run, command.template)
    messages, variables = conversation(command.system, prompt), switches(command.switch)
    given = chat.encode(messages, add_generation_prompt=True, **variables).ids
    greedy = Sampling(temperature=0.0)
    reply = chat.reply(messages, max_new_tokens=command.max_new_tokens or 128, sampling=greedy, **variables)
    return _Text(prompt, {"target": [*given, *reply.tokens]}, reply.text, len(given), chat.template)


def _name(run: LoadedModel) -> str:
    """Return the name of a model on the page."""
    return str(run.directory) if run.run is None else f"{run.run.recipe.name}, step {run.run.step}"


def _side_by_side(
    command: Inspect, run: LoadedModel, text: _Text, labels: dict[str, list[str]]
) -> dict[str, LoadedModel]:
    """Return the model and the model of --compare, by name.

    Raises:
        ConfigError: both are the same model, are of different kinds, or tokenize the text differently.
    """
    if command.compare.isdecimal() or command.compare in ("best", "newest"):
        step = int(command.compare) if command.compare.isdecimal() else command.compare
        command = dataclasses.replace(command, step=step)
    else:
        command = dataclasses.replace(command, directory=Path(command.compare), step="best")
    other = command.load()
    _check_reader(command, other)
    if other.place() == run.place():
        raise ConfigError(
            f"--compare {command.compare} is the same model as the first one, {_name(run)}. Pass another step or DIR."
        )
    if run.kind.writes != other.kind.writes:
        kinds = f"a {type(run.model).__name__} and a {type(other.model).__name__}"
        raise ConfigError(f"--compare needs two models of the same kind, got {kinds}. Pass another DIR.")
    _check_same_tokens(command, other, text, labels)
    names = [_name(run), _name(other)]
    if names[0] == names[1]:
        names = [f"{name} ({opened.directory})" for name, opened in zip(names, (run, other), strict=True)]
    return dict(zip(names, (run, other), strict=True))


def _check_same_tokens(command: Inspect, other: LoadedModel, text: _Text, labels: dict[str, list[str]]) -> None:
    """Raise ConfigError unless the other model's tokenizer gives the same ids for the prompt and maps them to the same
    tokens.
    """
    given = text.rows["source"] if "source" in text.rows else text.rows["target"][: text.written_from]
    try:
        same = _encoded(command, other, text) == given and all(
            other.tokenizer.tokens(row) == labels[name] for name, row in text.rows.items()
        )
    except ValueError:  # an id that is not in its vocabulary
        same = False
    if not same:
        raise ConfigError(
            f"--compare needs a model with the same tokenizer, but {command.directory} splits this text into other "
            f"tokens than the first model. Pass a model with the same tokenizer, or write one page per model."
        )


def _encoded(command: Inspect, run: LoadedModel, text: _Text) -> list[int]:
    """Return the ids of the prompt; of a conversation, with the template that wrote it: a base model has none."""
    from transformer.inference import _generate as generating

    if text.template is None:
        return generating.encode_prompt(run, text.prompt)
    from transformer.chat._chat import Chat

    chat = Chat(run.model, run.params, run.tokenizer, template=text.template)
    messages = conversation(command.system, text.prompt)
    return chat.encode(messages, add_generation_prompt=True, **switches(command.switch)).ids


def _capture(run: LoadedModel, text: _Text) -> Any:
    from transformer.inference._text_attention import sown_weights

    return sown_weights(run.model, run.params, [*text.rows.values()])


def _save_page(
    command: Inspect,
    arguments: Sequence[str],
    shown: dict[str, LoadedModel],
    sown: Sequence[Any],
    text: _Text,
    labels: dict[str, list[str]],
) -> None:
    from transformer.viz._attention_page import Panel, save_attention_page
    from transformer.viz._attention_weights import attention_maps

    panels, facts = [], {}
    for (name, run), seen in zip(shown.items(), sown, strict=True):
        config = run.model.config
        if not seen:
            raise ConfigError(f"{name} has no attention layer, so that there is nothing to compare. Remove --compare.")
        layers = {"encoder": config.num_layers, "decoder": config.num_layers}
        if len(text.rows) == 2:
            layers = {"encoder": config.encoder_layers, "decoder": config.decoder_layers}
        panels.append(Panel(name=name, maps=attention_maps(seen, config), layers=layers))
        facts["Model" if not facts else "Compared with"] = _described(name, run, len(text.rows) == 2)
    (first, *_) = shown.values()
    asked = first.model.execution.attention
    kernel = "reference: computes the full attention matrix of each layer."
    if asked not in ("auto", "reference"):
        kernel += f" The model's own kernel, {asked}, computes the same result without storing the weights."
    facts["Kernel"] = kernel
    if any(one.weights.sum(-1).min() < ROW_SUM for panel in panels for one in panel.maps):
        facts["Sinks"] = (
            "Each head has an attention sink, which is not drawn: the weights of a query sum to less than 1."
        )
    facts["Tokens"] = ", ".join(f"{len(row)} ({name})" for name, row in text.rows.items())
    facts["Command"] = f"{program('inspect')} {shlex.join(arguments)}"
    texts = {} if command.system is None else {"System message": decode_argument(command.system)}
    texts["Prompt"] = text.prompt
    if text.target is not None:
        texts["Answer" if command.chat else "Target" if text.written_from is None else "Generated"] = text.target
    names = list(dict.fromkeys(_name(run).partition(", step")[0] for run in shown.values()))
    title = f"Attention of {' and '.join(names)}"
    save_attention_page(
        command.html, panels, title=title, written_from=text.written_from, texts=texts, facts=facts, **labels
    )


def _described(name: str, run: LoadedModel, two_stacks: bool) -> str:
    import jax

    config = run.model.config
    layers = f"layers: {config.num_layers}"
    if two_stacks:
        layers = f"layers: {config.encoder_layers} + {config.decoder_layers}"
    heads = f"heads: {config.num_heads}"
    if config.num_kv_heads not in (None, config.num_heads):
        heads += f", key-value heads: {config.num_kv_heads}"
    windows = sorted({kind.window for kind in config.kinds if kind.window})
    seen = f", windows: {' and '.join(map(str, windows))}" if windows else ""
    count = sum(leaf.size for leaf in jax.tree.leaves(run.params))
    sizes = f"{layers}, {heads}{seen}, d_model: {config.d_model}, parameters: {count:,}"
    return f"{name}: {type(run.model).__name__} in {run.directory}; {sizes}"


def _report(
    command: Inspect, run: LoadedModel, text: _Text, labels: dict[str, list[str]], paths: Sequence[Path]
) -> None:
    import jax
    import jax.numpy as jnp

    from transformer.cli._texts import shown
    from transformer.inference._text_attention import reference_model
    from transformer.viz.studies._sizes import sizes, sizes_table

    tokens = [jax.ShapeDtypeStruct((1, len(ids)), jnp.int32) for ids in text.rows.values()]
    found = sizes(reference_model(run.model), *tokens) if command.sizes else []
    if command.json:
        values = {"sizes": [dataclasses.asdict(size) for size in found]} if command.sizes else {}
        values |= {"page": str(command.html)} if command.html is not None else {}
        paths = [str(path) for path in paths]
        command.print_json(run, prompt=text.prompt, target=text.target, paths=paths, **values)
        return
    if command.chat:
        print(shown(text.target))
    elif text.target is not None:
        print(f"{text.prompt} -> {text.target}" if "source" in labels else f"{text.prompt}{text.target}")
    if command.sizes:
        for name, words in labels.items():
            print(f"{name}, {len(words)} tokens: {' '.join(words)}")
        print(f"\n{sizes_table(found)}\n")
    for path in [*paths, *([] if command.html is None else [command.html])]:
        print(path)
