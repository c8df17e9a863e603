"""Writing of GGUF files for tests: the conversion of llama.cpp's script, and quantized blocks."""

import struct

import jax.numpy as jnp
import numpy as np

from transformer.zoo.weights._gguf_blocks import FORMATS

CODES = {blocks.name: code for code, blocks in FORMATS.items()}
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_GEMMA2 = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value_of(value) -> bytes:
    """Return type and value of a metadata entry: floats are 32 bits wide, integers unsigned 32 bits."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, np.ndarray):
        kind = {"float32": 6, "int32": 5, "uint32": 4}[value.dtype.name]
        return struct.pack("<IIQ", 9, kind, len(value)) + value.tobytes()
    return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))


def gguf(metadata, tensors, alignment=32) -> bytes:
    """Return a GGUF file. `tensors` maps a name to (format, shape, bytes of the data)."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(text(key) + value_of(value) for key, value in metadata.items())
    place, data = 0, b""
    for name, (form, shape, raw) in tensors.items():
        head += text(name) + struct.pack("<I", len(shape)) + b"".join(struct.pack("<Q", s) for s in shape[::-1])
        head += struct.pack("<IQ", CODES[form], place)
        data += raw + bytes(-len(raw) % alignment)
        place = len(data)
    return head + bytes(-len(head) % alignment) + data


def stored(array, form="F32"):
    """Return (format, shape, bytes) of an array in a format; Q8_0 and Q4_0 by ggml's reference quantization."""
    array = np.asarray(array, np.float32)
    dtypes = {"F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16}
    if form in dtypes:
        return form, array.shape, array.astype(dtypes[form]).tobytes()
    blocks = array.reshape(-1, 32)
    if form == "Q8_0":
        scale = np.abs(blocks).max(1, keepdims=True) / np.float32(127)
        inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
        codes = blocks * inverse
        codes = (np.sign(codes) * np.floor(np.abs(codes) + np.float32(0.5))).astype(np.int8).view(np.uint8)
    else:
        assert form == "Q4_0"
        largest = np.take_along_axis(blocks, np.abs(blocks).argmax(1, keepdims=True), 1)
        scale = largest / np.float32(-8)
        inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
        nibbles = np.trunc(blocks * inverse + np.float32(8.5)).astype(np.uint8).clip(0, 15)
        codes = nibbles[:, :16] | nibbles[:, 16:] << 4
    return form, array.shape, np.concatenate([scale.astype(np.float16).view(np.uint8), codes], 1).tobytes()


def random_blocks(form, shape, seed=0):
    """Return (format, shape, bytes) of random valid blocks whose weights have a magnitude of about 0.1."""
    blocks = FORMATS[CODES[form]]
    random = np.random.RandomState(seed)
    raw = random.randint(0, 256, (int(np.prod(shape)) // blocks.size, blocks.nbytes)).astype(np.uint8)
    scales = {"Q6_K": (208,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q4_1": (0, 2), "Q5_1": (0, 2)}.get(form, (0,))
    steps = {"Q6_K": 1e-4, "Q4_K": 3e-4, "Q5_K": 2e-4, "Q8_0": 1e-3}.get(form, 0.02)
    for at in scales:
        chosen = (steps * random.uniform(0.5, 1.0, (len(raw), 1))).astype(np.float16)
        raw[:, at : at + 2] = chosen.view(np.uint8)
    return form, tuple(shape), raw.tobytes()


def permuted(array, heads):
    """Permute rows as llama.cpp's script does (`LlamaModel.permute`)."""
    return array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def name_in_gguf(name, family):
    module, _, last = name.rpartition(".")
    plain = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if module in plain:
        return f"{plain[module]}.{last}"
    _, _, layer, module = module.split(".", 3)
    return f"blk.{layer}.{(_NAMES | (_GEMMA2 if family == 'gemma2' else {}))[module]}.{last}"


def metadata_of(config, family):
    """Return the metadata of a model with this config.json."""
    rope = config.get("rope_parameters", {})
    size = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    values = {
        "vocab_size": config["vocab_size"],
        "rope.dimension_count": size,
        "context_length": config.get("max_position_embeddings", 2048),
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "block_count": config["num_hidden_layers"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float(rope.get("rope_theta", 10_000.0)),
    }
    if "head_dim" in config:
        values |= {"attention.key_length": size, "attention.value_length": size}
    if (kind := rope.get("rope_type", "default")) in ("linear", "yarn"):
        values |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        values["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if family == "gemma2":
        names = ("attn_logit_softcapping", "final_logit_softcapping")
        values |= {name: config[name] for name in names} | {"attention.sliding_window": config["sliding_window"]}
    return {"general.architecture": family} | {f"{family}.{key}": value for key, value in values.items()}


def converted(config, tensors):
    """Return the metadata and the tensors of a checkpoint in the Hugging Face format, as llama.cpp's script does."""
    family = config["model_type"]
    made = {}
    for name, array in tensors.items():
        if family == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            array = permuted(array, heads)
        if family in ("gemma", "gemma2") and name.endswith("norm.weight"):
            array = array + np.float32(1)
        made[name_in_gguf(name, family)] = array
    rope = config.get("rope_parameters", {})
    if rope.get("rope_type") == "llama3":
        made["rope_freqs.weight"] = llama3_factors(config["head_dim"], rope)
    return metadata_of(config, family), made


def llama3_factors(size, rope):
    """Return the divisors of the rotary frequencies, one by one as in llama.cpp's script."""
    original = rope["original_max_position_embeddings"]
    low, high = original / rope["low_freq_factor"], original / rope["high_freq_factor"]
    factors = []
    for i in range(0, size, 2):
        length = 2 * np.pi * rope["rope_theta"] ** (i / size)
        if length < high:
            factors.append(1.0)
        elif length > low:
            factors.append(rope["factor"])
        else:
            smooth = (original / length - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)
