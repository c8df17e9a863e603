"""Weights in and out as data: rules say which tensors of a file are which parameters, and are read both ways.

A rule with `{layer}` in its names stands for every layer of a stack, one with `{expert}` for every expert of a layer:

    Rule("model.layers.{layer}.self_attn.q_proj.weight", "decoder/{layer}/self_attention/query/kernel", MATRIX)

Where a layer has no such parameter (a bias in a model without), the rule says nothing about it: a family lists what its
models may have. That nothing is forgotten is checked afterwards, for every tensor and every parameter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from transformer.config._model import TransformerConfig
from transformer.config._parts import LayerKind

Shape = tuple[int, ...]
"""sizes of the axes of an array"""


@dataclass(frozen=True)
class Relation:
    """How the tensors of a rule and its parameters, of one layer and one expert, are made of each other. The base: they
    are the same.
    """

    def tensor_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Shapes of the tensors for parameters of these shapes."""
        return list(shapes)

    def load(self, tensors: Sequence[np.ndarray], shapes: Sequence[Shape]) -> list[np.ndarray]:
        """Parameters of these shapes, made of the tensors; views where that will do."""
        return list(tensors)

    def save(self, parameters: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The tensors that `load` would make these parameters of."""
        return list(parameters)


@dataclass(frozen=True)
class Reshaped(Relation):
    """Each parameter is a tensor with axes merged: a matrix of its first `inputs` axes and of the rest, turned round
    where `transposed` (PyTorch keeps the outputs of a linear map first); or with `inputs` 0 a vector.
    """

    inputs: int
    transposed: bool = False

    def tensor_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return [self._shape(shape) for shape in shapes]

    def _shape(self, shape: Shape) -> Shape:
        if not self.inputs:
            return (math.prod(shape),)
        sides = (math.prod(shape[: self.inputs]), math.prod(shape[self.inputs :]))
        return sides[::-1] if self.transposed else sides

    def load(self, tensors: Sequence[np.ndarray], shapes: Sequence[Shape]) -> list[np.ndarray]:
        turned = [tensor.T if self.transposed else tensor for tensor in tensors]
        return [tensor.reshape(shape) for tensor, shape in zip(turned, shapes, strict=True)]

    def save(self, parameters: Sequence[np.ndarray]) -> list[np.ndarray]:
        matrices = [
            p.reshape(self._shape(p.shape)[::-1] if self.transposed else self._shape(p.shape)) for p in parameters
        ]
        return [matrix.T if self.transposed else matrix for matrix in matrices]


SAME = Relation()
"""the tensor is the parameter"""
VECTOR = Reshaped(0)
"""a bias of heads (N, H) is one vector in the file"""
MATRIX = Reshaped(1, transposed=True)
"""a linear map (in, *out), as PyTorch keeps it: (out, in)"""
MERGED = Reshaped(2, transposed=True)
"""a linear map from two axes, (N, H, out), as PyTorch keeps it: (out, N H)"""


@dataclass(frozen=True)
class Fused(Relation):
    """Several parameters are one tensor: what `each` makes of them, joined along `axis`."""

    axis: int = 0
    each: Relation = MATRIX

    def tensor_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        parts = self.each.tensor_shapes(shapes)
        axis = self.axis % len(parts[0])
        total = sum(part[axis] for part in parts)
        return [(*parts[0][:axis], total, *parts[0][axis + 1 :])]

    def load(self, tensors: Sequence[np.ndarray], shapes: Sequence[Shape]) -> list[np.ndarray]:
        sizes = [part[self.axis] for part in self.each.tensor_shapes(shapes)]
        return self.each.load(np.split(tensors[0], np.cumsum(sizes)[:-1], axis=self.axis), shapes)

    def save(self, parameters: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [np.concatenate(self.each.save(parameters), axis=self.axis)]


@dataclass(frozen=True)
class FusedByHead(Relation):
    """Several maps with equally many heads (..., N, H), or their biases, are one tensor: of the first head those of
    all, then of the second, and so on. `each` says what one of them is by itself.
    """

    each: Relation

    def tensor_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        rows, *rest = self.each.tensor_shapes(shapes)[0]
        return [(len(shapes) * rows, *rest)]

    def load(self, tensors: Sequence[np.ndarray], shapes: Sequence[Shape]) -> list[np.ndarray]:
        heads, size = shapes[0][-2:]
        by_head = tensors[0].reshape(heads, len(shapes), size, *tensors[0].shape[1:])
        parts = [by_head[:, i].reshape(heads * size, *tensors[0].shape[1:]) for i in range(len(shapes))]
        return self.each.load(parts, shapes)

    def save(self, parameters: Sequence[np.ndarray]) -> list[np.ndarray]:
        heads, size = parameters[0].shape[-2:]
        parts = [part.reshape(heads, size, *part.shape[1:]) for part in self.each.save(parameters)]
        joined = np.stack(parts, axis=1)
        return [joined.reshape(len(parts) * heads * size, *joined.shape[3:])]


@dataclass(frozen=True)
class WithoutFirst(Relation):
    """The first `rows` of the tensor stand for no position: cut off, and zeros where it is written."""

    rows: int

    def tensor_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return [(length + self.rows, *rest) for length, *rest in shapes]

    def load(self, tensors: Sequence[np.ndarray], shapes: Sequence[Shape]) -> list[np.ndarray]:
        return [tensor[self.rows :] for tensor in tensors]

    def save(self, parameters: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [
            np.concatenate([np.zeros_like(table, shape=(self.rows, *table.shape[1:])), table]) for table in parameters
        ]


@dataclass(frozen=True)
class Row(Relation):
    """The tensor has `axes` more axes in front, of size 1."""

    axes: int

    def tensor_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return [(1,) * self.axes + shape for shape in shapes]

    def load(self, tensors: Sequence[np.ndarray], shapes: Sequence[Shape]) -> list[np.ndarray]:
        return [tensor.reshape(shape) for tensor, shape in zip(tensors, shapes, strict=True)]

    def save(self, parameters: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [parameter[(None,) * self.axes] for parameter in parameters]


@dataclass(frozen=True)
class Rule:
    """Which tensors of a file are which parameters: one name each, or several that one relation joins.

    The name of a parameter is its path; of one in a layer it begins with the stack and `{layer}`, such as
    `decoder/{layer}/attention_norm/scale`, wherever that layer lies.
    """

    tensors: str | tuple[str, ...]
    parameters: str | tuple[str, ...]
    relation: Relation = SAME


def linear(tensor: str, parameter: str, relation: Relation = MATRIX) -> list[Rule]:
    """Rules of a linear map: `weight` is `kernel` (by the relation), `bias` is `bias`."""
    return [
        Rule(f"{tensor}.weight", f"{parameter}/kernel", relation),
        Rule(f"{tensor}.bias", f"{parameter}/bias", VECTOR),
    ]


def norm(tensor: str, parameter: str) -> list[Rule]:
    """Rules of a normalization: `weight` is `scale`, `bias` is `bias`."""
    return [Rule(f"{tensor}.weight", f"{parameter}/scale"), Rule(f"{tensor}.bias", f"{parameter}/bias")]


def modules(tensors: str, parameters: str, names: Mapping[str, str]) -> list[Rule]:
    """Rules of several norms and linear layers.

    `names` maps the path of each module, without `parameters` in front, to the name of its tensors, without `tensors`
    in front. A path that ends in `norm` is a normalization, one that ends in `out` a linear layer whose inputs are
    heads; all others are linear layers.
    """
    rules = []
    for ours, theirs in names.items():
        tensor, parameter = f"{tensors}{theirs}", f"{parameters}{ours}"
        if ours.endswith("norm"):
            rules += norm(tensor, parameter)
        else:
            rules += linear(tensor, parameter, MERGED if ours.endswith("out") else MATRIX)
    return rules


def fused(tensor: str, parameters: Sequence[str], weight: Relation, bias: Relation) -> list[Rule]:
    """Rules of several linear layers that are one in the file; `weight` and `bias` relate its two tensors to them."""
    return [
        Rule(f"{tensor}.weight", tuple(f"{name}/kernel" for name in parameters), weight),
        Rule(f"{tensor}.bias", tuple(f"{name}/bias" for name in parameters), bias),
    ]


@dataclass(frozen=True)
class Target:
    """The parameter at a `path`, or a part of one that is stacked: `index` on its first axes."""

    path: str
    index: tuple[int, ...] = ()


@dataclass(frozen=True)
class Link:
    """A rule applied to one layer and expert: `tensors` by name, and `targets`, the parts of parameters they are."""

    tensors: tuple[str, ...]
    targets: tuple[Target, ...]
    relation: Relation

    def shapes(self, parameters: Mapping[str, Shape]) -> list[Shape]:
        """Shapes of the targets, where `parameters` has those of whole parameters."""
        return [parameters[target.path][len(target.index) :] for target in self.targets]


def layer_places(config: TransformerConfig, num_layers: int) -> list[tuple[str, int | None]]:
    """Where each layer of a stack lies: its path inside the stack and, where it is stacked with others, its index."""
    return [(layer.path, layer.index) for layer in config.layers(num_layers)]


def layer_kinds(config: TransformerConfig, num_layers: int) -> list[LayerKind]:
    """The kind of each layer of a stack, in order."""
    return [layer.kind for layer in config.layers(num_layers)]


def link(
    rules: Iterable[Rule], parameters: Mapping[str, Shape], stacks: Mapping[str, Sequence[tuple[str, int | None]]]
) -> list[Link]:
    """The rules applied to a model with these parameters, whose stacks have these `layer_places`."""
    return [one for rule in rules for one in _links(rule, parameters, stacks)]


def _links(rule: Rule, parameters: Mapping[str, Shape], stacks: Mapping[str, Any]) -> Iterator[Link]:
    names = (rule.tensors,) if isinstance(rule.tensors, str) else rule.tensors
    paths = (rule.parameters,) if isinstance(rule.parameters, str) else rule.parameters
    for one in _by_layer(names, paths, rule.relation, stacks):
        if any(target.path not in parameters for target in one.targets):
            continue
        if any("{expert}" in name for name in names):
            first = one.targets[0]
            yield from _by_expert(one, num_experts=parameters[first.path][len(first.index)])
        else:
            yield one


def _by_layer(
    names: Sequence[str], paths: Sequence[str], relation: Relation, stacks: Mapping[str, Any]
) -> Iterator[Link]:
    """One link for each layer of the stack that the paths begin with; one in all where they name no `{layer}`."""
    stack, in_layers, _ = paths[0].partition("/{layer}/")
    if not in_layers:
        yield Link(tuple(names), tuple(Target(path) for path in paths), relation)
        return
    for number, (inside, index) in enumerate(stacks.get(stack, ())):
        yield Link(
            tuple(name.replace("{layer}", str(number)) for name in names),
            tuple(Target(path.replace("{layer}", inside), () if index is None else (index,)) for path in paths),
            relation,
        )


def _by_expert(one: Link, num_experts: int) -> Iterator[Link]:
    """One link for each expert: its index is the first axis of the parameter of a layer."""
    for expert in range(num_experts):
        yield Link(
            tuple(name.replace("{expert}", str(expert)) for name in one.tensors),
            tuple(Target(target.path, (*target.index, expert)) for target in one.targets),
            one.relation,
        )


def uncovered(links: Iterable[Link], parameters: Mapping[str, Shape]) -> list[str]:
    """Parameters, or layers of them, that no link fills or that several do: the rules don't fit the model."""
    filled: dict[str, list[tuple[int, ...]]] = {path: [] for path in parameters}
    for target in itertools.chain.from_iterable(one.targets for one in links):
        filled[target.path].append(target.index)
    faults = []
    for path, indices in filled.items():
        depth = len(indices[0]) if indices else 0
        wanted = list(itertools.product(*map(range, parameters[path][:depth])))
        if sorted(indices) != wanted:
            faults.append(path)
    return faults
