"""PatchTST: models of time series with channel-independent patches and batch norms with fixed statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from transformer.config._model import TransformerConfig
from transformer.config._parts import Series
from transformer.config._positions import LearnedOptions
from transformer.nn.models._forecaster import Forecaster, SeriesEncoder
from transformer.nn.models._series import PatchReconstructor, SeriesClassifier, SeriesRegressor
from transformer.zoo._family import Family, Head
from transformer.zoo._fields import (
    ACTIVATIONS,
    Codec,
    Field,
    FieldError,
    Fields,
    Fixed,
    Unread,
    read_table,
    sizes,
    training_fields,
    write_table,
    written_as,
)
from transformer.zoo.families._bart import attention_rules
from transformer.zoo.weights._rules import MATRIX, Arrays, Relation, Rule, Shape, Shapes, WithUnread, linear, norm, row


@dataclass(frozen=True)
class Stacked(Relation):
    """Tensors of equal shape stacked along a new first axis of one parameter; `each` relates a tensor to a slice."""

    each: Relation

    def tensor_shapes(self, shapes: Shapes) -> list[Shape]:
        (shape,) = shapes
        return self.each.tensor_shapes([shape[1:]] * shape[0])

    def load(self, tensors: Arrays, shapes: Shapes) -> list[np.ndarray]:
        return [np.stack(self.each.load(tensors, [shape[1:] for shape in shapes for _ in tensors]))]

    def save(self, parameters: Arrays) -> list[np.ndarray]:
        return self.each.save(list(parameters[0]))


COUNTED = WithUnread(lambda parameter: np.zeros((), np.int64))
"""A tensor with the `num_batches_tracked` counter of a PyTorch batch norm, which is not used, and written as 0."""


def batch_norm(tensor: str, parameter: str) -> list[Rule]:
    """Return the rules for a batch norm with fixed statistics."""
    variance = (f"{tensor}.running_var", f"{tensor}.num_batches_tracked")
    mean = Rule(f"{tensor}.running_mean", f"{parameter}/mean")
    return [*norm(tensor, parameter), mean, Rule(variance, f"{parameter}/variance", COUNTED)]


_PLAIN = {
    "num_input_channels": ("channels", 1),
    "context_length": ("context_length", 32),
    "patch_length": ("patch_length", 1),
    "patch_stride": ("patch_stride", 1),
    "share_embedding": ("shared_embedding", True),
    "use_cls_token": ("class_token", False),
}
_SCALINGS = {"std": "std", "mean": "mean", None: "none", True: "mean", False: "none"}
_POOLINGS = {None: "flatten", "mean": "mean", "max": "max", False: "flatten"}


@dataclass(frozen=True)
class SeriesSizes(Codec):
    """Sizes of context, forecast and patches, and the options for scaling and pooling."""

    forecasts: bool = False
    """Whether the model forecasts `prediction_length` steps; others don't read this field."""
    pools: bool = False
    """Whether the head needs one vector per channel: by a class token, or by pooling of the patches."""

    names = (*_PLAIN, "prediction_length", "scaling", "pooling_type")

    def read(self, values: Fields, changes: Fields) -> Fields:
        fields = read_table(values, _PLAIN)
        scaling = Field("scaling", "scaling", "std", _SCALINGS).read(values, changes)
        named, pooling = values.get("pooling_type", "mean"), Field("pooling_type", "pooling", "mean", _POOLINGS)
        pooling = pooling.read(values, changes)["pooling"]
        if self.pools and not fields["class_token"] and pooling == "flatten":
            raise FieldError(f"pooling_type is {named!r}, but this head needs mean, max or use_cls_token")
        fields["horizon"] = values.get("prediction_length", 24) if self.forecasts else None
        # With a class token, the head reads only this token, and pooling has no effect.
        return {"input": Series(**fields, **scaling, pooling="flatten" if fields["class_token"] else pooling)}

    def write(self, config: TransformerConfig) -> Fields:
        series = config.series
        if series is None:
            return {}
        values = {"prediction_length": series.horizon} if self.forecasts else {}
        values |= write_table(series, _PLAIN) | written_as("scaling", series.scaling, _SCALINGS)
        return values | written_as("pooling_type", series.pooling, _POOLINGS)


@dataclass(frozen=True)
class SeriesTargets(Codec):
    """`num_targets`, the number of classes or of predicted numbers, and `output_range`, the limits of the latter."""

    classes: bool
    """Whether the targets are classes."""
    names = ("num_targets", "output_range")

    def read(self, values: Fields, changes: Fields) -> Fields:
        count, limits = values.get("num_targets", 1), values.get("output_range")
        if self.classes:
            return {"output.num_classes": count}
        return {
            "output.num_targets": count,
            "output.target_range": None if limits is None else tuple(float(limit) for limit in limits),
        }

    def write(self, config: TransformerConfig) -> Fields:
        output = config.output
        values = {"num_targets": output.num_classes if self.classes else output.num_targets}
        values = {name: value for name, value in values.items() if value is not None}
        return values if output.target_range is None else values | {"output_range": list(output.target_range)}


