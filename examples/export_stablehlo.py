"""Export a trained model to one StableHLO file, for any batch size and length, on CPU, GPU and TPU.

Reading the file requires only JAX. The parameters are constants in the file. If they take gigabytes, make them an
argument of `logits`, so that one file works with every checkpoint. Needs flatbuffers: `pip install flatbuffers`.

Usage: python -m examples.export_stablehlo [WORKDIR]   (workdir of a text model; a Seq2Seq takes source and target)
"""

import importlib.util
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import export

import transformer
from transformer import CausalLM, RotaryOptions, Seq2Seq, TransformerConfig


def train():
    """Train a small model to count from 0 to 9 repeatedly. Pass WORKDIR to export your own run instead."""
    model = CausalLM(TransformerConfig(vocab_size=10, d_model=32, num_layers=2, num_heads=4, position=RotaryOptions()))
    rows = (jnp.arange(10)[:, None] + jnp.arange(9)[None, :]) % 10

    def loss(params):
        probabilities = jax.nn.softmax(model.apply({"params": params}, rows[:, :-1]))
        return -jnp.log((probabilities * jax.nn.one_hot(rows[:, 1:], 10)).sum(-1)).mean()

    step = jax.jit(lambda params: jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params)))
    params = jax.jit(model.init)(jax.random.key(0), rows)["params"]
    for _ in range(50):
        params = step(params)
    return model, params


def main(workdir=None, folder=None):
    if importlib.util.find_spec("flatbuffers") is None:  # check before training
        raise SystemExit("jax.export needs flatbuffers, which is not installed. Run: pip install flatbuffers")
    model, params = transformer.load(workdir) if workdir else train()
    logits = jax.jit(lambda *tokens: model.apply({"params": params}, *tokens))
    shapes = ["batch, source", "batch, target"] if isinstance(model, Seq2Seq) else ["batch, length"]
    scope = export.SymbolicScope()
    abstract = [jax.ShapeDtypeStruct(export.symbolic_shape(shape, scope=scope), jnp.int32) for shape in shapes]
    exported = export.export(logits, platforms=("cpu", "cuda", "tpu"))(*abstract)
    file = Path(folder or tempfile.mkdtemp()) / "model.stablehlo"
    file.write_bytes(exported.serialize())
    print(f"{file}: {file.stat().st_size:,} bytes, {exported.in_avals} -> {exported.out_avals}")

    read = export.deserialize(bytearray(file.read_bytes()))
    tokens = [jnp.tile(jnp.arange(7) % 10, (3, 1))] * len(shapes)
    difference = jnp.abs(read.call(*tokens) - logits(*tokens)).max()
    print(f"logits of 3 x 7 tokens: largest difference between file and model {difference:.1e}")
    return {"file": file, "logits": logits, "difference": difference}


if __name__ == "__main__":
    main(*sys.argv[1:])
