"""Description of a family of pretrained models: its config.json, its tensor names and its published variants."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import flax.linen as nn
import jax
from jaxtyping import PyTree

from transformer.chat._image_prompts import ImageText
from transformer.config._checks import ConfigError, nearest
from transformer.config._model import DynamicImageTokens, Images, ImageTokens, TransformerConfig
from transformer.config._parts import LayerKind
from transformer.config._paths import fields_by_path, get_path
from transformer.config._positions import LearnedOptions, Position, RotaryOptions
from transformer.nn.models._dual import DualEncoder
from transformer.nn.models._encoders import Embedder
from transformer.nn.models._kinds import example_inputs, kind_of
from transformer.nn.models._vision import VisionEmbedder
from transformer.zoo._fields import FIXED_EVERYWHERE, LAYER_SIZES, NEUTRAL, Codec, Field, FieldError, Fields, Json
from transformer.zoo.weights._rules import Link, Rule, layer_kinds, layer_places, link

FREE = frozenset(
    {"dropout_rate", "attention.dropout_rate", "parameters.initializer_range", "dtype", "parameters.dtype"}
)
"""Fields of a TransformerConfig that do not affect a trained model's outputs."""

MAX_LAYERS = 1024
"""Maximum number of layers per stack that a config.json may specify."""
MAX_EXPERTS = 100_000
"""Maximum number of experts, summed over all layers: the tensors of each expert are listed by name."""
MAX_NUMBER = 2**31 - 1
"""Largest integer that a config.json may contain: sizes and indices are computed in 32 bits."""

MAX_DIFFERENCES = 5
"""Maximum number of unsupported fields that an error message lists."""
MAX_UNKNOWN = 100
"""Maximum number of unknown fields that an error message lists, each with a suggestion."""

LAYER_NORM = {"norm.kind": "layer_norm", "embedding.scale": False}
"""Constants of families with LayerNorm and embeddings that are not scaled."""
WITHOUT_BALANCE = {"load_balance_weight": 0.0, "router_z_weight": 0.0}
"""Fields of `MoE` that affect training only, for families whose files do not contain them."""

Rules = Sequence[Rule] | Callable[[TransformerConfig], Sequence[Rule]]
"""Rules of a family, or a function that returns those for a config."""


class NoCounterpart(ConfigError):
    """Raised for a model that a family's config.json cannot describe; `differences` counts the unsupported fields."""

    def __init__(self, message: str, differences: int):
        super().__init__(message)
        self.differences = differences


@dataclass(frozen=True, kw_only=True)
class Head:
    """One architecture of a family, such as its language model or its classifier.

    `constants` and `fields` are added to those of the family.
    """

    model: type
    """Class of the model."""
    constants: Fields = field(default_factory=dict)
    fields: tuple[Codec, ...] = ()
    rules: tuple[Rule, ...] = ()
    """Rules for the tensors that only this architecture has."""
    base: bool = False
    """Whether this is the base model without a head, whose tensor names lack the family's prefix."""
    ignored: tuple[str, ...] = ()
    """Patterns of unneeded tensors, in addition to the family's."""
    optional: Mapping[str, Fields] = field(default_factory=dict)
    """Tensors that only some files have, which config.json does not mention -> fields of the TransformerConfig of a
    model with this tensor."""
    untied_by: str | None = None
    """Name of a tensor that decides about weight tying: if it differs from the tensor that it would repeat, the model
    is untied, regardless of config.json."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Published weights: the id on the hub, the number of parameters, and the config.json fields for their sizes."""

    hub: str
    parameters: int
    fields: Fields
    architecture: str | None = None
    """None: the first architecture of the family."""


