"""Settings that tokenizer.json and tokenizer_config.json both have: which file counts, compared with transformers."""

import itertools
import json

import pytest
from library_tokenizers import save
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from transformer.data.tokenizers._pretrained import load_pretrained_tokenizer
from transformer.training.workdir._provenance import tokenizer_fingerprint

CONTRADICTION = r"tokenizer_config\.json contradicts tokenizer\.json"
TEXT = "Hello Café 你好"


def bert(nested=False, **options):
    """WordPiece whose normalizer has these options."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "Hello", "café", "cafe", "Café", "Cafe", "你", "好"]
    library = Library(models.WordPiece({word: i for i, word in enumerate([*words, "你好"])}, unk_token="[UNK]"))
    own = normalizers.BertNormalizer(**options)
    library.normalizer = normalizers.Sequence([normalizers.NFC(), own]) if nested else own
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    library.add_special_tokens(words[:5])
    return library


def gpt(prefix):
    """Byte-level BPE with or without a space before a text."""
    entries = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġa"]
    library = Library(models.BPE(vocab={one: i for i, one in enumerate(entries)}, merges=[("Ġ", "a")]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    library.add_special_tokens([AddedToken("<|endoftext|>", special=True, normalized=False)])
    return library


def llama(prefix, prepend=False):
    """BPE of SentencePiece, whose prefix is set by the division into words, or by the normalizer as in older files."""
    entries = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "▁a"]
    library = Library(
        models.BPE(
            vocab={one: i for i, one in enumerate(entries)},
            merges=[("▁", "a")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    if prepend:
        library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        scheme = "first" if prefix else "never"
        library.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    return library


NAMES = {
    "Bert": dict.fromkeys(["pad_token", "unk_token", "cls_token", "sep_token", "mask_token"]),
    "GPT2": {"unk_token": "<|endoftext|>", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
    "Llama": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False},
}
NAMES["Bert"] = {name: f"[{name.split('_')[0].upper()}]" for name in NAMES["Bert"]}


def written(folder, library, class_name, **settings):
    kind = next((name for name in NAMES if class_name.startswith(name)), "Bert")
    config = NAMES[kind] | {"tokenizer_class": class_name} | settings
    return save(folder, library, tokenizer_config=config)


def text_of(library, text):
    return library.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    "settings", [{"do_lower_case": False}, {"strip_accents": False}, {"tokenize_chinese_chars": False}]
)
def test_settings_of_the_tokenizer_class_are_applied(tmp_path, nested, settings):
    names = {"do_lower_case": "lowercase", "tokenize_chinese_chars": "handle_chinese_chars"}
    options = {names.get(name, name): value for name, value in settings.items()}
    with pytest.warns(UserWarning, match=rf"{CONTRADICTION}: {next(iter(settings))} is false\. tokenizer_config.json"):
        found = load_pretrained_tokenizer(written(tmp_path, bert(nested), "BertTokenizerFast", **settings))
    assert found.encode(TEXT) == text_of(bert(**options), TEXT) != text_of(bert(), TEXT)


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize(("make", "class_name"), [(gpt, "GPT2Tokenizer"), (llama, "LlamaTokenizerFast")])
def test_adds_a_space_before_a_text(tmp_path, make, class_name, prefix):
    with pytest.warns(UserWarning, match=rf"{CONTRADICTION}: add_prefix_space is {str(prefix).lower()}"):
        found = load_pretrained_tokenizer(written(tmp_path, make(not prefix), class_name, add_prefix_space=prefix))
    assert found.encode("a b") == text_of(make(prefix), "a b") != text_of(make(not prefix), "a b")


def test_keeps_a_space_added_by_the_normalizer(tmp_path):
    folder = written(tmp_path, llama(True, prepend=True), "LlamaTokenizer", add_prefix_space=False)
    with pytest.warns(UserWarning, match=CONTRADICTION):
        found = load_pretrained_tokenizer(folder)
    assert found.encode("a b") == text_of(llama(False), "a b") != text_of(llama(True, prepend=True), "a b")


@pytest.mark.parametrize("class_name", ["PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizer"])
def test_other_tokenizer_classes_use_the_file_unchanged(tmp_path, class_name):
    folder = written(
        tmp_path, bert(), class_name, unk_token="[UNK]", bos_token=None, eos_token=None, do_lower_case=False
    )
    with pytest.warns(UserWarning, match=rf"{CONTRADICTION}: do_lower_case is false\. tokenizer.json is used"):
        found = load_pretrained_tokenizer(folder)
    assert found.encode(TEXT) == text_of(bert(), TEXT)


@pytest.mark.parametrize(
    ("library", "class_name", "settings"),
    [
        (bert(), "BertTokenizer", {"do_lower_case": True, "strip_accents": None, "tokenize_chinese_chars": True}),
        (gpt(True), "GPT2Tokenizer", {"add_prefix_space": True}),
        (llama(True), "LlamaTokenizer", {"add_prefix_space": True}),
        (llama(True, prepend=True), "LlamaTokenizer", {"add_prefix_space": True, "legacy": False}),
        (llama(False), "LlamaTokenizer", {"add_prefix_space": None}),
    ],
)
def test_consistent_files_change_nothing(tmp_path, library, class_name, settings):
    found = load_pretrained_tokenizer(written(tmp_path, library, class_name, **settings))  # warnings are errors
    assert found.encode("a b café") == text_of(library, "a b café")
    assert "settings" not in found.state()


def test_an_applied_setting_changes_the_fingerprint(tmp_path):
    """A run can't be resumed with other tokens than those of its training."""
    same = load_pretrained_tokenizer(written(tmp_path / "a", bert(), "BertTokenizer", do_lower_case=True))
    with pytest.warns(UserWarning, match=CONTRADICTION):
        other = load_pretrained_tokenizer(written(tmp_path / "b", bert(), "BertTokenizer", do_lower_case=False))
    assert tokenizer_fingerprint(same) != tokenizer_fingerprint(other)


