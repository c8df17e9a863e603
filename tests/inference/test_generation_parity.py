"""The text of an encoder-decoder equals that of transformers' `generate` with the same generation_config.json."""

import json
import random
import warnings

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from transformer.inference import open_model

pytestmark = pytest.mark.parity
NAMES = ["<s>", "<pad>", "</s>", "<unk>", *(f"w{i}" for i in range(28))]
SMALL = {"vocab_size": len(NAMES), "d_model": 16}
BART = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in (("layers", 1), ("ffn_dim", 20))}
BART |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 64, "init_std": 0.6}
BART |= {"decoder_start_token_id": 2, "forced_bos_token_id": 0, "forced_eos_token_id": 2}
T5 = {"d_kv": 8, "d_ff": 20, "num_layers": 1, "num_heads": 2, "initializer_factor": 3.0}
T5 |= {"decoder_start_token_id": 1, "pad_token_id": 1, "eos_token_id": 2}


def drawn(draw, family):
    """Return a random selection of generation settings."""
    found = {
        "num_beams": draw.choice([1, 2, 3, 4, 5]),
        "max_length": draw.choice([9, 14, 20]),
        "length_penalty": draw.choice([0.0, 0.5, 1.0, 2.0]),
        "early_stopping": draw.choice([True, False, "never"]),
        "min_length": draw.choice([0, 3, 8]),
        "no_repeat_ngram_size": draw.choice([0, 1, 2, 3]),
        "repetition_penalty": draw.choice([1.0, 1.0, 1.3, 0.7]),
        "bad_words_ids": [[draw.randrange(4, 32)]],
        "suppress_tokens": [draw.randrange(4, 32) for _ in range(3)],
    }
    found |= {"forced_eos_token_id": 2} if family == "t5" else {}
    kept = ("num_beams", "max_length")
    return {name: value for name, value in found.items() if name in kept or draw.random() < 0.75}


def write(directory, family):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if family == "bart":
        model = transformers.BartForConditionalGeneration(transformers.BartConfig(**SMALL, **BART))
    else:
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(**SMALL, **T5))
    model.save_pretrained(directory)
    library = tokenizers.Tokenizer(models.WordLevel({name: i for i, name in enumerate(NAMES)}, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(NAMES[:4])
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    library.save(str(directory / "tokenizer.json"))


@pytest.mark.programs(120, reason="each drawn beam search is a program of its own")
@pytest.mark.parametrize("family", ["bart", "t5"])
def test_random_settings_give_the_texts_of_transformers(family, tmp_path):
    write(tmp_path, family)
    import torch
    import transformers

    path, draw = tmp_path / "generation_config.json", random.Random(1)
    base, source = json.loads(path.read_text()), "w3 w7 w9 w14"
    for _ in range(5):
        settings = drawn(draw, family)
        path.write_text(json.dumps(base | settings))
        theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()
        ours = open_model(tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            row = theirs.generate(torch.tensor([ours.tokenizer.encode_source(source)]))[0].tolist()
        wanted = ours.tokenizer.decode(row)
        assert ours.translate(source) == wanted, settings
        assert ours.generate(source) == wanted, settings