def variants(
    hub: str,
    table: Mapping[str, tuple[str | int | Fields, ...]],
    sizes: Sequence[str] = LAYER_SIZES,
    architecture: str | None = None,
    **alike: Json,
) -> dict[str, Variant]:
    """Return variants from a table: name -> id, number of parameters, sizes, and other fields.

    A row may omit the id if it is the name, and the other fields. All ids begin with `hub`. `sizes` are the names of
    the sizes in config.json, and `alike` fields that all variants share.
    """
    found = {}
    for name, row in table.items():
        last, parameters, *values = row if isinstance(row[0], str) else (name, *row)
        own = values.pop() if values and isinstance(values[-1], dict) else {}
        fields = alike | dict(zip(sizes, values, strict=False)) | own
        found[name] = Variant(hub=f"{hub}{last}", parameters=parameters, fields=fields, architecture=architecture)
    return found


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models, described as data.

    Raises:
        ConfigError: (by its methods) a config.json or a model that does not belong to this family. The message lists
            all problems.
    """

    name: str
    """The `model_type` in config.json."""
    title: str
    """Name for documentation and messages."""
    citation: str
    """Authors, year and location of the paper."""
    heads: Mapping[str, Head]
    """Heads by architecture; saving prefers the first that fits."""
    constants: Fields
    """Fields of the TransformerConfig that all models of the family share."""
    fields: tuple[Codec, ...]
    """Codecs for all other fields, in the order in which they are read."""
    rules: Rules
    """Rules that relate tensors to parameters. Rules for parameters that a model lacks are skipped."""
    prefix: str = ""
    """Prefix of tensor names that files of a base model omit."""
    ignored: tuple[str, ...] = ()
    """Patterns of tensors that are not needed: buffers, weights of other heads."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Tensors that files of tied models may repeat -> the tensor that they repeat."""
    old_names: Mapping[str, str] = field(default_factory=dict)
    """Parts of tensor names -> their spelling in files of older releases."""
    variants: Mapping[str, Variant] = field(default_factory=dict)
    """Published weights by a short name."""
    any_image_size: bool = False
    """Whether the models read images of any size: the positions of patches are interpolated."""
    antialias: bool = False
    """Whether the interpolation of positions to fewer patches averages over wider intervals."""
    aliases: tuple[str, ...] = ()
    """Other values of `model_type` for this family."""
    image_text: ImageText | None = None
    """How the text of a vision-language model represents images; None: the models don't read images with text."""

    def head_of(self, values: Fields) -> tuple[str, Head]:
        """Return the name of the architecture in a config.json, and its head."""
        names = values.get("architectures") or [next(iter(self.heads))]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ConfigError(
                f"architectures in config.json must be a list of names such as {next(iter(self.heads))}, got "
                f"{names!r:.80}. Correct it, or pass architecture=."
            )
        for name in names:
            if name in self.heads:
                return name, self.heads[name]
        raise ConfigError(
            f"the architecture {', '.join(map(str, names))} of {self.title} is not supported (supported: "
            f"{', '.join(self.heads)}). If the weights belong to one of these, pass its name as architecture=."
        )

    def read(self, values: Fields, head: Head) -> TransformerConfig:
        """Return the TransformerConfig that a config.json describes."""
        constants = dict(self.constants) | dict(head.constants)
        changes, faults = read_fields(values, (*self.fields, *head.fields), constants)
        if faults:
            raise ConfigError(
                f"config.json of {self.title} can't be used: {'; '.join(faults)}. If a field does not affect the "
                f"computation, remove it from config.json or list it in ignore_fields=."
            )
        try:
            config = TransformerConfig(**changes)
        except (ConfigError, TypeError, ValueError) as error:
            text = _in_names(str(error), (*self.fields, *head.fields))
            raise ConfigError(f"config.json of {self.title} does not describe a valid model: {text}") from error
        self._check_experts(config)
        return config

    def with_optional(self, config: TransformerConfig, head: Head, tensors: Collection[str]) -> TransformerConfig:
        """Return the config with the optional parts of this architecture that a file with these tensors has."""
        named = self.names_in(tensors)
        for tensor, changes in head.optional.items():
            if named(tensor) in tensors:
                config = config.replace(**changes)
        return config

    def read_back(self, values: Fields, head: Head, saved: TransformerConfig) -> TransformerConfig:
        """Return the config that a model will have that is saved with this config.json: with its optional parts."""
        config = self.read(values, head)
        for changes in head.optional.values():
            if all(get_path(saved, path) == value for path, value in changes.items()):
                config = config.replace(**changes)
        return config

    def _check_experts(self, config: TransformerConfig) -> None:
        """Raise ConfigError for an implausible number of experts, because all their tensors are listed by name."""
        kinds = layer_kinds(config, config.num_layers)
        if (experts := sum(kind.moe.num_experts for kind in kinds if kind.moe is not None)) > MAX_EXPERTS:
            raise ConfigError(
                f"config.json of {self.title} specifies {experts} experts in all layers together: expected at most "
                f"{MAX_EXPERTS}. Correct it."
            )

    def write(self, config: TransformerConfig, architecture: str) -> Fields:
        """Return a config.json for a model of this family. NoCounterpart names the fields that it can't describe."""
        head = self.heads[architecture]
        values: Fields = {"architectures": [architecture], "model_type": self.name}
        try:
            values |= write_fields(config, (*self.fields, *head.fields))
        except NoCounterpart as error:  # of an object inside config.json
            text = f"{self.title} has no counterpart for this model: {error}."
            raise NoCounterpart(text, error.differences) from None
        # Codecs omit what they cannot represent, so reading the result back shows what was lost.
        try:
            again = self.read_back(values, head, config)
        except ConfigError as error:  # the family has no representation for a value
            raise NoCounterpart(f"{self.title} can't describe this model: {error}", 99) from error
        pools = head.model in (Embedder, VisionEmbedder, DualEncoder)
        mine, theirs = (canonical(c) | ({"output.pooling": c.output.pooling} if pools else {}) for c in (config, again))
        differing = [name for name in mine if mine[name] != theirs.get(name)]
        if differing:
            described = [
                f"{name} {_difference(mine[name], theirs.get(name), self.title)}"
                for name in differing[:MAX_DIFFERENCES]
            ]
            more = f"; and {len(differing) - len(described)} more" if len(described) < len(differing) else ""
            raise NoCounterpart(
                f"{self.title} has no counterpart for this model: {'; '.join(described)}{more}.", len(differing)
            )
        return values | {
            "dtype": config.parameters.dtype,
            "initializer_range": config.parameters.initializer_range or 0.02,
        }

    def without_prefix(self, name: str) -> str:
        """Return the name of a tensor in a file that omits the prefix."""
        return name.removeprefix(self.prefix)

    def names_in(self, tensors: Collection[str]) -> Callable[[str], str]:
        """Return a function from a tensor's usual name to its name in a file that contains `tensors`: without prefix if
        no tensor has it, and an old name if the file has only that one.
        """
        without_prefix = not any(tensor.startswith(self.prefix) for tensor in tensors)

        def named(name: str) -> str:
            name = self.without_prefix(name) if without_prefix else name
            old = (name.replace(part, older) for part, older in self.old_names.items())
            return name if name in tensors else next((one for one in old if one in tensors), name)

        return named

    def links(self, model: nn.Module, architecture: str, shapes: Mapping[str, tuple[int, ...]]) -> list[Link]:
        """Return the rules applied to this model, given the shapes of its parameters by path."""
        rules = [*rules_of(self.rules, model.config), *self.heads[architecture].rules]
        places = stack_places(model)
        if model.config.attention.causal:
            # A Classifier holds its layers under "encoder", but the rules of a decoder family say "decoder".
            shapes = {re.sub(r"^encoder/", "decoder/", path): shape for path, shape in shapes.items()}
            return [_in_encoder(one) for one in link(rules, shapes, places)]
        return link(rules, shapes, places)