def _rules(config: TransformerConfig) -> list[Rule]:
    encoder, layer, ours = "model.encoder.", "model.encoder.layers.{layer}.", "encoder/{layer}/"
    table, embedding = f"{encoder}positional_encoder.", f"{encoder}embedder.input_embedding"
    channels = range(0 if config.series is None else config.series.channels)
    weights, biases = (tuple(f"{embedding}.{i}.{part}" for i in channels) for part in ("weight", "bias"))
    rules = [
        *linear(embedding, "series_embedding"),
        Rule(weights, "channel_embedding/kernel", Stacked(MATRIX)),
        Rule(biases, "channel_embedding/bias", Stacked(Relation())),
        Rule(f"{table}cls_token", "class_token", row(3)),
        Rule(f"{table}position_enc", "encoder/position_table"),
        *attention_rules(f"{layer}self_attn", f"{ours}self_attention"),
        *linear(f"{layer}ff.0", f"{ours}feed_forward/up"),
        *linear(f"{layer}ff.3", f"{ours}feed_forward/down"),
    ]
    for theirs, name in {"norm_sublayer1": "attention_norm", "norm_sublayer3": "feed_forward_norm"}.items():
        tensor, parameter = f"{layer}{theirs}", f"{ours}{name}"
        is_layer_norm = config.norm.kind == "layer_norm"
        rules += norm(tensor, parameter) if is_layer_norm else batch_norm(f"{tensor}.batchnorm", parameter)
    return rules


_OF_PRETRAINING = Unread(("do_mask_input", "mask_value"))
_OF_TARGETS = Unread(("num_targets", "output_range"))
_OF_DISTRIBUTIONS = Unread(("distribution_output", "num_parallel_samples"))
_POINTS = Fixed("loss", ("mse",))
"""Other losses train the parameters of a distribution, which is not supported."""
_FREE_LOSS = Unread(("loss",), {"loss": "mse"})
_FREE_PROJECTION = Unread(("share_projection",))


def _head(model: type, output: str | None, *fields: Codec, **options: Any) -> Head:
    """Return a head whose output layer has the tensors `output`."""
    rules = () if output is None else tuple(linear(output, "output"))
    return Head(model=model, rules=rules, fields=(*fields, _OF_DISTRIBUTIONS), **options)


PATCHTST = Family(
    name="patchtst",
    title="PatchTST",
    citation="Nie et al. 2022, arXiv 2211.14730",
    heads={
        "PatchTSTForPrediction": _head(
            Forecaster,
            "head.projection",
            SeriesSizes(forecasts=True),
            # The reference fails for separate heads per channel if there are several channels.
            Fixed("share_projection", (True,)),
            *(_POINTS, _OF_TARGETS, _OF_PRETRAINING),
        ),
        "PatchTSTForClassification": _head(
            SeriesClassifier,
            "head.linear",
            *(SeriesSizes(pools=True), SeriesTargets(classes=True)),
            *(_FREE_LOSS, _OF_PRETRAINING, _FREE_PROJECTION),
        ),
        "PatchTSTForRegression": _head(
            SeriesRegressor,
            "head.projection",
            *(SeriesSizes(pools=True), SeriesTargets(classes=False)),
            *(_POINTS, _OF_PRETRAINING, _FREE_PROJECTION),
        ),
        "PatchTSTForPretraining": _head(
            PatchReconstructor,
            "head.linear",
            *(SeriesSizes(), Fixed("mask_value", (0,)), Unread(("do_mask_input",), {"do_mask_input": True})),
            *(_FREE_LOSS, _OF_TARGETS, _FREE_PROJECTION),
        ),
        "PatchTSTModel": _head(
            SeriesEncoder,
            None,
            # With do_mask_input, the reference masks random patches in every call.
            *(SeriesSizes(), Fixed("do_mask_input", (False, None)), Unread(("mask_value",))),
            *(_FREE_LOSS, _OF_TARGETS, _FREE_PROJECTION),
            base=True,
            ignored=(r"head\.(linear|projection)\.(weight|bias)",),
        ),
    },
    constants={
        "position": LearnedOptions(),
        "stack.final_norm": False,
        "attention.biases": ("query", "key", "value", "out"),
    },
    fields=(
        *sizes(d_model=("d_model", 128), num_layers=("num_hidden_layers", 3), num_heads=("num_attention_heads", 4)),
        Field("ffn_dim", "feed_forward.d_ff", 512),
        Field("activation_function", "feed_forward.activation", "gelu", ACTIVATIONS),
        Field("bias", "parameters.use_bias", True),
        Field("norm_type", "norm.kind", "batchnorm", {"batchnorm": "frozen_batch_norm", "layernorm": "layer_norm"}),
        Field("norm_eps", "norm.epsilon", 1e-5),
        Field("pre_norm", "norm.position", True, {True: "pre", False: "post"}),
        *training_fields("path_dropout", "attention_dropout", "init_std"),
        Fixed("channel_attention", (False,)),
        # The file contains the position table for both types.
        Fixed("positional_encoding_type", ("random", "sincos")),
        Unread(("positional_dropout", "ff_dropout", "head_dropout", "dropout", "initializer_range")),
    ),
    rules=_rules,
    prefix="model.",
)
