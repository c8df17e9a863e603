"""Train and decode with layers of google-deepmind/gemma as published and with this library's attention; compare both.

Usage: python -m examples.elsewhere.gemma CHECKOUT   (or a directory with the unpacked wheel of gemma 3.2.1)
"""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from examples.elsewhere.compare import check, load, patched_copy, train

STEPS, BATCH, LENGTH, PROMPT, VOCABULARY, WIDTH = 41, 8, 40, 9, 101, 64
SIZES = {"num_heads": 4, "num_kv_heads": 2, "embed_dim": WIDTH, "head_dim": 16, "hidden_dim": 128}
OPTIONS = {"use_post_attn_norm": True, "use_post_ffw_norm": True, "transpose_gating_einsum": False}
OPTIONS |= {"query_pre_attn_scalar": 16**-0.5, "attn_logits_soft_cap": 5.0, "sliding_window_size": 7}


class Model(nn.Module):
    """Gemma's embedding and blocks, one with a sliding window and one without; logits (B, T, V) and the caches."""

    modules: types.ModuleType

    @nn.compact
    def __call__(self, tokens, positions, mask, caches=(None, None)):
        embedder, kinds, after = self.modules.Embedder(VOCABULARY, WIDTH), self.modules.AttentionType, []
        x = embedder.encode(tokens)
        for kind, cache in zip((kinds.LOCAL_SLIDING, kinds.GLOBAL), caches, strict=True):
            cache, x = self.modules.Block(attn_type=kind, **SIZES, **OPTIONS)(x, positions, cache, mask)
            after.append(cache)
        return embedder.decode(x), tuple(after)


def sequences(step):
    """Sequences that count up in steps of 7 from a random number, modulo the vocabulary: (B, T + 1)."""
    start = jax.random.randint(jax.random.key(step), (BATCH, 1), 0, VOCABULARY)
    return (start + 7 * jnp.arange(LENGTH + 1)[None]) % VOCABULARY


def decode(model, params):
    """Continue prompts by greedy decoding, with a prefill and one step per token over the cache: (B, T)."""
    cache = model.modules.Attention.init_cache(LENGTH, SIZES["num_kv_heads"], SIZES["head_dim"], BATCH, jnp.float32)
    apply, caches, tokens = jax.jit(model.apply), (cache, cache), sequences(STEPS)[:, :PROMPT]
    text = tokens
    while (length := text.shape[1]) < LENGTH:
        positions = jnp.arange(length - tokens.shape[1], length)[None].repeat(BATCH, 0)
        mask = jnp.arange(LENGTH) <= positions[:, :, None]
        logits, caches = apply({"params": params}, tokens, positions, mask, caches)
        text = jnp.concatenate([text, tokens := logits[:, -1:].argmax(-1)], 1)
    return text


def main(checkout):
    # Kauldron needs TensorFlow. Here it only marks the attention weights with an identity function.
    kauldron = types.SimpleNamespace(kd=types.SimpleNamespace(nn=types.SimpleNamespace(Identity=lambda: lambda x: x)))
    folders, name = (checkout, patched_copy(checkout, "gemma.patch", "gemma")), "gemma.gm.nn._modules"
    models = [Model(load(folder, name, replaced={"kauldron": kauldron})[0]) for folder in folders]
    batches, mask = [sequences(step) for step in range(STEPS)], jnp.tril(jnp.ones((BATCH, LENGTH, LENGTH), bool))
    positions = jnp.arange(LENGTH)[None].repeat(BATCH, 0)
    params = models[0].init(jax.random.key(0), batches[0][:, :-1], positions, mask)["params"]

    def run(model):
        def loss(params, tokens):
            logits, _ = model.apply({"params": params}, tokens[:, :-1], positions, mask)
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        return train(loss, params, batches)

    (losses, trained), (patched, _) = map(run, models)
    check(losses, patched, tolerance=1e-6)
    np.testing.assert_array_equal(*[decode(model, trained) for model in models])
    print(f"{BATCH} x {LENGTH - PROMPT} tokens decoded with the cache are equal")


if __name__ == "__main__":
    main(*sys.argv[1:])