def _in_encoder(one: Link) -> Link:
    targets = (replace(target, path=re.sub(r"^decoder/", "encoder/", target.path)) for target in one.targets)
    return replace(one, targets=tuple(targets))


def rename(links: Sequence[Link], named: Callable[[str], str]) -> list[Link]:
    """Return the links with their tensors renamed."""
    return [replace(one, tensors=tuple(map(named, one.tensors))) for one in links]


def stack_places(model: nn.Module) -> dict[str, list[tuple[str, int | None]]]:
    """Return the path and index of each layer, for each stack of a model."""
    config, kind = model.config, kind_of(model)
    if kind.source:
        sizes = {"encoder": config.encoder_layers, "decoder": config.decoder_layers}
        return {name: layer_places(config, layers) for name, layers in sizes.items()}
    stacks = {"encoder": config, "decoder": config}
    if kind.compares:
        stacks = {"text/encoder": config, "image/encoder": config.image_encoder}
    elif kind.image_prompts:
        stacks = {"image/encoder": config.image_encoder, "decoder": config}
    return {name: layer_places(one, one.num_layers) for name, one in stacks.items()}


def canonical(config: TransformerConfig) -> Fields:
    """Return a normal form of a config, so that two configs of the same function compare equal.

    Defaults are filled in, fields that the model does not use are neutralized, and layers are listed one by one.
    """
    values = {
        path: value
        for path, value in fields_by_path(config).items()
        if path not in FREE and not path.startswith("position")
    }
    encoder, decoder = config.encoder_layers, config.decoder_layers
    for path in ("num_layers", "stack.prefix", "stack.period", "stack.suffix"):
        del values[path]
    values |= {
        "stack.num_encoder_layers": encoder,
        "stack.num_decoder_layers": decoder,
        "stack.encoder_num_heads": config.stack.encoder_num_heads or config.num_heads,
        "stack.encoder_d_ff": config.stack.encoder_d_ff or config.feed_forward_width,
        "attention.num_kv_heads": config.kv_heads,
        "attention.head_dim": config.size_of_head,
        "attention.value_dim": config.size_of_value,
        "feed_forward.d_ff": config.feed_forward_width,
        "attention.scale": config.attention.scale or config.size_of_head**-0.5,
        "attention.biases": _biases(config),
        "position": _position(config),
    }
    per_layer = config.embedding.per_layer_vocab_size or config.vocab_size
    values["embedding.per_layer_vocab_size"] = None if config.embedding.per_layer_width is None else per_layer
    values |= _image_input(config)
    kinds = {}
    for stack, layers in {"encoder": encoder, "decoder": decoder}.items():
        kinds[stack] = [_kind(config, kind) for kind in layer_kinds(config, layers)]
    values |= _without_unread(config)
    if all(kind.moe is not None and not kind.moe.beside_dense for layers in kinds.values() for kind in layers):
        values["feed_forward.d_ff"] = values["stack.encoder_d_ff"] = None  # every layer uses the width of its experts
    return values | {"layers": kinds}


