"""Fuzz tests of GGUF files: header, metadata, tensors and tokenizer are read, or rejected with one line."""

import struct

import numpy as np
from fuzz_parts import BYTE_EDITS, Fuzz, damaged, fuzz
from gguf_parts import gguf, metadata_of, random_blocks, stored, value_of
from hypothesis import strategies as st

from transformer.data.tokenizers._gguf import tokenizer_files
from transformer.data.tokenizers._pretrained import PretrainedTokenizer
from transformer.zoo._gguf import GGUFFiles

__all__ = ["fuzz"]  # a fixture

CONFIG = {"hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
CONFIG |= {"num_key_value_heads": 1, "rms_norm_eps": 1e-5, "vocab_size": 6, "head_dim": 4}
TOKENS = ["<unk>", "<s>", "▁", "a", "▁a", "<0x0A>"]
SPM = {"tokens": TOKENS, "scores": np.arange(6, dtype=np.float32), "model": "llama", "bos_token_id": 1}
SPM |= {"token_type": np.array([2, 3, 1, 1, 1, 6], np.int32)}
BPE = {"model": "gpt2", "pre": "qwen2", "tokens": ["a", "b", "ab", "<e>"], "merges": ["a b"], "eos_token_id": 3}
GEMMA = CONFIG | {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 1.0, "sliding_window": 3}
METADATA = [
    metadata_of(config, family) | {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()}
    for config, family, tokenizer in ((CONFIG, "llama", SPM), (CONFIG, "qwen2", BPE), (GEMMA, "gemma2", SPM))
]
TENSORS = {
    "token_embd.weight": stored(np.ones((6, 4))),
    "blk.0.attn_q.weight": stored(np.ones((4, 4)), "F16"),
    "blk.0.attn_k.weight": random_blocks("Q4_0", (4, 32)),
    "blk.0.ffn_down.weight": random_blocks("Q6_K", (1, 256)),
    "rope_freqs.weight": stored(np.ones(2)),
}
RAW = st.one_of(
    st.integers(0, 2**32 - 1),
    st.sampled_from(
        [0.0, -1.0, float("nan"), float("inf"), True, False, "", "llama", "gpt2", "yarn", "none", ["a"], []]
    ),
    st.sampled_from([np.zeros(0, np.float32), np.arange(6, dtype=np.int32), np.full(6, np.inf, np.float32)]),
)
EDITS = st.lists(st.tuples(st.integers(0, 40), RAW), max_size=2)


def edited(metadata, edits):
    keys = list(metadata)
    return metadata | {keys[at % len(keys)]: value for at, value in edits}


FILES = st.one_of(
    st.builds(lambda metadata, edits: gguf(edited(metadata, edits), TENSORS), st.sampled_from(METADATA), EDITS),
    st.builds(lambda metadata, edits: damaged(gguf(metadata, TENSORS), edits), st.sampled_from(METADATA), BYTE_EDITS),
    st.builds(
        lambda tensors, keys, rest: b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + rest,
        st.sampled_from([0, 1, 2, 2**32, 2**63]),
        st.sampled_from([0, 1, 2, 2**32, 2**63]),
        st.builds(b"".join, st.lists(st.binary(max_size=9) | RAW.map(value_of), max_size=5)),
    ),
)


def test_fuzzed_gguf_files(fuzz: Fuzz):
    def read(folder, content):
        files = GGUFFiles(folder / "a.gguf")
        for name, info in files.tensors.items():
            assert files.read(name).shape == info.shape
        PretrainedTokenizer(tokenizer_files(files.metadata), 6).encode("a ab")

    put = lambda folder, content: (folder / "a.gguf").write_bytes(content)  # noqa: E731
    fuzz("GGUF file", 6000, FILES, read, put=put)
