"""A family of pretrained models: how its config.json and its tensors are read and written, and its published sizes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from transformer.config._checks import ConfigError, nearest
from transformer.config._model import TransformerConfig
from transformer.config._parts import LayerKind
from transformer.config._paths import fields_by_path
from transformer.nn.models._encoders import Embedder
from transformer.nn.models._forecaster import Forecaster
from transformer.nn.models._seq2seq import Seq2Seq
from transformer.nn.models._speech import FRAMES_A_POSITION, SpeechToText
from transformer.nn.models._vision import VisionClassifier
from transformer.zoo._fields import FIXED_EVERYWHERE, NEUTRAL, Codec, FieldError
from transformer.zoo.weights._rules import Link, Rule, layer_kinds, layer_places, link

FREE = frozenset({"dropout_rate", "attention.dropout_rate", "initializer_range", "dtype", "param_dtype"})
"""fields of a TransformerConfig that change nothing of what a trained model computes"""

MAX_LAYERS = 1024
"""of a stack that a config.json may ask for"""
MAX_EXPERTS = 100_000
"""of all its layers together: each has tensors by name"""
MAX_NUMBER = 2**31 - 1
"""in a config.json: sizes and places are 32 bits wide where they are computed with"""

MAX_DIFFERENCES = 5
"""fields of a model without a counterpart that a message lists"""
MAX_UNKNOWN = 100
"""fields that are told of, each with the one that it is like"""

_FREE_OF_EXPERTS = {"load_balance_weight": 0.0, "router_z_weight": 0.0}


class NoCounterpart(ConfigError):
    """A model that a family's config.json can't describe; `differences`: in how many fields."""

    def __init__(self, message: str, differences: int):
        super().__init__(message)
        self.differences = differences


@dataclass(frozen=True, kw_only=True)
class Head:
    """What a family's models of one purpose are, of the class `model`: the `architectures` of config.json name it.

    `constants` are fields of the TransformerConfig that it has beside the family's, `fields` of config.json likewise.
    """

    model: type
    constants: Mapping[str, Any] = field(default_factory=dict)
    fields: tuple[Codec, ...] = ()
    rules: tuple[Rule, ...] = ()
    """of the tensors that this head alone has"""
    base: bool = False
    """a model without a head: its files leave the family's prefix out"""
    ignored: tuple[str, ...] = ()
    """patterns of tensors that this head doesn't need, beside the family's"""
    untied_by: str | None = None
    """a tensor that makes a model untied where it differs from the one it would repeat, whatever config.json says"""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Published weights: where they are (`hub`), fields of config.json that make their sizes, how many `parameters`."""

    hub: str
    parameters: int
    fields: Mapping[str, Any]
    architecture: str | None = None
    """None: the family's first"""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family, as data.

    Raises:
        ConfigError: (its methods) a config.json or a model that is not of this family; everything that doesn't fit.
    """

    name: str
    """model_type in config.json"""
    title: str
    """what people call it"""
    citation: str
    """authors and year, and where the paper is"""
    heads: Mapping[str, Head]
    """by architecture, the one that is saved first"""
    constants: Mapping[str, Any]
    """fields of the TransformerConfig that all its models have"""
    fields: tuple[Codec, ...]
    """what config.json says of the others, in the order of reading"""
    rules: Callable[[TransformerConfig], Sequence[Rule]]
    """its tensors and parameters; what a model doesn't have may be among them"""
    prefix: str = ""
    """first part of the names of tensors that files of a model without a head leave out"""
    ignored: tuple[str, ...] = ()
    """patterns of tensors that are not needed: buffers, weights of other heads"""
    copies: Mapping[str, str] = field(default_factory=dict)
    """tensors that tied models may repeat, and which one they repeat"""
    old_names: Mapping[str, str] = field(default_factory=dict)
    """parts of names of tensors, and what they are in files of an older release"""
    variants: Mapping[str, Variant] = field(default_factory=dict)
    """published weights by a short name"""
    aliases: tuple[str, ...] = ()
    """other model_types that are read as this one"""

    def head_of(self, values: Mapping[str, Any]) -> tuple[str, Head]:
        """The architecture that a config.json names, and what it is here."""
        names = values.get("architectures") or [next(iter(self.heads))]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ConfigError(
                f"architectures in config.json must be a list of names such as {next(iter(self.heads))}, got "
                f"{names!r:.80}. Correct it, or give architecture=."
            )
        for name in names:
            if name in self.heads:
                return name, self.heads[name]
        raise ConfigError(
            f"the architecture {', '.join(map(str, names))} of {self.title} is not built here: there are "
            f"{', '.join(self.heads)}. If the weights are those of one of them, give its name as architecture=."
        )

    def read(self, values: Mapping[str, Any], head: Head) -> TransformerConfig:
        """The TransformerConfig that a config.json describes."""
        changes, faults, known = self._read_fields(values, head)
        for name, choices in FIXED_EVERYWHERE.items():
            if name not in known and values.get(name, choices[0]) not in choices:
                faults.append(f"{name} is {values[name]!r}, which changes what is computed and is not built here")
        faults += _unknown_fields(values, known)
        if faults:
            raise ConfigError(
                f"config.json of {self.title} is not understood: {'; '.join(faults)}. Fields that are known to change "
                f"nothing can be taken out of config.json, or named in ignore_fields=."
            )
        try:
            config = TransformerConfig(**changes)
        except (ConfigError, TypeError, ValueError) as error:
            raise ConfigError(f"config.json of {self.title} describes no model: {error}") from error
        self._check_experts(config)
        return config

    def _read_fields(self, values: Mapping[str, Any], head: Head) -> tuple[dict[str, Any], list[str], set[str]]:
        """Fields of the TransformerConfig, what is wrong with config.json, and the names in it that have a meaning."""
        changes: dict[str, Any] = dict(self.constants) | dict(head.constants)
        faults: list[str] = []
        known = set(NEUTRAL)
        for codec in (*self.fields, *head.fields):
            known.update(codec.names)
            if large := [name for name in codec.names if _is_too_large(values.get(name))]:
                faults.append(f"{', '.join(large)} is above {MAX_NUMBER}, which no model has")
                continue
            try:
                changes |= codec.read(values, changes)
            except FieldError as error:
                faults.append(str(error))
            except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
                given = ", ".join(name for name in codec.names if name in values)
                faults.append(f"{given or codec.names[0]} can't be read ({error})")
            _check_layers(changes)
        return changes, faults, known

    def _check_experts(self, config: TransformerConfig) -> None:
        """Raises ConfigError for more experts than any model has: each has tensors, which are listed by name."""
        kinds = layer_kinds(config, config.num_layers)
        if (experts := sum(kind.moe.num_experts for kind in kinds if kind.moe is not None)) > MAX_EXPERTS:
            raise ConfigError(
                f"config.json of {self.title} asks for {experts} experts in all layers together: expected at most "
                f"{MAX_EXPERTS}. Correct it."
            )

    def write(self, config: TransformerConfig, architecture: str) -> dict[str, Any]:
        """A config.json for a model of this family. NoCounterpart names the fields that it has no word for."""
        head = self.heads[architecture]
        values: dict[str, Any] = {"architectures": [architecture], "model_type": self.name}
        for codec in (*self.fields, *head.fields):
            values |= codec.write(config)
        try:
            again = self.read(values, head)
        except ConfigError as error:  # a value that has no word there
            raise NoCounterpart(f"{self.title} can't say what this model is: {error}", 99) from error
        pools = head.model is Embedder
        mine, theirs = (canonical(c) | ({"output.pooling": c.output.pooling} if pools else {}) for c in (config, again))
        differing = [name for name in mine if mine[name] != theirs[name]]
        if differing:
            told = [
                f"{name} {_difference(mine[name], theirs[name], self.title)}" for name in differing[:MAX_DIFFERENCES]
            ]
            more = f"; and {len(differing) - len(told)} more" if len(told) < len(differing) else ""
            raise NoCounterpart(
                f"{self.title} has no counterpart for this model: {'; '.join(told)}{more}.", len(differing)
            )
        return values | {"dtype": config.param_dtype, "initializer_range": config.initializer_range or 0.02}

    def without_prefix(self, name: str) -> str:
        """The name of a tensor in a file that leaves the prefix out."""
        return name.removeprefix(self.prefix)

    def names_in(self, tensors: Collection[str]) -> Callable[[str], str]:
        """What a file with these tensors calls each: without the prefix where none has it, by the old name where it has
        that one alone.
        """
        without_prefix = not any(tensor.startswith(self.prefix) for tensor in tensors)

        def named(name: str) -> str:
            name = self.without_prefix(name) if without_prefix else name
            old = (name.replace(part, older) for part, older in self.old_names.items())
            return name if name in tensors else next((one for one in old if one in tensors), name)

        return named

    def links(self, model: Any, architecture: str, shapes: Mapping[str, tuple[int, ...]]) -> list[Link]:
        """The rules applied to this model, whose parameters have these shapes."""
        rules = [*self.rules(model.config), *self.heads[architecture].rules]
        places = stack_places(model)
        if model.config.attention.causal:  # a decoder that classifies is the encoder of a Classifier
            shapes = {re.sub(r"^encoder/", "decoder/", path): shape for path, shape in shapes.items()}
            return [_in_encoder(one) for one in link(rules, shapes, places)]
        return link(rules, shapes, places)


