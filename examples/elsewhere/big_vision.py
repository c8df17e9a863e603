"""Train big_vision's ViT with an attention-pooling head as published and with this library's attention; compare losses.

Usage: python -m examples.elsewhere.big_vision CHECKOUT
"""

import sys
import types

import jax
import optax

from examples.elsewhere.compare import check, load, patched_copy, train

STEPS, BATCH, CLASSES = 41, 8, 7
SIZES = {"patch_size": (8, 8), "width": 64, "depth": 2, "mlp_dim": 128, "num_heads": 4}
OPTIONS = {"pool_type": "map", "head_zeroinit": False, "dropout": 0.1}


def images(step):
    """Noise (B, 32, 32, 3) whose mean depends on the class, the classes (B,), and a key for dropout."""
    first, second, third = jax.random.split(jax.random.key(step), 3)
    labels = jax.random.randint(first, (BATCH,), 0, CLASSES)
    noise = jax.random.normal(second, (BATCH, 32, 32, 3))
    return noise + labels[:, None, None, None] / CLASSES, labels, third


def main(checkout):
    # The model file imports these two to read checkpoints. They need TensorFlow, the model does not.
    absent = {name: types.ModuleType(name) for name in ("big_vision.utils", "big_vision.models.common")}
    vit = "big_vision.models.vit"
    (original,) = load(checkout, vit, replaced=absent)
    (patched,) = load(patched_copy(checkout, "big_vision.patch", "big_vision"), vit, replaced=absent)
    batches = [images(step) for step in range(STEPS)]
    # The patched model uses the same tree, because no parameter changes its name or shape.
    params = original.Model(CLASSES, **SIZES, **OPTIONS).init(jax.random.key(0), batches[0][0])["params"]

    def run(module):
        model = module.Model(CLASSES, **SIZES, **OPTIONS)

        def loss(params, batch):
            x, labels, key = batch
            logits, _ = model.apply({"params": params}, x, train=True, rngs={"dropout": key})
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        return train(loss, params, batches)[0]

    check(run(original), run(patched), tolerance=1e-6)


if __name__ == "__main__":
    main(*sys.argv[1:])
