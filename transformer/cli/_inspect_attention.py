"""`python -m transformer inspect`: where a trained model looks. (A file inspect.py would hide Python's own.)"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformer.cli._arguments import parse
from transformer.cli._models import ModelCommand
from transformer.cli._streams import decode_argument
from transformer.config._checks import ConfigError
from transformer.config._invocation import program

if TYPE_CHECKING:
    from transformer.inference._loading import LoadedModel


ROW_SUM = 0.99
"""rows of weights that sum to less than this have a sink; 1 less the rounding of weights in bfloat16"""


@dataclass(frozen=True, kw_only=True)
class Inspect(ModelCommand):
    """Draw the attention weights of every layer and head for one text, with the words on both axes: as PNG files, or
    with --html as one page to explore in a browser.
    """

    prompt: str
    """text to read; - reads stdin"""
    target: str | None = None
    """encoder-decoder: target text; None: the text that the model generates"""
    max_new_tokens: int | None = None
    """maximum tokens to generate, greedily, and to show; None: 128 for a translation, 0 after a prompt"""
    html: Path | None = None
    """write one self-contained HTML page instead of pictures, such as attention.html"""
    compare: str | None = None
    """with --html: show a second model that reads the same tokens: a step of the same workdir (500, best or newest), or
    another DIR"""
    sizes: bool = False
    """also print the shape of every array from the tokens to the logits"""
    output: Path | None = None
    """directory for the pictures; None: DIR/attention"""
    overwrite: bool = False
    """replace files at --html and --output that this program did not write"""


def main(arguments: Sequence[str]) -> None:
    """Prints the paths of the pictures or of the page, after the sizes where they are wanted."""
    command = parse(Inspect, "inspect", arguments)
    _check(command)
    run = command.load()
    text = _read(command, run)
    labels = {name: run.tokenizer.tokens(ids) for name, ids in text.rows.items()}
    shown = {_name(run): run}
    if command.compare is not None:
        shown = _side_by_side(command, run, text, labels)
    sown = [_watch(one, text) for one in shown.values()]
    if not sown[0] and (command.html is not None or not command.sizes):
        raise ConfigError(
            f"no layer of the model in {command.directory} attends to anything: there is nothing to draw. "
            f"--sizes shows what it computes instead."
        )
    paths = []
    if sown[0] and (command.html is None or command.output is not None):
        from transformer.viz._attention_maps import save_attention_maps
        from transformer.viz._attention_weights import attention_maps

        directory = command.directory / "attention" if command.output is None else command.output
        overwrite = command.overwrite or command.output is None  # names in a workdir are the program's
        paths = save_attention_maps(attention_maps(sown[0], run.model.config), directory, overwrite=overwrite, **labels)
    if command.html is not None:
        _save_page(command, arguments, shown, sown, text, labels)
    _report(command, run, text, labels, paths)


def _check(command: Inspect) -> None:
    """Raises ConfigError for options that don't go together, before anything is loaded."""
    if command.max_new_tokens is not None and command.max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens must be at least 1, got {command.max_new_tokens}.")
    if command.max_new_tokens is not None and command.target is not None:
        raise ConfigError("--target gives what the model would write: leave --max-new-tokens out, or --target.")
    if command.compare is not None and command.html is None:
        raise ConfigError("--compare puts two models onto one page: give its file too, such as --html attention.html.")
    if command.html is not None and (command.html.is_dir() or command.html.suffix not in (".html", ".htm")):
        raise ConfigError(f"--html takes the file to write, such as attention.html, got {command.html}.")
    if command.html is not None and not command.overwrite:
        from transformer.viz._output_files import check_replaceable

        check_replaceable([command.html])


@dataclass(frozen=True)
class _Text:
    """What a model reads: token ids of each side, "source" before "target"."""

    prompt: str
    rows: dict[str, list[int]]
    target: str | None = None
    """of an encoder-decoder the text on its decoder's side; of a causal model what it wrote behind the prompt"""
    written_from: int | None = None
    """the first token on the decoder's side that the model wrote itself"""


