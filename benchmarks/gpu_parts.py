"""The measurements of `benchmarks.gpu`. Each part is a generator that yields one row per measurement.

A row is a dictionary: `work`, `side` ("ours", "bound" or the name of the peer), `seconds` of one run, `rate` and its
`unit`, `first`, the seconds of the first run, which compiles, and optionally `flops` or `bytes` of one run, by which
`benchmarks.gpu` computes the share of the rates that this GPU reaches.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.side_by_side import compare
from transformer.config import LearnedOptions, RotaryOptions

Row = dict[str, Any]
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
PROMPT, NEW = 32, 128
"""tokens of a prompt, and generated tokens"""
ROWS = (1, 16)
"""batch sizes of decoding"""
PARAMETERS = 1_235_814_400
"""parameters of the model for decoding; each step reads all of them"""
ATTENTION = (8, 2_048, 16, 128)
"""(B, T, N, H) of attention"""
SEGMENTS = 4
"""texts of equal length in each packed row of attention"""
PRODUCT = 8_192
"""rows and columns of the multiplied matrices"""
COPIED = 2**31
"""bfloat16 numbers of the copied array: 4 GiB"""
QUEUED = 50
"""runs that are enqueued before the program waits, so that the time of launching them does not count"""
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


def timed(work: Callable[[], Any], wait: Callable[[Any], Any], *, runs: int, queued: int = 1) -> tuple[float, float]:
    """Return the median seconds of one run, and the seconds of the first one, which compiles.

    Args:
        work: enqueues one run, and returns its result.
        wait: waits for a result.
        runs: number of measurements, after one that is not counted.
        queued: runs per measurement, enqueued before it waits for the last one.
    """
    start = time.perf_counter()
    wait(work())
    first, seconds = time.perf_counter() - start, []
    for _ in range(1 + runs):
        start = time.perf_counter()
        for _ in range(queued - 1):
            work()
        wait(work())
        seconds.append((time.perf_counter() - start) / queued)
    return statistics.median(seconds[1:]), first


# Rates of the GPU


def bounds() -> Iterator[Row]:
    """Measure matrix multiplications of random bfloat16 matrices, and copies of an array (bytes read and written)."""
    import jax
    import jax.numpy as jnp

    # Random numbers: with equal ones, the GPU takes less power and clocks higher.
    left, right = jax.random.normal(jax.random.key(0), (2, PRODUCT, PRODUCT), jnp.bfloat16)
    product = jax.jit(jnp.matmul)
    seconds, first = timed(lambda: product(left, right), jax.block_until_ready, runs=3, queued=QUEUED)
    count = 2 * PRODUCT**3
    yield row("matrix multiplication", "bound", seconds, first, count / seconds, "FLOP/s")
    # The argument is donated: each run reads and writes the same array, and none waits for memory.
    copy, arrays = jax.jit(jnp.negative, donate_argnums=0), [jnp.ones((COPIED,), jnp.bfloat16)]

    def copied():
        arrays[0] = copy(arrays[0])
        return arrays[0]

    seconds, first = timed(copied, jax.block_until_ready, runs=3, queued=QUEUED)
    yield row("copy", "bound", seconds, first, 2 * 2 * COPIED / seconds, "bytes/s")


def row(work: str, side: str, seconds: float, first: float, rate: float, unit: str, **more: Any) -> Row:
    """Return a row of the results."""
    return {"work": work, "side": side, "seconds": seconds, "first": first, "rate": rate, "unit": unit, **more}


# Attention


def attention() -> Iterator[Row]:
    """Measure our attention: causal, forward, forward with backward, and on packed rows."""
    import jax
    import jax.numpy as jnp

    from transformer import Mask, dot_product_attention

    query, key, value, slope = jax.random.normal(jax.random.key(0), (4, *ATTENTION), jnp.bfloat16)
    size, length = ATTENTION[:2]
    segments = jnp.asarray(np.broadcast_to(np.arange(length) * SEGMENTS // length, (size, length)))
    for name, mask in {"causal": Mask.causal(), "packed": Mask.causal() & Mask.segments(segments)}.items():

        def forward(query, key, value, mask=mask):
            return dot_product_attention(query, key, value, mask=mask)

        def backward(query, key, value, slope, forward=forward):
            out, pull = jax.vjp(forward, query, key, value)
            return out, pull(slope)

        for passes, function, arrays in (
            ("forward", forward, (query, key, value)),
            ("forward and backward", backward, (query, key, value, slope)),
        ):
            compiled = jax.jit(function)
            seconds, first = timed(
                lambda compiled=compiled, arrays=arrays: compiled(*arrays),
                jax.block_until_ready,
                runs=3,
                queued=QUEUED if name == "causal" else 5,
            )
            yield attention_row(name, passes, "ours", seconds, first)


def attention_row(mask: str, passes: str, side: str, seconds: float, first: float) -> Row:
    """Return a row of attention. Forward takes 4 B N T^2 H FLOPs, backward 2.5 times as many, and causal half of it.

    Packed rows of `SEGMENTS` texts take the FLOPs of these texts.
    """
    size, length, heads, width = ATTENTION
    count = 4 * size * heads * length**2 * width / 2 * (1 if passes == "forward" else 3.5)
    count /= SEGMENTS if mask == "packed" else 1
    return row(f"attention, {mask}, {passes}", side, seconds, first, count / seconds, "FLOP/s", flops=count)


def attention_torch() -> Iterator[Row]:
    """Measure causal attention of PyTorch, with cuDNN and with its flash attention."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    size, length, heads, width = ATTENTION
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    arrays = torch.randn(4, size, heads, length, width, dtype=torch.bfloat16, device=device)
    query, key, value = (array.clone().requires_grad_() for array in arrays[:3])

    def forward():
        with torch.no_grad():
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def backward():
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return torch.autograd.grad(out, (query, key, value), arrays[3])

    backends = {"PyTorch cuDNN": SDPBackend.CUDNN_ATTENTION, "PyTorch flash": SDPBackend.FLASH_ATTENTION}
    for side, backend in backends.items():
        with sdpa_kernel(backend):
            for passes, work in {"forward": forward, "forward and backward": backward}.items():
                seconds, first = timed(work, _wait_for_torch, runs=3, queued=QUEUED)
                yield attention_row("causal", passes, side, seconds, first)


