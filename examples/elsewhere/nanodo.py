"""Train google-deepmind/nanodo as published and with this library's attention, and compare the losses.

Usage: python -m examples.elsewhere.nanodo CHECKOUT [PATCH]   (PATCH: nanodo.patch, or nanodo_module.patch)
"""

import sys

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from examples.elsewhere.compare import check, load, patched_copy, train

STEPS, BATCH, LENGTH, VOCABULARY = 41, 8, 96, 101
SIZES = {"D": 64, "H": 4, "L": LENGTH, "N": 2, "V": VOCABULARY, "F": 256}


def sequences(step):
    """Sequences that count up in steps of 7 from a random number, modulo the vocabulary: (B, L + 1)."""
    start = jax.random.randint(jax.random.key(step), (BATCH, 1), 0, VOCABULARY)
    return (start + 7 * jnp.arange(LENGTH + 1)[None]) % VOCABULARY


def rename(params):
    """Rename the original parameters for nanodo_module.patch: our attention names its output projection `out`."""
    if not isinstance(params, dict):
        return params
    return {"out" if name == "attn_out_proj" else name: rename(value) for name, value in params.items()}


def main(checkout, patch="nanodo.patch"):
    (original,) = load(checkout, "nanodo.model")
    (patched,) = load(patched_copy(checkout, patch, "nanodo"), "nanodo.model")
    batches = [sequences(step) for step in range(STEPS)]
    model = original.TransformerDo(original.DoConfig(**SIZES))
    params = nn.meta.unbox(model.init(jax.random.key(0), batches[0][:, :-1])["params"])

    def run(module, params):
        model = module.TransformerDo(module.DoConfig(**SIZES))

        def loss(params, tokens):
            logits = model.apply({"params": params}, tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        return train(loss, params, batches)[0]

    renamed = rename(params) if patch == "nanodo_module.patch" else params
    check(run(original, params), run(patched, renamed), tolerance=5e-7)


if __name__ == "__main__":
    main(*sys.argv[1:])