def _read(command: Inspect, run: LoadedModel) -> _Text:
    from transformer.cli import _texts as texts
    from transformer.generate._sampling import Sampling
    from transformer.nn.models._causal_lm import CausalLM
    from transformer.nn.models._seq2seq import Seq2Seq

    _check_reader(command, run)
    (prompt,) = texts.read_prompts([command.prompt], lines=False)  # of stdin, all is one text
    target = None if command.target is None else decode_argument(command.target)
    texts.warn_of_unknown(run, [prompt])
    ids, new = texts.encode_prompt(run, prompt), command.max_new_tokens
    if not isinstance(run.model, Seq2Seq):
        if target is not None:
            raise ConfigError(
                "--target is for an encoder-decoder; a model of one stack reads one text: put it into --prompt."
            )
        if isinstance(run.model, CausalLM):
            return _Text(prompt, {"target": ids}) if new is None else _written(run, prompt, ids, new)
        if new is not None:
            raise ConfigError(f"a {type(run.model).__name__} writes no text: leave --max-new-tokens out.")
        return _Text(prompt, {"source": ids})
    texts.warn_of_unknown(run, [] if target is None else [target], normalize=False)
    if target is None:
        greedy = Sampling(temperature=0.0)
        target = texts.translate(run, [prompt], max_new_tokens=new or 128, sampling=greedy, seed=0)[0].output
    start = run.target_start
    rows = {"source": ids, "target": [*start, *texts.encode(run, target, "target")]}
    return _Text(prompt, rows, target, len(start) if command.target is None else None)


def _check_reader(command: Inspect, run: LoadedModel) -> None:
    """Raises ConfigError for a model that reads no text."""
    from transformer.nn.models._base import TokenEncoder
    from transformer.nn.models._causal_lm import CausalLM
    from transformer.nn.models._seq2seq import Seq2Seq
    from transformer.nn.models._speech import SpeechToText

    if not isinstance(run.model, CausalLM | Seq2Seq | TokenEncoder) or isinstance(run.model, SpeechToText):
        raise ConfigError(
            f"{command.directory} holds a {type(run.model).__name__}, which reads no text. From Python its maps are "
            f"drawn all the same: docs/inspect.md."
        )


def _written(run: LoadedModel, prompt: str, ids: list[int], new: int) -> _Text:
    """A prompt and what a causal model writes behind it, all of which it must be able to read at once."""
    from transformer.cli import _texts as texts
    from transformer.generate._generation import generate
    from transformer.generate._sampling import Sampling

    if run.context is not None and len(ids) + new > run.context:
        room = run.context - len(ids)
        remedy = f"Give at most --max-new-tokens {room}" if room > 0 else "Leave --max-new-tokens out"
        raise ConfigError(
            f"the model reads {run.context} tokens at once; the prompt has {len(ids)}, so that {new} new ones don't "
            f"fit. {remedy}, or shorten the prompt."
        )
    greedy = Sampling(temperature=0.0, suppress=run.suppressed)
    (row,) = generate(run.model, run.params, [ids], max_new_tokens=new, eos_id=run.eos_ids, sampling=greedy)
    ids = [*ids, *row]
    return _Text(prompt, {"target": ids}, texts.went_on(run.tokenizer, ids, len(row)), len(ids) - len(row))


def _name(run: LoadedModel) -> str:
    """What a model is called on a page."""
    return str(run.directory) if run.run is None else f"{run.run.recipe.name}, step {run.run.step}"


def _side_by_side(
    command: Inspect, run: LoadedModel, text: _Text, labels: dict[str, list[str]]
) -> dict[str, LoadedModel]:
    """The model and the one of --compare, by name. ConfigError: it is the same, or can't read the same tokens."""
    if command.compare.isdecimal() or command.compare in ("best", "newest"):
        step = int(command.compare) if command.compare.isdecimal() else command.compare
        command = dataclasses.replace(command, step=step)
    else:
        command = dataclasses.replace(command, directory=Path(command.compare), step="best")
    other = command.load()
    _check_reader(command, other)
    if other.place() == run.place():
        raise ConfigError(
            f"--compare {command.compare} is what is shown anyway, {_name(run)}: name another step, or another DIR."
        )
    sides = _read_sides(run), _read_sides(other)
    if sides[0] != sides[1]:
        kinds = f"a {type(run.model).__name__} and a {type(other.model).__name__}"
        raise ConfigError(f"{kinds} don't read the same: --compare needs two models of one kind.")
    _check_same_tokens(command, other, text, labels)
    names = [_name(run), _name(other)]
    if names[0] == names[1]:
        names = [f"{name} ({opened.directory})" for name, opened in zip(names, (run, other), strict=True)]
    return dict(zip(names, (run, other), strict=True))


