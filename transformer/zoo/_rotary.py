"""Mapping between the rotary positions of a config.json and those of a TransformerConfig."""

from __future__ import annotations

import math
from dataclasses import dataclass

from transformer.config._model import TransformerConfig
from transformer.config._parts import RotaryScaling
from transformer.zoo._fields import Codec, FieldError, Fields

_LENGTH = {"original_max_position_embeddings": "original_length"}
_STRETCH = {"factor": "factor"} | _LENGTH
_FACTORS = {"short_factor": "short_factors", "long_factor": "long_factors"}
_LLAMA3 = _STRETCH | {"low_freq_factor": "low_frequency_factor", "high_freq_factor": "high_frequency_factor"}
_ORIGINAL = frozenset(_LENGTH)
_SCALING_FIELDS: dict[str, tuple[dict[str, str], frozenset[str], frozenset[str]]] = {
    "default": ({}, frozenset(), _ORIGINAL | {"factor", "max_position_embeddings"}),
    "linear": ({"factor": "factor"}, frozenset({"factor"}), _ORIGINAL),
    "llama3": (_LLAMA3, frozenset(_LLAMA3), frozenset()),
    "yarn": (
        _STRETCH | {name: name for name in ("beta_fast", "beta_slow", "truncate", "attention_factor")},
        *(frozenset({"factor"}), frozenset()),
    ),
    "dynamic": ({"factor": "factor"}, frozenset({"factor"}), _ORIGINAL),
    "longrope": (
        {"factor": "factor"} | _FACTORS | _LENGTH | {"attention_factor": "attention_factor"},
        *(frozenset(_FACTORS), frozenset()),
    ),
}
"""Kind of scaling -> fields of `rope_parameters` and `RotaryScaling`, those required, and others that are ignored."""


def read_rotary(parameters: Fields, default_base: float, length: int | None) -> tuple[float, RotaryScaling | None]:
    """Return the base (default: `default_base`) and the scaling that a description of rotary positions specifies.

    `parameters` are `rope_parameters`, or `rope_scaling` of older files with `rope_theta` added. `length` is the
    original context length for YaRN if they have none.
    """
    base = parameters.get("rope_theta")
    base = float(default_base if base is None else base)
    kind = parameters.get("rope_type", parameters.get("type")) or "default"
    known = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
    if kind not in _SCALING_FIELDS:
        raise FieldError(
            f"rotary scaling is {kind!r}, which is not supported (supported: {', '.join(_SCALING_FIELDS)})"
        )
    fields, needed, ignored = _SCALING_FIELDS[kind]
    if missing := needed - parameters.keys():
        raise FieldError(f"rotary scaling {kind} lacks the required fields {', '.join(sorted(missing))}")
    if strange := parameters.keys() - known - fields.keys() - ignored:
        raise FieldError(f"rotary scaling {kind} has unknown fields: {', '.join(sorted(strange))}")
    if not fields:
        return base, None
    changes = {ours: parameters[theirs] for theirs, ours in fields.items() if parameters.get(theirs) is not None}
    # The reference takes max_position_embeddings as the original length if these kinds do not specify one.
    if kind in ("yarn", "dynamic", "longrope") and "original_length" not in changes and length is not None:
        changes["original_length"] = length
    if kind == "longrope":
        _read_longrope(changes, length)
    return base, RotaryScaling(kind=kind, **changes)


def _read_longrope(changes: Fields, length: int | None) -> None:
    """Complete the fields of longrope: its factor defaults to the ratio of both lengths, and at most 1 is no change."""
    for name, ours in _FACTORS.items():
        if not isinstance(changes.get(ours), list | tuple):
            raise FieldError(f"{name} of rotary scaling longrope must be a list of numbers")
        changes[ours] = tuple(map(float, changes[ours]))
    if "factor" not in changes:
        if length is None or "original_length" not in changes:
            raise FieldError("rotary scaling longrope lacks factor, and max_position_embeddings to compute it")
        changes["factor"] = length / changes["original_length"]
    changes["factor"] = max(changes["factor"], 1.0)


def write_rotary(base: float, scaling: RotaryScaling | None) -> Fields:
    """Return the `rope_parameters` from which `read_rotary` reads this base and scaling."""
    parameters: Fields = {"rope_theta": base, "rope_type": "default" if scaling is None else scaling.kind}
    if scaling is None:
        return parameters
    # A family without this kind of scaling finds out by reading the result back.
    fields, *_ = _SCALING_FIELDS.get(scaling.kind, _SCALING_FIELDS["linear"])
    given = {theirs: getattr(scaling, ours) for theirs, ours in fields.items()}
    given = {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}
    return parameters | {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class Rope(Codec):
    """Rotary positions: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (older files).

    Read after the head sizes, because `partial_rotary_factor` is a fraction of the head dimension.
    """

    default_base: float = 10_000.0
    """Base if the file does not specify one."""
    default_share: float | None = None
    """Fraction of each head that is rotated if the file does not specify it. None: this family always rotates whole
    heads."""
    share_name: str = "partial_rotary_factor"
    """Name of the fraction outside `rope_parameters`."""
    base_name: str = "rope_theta"
    """Name of the base outside `rope_parameters`."""

    @property
    def names(self) -> tuple[str, ...]:
        own = (self.share_name, self.base_name)
        return ("rope_parameters", "rope_theta", "rope_scaling", "max_position_embeddings", *own)

    def read(self, values: Fields, changes: Fields) -> Fields:
        given = values.get("rope_scaling") or values.get("rope_parameters") or {}
        parameters = {"rope_theta": values.get(self.base_name)} | given
        whole = 1.0 if self.default_share is None else self.default_share
        share = parameters.get("partial_rotary_factor", values.get(self.share_name, whole))
        if self.default_share is None and share != 1:
            raise FieldError(f"{self.share_name} is {share!r}, but this family always rotates whole heads")
        base, scaling = read_rotary(parameters, self.default_base, values.get("max_position_embeddings"))
        # The number of rotated dimensions, rounded down as in the reference.
        head = changes.get("attention.head_dim") or changes["d_model"] // changes["num_heads"]
        rotated = int(head * share)
        return {
            "position.base": base,
            "position.scaling": scaling,
            "position.dim": None if rotated == head else rotated,
        }

    def write(self, config: TransformerConfig) -> Fields:
        parameters = write_rotary(config.rotary.base, config.rotary.scaling)
        share = {}
        if self.default_share is not None:
            head = config.size_of_head
            rotated = config.rotary.dim or head
            # The reference computes int(head * share). In floating point this can lose one dimension: 30 / 44 * 44 is
            # less than 30. The next larger float avoids that.
            part = rotated / head if int(head * (rotated / head)) == rotated else math.nextafter(rotated / head, 1.0)
            share = {"partial_rotary_factor": part}
        # A model with rotary positions has no fixed length. Write the length for which the scaling is made, or a large
        # default, because other programs expect the field.
        scaling, trained, scaled = config.rotary.scaling, 131_072, 1.0
        if scaling is not None:
            # With dynamic scaling, the reference takes this field as the original length.
            trained, scaled = scaling.original_length, 1.0 if scaling.kind == "dynamic" else scaling.factor
        return {
            "rope_parameters": parameters | share,
            self.base_name: config.rotary.base,
            "max_position_embeddings": int(trained * scaled),
        } | ({self.share_name: share["partial_rotary_factor"]} if share else {})
