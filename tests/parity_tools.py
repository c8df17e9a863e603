"""Comparison of models with another implementation: conversion of its weights and gradients to our parameter tree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

EPSILON = 0.03  # of every norm, large enough to detect another epsilon or another position of it


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def ids(seed, vocab_size, *shape):
    return np.random.default_rng(seed).integers(0, vocab_size, shape).astype(np.int32)


def close(ours, theirs, tolerance=1e-5):
    theirs = theirs.detach().numpy() if hasattr(theirs, "detach") else theirs
    assert np.abs(theirs).max() > 1e-3  # something to compare
    np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance * np.abs(theirs).max())


# Weights. A table maps each of our modules to the tensor of the other implementation. `{}` stands for weight or bias,
# `*` for the index of the layer, and `[k]` for the k-th third of a fused matrix for queries, keys and values.


def convert(like, theirs, rules, *, inputs_first=False):
    """Convert the weights (or gradients) of the other implementation to our tree, and assert that all are used.

    Args:
        like: our parameters (or their shapes).
        theirs: tensors of the other implementation by name.
        rules: our module or parameter -> name in `theirs`, see above.
        inputs_first: whether their matrices are (in, out) like ours, instead of (out, in) as in PyTorch.
    """
    parts_used = dict.fromkeys(theirs, 0.0)

    def read(ours, leaf, layer=""):
        name, _, third = rules.get(f"{ours}/{leaf}", rules.get(ours)).partition("[")
        name = name.replace("*", layer).replace("{}", "bias" if leaf == "bias" else "weight")
        array = theirs[name].detach().numpy()
        array = array.T if leaf == "kernel" and not inputs_first else array
        parts_used[name] += 1 / 3 if third else 1
        return np.split(array, 3, axis=-1)[int(third[0])] if third else array

    flat = {}
    for path, array in flatten_dict(like, sep="/").items():
        ours, _, leaf = path.rpartition("/")
        if "*" in rules.get(path, rules.get(ours)):
            flat[path] = np.stack([read(ours, leaf, str(i)).reshape(array.shape[1:]) for i in range(len(array))])
        else:
            flat[path] = read(ours, leaf).reshape(array.shape)
    assert parts_used == pytest.approx(dict.fromkeys(theirs, 1.0))
    return unflatten_dict(flat, sep="/")


def randomize(torch, module, seed=0):
    """Add random numbers to every parameter, including norms and biases."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return module


def compare(torch, module, run_theirs, rules, model, run_ours, *inputs, gradients_of=0, **options):
    """Compare the outputs of both implementations and the gradients of a random weighted sum of the outputs.

    Gradients are taken by all weights and the first `gradients_of` inputs. `run_ours` is called with (apply, *inputs).
    The measured differences are within a fifth of the tolerances. The tolerance of gradients is twice as large, because
    they take two passes.
    """
    arrays = [jnp.asarray(x) for x in inputs]
    shapes = jax.eval_shape(lambda: run_ours(lambda *a, **k: model.init(jax.random.key(0), *a, **k), *arrays))["params"]
    params = convert(shapes, dict(module.named_parameters()), rules, **options)

    tensors = [torch.tensor(x, dtype=torch.long if x.dtype == np.int32 else None) for x in inputs]
    for tensor in tensors[:gradients_of]:
        tensor.requires_grad_()
    theirs = run_theirs(*tensors)
    weights = normal(99, *theirs.shape)
    (theirs * torch.tensor(weights)).sum().backward()

    @jax.jit
    def ours(params, floats):
        def weighted(params, floats):
            out = run_ours(lambda *a, **k: model.apply({"params": params}, *a, **k), *floats, *arrays[gradients_of:])
            return (out * weights).sum(), out

        (_, out), gradients = jax.value_and_grad(weighted, argnums=(0, 1), has_aux=True)(params, floats)
        return out, gradients

    out, (of_params, of_floats) = ours(params, arrays[:gradients_of])
    close(out, theirs)
    expected = convert(shapes, {name: p.grad for name, p in module.named_parameters()}, rules, **options)
    expected, got = flatten_dict(expected, sep="/"), flatten_dict(of_params, sep="/")
    # The bias of keys adds a constant to all scores of a query, so its true gradient is 0, and only rounding remains.
    blind = [path for path in expected if path.endswith("attention/key/bias")]
    for path in blind:
        assert max(np.abs(got.pop(path)).max(), np.abs(expected.pop(path)).max()) < 1e-4
    for path, gradient in expected.items():
        np.testing.assert_allclose(
            got[path], gradient, rtol=2e-5, atol=2e-5 * np.abs(gradient).max(), err_msg=f"gradient of {path}"
        )
    for mine, tensor in zip(of_floats, tensors[:gradients_of], strict=True):
        close(mine, tensor.grad, 2e-5)


SCALINGS = {
    "default": (10_000.0, None, {}),
    "linear": (10_000.0, {"kind": "linear", "factor": 4.0}, {"factor": 4.0}),
    "llama3": (  # of Llama 3.1
        500_000.0,
        {"kind": "llama3", "factor": 8.0, "original_length": 8192},
        {"factor": 8.0, "original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ),
    "llama3, other factors": (
        10_000.0,
        {"kind": "llama3", "factor": 3.0, "original_length": 512, "low_frequency_factor": 1.5}
        | {"high_frequency_factor": 9.0},
        {"factor": 3.0, "original_max_position_embeddings": 512, "low_freq_factor": 1.5, "high_freq_factor": 9.0},
    ),
    "yarn": (  # of Qwen 2.5
        1_000_000.0,
        {"kind": "yarn", "factor": 4.0, "original_length": 32_768},
        {"factor": 4.0, "original_max_position_embeddings": 32_768},
    ),
    "yarn, other betas": (
        10_000.0,
        {"kind": "yarn", "factor": 16.0, "original_length": 4096, "beta_fast": 20.0, "beta_slow": 3.0},
        {"factor": 16.0, "original_max_position_embeddings": 4096, "beta_fast": 20.0, "beta_slow": 3.0},
    ),
}


def llama_config(transformers, base, rope, **sizes):
    return transformers.LlamaConfig(
        rope_parameters={"rope_theta": base, **rope},
        max_position_embeddings=round(rope.get("factor", 1.0) * rope.get("original_max_position_embeddings", 2048)),
        attn_implementation="eager",
        **sizes,
    )
