"""A tiny directory of BERT weights, learnable labeled texts, and recipes, for tests of fine-tuning."""

import dataclasses
import json

import jax
import numpy as np
import tokenizers
from training_recipes import short_recipe

from transformer.config import OutputOptions, TransformerConfig
from transformer.data import SST2
from transformer.nn.models import MaskedLM
from transformer.training.lora import LoRA
from transformer.zoo import abstract_params, save_pretrained
from transformer.zoo.families._bert import BERT

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "a", "the", "very", "not", "##s"]
SIZES = {
    "vocab_size": len(WORDS),
    "hidden_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "intermediate_size": 10,
    "max_position_embeddings": 19,
    "initializer_range": 0.3,
}


def bert_directory(folder):
    """Write a model with random weights as on the Hugging Face Hub: config.json, safetensors, tokenizer.json."""
    head = BERT.heads["BertForMaskedLM"]
    model = MaskedLM(BERT.read(SIZES | {"model_type": "bert", "architectures": ["BertForMaskedLM"]}, head))
    random = np.random.default_rng(3)
    shapes = jax.tree_util.tree_leaves_with_path(abstract_params(model))
    leaves = [
        random.normal(float(path[-1].key == "scale"), 0.4, leaf.shape).astype(np.float32) for path, leaf in shapes
    ]
    params = jax.tree.unflatten(jax.tree.structure(abstract_params(model)), leaves)
    save_pretrained(model, params, folder, fields={"pad_token_id": 0})
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder):
    """Write a WordPiece tokenizer with BERT's template, in the format of transformers."""
    library = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    library.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    library.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    library.save(str(folder / "tokenizer.json"))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def write_sst2(folder, train=48, dev=16):
    """Write train.tsv, dev.tsv and an unlabeled test.tsv. One word of each sentence determines its class."""
    rows = []
    for number in range(train + dev):
        kind = number % 2
        filling = ["the", "a", "very", "film", "films"]
        words = [filling[(number // 2 + i) % 5] for i in range(number % 3)]
        words.insert(number % (len(words) + 1), ("bad", "good")[kind])
        rows.append(f"{' '.join(words)} \t{kind}\n")
    folder.mkdir(exist_ok=True)
    (folder / "train.tsv").write_text("sentence\tlabel\n" + "".join(rows[:train]))
    (folder / "dev.tsv").write_text("sentence\tlabel\n" + "".join(rows[train:]))
    (folder / "test.tsv").write_text("index\tsentence\n0\ta film\n")
    return folder


def finetuning(data, *, lora=None, steps=30, **groups):
    """Return a recipe that learns these texts in 30 steps."""
    recipe = short_recipe(
        "tiny",
        TransformerConfig(output=OutputOptions(num_classes=2), dropout_rate=0.05),
        SST2(manual_dir=str(data), max_length=9, batch_size=8, eval_batch_size=16),
        optimizer={"learning_rate": 2e-2, "warmup_steps": 2, "schedule": "constant"},
        training={"steps": steps},
        evaluation={"every": 10},
        checkpoint={"every": 10},
        logging={"every": 10},
    )
    return dataclasses.replace(recipe, lora=lora, **groups)


SMALL_LORA = LoRA(rank=3, alpha=6.0, targets=("query", "value", "out", "up"))
