"""Chat templates in the style of the published families, and tiny tokenizers and models for them."""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from shared_folders import copy_once_made
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from transformer.config import QKNorm, llama_decoder
from transformer.data.tokenizers._pretrained import PretrainedTokenizer
from transformer.nn.models import CausalLM, Seq2Seq
from transformer.zoo import save_pretrained

TEMPLATES = Path(__file__).parent / "chat" / "templates"
WORDS = [
    "Hello world, how are you today?",
    "system user assistant tool model",
    "The answer is 4. im_end eot end of turn",
]


CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN_NAMED = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
# name: (special tokens, other added tokens, kind of tokenizer, bos, eos)
FAMILIES = {
    "llama3": (
        ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        [],
        "bytes",
        "<|begin_of_text|>",
        "<|eot_id|>",
    ),
    "qwen2": (CHATML, QWEN_NAMED[:4], "bytes", None, "<|im_end|>"),
    "qwen3": (CHATML, QWEN_NAMED, "bytes", None, "<|im_end|>"),
    "gemma2": (
        ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"],
        ["\n\n"],
        "pieces",
        "<bos>",
        "<eos>",
    ),
    "gemma3": (
        ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"],
        ["\n\n"],
        "pieces",
        "<bos>",
        "<eos>",
    ),
    "mistral": (["<unk>", "<s>", "</s>", "[INST]", "[/INST]"], [], "pieces", "<s>", "</s>"),
    "mixtral": (["<unk>", "<s>", "</s>"], [], "pieces", "<s>", "</s>"),
    "phi3": (
        ["<unk>", "<s>", "</s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"],
        [],
        "stripping pieces",
        "<s>",
        "<|endoftext|>",
    ),
    "phi4_mini": (
        ["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|tool|>", "<|/tool|>"],
        [],
        "bytes",
        "<|endoftext|>",
        "<|endoftext|>",
    ),
    "gpt_oss": (
        ["<|startoftext|>", "<|endoftext|>", "<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>"],
        [],
        "bytes",
        "<|startoftext|>",
        "<|return|>",
    ),
    "olmo2": (["<|endoftext|>", "<|pad|>"], [], "bytes", "<|endoftext|>", "<|endoftext|>"),
    "deepseek_v3": (
        ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"],
        ["<think>", "</think>"],
        "bytes",
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
    ),
    "smollm": (CHATML, [], "bytes", "<|im_start|>", "<|im_end|>"),
    "documents": (CHATML, [], "bytes", None, "<|im_end|>"),
}


def template(family: str) -> str:
    """Return the chat template of a family."""
    return (TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8")


def library(kind: str, special: list[str], others: list[str] = ()) -> tokenizers.Tokenizer:
    """Return a tokenizer of a kind: "bytes" as GPT-2 and Llama 3, "pieces" as Llama 2 and Gemma, with byte fallback."""
    if kind == "bytes":
        made = tokenizers.Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        made.train_from_iterator(
            WORDS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
        )
    else:
        letters = sorted({character for text in WORDS for character in text.replace(" ", "▁")} | set("\n▁<>|[]/_"))
        pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, "He", "▁w"]
        vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
        made = tokenizers.Tokenizer(
            models.BPE(vocabulary, [("H", "e"), ("▁", "w")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
        )
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        made.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    strip = kind.startswith("stripping")
    made.add_special_tokens([AddedToken(name, normalized=False, rstrip=strip and "|" in name) for name in special])
    made.add_tokens([AddedToken(name, normalized=False) for name in others])
    return made


def files(family: str, **settings: object) -> dict[str, bytes]:
    """Return the tokenizer files of a family."""
    special, others, kind, bos, eos = FAMILIES[family]
    config = {
        "chat_template": template(family),
        "bos_token": bos,
        "eos_token": eos,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    config |= {"unk_token": "<unk>"} if "pieces" in kind else {}
    named = {"tokenizer_config.json": json.dumps({**config, **settings}).encode()}
    return {"tokenizer.json": library(kind, special, others).to_str().encode(), **named}


def tokenizer(family: str, **settings: object) -> PretrainedTokenizer:
    return PretrainedTokenizer(files(family, **settings))


def drawn_params(model: CausalLM | Seq2Seq, scale: float, seed: int = 0):
    """Return parameters as `init` does with `initializer_range` as the scale, from NumPy, which compiles no program."""
    random = np.random.default_rng(seed)
    ids = [jax.ShapeDtypeStruct((1, 2), jnp.int32)] * (2 if isinstance(model, Seq2Seq) else 1)
    shapes = jax.eval_shape(lambda *ids: model.init(jax.random.key(0), *ids), *ids)["params"]

    def draw(path, leaf):
        if path[-1].key == "scale":
            return np.ones(leaf.shape, leaf.dtype)
        return (scale * random.normal(size=leaf.shape)).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def write_chat_model(directory, family: str = "smollm", *, seed: int = 0, model: str = "llama", **generation: object):
    """Write a tiny Llama, or Qwen 3, with the tokenizer of a family as a directory of weights, and return it."""
    name = json.dumps(["chat", family, seed, model, generation], sort_keys=True)
    return copy_once_made(name, partial(_write_chat_model, family, seed, model, generation), directory)


def _write_chat_model(family, seed, model, generation, directory):
    made = tokenizer(family)
    config = llama_decoder(
        vocab_size=made.vocab_size, d_model=16, num_layers=2, num_heads=2, **{"feed_forward.d_ff": 24}
    )
    config = config.replace(
        **{"parameters.initializer_range": 0.5, "attention.qk_norm": QKNorm() if model == "qwen3" else None}
    )
    tiny = CausalLM(config)
    params = drawn_params(tiny, 0.5, seed)
    save_pretrained(tiny, params, directory, tokenizer=made, family=model)
    if generation:
        (directory / "generation_config.json").write_text(json.dumps(generation))
        (directory / "integrity.json").unlink(missing_ok=True)


CONVERSATIONS = {
    "one": [{"role": "user", "content": "Hello world"}],
    "system": [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Hi"}],
    "three": [
        {"role": "user", "content": "  Hello\n"},
        {"role": "assistant", "content": "Hi!\n\nHow are you?"},
        {"role": "user", "content": "Fine, é 你好 🙂 <b>"},
    ],
    "thought": [
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": "The answer is 4.", "reasoning_content": "It is easy."},
    ],
    "written thought": [
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": "<think>\nEasy.\n</think>\n\n4"},
        {"role": "user", "content": "why?"},
    ],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "Hello "}, {"type": "text", "text": "world"}]}],
    "call": [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "n": 3}}}
            ],
        },
        {"role": "tool", "content": "sunny <tag>"},
    ],
    "skipped": [{"role": "skip", "content": "x"}, {"role": "user", "content": "y"}],
}


def weather(city: str, days: int = 1) -> str:
    """Return the weather of a city.

    Args:
        city: the name of
            the city
        days: number of days (choices: [1, 2])

    Returns:
        a description
    """
    return f"{city}: {days} sunny days"