def _image_input(config: TransformerConfig) -> Fields:
    """Return the fields of an input of images that has an encoder, with the normal form of the encoder."""
    if not isinstance(config.input, Images | ImageTokens | DynamicImageTokens):
        return {}
    inside = {name: value for name, value in vars(config.input).items() if name != "encoder"}
    inside |= {f"encoder.{name}": value for name, value in canonical(config.image_encoder).items()}
    return {"input": type(config.input).__name__} | {f"input.{name}": value for name, value in inside.items()}


def _without_unread(config: TransformerConfig) -> Fields:
    """Return neutral values for the fields that this config does not use, or that its layers override."""
    values: Fields = {}
    if config.norm.position == "post":
        values["stack.final_norm"] = None
    if config.stack.layer_scale is not None:
        values["stack.layer_scale"] = "learned"  # only its initial value is in the config
    if config.output.num_classes is None and not config.output.normalize:
        values["output.pooling"] = None
    return values


def _difference(mine: object, theirs: object, title: str) -> str:
    """Describe how a field of two canonical configs differs. For layers, describe the first difference."""
    if dataclasses.is_dataclass(mine) and type(mine) is type(theirs):
        return _different_fields(mine, theirs, "", title)
    if not isinstance(mine, dict) or theirs is None:
        return f"is {_described(mine)}, {title} has {_described(theirs)}"
    for stack, kinds in mine.items():
        for number, (one, other) in enumerate(zip(kinds, theirs[stack], strict=False)):
            if one != other:
                return _different_fields(one, other, f" in layer {number} of the {stack}", title)
    return f"is a list of a different length than in {title}"  # the numbers of layers differ


def _described(value: object) -> str:
    """Return a value for a message; of options only those that differ from their defaults."""
    if not dataclasses.is_dataclass(value):
        return f"{value!r:.80}"
    changed = [f.name for f in dataclasses.fields(value) if getattr(value, f.name) != f.default]
    return f"{type(value).__name__}({', '.join(f'{name}={getattr(value, name)!r:.80}' for name in changed)})"


def _different_fields(one: object, other: object, place: str, title: str) -> str:
    names = [f.name for f in dataclasses.fields(one) if getattr(one, f.name) != getattr(other, f.name)]
    first, second = (", ".join(f"{n}={getattr(part, n)!r:.80}" for n in names) for part in (one, other))
    return f"is {first}{place}, {title} has {second}"


def _position(config: TransformerConfig) -> Position:
    position = config.position
    if isinstance(position, RotaryOptions):  # base and scaling are compared by layer
        return replace(position, dim=position.dim or config.size_of_head, base=RotaryOptions.base, scaling=None)
    if isinstance(position, LearnedOptions):
        return LearnedOptions(max_length=config.max_length, source_max_length=config.longest_source)
    return position


def _biases(config: TransformerConfig) -> tuple[str, ...]:
    everywhere = ("query", "key", "value", "out")
    given = config.attention.biases
    if given is None:
        return everywhere if config.parameters.use_bias else ()
    return tuple(name for name in everywhere if name in given)


def _kind(config: TransformerConfig, kind: LayerKind) -> LayerKind:
    changes: Fields = {}
    if kind.moe is not None:
        width = kind.moe.d_ff or config.feed_forward_width
        shared = (kind.moe.shared_d_ff or width) if kind.moe.shared_experts else None
        changes["moe"] = replace(kind.moe, d_ff=width, shared_d_ff=shared, **WITHOUT_BALANCE)
    changes |= _heads(config, kind)
    if kind.moe is None or kind.moe.beside_dense:
        changes["d_ff"] = kind.d_ff or config.feed_forward_width
    if not isinstance(config.position, RotaryOptions) or not kind.rotary:
        changes |= {"rotary_base": None, "rotary_scaling": None}
    elif kind.self_attention and kind.gated_delta is None:
        changes["rotary_base"] = kind.rotary_base or config.rotary.base
        changes["rotary_scaling"] = kind.rotary_scaling or config.rotary.scaling
    return replace(kind, **changes)