def test_reads_the_truncation_side(tmp_path):
    library = bert()
    assert load_pretrained_tokenizer(written(tmp_path / "a", library, "BertTokenizer")).truncation_side == "right"
    library.enable_truncation(4, direction="left")
    assert load_pretrained_tokenizer(written(tmp_path / "b", library, "BertTokenizer")).truncation_side == "left"
    folder = written(tmp_path / "c", library, "BertTokenizer", truncation_side="right")
    assert load_pretrained_tokenizer(folder).truncation_side == "right"
    folder = written(tmp_path / "d", library, "BertTokenizer", truncation_side="middle")
    with pytest.raises(ValueError, match=r"truncation_side .* must be 'left' or 'right', got 'middle'"):
        load_pretrained_tokenizer(folder)


BOTH = (False, True)
CASES = [
    (
        "BertTokenizer",
        bert(lowercase=file),
        {"do_lower_case": lower, "strip_accents": strip, "tokenize_chinese_chars": c},
    )
    for file, lower, strip, c in itertools.product(BOTH, BOTH, (None, *BOTH), BOTH)
]
CASES += [
    (name, make(file), {"add_prefix_space": value})
    for (name, make), file, value in itertools.product(
        {"GPT2Tokenizer": gpt, "LlamaTokenizer": llama}.items(), BOTH, BOTH
    )
]
CASES += [("LlamaTokenizer", llama(True, prepend=True), {"add_prefix_space": False})]
CASES += [("PreTrainedTokenizerFast", bert(lowercase=value), {"do_lower_case": not value}) for value in BOTH]
CASES += [("PreTrainedTokenizerFast", gpt(value), {"add_prefix_space": not value}) for value in BOTH]


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore:tokenizer_config.json contradicts")
@pytest.mark.parametrize(("class_name", "library", "settings"), CASES)
def test_ids_equal_transformers(tmp_path, class_name, library, settings):
    transformers = pytest.importorskip("transformers", minversion="5")
    folder = written(tmp_path, library, class_name, **settings)
    if class_name == "PreTrainedTokenizerFast" and library.token_to_id("[CLS]") is None:
        names = NAMES["GPT2"] | {"tokenizer_class": class_name}
        save(tmp_path, library, tokenizer_config=names | settings)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), load_pretrained_tokenizer(folder)
    for text in ("a b", "Hello Café 你好 HELLO cafe", " a"):
        assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"], json.dumps(settings)
