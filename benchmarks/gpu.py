"""Benchmarks on one GPU: training compared with PyTorch, MFU, memory bandwidth in decoding, and the Shakespeare recipe.

Usage: python -m benchmarks.gpu [--parts gpt2 llama decode shakespeare] [--data.manual-dir FOLDER]

gpt2: GPT-2 124M, context 1,024, bfloat16, batch size 16, compared with the same model in PyTorch (torch.compile, its
flash attention, autocast). Each side runs in a separate process, and the processes take turns; this needs PyTorch for
CUDA. llama: training of a decoder with the shape of Llama 3.2 1B, contexts of 2,048 and 8,192. decode: greedy decoding
with the same model, batch size 1. Utilization is relative to rates measured on this GPU: matrix multiplications of
8,192 x 8,192 bfloat16 matrices, and reading 4 GiB. Model FLOPs are 6 per matrix parameter and token, and 12 L T d_model
/ 2 per token for causal attention (Chowdhery et al. 2022, arXiv 2204.02311, appendix B, causal half). The last line is
a JSON object.
"""

import argparse
import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.side_by_side import ROOT, Worker, compare, last_line, serve, versions
from transformer.config import LearnedOptions, RotaryOptions

GPT2 = {"vocab_size": 50_304, "d_model": 768, "num_layers": 12, "num_heads": 12}
LLAMA = {
    "vocab_size": 128_256,
    "d_model": 2_048,
    "num_layers": 16,
    "num_heads": 32,
    "attention.num_kv_heads": 8,
    "feed_forward.d_ff": 8_192,
}
WORKS = {"gpt2": (16, 1_024), "llama_2048": (8, 2_048), "llama_8192": (2, 8_192)}
"""(batch size, sequence length) of a training step"""
MODULE = "benchmarks.gpu"
PUBLISHED = 1.4697
"""loss in nats in nanoGPT's README, for the recipe that shakespeare_gpu reproduces"""


def config(work: str) -> Any:
    """Return the model config of a work."""
    from transformer.config import (
        EmbeddingOptions,
        FeedForwardOptions,
        NormOptions,
        ParameterOptions,
        TransformerConfig,
    )

    if work == "gpt2":
        return TransformerConfig(
            **GPT2,
            norm=NormOptions(kind="layer_norm_without_bias"),
            feed_forward=FeedForwardOptions(activation="gelu_erf"),
            position=LearnedOptions(max_length=WORKS[work][1]),
            parameters=ParameterOptions(use_bias=False, initializer_range=0.02),
            embedding=EmbeddingOptions(scale=False),
            dtype="bfloat16",
        )
    return TransformerConfig(
        **LLAMA,
        norm=NormOptions(kind="rms_norm"),
        feed_forward=FeedForwardOptions(activation="silu", gated=True),
        parameters=ParameterOptions(
            use_bias=False, initializer_range=0.02, dtype="bfloat16" if work == "decode" else "float32"
        ),
        position=RotaryOptions(),
        embedding=EmbeddingOptions(scale=False),
        dtype="bfloat16",
    )


def flops(work: str) -> float:
    """Return the model FLOPs of one training step.

    Forward and backward take 6 FLOPs per matrix parameter and token. Attention takes 12 L T D per token for QK^T and AV
    (4 T D per layer forward, three times that with backward), and half of it with a causal mask.
    """
    sizes, (rows, length) = GPT2 if work == "gpt2" else LLAMA, WORKS[work]
    width, layers, heads = sizes["d_model"], sizes["num_layers"], sizes["num_heads"]
    # Per layer: query and output projections (2 D^2), key and value projections (2 D^2 K / N), and the feed-forward.
    key_values = 2 * width * width * sizes.get("attention.num_kv_heads", heads) // heads
    feed_forward = 8 * width**2 if work == "gpt2" else 3 * width * sizes["feed_forward.d_ff"]
    matrices = layers * (2 * width**2 + key_values + feed_forward) + width * sizes["vocab_size"]
    return rows * length * (6 * matrices + 6 * layers * length * width)


