"""A short input and the logits that a model gave for it when it was saved."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from transformer.config._model import Execution
from transformer.nn.models._seq2seq import Seq2Seq
from transformer.zoo._family import example_inputs
from transformer.zoo.weights._header import WeightsError
from transformer.zoo.weights._integrity import INTEGRITY_FILE

LENGTH = 8
"""tokens of the example"""
NUMBERS = 16
"""logits that are kept of the last position"""
TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
"""by dtype, how far logits may be from the expected ones, as a share of the largest: what other devices and releases of
XLA round otherwise"""
MAX_EXAMPLE_BYTES = 8 * 2**30
"""of parameters: larger models are saved without an example"""


def make_example(model: nn.Module, params: Any, dtype: str) -> dict[str, Any] | None:
    """A short input and some of its logits, as JSON values, of the model as it is loaded again: computed in `dtype`.

    None for a model with more than 8 GiB of parameters: to compute it may take memory and minutes that nobody expects
    of saving.
    """
    if sum(leaf.nbytes for leaf in jax.tree.leaves(params)) > MAX_EXAMPLE_BYTES:
        return None
    model = model.clone(config=model.config.replace(dtype=dtype, param_dtype=dtype), execution=Execution())
    inputs = _usual_inputs(model)
    logits = _logits(model, params, [_array(one) for one in inputs])
    places = sorted({round(i) for i in np.linspace(0, logits.size - 1, NUMBERS)})
    return {
        "inputs": inputs,
        "dtype": dtype,
        "places": places,
        "logits": [float(logits[place]) for place in places],
        "tolerance": TOLERANCES[dtype],
    }


def compare_example(directory: str | os.PathLike, example: dict[str, Any], model: nn.Module, params: Any) -> float:
    """Computes the logits of a directory's example by the model that was loaded from it, in the example's dtype.

    Returns:
        The largest difference from the expected logits, as a share of the largest of them.

    Raises:
        WeightsError: logits that differ by more than the tolerance, or an example that is not one of this model.
    """
    inputs, places, expected = _read_example(directory, example, model)
    logits = _logits(model, params, inputs)
    if max(places) >= logits.size:
        raise _not_understood(directory, f"places must be below {logits.size}, got {max(places)}")
    got = logits[places]
    differences = np.abs(got - expected)
    share = float(differences.max() / max(np.abs(expected).max(), 1e-30))
    tolerance = TOLERANCES[example_dtype(directory, example)]
    if not share <= tolerance:
        worst = int(np.nanargmax(np.where(np.isnan(differences), np.inf, differences)))
        raise WeightsError(
            f"the logits of {directory} differ from those in {INTEGRITY_FILE}: at place {places[worst]} expected "
            f"{expected[worst]:.6g}, got {got[worst]:.6g}; that is {share:.2g} of the largest, where {tolerance:g} is "
            f"allowed. The files are as they were saved, so that this release of transformer-zoo, JAX or the device "
            f"computes something else: try the release that saved them, and report it."
        )
    return share


def example_dtype(directory: str | os.PathLike, example: dict[str, Any]) -> str:
    """The dtype of an example's logits. WeightsError: none of those that models have."""
    given = example.get("dtype")
    if not isinstance(given, str) or given not in TOLERANCES:
        raise _not_understood(directory, f"dtype must be one of {', '.join(TOLERANCES)}, got {given!r:.80}")
    return given


def _vocabularies(model: nn.Module) -> list[int]:
    """Numbers of tokens that there are for each input of a model; any number for an input without tokens."""
    target = model.config.vocab_size or 1
    source = model.config.embedding.source_vocab_size or target
    return [source, target] if isinstance(model, Seq2Seq) else [target]


def _usual_inputs(model: nn.Module) -> list[dict[str, Any]]:
    """The inputs of a new example, as JSON values: tokens, or sines of a shape."""
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


def _logits(model: nn.Module, params: Any, inputs: Sequence[jax.Array]) -> np.ndarray:
    """All numbers that a model makes of inputs; of one number a token and vocabulary entry those of the last token."""
    with jax.default_matmul_precision("highest"):
        out = jax.jit(lambda params, *inputs: model.apply({"params": params}, *inputs))(params, *inputs)
    out = np.asarray(out, np.float32)
    return out[0, -1].ravel() if out.ndim == 3 else out[0].ravel()


def _read_example(
    directory: str | os.PathLike, example: dict[str, Any], model: nn.Module
) -> tuple[list[jax.Array], list[int], np.ndarray]:
    """Inputs, places and expected logits. WeightsError: values that are not those of an example of this model."""
    inputs, places, logits = (example.get(name) for name in ("inputs", "places", "logits"))
    _check_inputs(directory, inputs, model)
    numbers = (int, float)
    if not isinstance(places, list) or not places or not all(type(i) is int and i >= 0 for i in places):
        raise _not_understood(directory, f"places must be a list of whole numbers, got {places!r:.80}")
    if not isinstance(logits, list) or len(logits) != len(places) or not all(type(x) in numbers for x in logits):
        raise _not_understood(directory, f"logits must be {len(places)} numbers, got {logits!r:.80}")
    return [_array(one) for one in inputs], places, np.asarray(logits, np.float64)


def _check_inputs(directory: str | os.PathLike, inputs: Any, model: nn.Module) -> None:
    """Raises WeightsError unless `inputs` are those of an example of this model."""
    wanted = _usual_inputs(model)
    if not isinstance(inputs, list) or len(inputs) != len(wanted):
        raise _not_understood(directory, f"inputs must be {len(wanted)}, got {inputs!r:.80}")
    for given, usual, size in zip(inputs, wanted, _vocabularies(model), strict=True):
        tokens = given.get("tokens") if isinstance(given, dict) else None
        known = isinstance(tokens, list) and 0 < len(tokens) <= LENGTH
        if "tokens" in usual and not (known and all(type(i) is int and 0 <= i < size for i in tokens)):
            raise _not_understood(directory, f"tokens must be at most {LENGTH} numbers below {size}, got {given!r:.80}")
        if "sine" in usual and given != usual:
            raise _not_understood(directory, f"an input must be {usual}, got {given!r:.80}")


def _not_understood(directory: str | os.PathLike, fault: str) -> WeightsError:
    return WeightsError(
        f"the example in {os.path.join(directory, INTEGRITY_FILE)} is not understood: {fault}. Get the directory anew."
    )
