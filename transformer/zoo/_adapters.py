"""Adapters of the models of a family, in the format of PEFT."""

from __future__ import annotations

import os
from typing import Any

import flax.linen as nn

from transformer.nn.models._causal_lm import CausalLM
from transformer.nn.models._seq2seq import Seq2Seq
from transformer.zoo._family import Family, abstract_params
from transformer.zoo._pretrained import choose_family
from transformer.zoo.weights._adapters import Adapter, read_adapter, write_adapter
from transformer.zoo.weights._loading import parameter_shapes
from transformer.zoo.weights._rules import Link


def adapter_for(
    model: nn.Module,
    params: Any,
    directory: str | os.PathLike,
    family: Family | None = None,
    architecture: str | None = None,
) -> Adapter:
    """Read an adapter for a model.

    Args:
        model: the model.
        params: its parameters, without an adapter.
        directory: directory of the adapter.
        family: family whose module names the adapter uses; None: the first that can describe the model.
        architecture: its architecture, if `family` is given.

    Raises:
        FileNotFoundError, WeightsError, ConfigError: see `read_adapter`.
    """
    if family is None:
        family, architecture, _ = choose_family(model)
    title = f"this {family.title} model"
    return read_adapter(directory, _links(model, family, architecture), params, prefix=family.prefix, title=title)


def save_adapter(
    model: nn.Module,
    adapter: Adapter,
    params: Any,
    directory: str | os.PathLike,
    family: str | None,
    base: str | None = None,
) -> Family:
    """Write an adapter of a model, and return the family whose module names it uses.

    Args:
        model: the model.
        adapter: the adapter.
        params: parameters of the model, without the adapter.
        directory: new or empty directory.
        family: name of a family; None: the first family that can describe the model.
        base: name or directory of the model that the adapter is for.

    Raises:
        ConfigError: the family is unknown or can't describe the model, or PEFT's format can't express the updates.
        WeightsError: the directory is not empty.
    """
    chosen, architecture, _ = choose_family(model, family)
    task = {CausalLM: "CAUSAL_LM", Seq2Seq: "SEQ_2_SEQ_LM"}.get(type(model))
    write_adapter(directory, adapter, _links(model, chosen, architecture), params, base=base, task=task)
    return chosen


def _links(model: nn.Module, family: Family, architecture: str) -> list[Link]:
    return family.links(model, architecture, parameter_shapes(abstract_params(model)))