def _in_encoder(one: Link) -> Link:
    targets = (replace(target, path=re.sub(r"^decoder/", "encoder/", target.path)) for target in one.targets)
    return replace(one, targets=tuple(targets))


def rename(links: Sequence[Link], named: Callable[[str], str]) -> list[Link]:
    """The same links to tensors of other names."""
    return [replace(one, tensors=tuple(map(named, one.tensors))) for one in links]


def stack_places(model: Any) -> dict[str, list[tuple[str, int | None]]]:
    """Where the layers of each stack of a model lie."""
    config = model.config
    encoder, decoder = config.num_layers, config.num_layers
    if isinstance(model, Seq2Seq):
        encoder, decoder = config.encoder_layers, config.decoder_layers
    return {"encoder": layer_places(config, encoder), "decoder": layer_places(config, decoder)}


def canonical(config: TransformerConfig) -> dict[str, Any]:
    """What a config says in one way of saying it: defaults filled in, fields that nothing reads left out."""
    values = {path: value for path, value in fields_by_path(config).items() if path not in FREE}
    encoder, decoder = config.encoder_layers, config.decoder_layers
    for path in ("num_layers", "stack.prefix", "stack.period", "stack.suffix"):
        del values[path]
    values |= {
        "stack.num_encoder_layers": encoder,
        "stack.num_decoder_layers": decoder,
        "num_kv_heads": config.kv_heads,
        "attention.head_dim": config.size_of_head,
        "attention.value_dim": config.size_of_value,
        "d_ff": config.feed_forward_width,
        "attention.scale": config.attention.scale or config.size_of_head**-0.5,
        "attention.biases": _biases(config),
    }
    kinds = {}
    for stack, layers in {"encoder": encoder, "decoder": decoder}.items():
        kinds[stack] = [_kind(config, kind) for kind in layer_kinds(config, layers)]
    values |= _without_unread(config)
    if all(kind.moe is not None for layers in kinds.values() for kind in layers):
        values["d_ff"] = None  # the experts' own
    return values | {"layers": kinds}


