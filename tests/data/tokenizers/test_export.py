"""Export of tokenizers for other programs: the same ids and the same decoded text."""

import pytest
import tokenizers

from transformer.data.tokenizers._bpe import BPETokenizer
from transformer.data.tokenizers._export import as_pretrained
from transformer.data.tokenizers._pretrained import load_pretrained_tokenizer
from transformer.data.tokenizers._vocabularies import ByteTokenizer, CharTokenizer, WordTokenizer

TEXT = "To be, or not to be:\nthat is the  question — ¿señor?\t42"
OURS = {
    "char": CharTokenizer(sorted(set(TEXT))),
    "byte": ByteTokenizer(),
    "word": WordTokenizer(sorted(set(TEXT.split()))),
    "word with unknown": WordTokenizer(["be", "to"], unknown=True),
    "bpe": BPETokenizer.train([TEXT] * 3, 290),
}


@pytest.mark.parametrize("name", OURS)
def test_an_exported_tokenizer_gives_the_same_ids_and_text(name, tmp_path):
    ours = OURS[name]
    as_pretrained(ours).save(tmp_path)
    theirs = load_pretrained_tokenizer(tmp_path, ours.vocab_size)
    plain = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))  # as other programs load it
    ids = ours.encode(TEXT)
    assert theirs.encode(TEXT) == plain.encode(TEXT, add_special_tokens=False).ids == ids
    assert theirs.decode(ids) == ours.decode(ids)
    assert (theirs.pad_id, theirs.bos_id, theirs.eos_id, theirs.unk_id) == (0, 1, 2, ours.unk_id)
    assert theirs.encode_source(TEXT) == ours.encode_source(TEXT)


def test_rejects_a_normalization_without_equivalent():
    with pytest.raises(ValueError, match="'number_words'"):
        as_pretrained(ByteTokenizer(normalization="number_words"))


def test_rejects_a_word_named_like_a_special_token():
    """In the exported file, the word and the special token would be the same, so that the id of the word would
    change.
    """
    with pytest.raises(ValueError, match=r"vocabulary.*<unk>"):
        as_pretrained(WordTokenizer(["be", "<unk>"], unknown=True))
