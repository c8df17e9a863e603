"""A short example input and its logits, stored with a saved model to verify it later."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from transformer.config._execution import Execution
from transformer.nn.models._kinds import example_inputs, kind_of
from transformer.zoo.weights._header import WeightsError
from transformer.zoo.weights._integrity import INTEGRITY_FILE

LENGTH = 8
"""Number of tokens of the example."""
NUMBERS = 16
"""Number of logits of the last position that are stored."""
TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
"""Maximum difference of logits by dtype, relative to the largest expected logit. It allows for different rounding
on other devices and with other XLA versions."""
MAX_EXAMPLE_BYTES = 8 * 2**30
"""Models with more bytes of parameters are saved without an example."""


def make_example(model: nn.Module, params: PyTree, dtype: str) -> dict[str, Any] | None:
    """Compute the example of a model: a short input and some of its logits in `dtype`, as JSON values.

    A model with more than 8 GiB of parameters has none: the forward pass would make saving slow, and may exceed the
    memory.
    """
    if sum(leaf.nbytes for leaf in jax.tree.leaves(params)) > MAX_EXAMPLE_BYTES:
        return None
    model = model.clone(config=model.config.replace(dtype=dtype, **{"parameters.dtype": dtype}), execution=Execution())
    inputs = _default_inputs(model)
    logits = _logits(model, params, [_array(one) for one in inputs])
    places = sorted({round(i) for i in np.linspace(0, logits.size - 1, NUMBERS)})
    return {
        "inputs": inputs,
        "dtype": dtype,
        "places": places,
        "logits": [float(logits[place]) for place in places],
        "tolerance": TOLERANCES[dtype],
    }


def compare_example(directory: str | os.PathLike, example: dict[str, Any], model: nn.Module, params: PyTree) -> float:
    """Return the largest difference of the example's logits, relative to the largest, from the model of the directory.

    WeightsError if it is above the tolerance, or the example does not belong to this model.
    """
    inputs, places, expected = _read_example(directory, example, model)
    logits = _logits(model, params, inputs)
    if max(places) >= logits.size:
        raise _invalid_example(directory, f"places must be below {logits.size}, got {max(places)}")
    got = logits[places]
    differences = np.abs(got - expected)
    # The lower bound avoids 0 / 0 if all expected logits are 0.
    share = float(differences.max() / max(np.abs(expected).max(), 1e-30))
    tolerance = TOLERANCES[example_dtype(directory, example)]
    if not share <= tolerance:  # unlike `share > tolerance`, this is also true for NaN
        worst = int(np.nanargmax(np.where(np.isnan(differences), np.inf, differences)))
        raise WeightsError(
            f"the logits of {directory} differ from those in {INTEGRITY_FILE}: at index {places[worst]} expected "
            f"{expected[worst]:.6g}, got {got[worst]:.6g}. The relative difference is {share:.2g}, the tolerance "
            f"{tolerance:g}. The files are unchanged, so the computation differs in this version of transformer-zoo or "
            f"JAX, or on this device. Try the versions that saved the model, and report the problem."
        )
    return share


def example_dtype(directory: str | os.PathLike, example: dict[str, Any]) -> str:
    """Return the dtype of an example's logits; raise WeightsError if models don't have it."""
    given = example.get("dtype")
    if not isinstance(given, str) or given not in TOLERANCES:
        raise _invalid_example(directory, f"dtype must be one of {', '.join(TOLERANCES)}, got {given!r:.80}")
    return given


def _vocabularies(model: nn.Module) -> list[int]:
    """Return the vocabulary size for each input of a model (unused for inputs that are not tokens)."""
    target = model.config.vocab_size or 1
    source = model.config.embedding.source_vocab_size or target
    kind = kind_of(model)
    return [source, target] if kind.source or kind.compares else [target]


def _default_inputs(model: nn.Module) -> list[dict[str, Any]]:
    """Return the inputs of a new example, as JSON values: tokens, or the shape of a sine wave for numeric inputs."""
    config, usual = model.config, []
    length = min(LENGTH, config.max_length or LENGTH, config.longest_source or LENGTH)
    for one, vocabulary in zip(example_inputs(model), _vocabularies(model), strict=True):
        tokens = [(3 + 7 * i) % vocabulary for i in range(length)]
        usual.append({"tokens": tokens} if jnp.issubdtype(one.dtype, jnp.integer) else {"sine": list(one.shape)})
    return usual


def _array(described: dict[str, Any]) -> jax.Array:
    if "tokens" in described:
        return jnp.asarray([described["tokens"]], jnp.int32)
    shape = described["sine"]
    return jnp.asarray(np.sin(0.7 * np.arange(np.prod(shape))).reshape(shape), jnp.float32)


def _logits(model: nn.Module, params: PyTree, inputs: Sequence[jax.Array]) -> np.ndarray:
    """Return the flattened outputs of a model. For logits per token (B, T, V), return only those of the last token.

    Matrix multiplications use the highest precision, because accelerators default to a lower one.
    """
    with jax.default_matmul_precision("highest"):
        out = jax.jit(lambda params, *inputs: model.apply({"params": params}, *inputs))(params, *inputs)
    out = np.asarray(out, np.float32)
    return out[0, -1].ravel() if out.ndim == 3 else out[0].ravel()


def _read_example(
    directory: str | os.PathLike, example: dict[str, Any], model: nn.Module
) -> tuple[list[jax.Array], list[int], np.ndarray]:
    """Return the inputs, the indices of the stored logits and their values; raise WeightsError if they are invalid."""
    inputs, places, logits = (example.get(name) for name in ("inputs", "places", "logits"))
    _check_inputs(directory, inputs, model)
    numbers = (int, float)
    if not isinstance(places, list) or not places or not all(type(i) is int and i >= 0 for i in places):
        raise _invalid_example(directory, f"places must be a list of non-negative integers, got {places!r:.80}")
    if not isinstance(logits, list) or len(logits) != len(places) or not all(type(x) in numbers for x in logits):
        raise _invalid_example(directory, f"logits must be {len(places)} numbers, got {logits!r:.80}")
    return [_array(one) for one in inputs], places, np.asarray(logits, np.float64)


def _check_inputs(directory: str | os.PathLike, inputs: object, model: nn.Module) -> None:
    """Raise WeightsError unless `inputs` are valid example inputs of this model."""
    wanted = _default_inputs(model)
    if not isinstance(inputs, list) or len(inputs) != len(wanted):
        raise _invalid_example(directory, f"inputs must be a list of length {len(wanted)}, got {inputs!r:.80}")
    for given, usual, size in zip(inputs, wanted, _vocabularies(model), strict=True):
        tokens = given.get("tokens") if isinstance(given, dict) else None
        known = isinstance(tokens, list) and 0 < len(tokens) <= LENGTH
        if "tokens" in usual and not (known and all(type(i) is int and 0 <= i < size for i in tokens)):
            raise _invalid_example(directory, f"tokens must be at most {LENGTH} ids below {size}, got {given!r:.80}")
        if "sine" in usual and given != usual:
            raise _invalid_example(directory, f"an input must be {usual}, got {given!r:.80}")


def _invalid_example(directory: str | os.PathLike, fault: str) -> WeightsError:
    return WeightsError(
        f"the example in {os.path.join(directory, INTEGRITY_FILE)} is invalid: {fault}. Download or export the "
        f"directory again."
    )