def _read_sides(run: LoadedModel) -> str:
    from transformer.nn.models._causal_lm import CausalLM
    from transformer.nn.models._seq2seq import Seq2Seq

    return next((kind.__name__ for kind in (Seq2Seq, CausalLM) if isinstance(run.model, kind)), "encoder")


def _check_same_tokens(command: Inspect, other: LoadedModel, text: _Text, labels: dict[str, list[str]]) -> None:
    """Raises ConfigError unless another model's tokenizer cuts the prompt alike and means the same by every id."""
    from transformer.cli import _texts as texts

    given = text.rows["source"] if "source" in text.rows else text.rows["target"][: text.written_from]
    try:
        same = texts.encode_prompt(other, text.prompt) == given and all(
            other.tokenizer.tokens(row) == labels[name] for name, row in text.rows.items()
        )
    except ValueError:  # an id that it doesn't have
        same = False
    if not same:
        raise ConfigError(
            f"{command.directory} reads this text as other tokens than the first model, so that its maps can't stand "
            f"beside it. Compare models of one tokenizer, or write a page for each."
        )


def _reference(run: LoadedModel) -> Any:
    """The model with the kernel that can always give its weights, whatever it was trained with."""
    execution = dataclasses.replace(run.model.execution, attention="reference", sow_weights=True)
    return run.model.clone(execution=execution)


def _watch(run: LoadedModel, text: _Text) -> Any:
    """What attention sows when a model reads the text's rows (1, T); nothing when no layer attends. ValueError: more
    than a page can hold, before it is computed.
    """
    import jax
    import jax.numpy as jnp

    from transformer.viz._attention_page import check_weights

    model = _reference(run)
    tokens = [jnp.asarray([ids], jnp.int32) for ids in text.rows.values()]

    @jax.jit
    def watch(params, *tokens):
        return model.apply({"params": params}, *tokens, mutable=["intermediates"])[1].get("intermediates", {})

    check_weights(sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(watch, run.params, *tokens))))
    return jax.device_get(watch(run.params, *tokens))


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
            raise ConfigError(f"no layer of {name} attends to anything: there is nothing to draw beside the other.")
        layers = {"encoder": config.num_layers, "decoder": config.num_layers}
        if len(text.rows) == 2:
            layers = {"encoder": config.encoder_layers, "decoder": config.decoder_layers}
        panels.append(Panel(name=name, maps=attention_maps(seen, config), layers=layers))
        facts["Model" if not facts else "Beside it"] = _described(name, run, len(text.rows) == 2)
    (first, *_) = shown.values()
    asked = first.model.execution.attention
    kernel = "reference: all weights of a layer at once, as the formula is written."
    if asked not in ("auto", "reference"):
        kernel += f" The model's own kernel, {asked}, computes the same and keeps no weights."
    facts["Kernel"] = kernel
    if any(one.weights.sum(-1).min() < ROW_SUM for panel in panels for one in panel.maps):
        facts["Sinks"] = "Each head has a sink, which takes weight and is not drawn: rows sum to less than 1."
    facts["Tokens"] = ", ".join(f"{len(row)} ({name})" for name, row in text.rows.items())
    facts["Command"] = f"{program('inspect')} {shlex.join(arguments)}"
    texts = {"Prompt": text.prompt}
    if text.target is not None:
        texts["Target" if text.written_from is None else "Written"] = text.target
    names = list(dict.fromkeys(_name(run).partition(", step")[0] for run in shown.values()))
    title = f"Where {' and '.join(names)} {'looks' if len(names) == 1 else 'look'}"
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
        heads += f", of keys and values {config.num_kv_heads}"
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

    from transformer.viz.studies._sizes import sizes, sizes_table

    tokens = [jax.ShapeDtypeStruct((1, len(ids)), jnp.int32) for ids in text.rows.values()]
    found = sizes(_reference(run), *tokens) if command.sizes else []
    if command.json:
        values = {"sizes": [dataclasses.asdict(size) for size in found]} if command.sizes else {}
        values |= {"page": str(command.html)} if command.html is not None else {}
        paths = [str(path) for path in paths]
        command.print_json(run, prompt=text.prompt, target=text.target, paths=paths, **values)
        return
    if text.target is not None:
        print(f"{text.prompt} -> {text.target}" if "source" in labels else f"{text.prompt}{text.target}")
    if command.sizes:
        for name, words in labels.items():
            print(f"{name}, {len(words)} tokens: {' '.join(words)}")
        print(f"\n{sizes_table(found)}\n")
    for path in [*paths, *([] if command.html is None else [command.html])]:
        print(path)
