"""Fuzz tests of checkpoints with GPTQ, AWQ, fp8 and mxfp4: they are read, or rejected with one line."""

import json

import jax.numpy as jnp
import numpy as np
from fuzz_parts import ODD, Fuzz, fuzz
from hypothesis import strategies as st

from transformer.zoo.weights._files import WeightFiles
from transformer.zoo.weights._header import header_bytes
from transformer.zoo.weights._quantized import plain_files

__all__ = ["fuzz"]  # a fixture

SETTINGS = {
    "quant_method": ["gptq", "gptq", "awq", "awq", "fp8", "mxfp4"],
    "bits": [4, 4, 8],
    "group_size": [8, 8, 16, -1],
    "desc_act": [True, False],
    "checkpoint_format": ["gptq", "gptq_v2"],
}
KEYS = st.sampled_from([*SETTINGS, "version", "dynamic", "weight_block_size", "zero_point", "w_bit"])
METHODS = st.builds(
    lambda plain, key, value, is_odd: plain | ({key: value} if is_odd else {}),
    st.fixed_dictionaries({name: st.sampled_from(values) for name, values in SETTINGS.items()}),
    KEYS,
    ODD,
    st.sampled_from([True, False, False]),
)
SHAPES = {"qweight": [(2, 8), (4, 8), (16, 1)], "qzeros": [(2, 1), (1, 1), (2, 2)], "scales": [(2, 8), (1, 8)]}
SHAPES |= {"g_idx": [(16,)], "weight": [(4, 8)], "weight_scale_inv": [(1, 1)]}
DTYPES = {"scales": np.float16, "weight": jnp.float8_e4m3fn, "weight_scale_inv": np.float32}
TENSORS = st.lists(st.sampled_from([0, 0, 0, 1, 2, None]), min_size=len(SHAPES), max_size=len(SHAPES))


def test_fuzzed_quantized_directories(fuzz: Fuzz):
    def put(folder, value):
        settings, chosen, seed = value
        tensors = {}
        for (name, shapes), choice in zip(SHAPES.items(), chosen, strict=True):
            if choice is not None:
                tensors[f"a.{name}"] = (np.dtype(DTYPES.get(name, np.int32)), shapes[choice % len(shapes)])
        data = np.random.RandomState(seed)
        raw = b"".join(
            data.randint(0, 2 if name == "a.g_idx" else 256, shape).astype(dtype).tobytes()
            for name, (dtype, shape) in tensors.items()
        )
        (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))
        (folder / "model.safetensors").write_bytes(header_bytes(tensors) + raw)

    def read(folder, value):
        files = plain_files(WeightFiles(folder))
        for name, info in files.tensors.items():
            assert files.read(name).shape == info.shape

    inputs = st.tuples(METHODS, TENSORS, st.integers(0, 99))
    fuzz("quantized weights", 2000, inputs, read, put=put)
