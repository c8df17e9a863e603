"""Write a Llama directory of `serving_http.write_model` as a GGUF file, in the environment of llama.cpp's server.

Usage: PYTHON benchmarks/llama_cpp_model.py DIRECTORY FILE.gguf

It imports only numpy and gguf (`pip install llama-cpp-python[server] gguf`). Matrices stay float32 or
bfloat16; vectors become float32.
"""

import json
import sys
from pathlib import Path

import numpy as np

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""modules in safetensors -> in GGUF, without the number of the layer"""
TYPES = {"F32": np.float32, "BF16": np.uint16}
"""types in safetensors"""
NEVER = "\u0100 \u0100"
"""a merge of two zero bytes: the file must have merges, but a token stays one byte"""


def tensors(file: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a safetensors file: float32, or bfloat16 as unsigned integers of 16 bits."""
    data = file.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    found = {}
    for name, about in json.loads(data[8:begin]).items():
        if name == "__metadata__":
            continue
        if about["dtype"] not in TYPES:
            raise ValueError(f"{name} must be float32 or bfloat16, got {about['dtype']}. Write it as one of them.")
        first, end = about["data_offsets"]
        found[name] = np.frombuffer(data[begin + first : begin + end], TYPES[about["dtype"]]).reshape(about["shape"])
    return found


def name_in_gguf(name: str) -> str:
    """Return the name of a tensor in GGUF."""
    module, _, last = name.rpartition(".")
    if module in NAMES:
        return f"{NAMES[module]}.{last}"
    _, _, layer, module = module.split(".", 3)
    return f"blk.{layer}.{NAMES[module]}.{last}"


def convert(directory: Path, file: Path) -> None:
    """Write the weights, the sizes and the tokenizer."""
    import gguf

    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    tokenizer = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    template = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"]
    vocabulary = tokenizer["model"]["vocab"] | {one["content"]: one["id"] for one in tokenizer["added_tokens"]}
    special = {one["content"] for one in tokenizer["added_tokens"]}
    names = sorted(vocabulary, key=vocabulary.get)
    heads = config["num_attention_heads"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base((config.get("rope_parameters") or config).get("rope_theta", 10_000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(names)
    writer.add_token_types([3 if name in special else 1 for name in names])  # 3: control, 1: normal
    writer.add_token_merges([NEVER])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_bos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(template)
    for name, array in tensors(directory / "model.safetensors").items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # llama.cpp rotates neighboring dimensions
            kept = heads if "q_proj" in name else config["num_key_value_heads"]
            array = array.reshape(kept, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        array = np.ascontiguousarray(array)
        if array.dtype == np.float32:
            writer.add_tensor(name_in_gguf(name), array)
        elif array.ndim == 1:  # llama.cpp multiplies by vectors of float32 only
            writer.add_tensor(name_in_gguf(name), (array.astype(np.uint32) << 16).view(np.float32))
        else:
            writer.add_tensor(name_in_gguf(name), array.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
