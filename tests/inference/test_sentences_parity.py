"""Embeddings with the settings that sentence-transformers saves, compared with its own."""

import json

import numpy as np
import pytest
from library_tokenizers import save
from tokenizers import Tokenizer as Library
from tokenizers import models, normalizers, pre_tokenizers, processors

from transformer.inference import open_model

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore:.*is truncated to:UserWarning")]
WORDS = ["the", "cold", "north", "The", "COLD", "stock", "prices", "fell", "café", "cafe", "CAFÉ", "query"]
TEXTS = ["the cold north", "The COLD stock prices fell " * 9, "CAFÉ cafe the north " * 5 + "query"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A directory with a random BERT of 16 dimensions that distinguishes cases and accents."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    entries = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    library = Library(models.WordPiece({word: i for i, word in enumerate(entries)}, unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    library.add_special_tokens(entries[:5])
    folder = tmp_path_factory.mktemp("encoder")
    names = {name: f"[{name.split('_')[0].upper()}]" for name in ("pad_token", "unk_token", "cls_token", "sep_token")}
    settings = {"do_lower_case": False, "strip_accents": False, "tokenizer_class": "BertTokenizer"}
    save(folder, library, tokenizer_config=names | {"mask_token": "[MASK]", "model_max_length": 48} | settings)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=len(entries), max_position_embeddings=64, **sizes)
    transformers.BertModel(config).save_pretrained(folder)
    return folder


def changed(folder, file, **values):
    old = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    (folder / file).write_text(json.dumps(old | values))


CHANGES = {
    "as saved": lambda folder: None,
    "limit of the tokenizer": lambda folder: changed(folder, "tokenizer_config.json", model_max_length=9),
    "limit of both": lambda folder: [
        changed(folder, "tokenizer_config.json", model_max_length=9),
        changed(folder, "sentence_bert_config.json", max_seq_length=7),
    ],
    "left side": lambda folder: changed(folder, "tokenizer_config.json", model_max_length=9, truncation_side="left"),
    "lower case of the tokenizer": lambda folder: changed(folder, "tokenizer_config.json", do_lower_case=True),
    "accents": lambda folder: changed(folder, "tokenizer_config.json", do_lower_case=True, strip_accents=True),
    "lower case of the module": lambda folder: changed(folder, "sentence_bert_config.json", do_lower_case=True),
    "dimensions": lambda folder: changed(folder, "config_sentence_transformers.json", truncate_dim=5),
    "prompt": lambda folder: changed(
        folder, "config_sentence_transformers.json", prompts={"q": "query the "}, default_prompt_name="q"
    ),
}


@pytest.mark.filterwarnings("ignore:tokenizer_config.json contradicts")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_embeddings_equal_sentence_transformers(encoder, tmp_path, change):
    reference = pytest.importorskip("sentence_transformers", minversion="6")
    modules = reference.sentence_transformer.modules
    transformer = reference.base.modules.Transformer(str(encoder))
    parts = [transformer, modules.Pooling(16), reference.base.modules.Normalize()]
    folder = tmp_path / "model"
    reference.SentenceTransformer(modules=parts, device="cpu").save(str(folder))
    change(folder)
    theirs = reference.SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    ours = open_model(folder).embed(TEXTS)
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.filterwarnings("ignore:tokenizer_config.json contradicts")
def test_a_model_without_modules_has_the_limit_of_its_tokenizer(encoder):
    """sentence-transformers reads such a directory with the mean of the tokens."""
    reference = pytest.importorskip("sentence_transformers", minversion="6")
    theirs = reference.SentenceTransformer(str(encoder), device="cpu").encode([TEXTS[1] * 3])
    np.testing.assert_allclose(open_model(encoder).embed([TEXTS[1] * 3]), theirs, atol=1e-5)