def batch(work: str) -> tuple[np.ndarray, np.ndarray]:
    """Return random tokens and targets, each (B, T)."""
    vocabulary = (GPT2 if work == "gpt2" else LLAMA)["vocab_size"]
    return tuple(np.random.default_rng(0).integers(0, vocabulary, (2, *WORKS[work]), dtype=np.int32))


def ours(work: str) -> Callable[[], Any]:
    """Return our side: the training step that `train.py` builds from a recipe."""
    import jax
    import jax.numpy as jnp

    from transformer.config import Execution
    from transformer.data import TextFile
    from transformer.training import OptimizerConfig, Recipe, TrainingConfig
    from transformer.training._state import make_state
    from transformer.training._step import make_train_step

    rows, length = WORKS[work]
    recipe = Recipe(
        name="benchmark",
        model=config(work),
        data=TextFile(path="none", sequence_length=length, batch_size=rows),
        execution=Execution(scan=work != "gpt2", remat="none" if work == "gpt2" else "names"),
        optimizer=OptimizerConfig(beta2=0.95, weight_decay=0.1),
        training=TrainingConfig(),
    )
    tokens, targets = map(jnp.asarray, batch(work))
    given = {"tokens": tokens, "targets": targets, "weights": jnp.ones(targets.shape)}
    states = [jax.jit(lambda: make_state(recipe))()]
    compiled = jax.jit(make_train_step(recipe), donate_argnums=0)

    def step():
        states[0], metrics = compiled(states[0], given)
        return jax.block_until_ready((states[0], metrics))[1]

    return step


def pytorch(work: str) -> Callable[[], Any]:
    """Return the peer: a training step of GPT-2 in PyTorch."""
    import torch

    from benchmarks import torch_peers

    torch.set_float32_matmul_precision("high")
    model = torch_peers.GPT(
        GPT2["vocab_size"], WORKS[work][1], *(GPT2[n] for n in ("num_layers", "num_heads", "d_model"))
    )
    step = torch_peers.training_step(model, batch(work), betas=(0.9, 0.95), autocast=torch.bfloat16)
    return lambda: step().item()


def matrix_product(_: str) -> Callable[[], Any]:
    """Return one matrix multiplication of two 8,192 x 8,192 matrices."""
    import jax
    import jax.numpy as jnp

    matrix = jnp.ones((8_192, 8_192), jnp.bfloat16)
    product = jax.jit(lambda a: a @ a)
    return lambda: jax.block_until_ready(product(matrix))


def reading(_: str) -> Callable[[], Any]:
    """Return a sum over 4 GiB."""
    import jax
    import jax.numpy as jnp

    array = jnp.ones((2**31,), jnp.bfloat16)
    total = jax.jit(lambda a: a.sum(dtype=jnp.float32))
    return lambda: jax.block_until_ready(total(array))


def decoding(_: str) -> Callable[[], Any]:
    """Return greedy decoding of `NEW` tokens with batch size 1."""
    import jax
    import jax.numpy as jnp

    from transformer import CausalLM
    from transformer.config import Execution
    from transformer.generate import Sampling, generate

    model = CausalLM(config("decode"), Execution(scan=False))
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    prompt = [list(range(1, 33))]
    return lambda: generate(model, params, prompt, max_new_tokens=NEW, sampling=Sampling(temperature=0.0))


NEW = 128
PARAMETERS = 1_235_814_400
"""parameters of the model for decoding; each step reads all of them"""
SIDES = {"ours": ours, "torch": pytorch, "products": matrix_product, "reading": reading, "decode": decoding}


def seconds_of(side: str, work: str = "-", times: int = 10) -> float:
    """Return the median seconds of a piece of work, measured in a separate process."""
    worker = Worker(MODULE, "--worker", side, work)
    found = statistics.median(worker.run(times))
    worker.stop()
    return found


