"""A regular expression of the tokenizer that gives up on a conversation."""

import json

import pytest
from chat_parts import files

from transformer.chat._prompts import ChatPrompts
from transformer.data.tokenizers._pretrained import PretrainedTokenizer


@pytest.mark.parametrize("size", [30, 3000])
def test_a_panic_is_one_error_and_prints_nothing(capfd, size):
    made = dict(files("smollm"))
    content = json.loads(made["tokenizer.json"])
    split = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, content["pre_tokenizer"]]}
    made["tokenizer.json"] = json.dumps(content).encode()
    chat = ChatPrompts(PretrainedTokenizer(made))
    with pytest.raises(ValueError, match="the tokenizers library failed on this conversation"):
        chat.encode([{"role": "user", "content": "x" * size}])
    assert chat.encode([{"role": "user", "content": "hello"}]).ids
    assert capfd.readouterr() == ("", "")
