"""Tiny vision-language models with random weights, their files, and pictures."""

import json
from functools import partial
from pathlib import Path

import jax
import numpy as np
from flax.traverse_util import unflatten_dict
from golden import case as golden_case
from golden.case import numbers
from PIL import Image
from shared_folders import copy_once_made
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from transformer.data.tokenizers._pretrained import PretrainedTokenizer
from transformer.zoo import ENTRIES, abstract_params, save_pretrained
from transformer.zoo.weights._conversion import parameter_shapes

LETTERS = sorted(set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz.,:;?!0123456789<>|_/'-\n▁"))
SPECIAL = ["<pad>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"]
MARKERS = {
    "gemma3": ["<start_of_image>", "<end_of_image>", "<image_soft_token>"],
    "paligemma": ["<image>"],
    "llava": ["<image>"],
    "qwen2_vl": ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"],
    "qwen2_5_vl": ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"],
}
"""Special tokens of images of each family."""
TOKENS = {name: markers[-1] for name, markers in MARKERS.items()}
"""Name of the image token of each family."""
NAMED = {
    "gemma3": {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    },
    "paligemma": {"image_token": "<image>"},
    "llava": {"image_token": "<image>"},
    "qwen2_vl": {},
    "qwen2_5_vl": {},
}
_QWEN = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 3, "merge_size": 2, "temporal_patch_size": 2}
PREPROCESSING = {
    "gemma3": {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 12, "width": 12}, "resample": 2},
    "paligemma": {"image_processor_type": "SiglipImageProcessor", "size": {"height": 6, "width": 6}, "resample": 3},
    "llava": {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 6},
        "crop_size": {"height": 6, "width": 6},
    },
    # From 3 to 6 tokens of 6 x 6 pixels.
    "qwen2_vl": {**_QWEN, "size": {"shortest_edge": 108, "longest_edge": 216}},
    "qwen2_5_vl": {**_QWEN, "size": {"shortest_edge": 108, "longest_edge": 216}},
}
PREPROCESSING["paligemma"]["image_seq_length"] = 4
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<start_of_turn>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ 'MARKER' }}"
    "{% else %}{{ part['text'] | trim }}{% endif %}{% endfor %}{% endif %}{{ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)


def marker(family: str) -> str:
    """Return the text that stands for an image in a prompt."""
    names = MARKERS[family]
    return f"{names[0]}{names[2]}{names[1]}" if family.startswith("qwen") else names[0]


def tokenizer(family: str) -> PretrainedTokenizer:
    """Return a tokenizer of letters, in which line breaks that follow one another are one token, as in Gemma's."""
    pieces = [*SPECIAL, *MARKERS[family], *LETTERS, "\n\n", "\n\n\n", "▁is"]
    vocabulary = {piece: i for i, piece in enumerate([*pieces, "is"])}
    merges = [("\n", "\n"), ("\n\n", "\n"), ("i", "s"), ("▁", "is")]
    made = Tokenizer(models.BPE(vocabulary, merges, fuse_unk=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    made.add_special_tokens([AddedToken(name, normalized=False) for name in (*SPECIAL, *MARKERS[family])])
    made.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])])
    named = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "tokenizer_class": "TokenizersBackend"}
    named |= {"chat_template": TEMPLATE.replace("MARKER", marker(family)), "extra_special_tokens": NAMED[family]}
    return PretrainedTokenizer(
        {"tokenizer.json": made.to_str().encode(), "tokenizer_config.json": json.dumps(named).encode()}
    )


def write_vision_model(directory: Path, family: str) -> Path:
    """Write a tiny model of a family as a directory of weights, with its tokenizer and preprocessing; return it."""
    return copy_once_made(f"vision {family}", partial(_write_vision_model, family), directory)


def _write_vision_model(family: str, directory: Path) -> None:
    made, entry = tokenizer(family), ENTRIES[family]
    values = next(iter(golden_case.cases(family).values())).values
    text = values["text_config"] | {"vocab_size": made.vocab_size, "max_position_embeddings": 200}
    name = next(name for name in ("image_token_id", "image_token_index") if name in values)
    values = values | {"text_config": text, name: made.vocabulary.index(TOKENS[family])}
    head = next(iter(entry.heads.values()))
    model = head.model(entry.read(values, head))
    shapes = parameter_shapes(abstract_params(model))
    flat = {tuple(path.split("/")): numbers(path, shape) for path, shape in shapes.items()}
    flat["projector", "projection", "kernel"] *= 20  # so that images change what is generated
    params = jax.tree.map(jax.device_put, unflatten_dict(flat))
    save_pretrained(model, params, directory, tokenizer=made, family=family)
    (directory / "preprocessor_config.json").write_text(json.dumps(PREPROCESSING[family]))
    (directory / "integrity.json").unlink()


def picture(seed: int, height: int = 15, width: int = 20) -> Image.Image:
    """Return a smooth random picture."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 3, 3)).astype(np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