def _without_unread(config: TransformerConfig) -> dict[str, Any]:
    """Values for the fields that this config does not read, or that its layers say for themselves."""
    values: dict[str, Any] = {}
    if config.position != "rotary":
        values |= dict.fromkeys(("rotary.base", "rotary.dim", "rotary.scaling"))
    else:
        values["rotary.dim"] = config.rotary.dim or config.size_of_head
        values |= dict.fromkeys(("rotary.base", "rotary.scaling"), "by layer")
    if config.position != "t5":
        values |= dict.fromkeys(("t5_bias.buckets", "t5_bias.max_distance"))
    if config.norm_position == "post":
        values["stack.final_norm"] = None
    if not config.attention.qk_norm:
        values["attention.qk_norm_scope"] = None
    if config.embedding.source_max_length == config.max_length:
        values["embedding.source_max_length"] = None
    if config.output.num_classes is None and not config.output.normalize:
        values["output.pooling"] = None
    return values


def _difference(mine: Any, theirs: Any, title: str) -> str:
    """How a field of two canonical configs differs; of layers, the fields of the first that differs."""
    if not isinstance(mine, dict):
        return f"is {mine!r:.80}, {title} has {theirs!r:.80}"
    for stack, kinds in mine.items():
        for number, (one, other) in enumerate(zip(kinds, theirs[stack], strict=False)):
            names = [f.name for f in dataclasses.fields(one) if getattr(one, f.name) != getattr(other, f.name)]
            if names:
                first, second = (", ".join(f"{n}={getattr(kind, n)!r:.80}" for n in names) for kind in (one, other))
                return f"is {first} in layer {number} of the {stack}, {title} has {second}"
    return f"is a list of another length than in {title}"  # where the numbers of layers differ


