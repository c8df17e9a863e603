"""Draw attention: options and output of `inspect text`, `chat`, `image` and `audio`, and the pages of the first two."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from transformer.cli._arguments import PathText, check_least
from transformer.cli._models import ModelCommand
from transformer.config._checks import ConfigError
from transformer.config._invocation import program

if TYPE_CHECKING:
    from transformer.inference._loaded_model import LoadedModel

Labels: TypeAlias = dict[str, list[str]]
"""names of the tokens of a model's inputs, "source" and "target\""""

ROW_SUM = 0.99
"""attention weights of a query that sum to less than this have a sink; 1 minus the rounding error of bfloat16"""


@dataclass(frozen=True, kw_only=True)
class InspectCommand(ModelCommand):
    """Options of a command that draws attention as PNG files or as an HTML page."""

    html: Path | None = None
    """write one self-contained HTML file instead of PNG files, such as attention.html"""
    output: Path | None = None
    """directory for the PNG files; None: DIR/attention, unless --html is given"""
    overwrite: bool = False
    """replace files at --html and --output that this program did not write"""

    def check_page(self) -> None:
        """Raise ConfigError if --html names no HTML file, or a file of the user, before a model is loaded."""
        if self.html is None:
            return
        if self.html.is_dir() or self.html.suffix not in (".html", ".htm"):
            raise ConfigError(f"--html must name the HTML file to write, such as attention.html, got {self.html}.")
        if not self.overwrite:
            from transformer.viz._output_files import check_replaceable

            check_replaceable([self.html])

    @property
    def draws_pictures(self) -> bool:
        """Whether to write PNG files."""
        return self.html is None or self.output is not None

    @property
    def pictures(self) -> tuple[Path, bool]:
        """Directory of the PNG files, and whether to replace files that this program did not write."""
        if self.output is None:
            return self.directory / "attention", True  # this program owns the file names in a workdir
        return self.output, self.overwrite

    def report(self, opened: LoadedModel, text: str | None, /, **values: object) -> None:
        """Print the text and the `paths` among the values, or with --json all values."""
        files, page = [*map(str, values["paths"])], {} if self.html is None else {"page": str(self.html)}
        lines = [*([] if text is None else [text]), *files, *page.values()]
        self.answer_of(opened, lines or [""], **values | {"paths": files} | page)


def called(kind: str, arguments: Sequence[str]) -> str:
    """Return the command line of `inspect KIND`, for the page."""
    return f"{program(f'inspect {kind}')} {shlex.join(arguments)}"


@dataclass(frozen=True, kw_only=True)
class PromptCommand(InspectCommand):
    """Options of a command that draws the attention of a model that reads a text."""

    prompt: str
    """input text of the model; - reads stdin"""
    compare: PathText | None = None
    """with --html: also show another step of the workdir (500, best, newest) or another DIR with the same tokenizer"""
    sizes: bool = False
    """also print the shape of every array from the tokens to the logits"""
    max_new_tokens: int | None = None

    def check(self) -> None:
        """Raise ConfigError for options that are invalid with any model, before a model is loaded."""
        check_least("max-new-tokens", self.max_new_tokens)
        if self.compare is not None and self.html is None:
            raise ConfigError(
                "--compare shows two models on one HTML page and needs --html. Pass a file, such as --html "
                "attention.html."
            )
        self.check_page()


@dataclass(frozen=True)
class ModelInput:
    """Input of a model, and how the command shows it."""

    prompt: str
    rows: dict[str, list[int]]
    """token ids by name, "source" before "target\""""
    encode: Callable[[LoadedModel], list[int]]
    """returns the ids of the prompt for another model with the same tokenizer"""
    texts: dict[str, str]
    """texts on the page by title"""
    target: str | None = None
    """encoder-decoder: target text; causal model: the continuation or the answer that it generated"""
    generated_from: int | None = None
    """index of the first generated token in the target; None: no token was generated"""
    line: str | None = None
    """line to print"""


def draw(command: PromptCommand, opened: LoadedModel, text: ModelInput, command_line: str) -> None:
    """Draw the attention maps; print the array shapes with --sizes, then the paths of the files."""
    from transformer.inference._text_attention import sown_weights

    labels = {name: opened.tokenizer.tokens(ids) for name, ids in text.rows.items()}
    compares = command.compare is not None
    shown = _side_by_side(command, opened, text, labels) if compares else {_name(opened): opened}
    sown = [sown_weights(one.model, one.params, [*text.rows.values()]) for one in shown.values()]
    if not sown[0] and (command.html is not None or not command.sizes):
        raise ConfigError(
            f"the model in {command.directory} has no attention layer, so there are no attention maps to draw. Use "
            f"--sizes to print the shapes of its arrays instead."
        )
    paths = []
    if sown[0] and command.draws_pictures:
        from transformer.viz._attention_maps import save_attention_maps
        from transformer.viz._attention_weights import attention_maps

        maps, (directory, overwrite) = attention_maps(sown[0], opened.model.config), command.pictures
        paths = save_attention_maps(maps, directory, overwrite=overwrite, **labels)
    if command.html is not None:
        _save_page(command, command_line, shown, sown, text, labels)
    _report(command, opened, text, labels, paths)


