"""Declarative, bidirectional rules that map the tensors of a file to the parameters of a model.

A rule with `{layer}` in its names applies to every layer of a stack, a rule with `{expert}` to every expert of a layer:

    Rule("model.layers.{layer}.self_attn.q_proj.weight", "decoder/{layer}/self_attention/query/kernel", MATRIX)

A family lists rules for all parameters that its models may have. Rules for parameters that a model lacks, such as a
bias, are skipped. `uncovered` and `check_complete` verify afterwards that no parameter and no tensor is left over.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from transformer.config._model import TransformerConfig
from transformer.config._parts import LayerKind

Shape = tuple[int, ...]
"""Sizes of the axes of an array."""
Shapes = Sequence[Shape]
Arrays = Sequence[np.ndarray]


@dataclass(frozen=True)
class Relation:
    """Conversion between the tensors and the parameters of a rule, for one layer and one expert.

    The base class is the identity.
    """

    def tensor_shapes(self, shapes: Shapes) -> list[Shape]:
        """Return the shapes of the tensors for parameters of these shapes."""
        return list(shapes)

    def load(self, tensors: Arrays, shapes: Shapes) -> list[np.ndarray]:
        """Convert tensors to parameters of these shapes, as views if possible."""
        return list(tensors)

    def save(self, parameters: Arrays) -> list[np.ndarray]:
        """Convert parameters to tensors, the inverse of `load`."""
        return list(parameters)


@dataclass(frozen=True)
class Reshaped(Relation):
    """A tensor that is the parameter with its axes merged to a matrix or a vector.

    A kernel here keeps separate axes for heads, such as (in, N, H). The file has a matrix (in, N H), or its transpose
    (N H, in), because PyTorch's linear layers store the outputs first.
    """

    inputs: int
    """Number of leading axes that are inputs. They become one side of the matrix, the other axes become the other side.
    0: the tensor is a vector."""
    transposed: bool = False
    """Whether the file stores the transposed matrix (out, in)."""

    def tensor_shapes(self, shapes: Shapes) -> list[Shape]:
        return [self._shape(shape) for shape in shapes]

    def _shape(self, shape: Shape) -> Shape:
        if not self.inputs:
            return (math.prod(shape),)  # (N, H) -> (N H,)
        # (*inputs, *outputs) -> (in, out), both sides as products of their axes.
        sides = (math.prod(shape[: self.inputs]), math.prod(shape[self.inputs :]))
        return sides[::-1] if self.transposed else sides

    def load(self, tensors: Arrays, shapes: Shapes) -> list[np.ndarray]:
        # (out, in) -> (in, out) as a view, then split the merged axes: (in, N H) -> (in, N, H).
        matrices = [tensor.T if self.transposed else tensor for tensor in tensors]
        return [tensor.reshape(shape) for tensor, shape in zip(matrices, shapes, strict=True)]

    def save(self, parameters: Arrays) -> list[np.ndarray]:
        # `_shape` is the shape in the file. Reshape to the untransposed matrix first, then transpose it.
        matrices = [
            p.reshape(self._shape(p.shape)[::-1] if self.transposed else self._shape(p.shape)) for p in parameters
        ]
        return [matrix.T if self.transposed else matrix for matrix in matrices]


SAME = Relation()
"""The tensor equals the parameter."""
VECTOR = Reshaped(0)
"""A bias per head (N, H), stored as one vector (N H,)."""
MATRIX = Reshaped(1, transposed=True)
"""A linear map (in, *out), stored by PyTorch as (out, in)."""
MERGED = Reshaped(2, transposed=True)
"""A linear map (N, H, out) from two axes, stored by PyTorch as (out, N H)."""


@dataclass(frozen=True)
class Fused(Relation):
    """Several parameters concatenated to one tensor along `axis`, each converted by `each`."""

    axis: int = 0
    each: Relation = MATRIX

    def tensor_shapes(self, shapes: Shapes) -> list[Shape]:
        parts = self.each.tensor_shapes(shapes)
        axis = self.axis % len(parts[0])  # a negative axis counts from the end
        total = sum(part[axis] for part in parts)
        return [(*parts[0][:axis], total, *parts[0][axis + 1 :])]

    def load(self, tensors: Arrays, shapes: Shapes) -> list[np.ndarray]:
        # np.split takes the boundaries between the parts: cumulative sizes without the total.
        sizes = [part[self.axis] for part in self.each.tensor_shapes(shapes)]
        return self.each.load(np.split(tensors[0], np.cumsum(sizes)[:-1], axis=self.axis), shapes)

    def save(self, parameters: Arrays) -> list[np.ndarray]:
        return [np.concatenate(self.each.save(parameters), axis=self.axis)]


@dataclass(frozen=True)
class FusedByHead(Relation):
    """Several maps (..., N, H) with the same number of heads, or their biases, fused per head into one tensor.

    The rows of the tensor are: head 0 of all maps, head 1 of all maps, and so on, so that its shape is
    (N, maps, H, ...) with the first three axes merged. `each` converts a single map.
    """

    each: Relation

    def tensor_shapes(self, shapes: Shapes) -> list[Shape]:
        rows, *rest = self.each.tensor_shapes(shapes)[0]
        return [(len(shapes) * rows, *rest)]

    def load(self, tensors: Arrays, shapes: Shapes) -> list[np.ndarray]:
        heads, size = shapes[0][-2:]
        # (N maps H, ...) -> (N, maps, H, ...)
        by_head = tensors[0].reshape(heads, len(shapes), size, *tensors[0].shape[1:])
        # One map: (N, H, ...) -> (N H, ...)
        parts = [by_head[:, i].reshape(heads * size, *tensors[0].shape[1:]) for i in range(len(shapes))]
        return self.each.load(parts, shapes)

    def save(self, parameters: Arrays) -> list[np.ndarray]:
        heads, size = parameters[0].shape[-2:]
        # (N H, ...) -> (N, H, ...)
        parts = [part.reshape(heads, size, *part.shape[1:]) for part in self.each.save(parameters)]
        joined = np.stack(parts, axis=1)  # (N, maps, H, ...)
        return [joined.reshape(len(parts) * heads * size, *joined.shape[3:])]


@dataclass(frozen=True)
class EachTensor(Relation):
    """Conversion of each tensor to one parameter by functions."""

    shape: Callable[[Shape], Shape]
    """Shape of a parameter -> shape of its tensor."""
    to_parameter: Callable[[np.ndarray, Shape], np.ndarray]
    """Function of a tensor and the shape of its parameter."""
    to_tensor: Callable[[np.ndarray], np.ndarray]

    def tensor_shapes(self, shapes: Shapes) -> list[Shape]:
        return [self.shape(shape) for shape in shapes]

    def load(self, tensors: Arrays, shapes: Shapes) -> list[np.ndarray]:
        return [self.to_parameter(tensor, shape) for tensor, shape in zip(tensors, shapes, strict=True)]

    def save(self, parameters: Arrays) -> list[np.ndarray]:
        return [self.to_tensor(parameter) for parameter in parameters]


@dataclass(frozen=True)
class WithUnread(Relation):
    """A parameter in the first of two tensors. The second is not loaded; it is saved as `second` makes it."""

    second: Callable[[np.ndarray], np.ndarray]
    """Function from the parameter to the second tensor."""
    each: Relation = SAME
    """Relation of the first tensor."""

    def tensor_shapes(self, shapes: Shapes) -> list[Shape]:
        return [*self.each.tensor_shapes(shapes), self.second(np.broadcast_to(np.float32(0), shapes[0])).shape]

    def load(self, tensors: Arrays, shapes: Shapes) -> list[np.ndarray]:
        return self.each.load(tensors[:1], shapes)

    def save(self, parameters: Arrays) -> list[np.ndarray]:
        return [*self.each.save(parameters), self.second(parameters[0])]


def row(axes: int) -> Relation:
    """Return the relation to a tensor with `axes` additional leading axes of size 1."""
    return EachTensor(
        lambda shape: (1,) * axes + shape,
        lambda tensor, shape: tensor.reshape(shape),
        lambda parameter: parameter[(None,) * axes],
    )


def without_first(rows: int) -> Relation:
    """Return the relation to a position table whose first `rows` are unused: not loaded, and written as zeros."""
    return EachTensor(
        lambda shape: (shape[0] + rows, *shape[1:]),
        lambda tensor, shape: tensor[rows:],
        lambda table: np.concatenate([np.zeros_like(table, shape=(rows, *table.shape[1:])), table]),
    )


@dataclass(frozen=True)
class Rule:
    """A relation between one or several tensors and one or several parameters.

    A parameter is named by its path. In a layer, the path starts with the stack and `{layer}`, for example
    `decoder/{layer}/attention_norm/scale`, independent of where the parameters of that layer are stored.
    """

    tensors: str | tuple[str, ...]
    parameters: str | tuple[str, ...]
    relation: Relation = SAME


def linear(tensor: str, parameter: str, relation: Relation = MATRIX) -> list[Rule]:
    """Return the rules for a linear map: `weight` -> `kernel` (with the relation), `bias` -> `bias`."""
    return [
        Rule(f"{tensor}.weight", f"{parameter}/kernel", relation),
        Rule(f"{tensor}.bias", f"{parameter}/bias", VECTOR),
    ]


def norm(tensor: str, parameter: str) -> list[Rule]:
    """Return the rules for a normalization: `weight` -> `scale`, `bias` -> `bias`."""
    return [Rule(f"{tensor}.weight", f"{parameter}/scale"), Rule(f"{tensor}.bias", f"{parameter}/bias")]


def modules(tensors: str, parameters: str, names: Mapping[str, str]) -> list[Rule]:
    """Return the rules for several norms and linear layers, by path -> name of its tensors, both without the prefix.

    A path that ends in `norm` is a normalization. A path that ends in `out` is a linear layer with heads as inputs. All
    others are linear layers.
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
    """Return the rules for linear layers that are fused in the file; `weight` and `bias` are the relations to use."""
    return [
        Rule(f"{tensor}.weight", tuple(f"{name}/kernel" for name in parameters), weight),
        Rule(f"{tensor}.bias", tuple(f"{name}/bias" for name in parameters), bias),
    ]