def _biases(config: TransformerConfig) -> tuple[str, ...]:
    everywhere = ("query", "key", "value", "out")
    given = config.attention.biases
    return (everywhere if config.use_bias else ()) if given is None else tuple(n for n in everywhere if n in given)


def _kind(config: TransformerConfig, kind: LayerKind) -> LayerKind:
    changes: dict[str, Any] = {}
    if kind.moe is not None:
        width = kind.moe.d_ff or config.feed_forward_width
        changes["moe"] = replace(kind.moe, d_ff=width, **_FREE_OF_EXPERTS)
    if config.position != "rotary":
        changes |= {"rotary_base": None, "rotary_scaling": None}
    elif kind.self_attention:
        changes["rotary_base"] = kind.rotary_base or config.rotary.base
        changes["rotary_scaling"] = kind.rotary_scaling or config.rotary.scaling
    return replace(kind, **changes)


def _unknown_fields(values: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """One sentence for each field of config.json that has no meaning here, with the known name that it resembles."""
    unknown = sorted(values.keys() - set(known) - FIXED_EVERYWHERE.keys())
    sentences = [f"{name} is not known{nearest(name, known)}" for name in unknown[:MAX_UNKNOWN]]
    return sentences + ([f"{len(unknown) - MAX_UNKNOWN} more are not known"] if len(unknown) > MAX_UNKNOWN else [])


def _is_too_large(value: Any) -> bool:
    """Whether a value of config.json is, or holds, an integer that no model has."""
    inside = [value]
    for one in inside:
        inside += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
    return any(isinstance(one, int) and abs(one) > MAX_NUMBER for one in inside)


def _check_layers(changes: Mapping[str, Any]) -> None:
    """ConfigError for more layers than any model has, before each of them is looked at."""
    for name in ("num_layers", "stack.num_encoder_layers", "stack.num_decoder_layers"):
        layers = changes.get(name)
        if isinstance(layers, int) and layers > MAX_LAYERS:
            raise ConfigError(f"config.json asks for {layers} layers: expected at most {MAX_LAYERS}. Correct it.")


def example_inputs(model: Any) -> tuple[Any, ...]:
    """The smallest inputs that a model takes."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    if isinstance(model, VisionClassifier):
        patches = model.config.patches
        return (jnp.zeros((1, patches.image_height, patches.image_width, patches.channels)),)
    if isinstance(model, Forecaster):
        return (jnp.zeros((1, model.config.series.context_length, model.config.series.channels)),)
    if isinstance(model, SpeechToText):
        positions = model.config.longest_source or 1
        return (jnp.zeros((1, FRAMES_A_POSITION * positions, model.config.speech.mel_bins)), tokens)
    return (tokens, tokens) if isinstance(model, Seq2Seq) else (tokens,)


def abstract_params(model: Any) -> Any:
    """Shapes and types of a model's parameters, a tree; nothing is computed."""
    # Their shapes alone, too: an image is as large as config.json says.
    inputs = jax.eval_shape(lambda: example_inputs(model))
    return jax.eval_shape(lambda key, *inputs: model.init(key, *inputs), jax.random.key(0), *inputs)["params"]
