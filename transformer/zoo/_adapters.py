"""Adapters of the models of a family, in the format of PEFT."""

from __future__ import annotations

import os
from collections.abc import Sequence

import flax.linen as nn
from jaxtyping import PyTree

from transformer.nn.models._causal_lm import CausalLM
from transformer.nn.models._kinds import kind_of
from transformer.nn.models._seq2seq import Seq2Seq
from transformer.zoo._family import Family, abstract_params
from transformer.zoo._pretrained import choose_family
from transformer.zoo.weights._adapters import Adapter, read_adapter, write_adapter
from transformer.zoo.weights._conversion import parameter_shapes
from transformer.zoo.weights._rules import Link


def adapter_for(
    model: nn.Module,
    params: PyTree,
    directory: str | os.PathLike,
    family: Family | None = None,
    architecture: str | None = None,
) -> Adapter:
    """Read an adapter for a model with these parameters.

    `family` and `architecture` are those whose module names it uses; None: the first that can describe the model. The
    errors are those of `read_adapter`.
    """
    if family is None:
        family, architecture, _ = choose_family(model)
    links, title = _links(model, family, architecture), f"this {family.title} model"
    copies = _copies(model, family, links)
    return read_adapter(directory, links, params, prefix=family.prefix, title=title, copies=copies)


def save_adapter(
    model: nn.Module,
    adapter: Adapter,
    params: PyTree,
    directory: str | os.PathLike,
    family: str | None,
    base: str | None = None,
) -> Family:
    """Write an adapter of a model with these parameters, and return the family whose module names it uses.

    `family` is the name of a family (None: the first that can describe the model), and `base` the name or directory of
    the model that the adapter is for. The errors are those of `choose_family` and `write_adapter`.
    """
    chosen, architecture, _ = choose_family(model, family)
    task = {CausalLM: "CAUSAL_LM", Seq2Seq: "SEQ_2_SEQ_LM"}.get(type(model))
    links = _links(model, chosen, architecture)
    copies = _copies(model, chosen, links)
    write_adapter(directory, adapter, links, params, base=base, task=task, copies=copies)
    return chosen


def _links(model: nn.Module, family: Family, architecture: str) -> list[Link]:
    return family.links(model, architecture, parameter_shapes(abstract_params(model)))


def _copies(model: nn.Module, family: Family, links: Sequence[Link]) -> dict[str, str]:
    """Return the tensors of modules that are tied to others: copy -> the tensor of `links` with the same values."""
    if not kind_of(model).predicts_tokens or not model.config.embedding.tie:
        return {}
    names = {name for link in links for name in link.tensors}
    return {copy: name for copy, name in family.copies.items() if name in names and copy not in names}