@dataclass(frozen=True)
class Target:
    """The parameter at a `path`, or the part of a stacked parameter with this `index` on its first axes."""

    path: str
    index: tuple[int, ...] = ()


@dataclass(frozen=True)
class Link:
    """A rule applied to one layer and expert: names of `tensors`, and the corresponding parameter parts, `targets`."""

    tensors: tuple[str, ...]
    targets: tuple[Target, ...]
    relation: Relation

    def shapes(self, parameters: Mapping[str, Shape]) -> list[Shape]:
        """Return the shapes of the targets, given the shapes of all (stacked) parameters."""
        return [parameters[target.path][len(target.index) :] for target in self.targets]


def layer_places(config: TransformerConfig, num_layers: int) -> list[tuple[str, int | None]]:
    """Return where the parameters of each layer are stored: path inside the stack, and index if layers are stacked."""
    return [(layer.path, layer.index) for layer in config.layers(num_layers)]


def layer_kinds(config: TransformerConfig, num_layers: int) -> list[LayerKind]:
    """Return the kind of each layer of a stack, in order."""
    return [layer.kind for layer in config.layers(num_layers)]


def link(
    rules: Iterable[Rule], parameters: Mapping[str, Shape], stacks: Mapping[str, Sequence[tuple[str, int | None]]]
) -> list[Link]:
    """Apply the rules to a model, given the shapes of its parameters by path, and the `layer_places` of each stack."""
    return [one for rule in rules for one in _links(rule, parameters, stacks)]


