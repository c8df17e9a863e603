"""Loading and saving of weights: checkpoint directories, and rules that map tensors to parameters."""

from transformer.zoo.weights._conversion import check_complete, load_params, parameter_shapes, saved_tensors
from transformer.zoo.weights._files import TensorInfo, WeightFiles, WeightsError, first_non_finite, write_weights
from transformer.zoo.weights._hub import fetch
from transformer.zoo.weights._rules import MATRIX, MERGED, SAME, VECTOR, Fused, Relation, Reshaped, Rule, linear, norm

__all__ = [
    "MATRIX",
    "MERGED",
    "SAME",
    "VECTOR",
    "Fused",
    "Relation",
    "Reshaped",
    "Rule",
    "TensorInfo",
    "WeightFiles",
    "WeightsError",
    "check_complete",
    "fetch",
    "first_non_finite",
    "linear",
    "load_params",
    "norm",
    "parameter_shapes",
    "saved_tensors",
    "write_weights",
]