def check_reader(opened: LoadedModel) -> None:
    """Raise ConfigError for a model that does not read text."""
    if "text" not in opened.kind.inspects:
        raise ConfigError(
            f"inspect text needs a model that reads text; {opened.directory} contains a model of type "
            f"{type(opened.model).__name__}. Use inspect image or inspect audio, or see docs/inspect.md for Python."
        )


def _name(opened: LoadedModel) -> str:
    """Return the name of a model on the page."""
    return str(opened.directory) if opened.run is None else f"{opened.run.recipe.name}, step {opened.run.step}"


def _side_by_side(
    command: PromptCommand, opened: LoadedModel, text: ModelInput, labels: Labels
) -> dict[str, LoadedModel]:
    """Return the model and the model of --compare, by name."""
    if command.compare.isdecimal() or command.compare in ("best", "newest"):
        step = int(command.compare) if command.compare.isdecimal() else command.compare
        command = dataclasses.replace(command, step=step)
    else:
        command = dataclasses.replace(command, directory=Path(command.compare), step="best")
    other = command.load()
    check_reader(other)
    if other.place() == opened.place():
        raise ConfigError(
            f"--compare {command.compare} is the same model as the first one, {_name(opened)}. Pass another step or "
            f"DIR."
        )
    if opened.kind.writes != other.kind.writes:
        kinds = f"a {type(opened.model).__name__} and a {type(other.model).__name__}"
        raise ConfigError(f"--compare needs two models of the same kind, got {kinds}. Pass another DIR.")
    _check_same_tokens(command, other, text, labels)
    names = [_name(opened), _name(other)]
    if names[0] == names[1]:
        names = [f"{name} ({opened.directory})" for name, opened in zip(names, (opened, other), strict=True)]
    return dict(zip(names, (opened, other), strict=True))


def _check_same_tokens(command: PromptCommand, other: LoadedModel, text: ModelInput, labels: Labels) -> None:
    """Raise ConfigError unless the other model's tokenizer gives the same ids for the prompt, and the same tokens."""
    given = text.rows["source"] if "source" in text.rows else text.rows["target"][: text.generated_from]
    try:
        tokens = {name: other.tokenizer.tokens(row) for name, row in text.rows.items()}
        same = text.encode(other) == given and tokens == labels
    except ValueError:  # an id that is not in its vocabulary
        same = False
    if not same:
        raise ConfigError(
            f"--compare needs a model with the same tokenizer, but {command.directory} splits this text into "
            f"different tokens. Pass a model with the same tokenizer, or write one page per model."
        )


def _save_page(
    command: PromptCommand, line: str, shown: dict[str, LoadedModel], sown: list[Any], text: ModelInput, labels: Labels
) -> None:
    from transformer.viz._attention_page import Panel, save_attention_page
    from transformer.viz._attention_weights import attention_maps

    panels, facts = [], {}
    for (name, opened), seen in zip(shown.items(), sown, strict=True):
        config = opened.model.config
        if not seen:
            raise ConfigError(f"{name} has no attention layer, so there is nothing to compare. Remove --compare.")
        layers = {"encoder": config.num_layers, "decoder": config.num_layers}
        if len(text.rows) == 2:
            layers = {"encoder": config.encoder_layers, "decoder": config.decoder_layers}
        panels.append(Panel(name=name, maps=attention_maps(seen, config), layers=layers))
        facts["Model" if not facts else "Compared with"] = _described(name, opened, len(text.rows) == 2)
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
    facts["Command"] = line
    names = list(dict.fromkeys(_name(opened).partition(", step")[0] for opened in shown.values()))
    title = f"Attention of {' and '.join(names)}"
    save_attention_page(
        command.html, panels, title=title, written_from=text.generated_from, texts=text.texts, facts=facts, **labels
    )


def _described(name: str, opened: LoadedModel, two_stacks: bool) -> str:
    import jax

    config = opened.model.config
    layers = f"layers: {f'{config.encoder_layers} + {config.decoder_layers}' if two_stacks else config.num_layers}"
    heads = f"heads: {config.num_heads}"
    if config.kv_heads != config.num_heads:
        heads += f", key-value heads: {config.kv_heads}"
    windows = sorted({kind.window for kind in config.kinds if kind.window})
    seen = f", windows: {' and '.join(map(str, windows))}" if windows else ""
    count = sum(leaf.size for leaf in jax.tree.leaves(opened.params))
    sizes = f"{layers}, {heads}{seen}, d_model: {config.d_model}, parameters: {count:,}"
    return f"{name}: {type(opened.model).__name__} in {opened.directory}; {sizes}"


def _report(
    command: PromptCommand, opened: LoadedModel, text: ModelInput, labels: Labels, paths: Sequence[Path]
) -> None:
    import jax
    import jax.numpy as jnp

    from transformer.inference._text_attention import reference_model
    from transformer.viz.studies._sizes import sizes, sizes_table

    tokens = [jax.ShapeDtypeStruct((1, len(ids)), jnp.int32) for ids in text.rows.values()]
    found = sizes(reference_model(opened.model), *tokens) if command.sizes else []
    lines = [] if text.line is None else [text.line]
    if command.sizes:
        lines += [f"{name}, {len(words)} tokens: {' '.join(words)}" for name, words in labels.items()]
        lines.append(f"\n{sizes_table(found)}\n")
    values = {"sizes": [dataclasses.asdict(size) for size in found]} if command.sizes else {}
    values = {"prompt": text.prompt, "target": text.target, "paths": paths} | values
    command.report(opened, "\n".join(lines) if lines else None, **values)