def _heads(config: TransformerConfig, kind: LayerKind) -> Fields:
    """Return the sizes of the heads of a kind of layer, and whether queries and keys are normalized, with defaults."""
    changes: Fields = {} if config.attention.qk_norm is not None else {"qk_norm": True}
    if kind.self_attention and kind.gated_delta is None:
        changes |= {"head_dim": config.head_dim_of(kind), "num_kv_heads": config.kv_heads_of(kind)}
    return changes


def read_fields(values: Fields, codecs: Sequence[Codec], constants: Fields) -> tuple[Fields, list[str]]:
    """Return the TransformerConfig fields that a config.json (or an object inside it) describes, and its faults."""
    changes, faults, known = dict(constants), [], set(NEUTRAL)
    for codec in codecs:
        known.update(codec.names)
        if large := [name for name in codec.names if _is_too_large(values.get(name))]:
            faults.append(f"{', '.join(large)} is above {MAX_NUMBER}, which is too large for any model")
            continue
        try:
            changes |= codec.read(values, changes)
        except FieldError as error:
            faults.append(str(error))
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
            given = ", ".join(name for name in codec.names if name in values)
            faults.append(f"{given or codec.names[0]} can't be read ({error})")
        _check_layers(changes)
    for name, choices in FIXED_EVERYWHERE.items():
        if name not in known and values.get(name, choices[0]) not in choices:
            faults.append(f"{name} is {values[name]!r}, which changes the computation and is not supported")
    return changes, faults + _unknown_fields(values, known)


def rules_of(rules: Rules, config: TransformerConfig) -> Sequence[Rule]:
    """Return the rules of a family for a config."""
    return rules(config) if callable(rules) else rules


def refuse(**faults: Sequence[str]) -> None:
    """Raise FieldError if there are problems in an object inside config.json; keywords name the objects."""
    if found := [f"in {name}, {fault}" for name, inside in faults.items() for fault in inside]:
        raise FieldError("; ".join(found))


def write_fields(config: TransformerConfig, codecs: Sequence[Codec]) -> Fields:
    """Convert a TransformerConfig to fields of config.json, or of an object inside it."""
    return {name: value for codec in codecs for name, value in codec.write(config).items()}


def _unknown_fields(values: Fields, known: Collection[str]) -> list[str]:
    """Return one sentence for each unknown field of config.json, with the most similar known name.

    Fields that start with an underscore are notes of the program that wrote the file, such as `_name_or_path`.
    """
    unknown = sorted(name for name in values.keys() - set(known) - FIXED_EVERYWHERE.keys() if not name.startswith("_"))
    sentences = [f"{name} is not known{nearest(name, known)}" for name in unknown[:MAX_UNKNOWN]]
    return sentences + ([f"{len(unknown) - MAX_UNKNOWN} more are not known"] if len(unknown) > MAX_UNKNOWN else [])


def _is_too_large(value: object) -> bool:
    """Return whether a value of config.json is, or contains, an implausibly large integer."""
    inside = [value]
    for one in inside:
        inside += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
    return any(isinstance(one, int) and abs(one) > MAX_NUMBER for one in inside)


def _check_layers(changes: Fields) -> None:
    """Raise ConfigError for an implausible number of layers, before a later codec iterates over them."""
    for name in ("num_layers", "stack.num_encoder_layers", "stack.num_decoder_layers"):
        layers = changes.get(name)
        if isinstance(layers, int) and layers > MAX_LAYERS:
            raise ConfigError(f"config.json specifies {layers} layers: expected at most {MAX_LAYERS}. Correct it.")


def abstract_params(model: nn.Module) -> PyTree:
    """Return the tree of shapes and dtypes of a model's parameters, without computing anything."""
    # The inputs are abstract, too: config.json may specify images of any size.
    return jax.eval_shape(lambda: model.init(jax.random.key(0), *example_inputs(model)))["params"]


def _in_names(text: str, codecs: Sequence[Codec]) -> str:
    """Return an error about a TransformerConfig with the names of config.json, which the user can correct."""
    names = {codec.attribute: codec.name for codec in codecs if isinstance(codec, Field)}
    words = "|".join(re.escape(attribute) for attribute in sorted(names, key=len, reverse=True))
    return re.sub(rf"(?<![\w.])({words})(?![\w.]*\w)", lambda found: names[found[0]], text) if names else text