def _links(rule: Rule, parameters: Mapping[str, Shape], stacks: Mapping[str, Any]) -> Iterator[Link]:
    names = (rule.tensors,) if isinstance(rule.tensors, str) else rule.tensors
    paths = (rule.parameters,) if isinstance(rule.parameters, str) else rule.parameters
    for one in _by_layer(names, paths, rule.relation, stacks):
        if any(target.path not in parameters for target in one.targets):
            continue  # the model lacks this parameter
        if any("{expert}" in name for name in names):
            first = one.targets[0]  # (layers, experts, ...), or (experts, ...) if layers are not stacked
            yield from _by_expert(one, num_experts=parameters[first.path][len(first.index)])
        else:
            yield one


def _by_layer(
    names: Sequence[str], paths: Sequence[str], relation: Relation, stacks: Mapping[str, Any]
) -> Iterator[Link]:
    """Yield one link per layer of the stack that the paths start with, or a single link for paths without `{layer}`."""
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
    """Yield one link per expert; experts are the first axis of the parameter of a layer."""
    for expert in range(num_experts):
        yield Link(
            tuple(name.replace("{expert}", str(expert)) for name in one.tensors),
            tuple(Target(target.path, (*target.index, expert)) for target in one.targets),
            one.relation,
        )


def uncovered(links: Iterable[Link], parameters: Mapping[str, Shape]) -> list[str]:
    """Return the parameters of which some part is set by no link or by several links: the rules don't fit the model."""
    filled: dict[str, list[tuple[int, ...]]] = {path: [] for path in parameters}
    for target in itertools.chain.from_iterable(one.targets for one in links):
        filled[target.path].append(target.index)
    faults = []
    for path, indices in filled.items():
        # All indices of one parameter have the same length. Each combination must occur exactly once.
        depth = len(indices[0]) if indices else 0
        wanted = list(itertools.product(*map(range, parameters[path][:depth])))
        if sorted(indices) != wanted:
            faults.append(path)
    return faults
