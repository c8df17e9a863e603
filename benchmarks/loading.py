"""Host memory and time of loading weights: generate a checkpoint with Llama's shape, and load it in a new process.

    python -m benchmarks.loading [--gigabytes 1.0] [--dtype bfloat16] [--mesh 8]

Peak memory (VmHWM) is measured relative to the process after all imports. It includes the loaded parameters.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHILD = "benchmarks.loading"


def write(directory: Path, gigabytes: float, dtype: str) -> int:
    """Write a checkpoint of about `gigabytes` GB with the names and shapes of Llama, and return its size in bytes."""
    import jax
    import numpy as np

    from transformer.zoo import ENTRIES, abstract_params
    from transformer.zoo.weights import parameter_shapes, write_weights

    family = ENTRIES["llama"]
    sizes = {"vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16}
    layer = 1024 * (4 * 1024 + 3 * 2816)
    numbers = gigabytes * 1e9 / np.dtype(jax.numpy.dtype(dtype)).itemsize
    layers = max(1, round((numbers - 2 * 32_000 * 1024) / layer))
    architecture = next(iter(family.heads))
    head = family.heads[architecture]
    config = family.read(sizes | {"num_hidden_layers": layers, "head_dim": 64}, head).replace(
        **{"parameters.dtype": dtype}
    )
    model = head.model(config)
    shapes = parameter_shapes(abstract_params(model))
    links = family.links(model, architecture, shapes)
    random = np.random.default_rng(0)
    tensors = {}
    for one in links:
        for name, shape in zip(one.tensors, one.relation.tensor_shapes(one.shapes(shapes)), strict=True):
            block = random.standard_normal(1000).astype(np.float32).astype(jax.numpy.dtype(dtype))
            tensors[name] = lambda shape=shape, block=block: np.resize(block, shape)
    write_weights(directory, family.write(config, architecture), tensors)
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def measure(directory: Path, mesh: int) -> dict[str, float]:
    """Load a directory in this process. Return the memory before it, the additional peak memory, and the seconds."""
    import jax

    import transformer.nn.models  # noqa: F401  import before the measurement, because loading needs it
    from transformer import load
    from transformer.nn import make_mesh

    jax.numpy.zeros(1).block_until_ready()
    on = {"mesh": make_mesh({"fsdp": mesh, "data": -1})} if mesh else {}
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak (VmHWM) to the current memory
    before, begin = status("VmRSS"), time.perf_counter()
    _, params = load(directory, **on)
    jax.block_until_ready(params)
    seconds, peak = time.perf_counter() - begin, status("VmHWM")
    return {"before": before, "peak": peak - before, "seconds": seconds}


def status(field: str) -> int:
    """Return the value of a line in /proc/self/status, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def main() -> None:
    """Print one line of text and one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--mesh", type=int, default=0, help="simulated devices that share the parameters; 0: one device"
    )
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.mesh)))
        return
    with tempfile.TemporaryDirectory() as folder:
        size = write(Path(folder) / "weights", options.gigabytes, options.dtype)
        flags = f"--xla_force_host_platform_device_count={options.mesh or 1}"
        child = [sys.executable, "-m", CHILD, "--measure", str(Path(folder) / "weights"), "--mesh", str(options.mesh)]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        out = subprocess.run(child, env=environment, check=True, capture_output=True, text=True).stdout
    found = json.loads(out.splitlines()[-1])
    ratio = found["peak"] / size
    print(
        f"file size {size / 1e9:.3f} GB, {options.dtype}: peak memory {found['peak'] / 1e9:.3f} GB above the "
        f"{found['before'] / 1e9:.2f} GB of the process, {ratio:.3f} times the file size, {found['seconds']:.1f} s "
        f"({size / 1e9 / found['seconds']:.2f} GB/s)"
    )
    what = {"work": "load", "ratio": ratio, "unit": "peak host memory / file size", "bytes": size}
    print(json.dumps(what | found))


if __name__ == "__main__":
    main()
