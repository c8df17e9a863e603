"""Train and decode with Flax's lm1b example as published and with this library's attention; compare losses and tokens.

Usage: python -m examples.elsewhere.lm1b CHECKOUT   (of Flax, or its source distribution)
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from examples.elsewhere.compare import check, load, patched_copy, train

STEPS, BATCH, LENGTH, VOCABULARY, END = 41, 8, 48, 101, 1
SIZES = {"vocab_size": VOCABULARY, "output_vocab_size": VOCABULARY, "emb_dim": 64, "qkv_dim": 64, "num_heads": 4}
SIZES |= {"num_layers": 2, "mlp_dim": 128, "max_len": LENGTH}
FOLDER = "examples/lm1b"


def sequences(step):
    """Return tokens (B, L) that count up in steps of 7, padded with 0 on the right, and a key for dropout."""
    first, second, third = jax.random.split(jax.random.key(step), 3)
    start = jax.random.randint(first, (BATCH, 1), 0, VOCABULARY - 2)
    tokens = 2 + (start + 7 * jnp.arange(LENGTH)[None]) % (VOCABULARY - 2)
    lengths = jax.random.randint(second, (BATCH, 1), LENGTH // 2, LENGTH + 1)
    return jnp.where(jnp.arange(LENGTH)[None] < lengths, tokens, 0), third


def decode(models, temperature_sampler, params):
    """Sample with the cache from prompts of 3 to 10 tokens, with vmap over the prompts as in the example: (B, L)."""
    model = models.TransformerLM(models.TransformerConfig(**SIZES, deterministic=True, decode=True))
    prompts = jnp.where(jnp.arange(LENGTH)[None] < 3 + jnp.arange(BATCH)[:, None], sequences(STEPS)[0], 0)
    cache = model.init(jax.random.key(0), jnp.ones((1, LENGTH)))["cache"]

    def tokens_to_logits(tokens, cache):
        logits, changed = model.apply({"params": params, "cache": cache}, tokens, mutable=["cache"])
        return logits.squeeze(axis=1), changed["cache"]

    def sample(prompt, key):
        options = {"temperature": 0.7, "topk": 20, "eos_token": END}
        return temperature_sampler.temperature_sample(prompt, cache, tokens_to_logits, key, **options)

    return jax.jit(jax.vmap(sample))(prompts[:, None], jax.random.split(jax.random.key(1), BATCH))[:, 0]


def main(checkout):
    names = ("models", "temperature_sampler")
    original = load(f"{checkout}/{FOLDER}", *names)
    patched = load(patched_copy(checkout, "lm1b.patch", FOLDER) / FOLDER, *names)
    batches = [sequences(step) for step in range(STEPS)]
    config = original[0].TransformerConfig(**SIZES)
    # The patched model uses the same tree, because no parameter changes its name or shape.
    params = original[0].TransformerLM(config).init(jax.random.key(0), batches[0][0])["params"]

    def run(models, _):
        model = models.TransformerLM(config)

        def loss(params, batch):
            tokens, key = batch
            logits = model.apply({"params": params}, tokens, rngs={"dropout": key})
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean(where=tokens > 0)

        return train(loss, nn.meta.unbox(params), batches)

    (losses, trained), (patched_losses, _) = run(*original), run(*patched)
    check(losses, patched_losses, tolerance=1e-6)
    np.testing.assert_array_equal(decode(*original, trained), decode(*patched, trained))
    print(f"{BATCH} x {LENGTH} tokens sampled with the cache are equal")


if __name__ == "__main__":
    main(*sys.argv[1:])