def _wait_for_torch(_: Any) -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


# Greedy decoding


def decode() -> Iterator[Row]:
    """Measure our greedy decoding of `NEW` tokens."""
    import jax
    import jax.numpy as jnp

    from transformer import CausalLM
    from transformer.config import Execution
    from transformer.generate import Sampling, generate

    model = CausalLM(config("decode"), Execution(scan=False))
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    for rows in ROWS:
        prompts = prompts_of(rows).tolist()

        def work(prompts=prompts):
            return generate(model, params, prompts, max_new_tokens=NEW, sampling=Sampling(temperature=0.0))

        seconds, first = timed(work, lambda texts: check_lengths(map(len, texts)), runs=5)
        yield decode_row(rows, "ours", seconds, first)


def prompts_of(rows: int) -> np.ndarray:
    """Return random prompts, (rows, PROMPT)."""
    return np.random.default_rng(0).integers(0, LLAMA["vocab_size"], (rows, PROMPT))


def decode_row(rows: int, side: str, seconds: float, first: float) -> Row:
    """Return a row of decoding. Each of the `NEW` steps reads all parameters, of 2 bytes each."""
    return row(
        f"decode, {rows} rows", side, seconds, first, rows * NEW / seconds, "tokens/s", bytes=2 * PARAMETERS * NEW
    )


def check_lengths(lengths: Any) -> None:
    """Check that every row has `NEW` new tokens; RuntimeError otherwise."""
    if (found := set(lengths)) != {NEW}:
        raise RuntimeError(f"expected {NEW} new tokens in each row, got {sorted(found)}.")


def llama_torch() -> Any:
    """Return the model for decoding in transformers, with random bfloat16 weights. No token ends a text."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    made = LlamaConfig(
        vocab_size=LLAMA["vocab_size"],
        hidden_size=LLAMA["d_model"],
        intermediate_size=LLAMA["feed_forward.d_ff"],
        num_hidden_layers=LLAMA["num_layers"],
        num_attention_heads=LLAMA["num_heads"],
        num_key_value_heads=LLAMA["attention.num_kv_heads"],
        max_position_embeddings=2_048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(made).eval()
    finally:
        torch.set_default_dtype(before)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def decode_torch(*kinds: str) -> Iterator[Row]:
    """Measure greedy decoding of transformers.

    Args:
        kinds: "dynamic": a cache that grows, without compilation. "static": a cache of fixed size, with which
            `generate` compiles the step of one token by torch.compile(mode="reduce-overhead"), that is, CUDA graphs.
    """
    import torch

    model = llama_torch()
    for kind in kinds:
        for rows in ROWS:
            torch.compiler.reset()
            model.__dict__.pop("_compiled_call", None)  # otherwise the second batch size gets dynamic shapes
            prompts = torch.from_numpy(prompts_of(rows)).to(model.device)
            options = {"cache_implementation": "static", "compile_config": _compilation()} if kind == "static" else {}

            def work(prompts=prompts, options=options):
                with torch.inference_mode():
                    mask = torch.ones_like(prompts)
                    return model.generate(prompts, attention_mask=mask, max_new_tokens=NEW, do_sample=False, **options)

            def wait(texts):
                _wait_for_torch(texts)
                check_lengths([texts.shape[1] - PROMPT])

            seconds, first = timed(work, wait, runs=3 if kind == "static" else 2)
            yield decode_row(rows, f"transformers, {kind} cache", seconds, first)


def _compilation() -> Any:
    from transformers import CompileConfig

    return CompileConfig(mode="reduce-overhead", fullgraph=False)


# Training


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


SIDES = {"ours": ours, "torch": pytorch}
"""sides of a training step, each of which a worker runs"""


def gpt2() -> Iterator[Row]:
    """Compare the training step of GPT-2 with PyTorch, in two processes that take turns."""
    sides = [(MODULE, "--worker", side, "gpt2") for side in ("ours", "torch")]
    one = compare("gpt2", "torch", *sides, environment="untouched", turns=4, times=5)
    tokens, count = float(np.prod(WORKS["gpt2"])), flops("gpt2")
    for side, seconds, first in (
        ("ours", one.ours_seconds, one.ours_first),
        ("PyTorch", one.peer_seconds, one.peer_first),
    ):
        yield row("training step, gpt2", side, seconds, first, tokens / seconds, "tokens/s", flops=count)


def llama(work: str) -> Iterator[Row]:
    """Measure our training step with the shape of Llama 3.2 1B."""
    seconds, first = timed(ours(work), lambda _: None, runs=8)
    tokens = float(np.prod(WORKS[work]))
    yield row(f"training step, {work}", "ours", seconds, first, tokens / seconds, "tokens/s", flops=flops(work))
