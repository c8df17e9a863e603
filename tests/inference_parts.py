"""Tiny models with tokenizers, as directories of weights, for the tests of `transformer.inference`."""

import json
from functools import partial

import tokenizers
from golden import case as golden_case
from golden import ours
from shared_folders import copy_once_made
from tokenizers import models, pre_tokenizers, processors

WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree", "big", "small"]


def write_tokenizer(directory, *, pair):
    """Write a word-level tokenizer that adds [CLS] ... [SEP] around a text (`pair`), or [BOS] in front of it."""
    special = ["[PAD]", "[BOS]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {token: i for i, token in enumerate(special + WORDS)}
    library = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    template = ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1") if pair else ("[BOS] $A", "[BOS] $A $B:1")
    ids = [(token, i) for i, token in enumerate(special)]
    library.post_processor = processors.TemplateProcessing(single=template[0], pair=template[1], special_tokens=ids)
    library.save(str(directory / "tokenizer.json"))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "bos_token": "[BOS]", "eos_token": "[SEP]"}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))


def write_models(root):
    """Write four models and return their directories by name: language model, encoder-decoder, classifier, encoder."""
    made = {}
    for name, family, case in (
        ("writer", "gpt2", "lm"),
        ("translator", "t5", None),
        ("classifier", "bert", "classifier"),
        ("encoder", "bert", "base"),
    ):
        made[name] = copy_once_made(f"inference {name}", partial(_write_model, name, family, case), root / name)
    return made


def _write_model(name, family, case, directory):
    case = case or next(iter(golden_case.cases(family)))
    ours.write(directory, golden_case.golden(family)[case])
    write_tokenizer(directory, pair=name not in ("writer", "translator"))