def shakespeare(words: list[str]) -> dict[str, float]:
    """Train configs/shakespeare_gpu.py, and return its lowest evaluation loss and its seconds."""
    from transformer.viz import read_metrics

    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        command = [sys.executable, "train.py", "configs/shakespeare_gpu.py", "--workdir", f"{folder}/run", *words]
        subprocess.run(command, cwd=ROOT, check=True)
        seconds = time.perf_counter() - start
        lines = read_metrics(Path(folder) / "run" / "metrics.jsonl")
    return {"loss": min(line["eval/loss"] for line in lines if "eval/loss" in line), "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ["gpt2", "llama", "decode", "shakespeare"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--worker", nargs=2, metavar=("SIDE", "WORK"), help="internal: run one side as a worker")
    options, words = parser.parse_known_args()
    if options.worker:
        side, work = options.worker
        serve(SIDES[side](work))
        return

    # Otherwise this process reserves most of the GPU memory, which the workers need.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    from benchmarks.machine import machine

    if jax.default_backend() != "gpu":
        parser.error(
            f"this benchmark needs a GPU, but JAX uses {jax.default_backend()}. Run: make setup ACCELERATOR=gpu"
        )
    where = machine()
    rate, bandwidth = 2 * 8_192**3 / seconds_of("products"), 2**32 / seconds_of("reading")
    found: dict[str, Any] = {"matrix_flops": rate, "bytes_per_second": bandwidth}
    print(
        f"{where}: {rate / 1e12:.0f} TFLOP/s in matrix multiplications, {bandwidth / 1e12:.2f} TB/s memory bandwidth",
        flush=True,
    )
    ends: list[tuple[str, float, float, float, str]] = []
    if "gpt2" in options.parts:
        sides = [(MODULE, "--worker", side, "gpt2") for side in ("ours", "torch")]
        one = compare("gpt2", "torch", *sides, environment="untouched", turns=6, times=5)
        tokens = np.prod(WORKS["gpt2"])
        peer, mine = tokens / one.peer_seconds, tokens / one.ours_seconds
        ends.append(("training step, GPT-2 124M, bfloat16", peer, mine, one.ratio, "tokens/s"))
        share = flops("gpt2") / one.ours_seconds / rate
        found["gpt2"] = dataclasses.asdict(one) | {"mfu": share}
        comparison = f"PyTorch {peer:,.0f}, ratio {one.ratio:.2f}; MFU {100 * share:.1f} %"
        print(f"gpt2: {mine:,.0f} tokens/s, {comparison}", flush=True)
    for work in [name for name in WORKS if "llama" in name and "llama" in options.parts]:
        seconds = seconds_of("ours", work)
        reached = flops(work) / seconds
        found[work] = {"seconds": seconds, "mfu": reached / rate}
        ends.append(
            (f"training step, {work}, compared with matrix multiplications", rate, reached, reached / rate, "FLOP/s")
        )
        print(f"{work}: {np.prod(WORKS[work]) / seconds:,.0f} tokens/s, MFU {100 * reached / rate:.1f} %", flush=True)
    if "decode" in options.parts:
        rate_of_tokens = NEW / seconds_of("decode")
        read = 2 * PARAMETERS * rate_of_tokens  # 2 bytes per bfloat16 parameter
        found["decode"] = {"tokens_per_second": rate_of_tokens, "of_bandwidth": read / bandwidth}
        ends.append(
            ("greedy decoding, 1B, compared with memory bandwidth", bandwidth, read, read / bandwidth, "bytes/s")
        )
        print(f"decode: {rate_of_tokens:.1f} tokens/s, {100 * read / bandwidth:.1f} % of the memory bandwidth")
    if "shakespeare" in options.parts:
        found["shakespeare"] = shakespeare(words)
        loss = found["shakespeare"]["loss"]
        ends.append(
            ("configs/shakespeare_gpu.py, compared with nanoGPT's README", PUBLISHED, loss, PUBLISHED / loss, "nats")
        )
        print(f"shakespeare_gpu: {found['shakespeare']}")
    facts = {"all": found, "versions": versions("jax", "flax", "torch")}
    print(last_line(*ends[0], where, **facts))


if __name__ == "__main__":
    main()
