"""Texts that must match a JSON schema or a regular expression."""

import json
import random
import re
import sys

import jax
import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers

from transformer.config import ParameterOptions, TransformerConfig
from transformer.data.tokenizers._bpe import BPETokenizer
from transformer.data.tokenizers._export import as_pretrained
from transformer.data.tokenizers._pretrained import PretrainedTokenizer
from transformer.data.tokenizers._vocabularies import ByteTokenizer, CharTokenizer
from transformer.generate import Sampling, TokenStream
from transformer.inference import GrammarError, Grammars
from transformer.nn.models import CausalLM

pytest.importorskip("llguidance")

VOCAB = 301  # more rows than tokens, and no multiple of 32
GREEDY = Sampling(temperature=0.0)
TOKENIZERS = {
    "byte": ByteTokenizer(),
    "bpe": BPETokenizer.train(['{"name": "yes", "of": [true, false, null, 1, 20], "é": "née"}'] * 3, 299),
}
EXAMPLE = {"type": "object", "properties": {"a": {"enum": ["x", "é"]}}, "required": ["a"]}


@pytest.fixture(scope="module")
def stream():
    config = TransformerConfig(
        vocab_size=VOCAB, d_model=32, num_layers=2, num_heads=2, parameters=ParameterOptions(initializer_range=0.3)
    )
    model = CausalLM(config)
    return TokenStream(model, jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), int))["params"])


@pytest.fixture(scope="module", params=TOKENIZERS)
def grammars(request):
    return Grammars(TOKENIZERS[request.param], VOCAB), TOKENIZERS[request.param]


@pytest.fixture(scope="module")
def of_bytes():
    return Grammars(TOKENIZERS["byte"], VOCAB)


def answer(stream, constraint, seed=0, limit=400, sampling=None):
    given = {"max_new_tokens": limit, "sampling": sampling or Sampling(), "seed": seed, "constraint": constraint}
    pieces = list(stream.generate([5, 6], **given))
    return [token for piece in pieces for token in piece.tokens], pieces[-1].ended


def random_schema(rng, depth=2):
    """A schema of which every match is short, so that a random model reaches the end of it."""
    kinds = ["string", "integer", "boolean", "null", "enum", "pattern", *["object", "array", "anyOf"] * (depth > 0)]
    match rng.choice(kinds):
        case "string":
            return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 6)}
        case "integer":
            low = rng.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 200)}
        case "enum":
            return {"enum": rng.sample(["red", "grün", 'a"b', 1, 2.5, True, None, [1], {"k": "v"}], rng.randint(1, 4))}
        case "pattern":
            return {"type": "string", "pattern": rng.choice(["^[a-f]{2,5}$", r"^\d{4}-\d{2}$", "^(on|off)$"])}
        case "array":
            items = random_schema(rng, depth - 1)
            return {"type": "array", "items": items, "minItems": rng.randint(0, 1), "maxItems": rng.randint(1, 3)}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}
        case "object":
            names = rng.sample(["name", "age", "größe", "a b", "x"], rng.randint(1, 3))
            properties = {name: random_schema(rng, depth - 1) for name in names}
            required = rng.sample(names, rng.randint(0, len(names)))
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case kind:
            return {"type": kind}


@pytest.mark.parametrize("count", [8, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.programs(7, reason="the package computes single operations outside of jit")
def test_every_answer_matches_its_schema(stream, grammars, count):
    made, tokenizer = grammars
    for number in range(count):
        schema = random_schema(random.Random(number))
        constraint = made.json_schema(schema)
        tokens, ended = answer(stream, constraint, seed=number)
        assert ended
        assert constraint.complete
        jsonschema.validate(json.loads(tokenizer.decode(tokens)), schema)  # an implementation of its own


@pytest.mark.programs(7, reason="the package computes single operations outside of jit")
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=2.0, top_k=5, repetition_penalty=1.3)])
@pytest.mark.parametrize(
    "pattern", ["(?i)yes|no", r"[a-z]{3,8}@[a-z]{2,5}\.(de|com)", "<eos>", "a<pad>b<eos>", "é{2}ü?"]
)
def test_every_answer_matches_its_regular_expression(stream, grammars, pattern, sampling):
    """This includes `<eos>`: the spelling of a special token is a text of five characters."""
    made, tokenizer = grammars
    tokens, ended = answer(stream, made.regex(pattern), sampling=sampling)
    assert ended
    assert re.fullmatch(pattern, tokenizer.decode(tokens))
    assert not tokenizer.special_ids & set(tokens)


def test_a_schema_cannot_generate_special_tokens(stream, grammars):
    made, tokenizer = grammars
    tokens, _ = answer(stream, made.json_schema({"const": "<bos><eos>"}), sampling=GREEDY)
    assert tokenizer.decode(tokens) == '"<bos><eos>"'


class Everything:
    """A constraint that allows all tokens."""

    vocab_size, end_ids = VOCAB, (7,)

    def __init__(self):
        self.accepted = []

    def allowed(self):
        return np.full(-(-VOCAB // 32), 2**32 - 1, np.uint32)

    def accept(self, token):
        self.accepted.append(token)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(top_p=0.9)])
def test_a_constraint_that_allows_everything_changes_nothing(stream, sampling):
    constraint = Everything()
    tokens, ended = answer(stream, constraint, seed=3, limit=40, sampling=sampling)
    plain = list(stream.generate([5, 6], max_new_tokens=40, sampling=sampling, seed=3, eos_id=7))
    assert tokens == [token for piece in plain for token in piece.tokens] == constraint.accepted
    assert ended == plain[-1].ended
    assert len(tokens) > 1


def test_log_probabilities_are_unconstrained_model_values(stream, of_bytes):
    """Not those among the allowed tokens, of which there is one at each step."""
    pieces = list(stream.generate([5, 6], max_new_tokens=9, sampling=GREEDY, constraint=of_bytes.regex("abc")))
    found = [piece.log_probabilities for piece in pieces if piece.tokens]
    assert len(found) == 3
    assert all(each[0] < -0.1 for each in found)


def test_the_limit_leaves_a_text_incomplete(stream, of_bytes):
    constraint = of_bytes.json_schema(EXAMPLE)
    tokens, ended = answer(stream, constraint, limit=4)
    assert TOKENIZERS["byte"].decode(tokens) == '{"a"'
    assert not ended
    assert not constraint.complete


def test_constraints_do_not_share_their_state(stream, of_bytes):
    first = of_bytes.regex("ab")
    first.accept(TOKENIZERS["byte"].encode("a")[0])
    assert TOKENIZERS["byte"].decode(answer(stream, of_bytes.regex("ab"))[0]) == "ab"


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "strin"}, "the JSON schema can't be used: Invalid type: strin."),
        ({"type": "object", "not": {}}, 'Unimplemented keys: ["not"].'),
        ({"$ref": "http://example.com/x"}, "Default retriever does not fetch resources."),
        ({"type": "integer", "minimum": 3, "maximum": 1}, "minimum (3) is greater than maximum (1)."),
        ({"type": "string", "pattern": "("}, "unclosed group."),
        ([], "a JSON schema must be an object, true or false, got list."),
        ({"enum": [float("nan")]}, "the JSON schema can't be written as JSON: Out of range float values"),
    ],
)
def test_rejects_invalid_schemas(of_bytes, schema, message):
    with pytest.raises(GrammarError, match=re.escape(message)):
        of_bytes.json_schema(schema)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("a(", "the regular expression can't be used: unclosed group."),
        ("(?=x)y", "look-around, including look-ahead and look-behind, is not supported."),
        (3, "a regular expression must be a text, got int."),
    ],
)
def test_rejects_invalid_expressions(of_bytes, pattern, message):
    with pytest.raises(GrammarError, match=re.escape(message)):
        of_bytes.regex(pattern)


def test_rejects_a_token_that_is_not_allowed(of_bytes):
    constraint = of_bytes.regex("ab")
    with pytest.raises(GrammarError, match=r"the text can't be continued: .*doesn't satisfy the grammar"):
        constraint.accept(TOKENIZERS["byte"].encode("b")[0])


def test_supports_a_tokenizer_with_byte_fallback(stream):
    """As Llama 2 has: spaces are a mark in the vocabulary, and other characters are bytes like <0xC3>."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdef", *'{}":']
    model = models.BPE({token: i for i, token in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True)
    library = tokenizers.Tokenizer(model)
    library.normalizer = normalizers.Replace(" ", "▁")
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    library.add_special_tokens(tokens[:3])
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    files = {"tokenizer.json": library.to_str(), "tokenizer_config.json": json.dumps(settings)}
    tokenizer = PretrainedTokenizer({name: text.encode() for name, text in files.items()}, VOCAB)
    for constant in ("a é", "</s>"):
        tokens, ended = answer(stream, Grammars(tokenizer, VOCAB).json_schema({"const": constant}))
        assert ended
        assert json.loads(tokenizer.decode(tokens)) == constant


def test_rejects_tokenizers_without_bytes():
    with pytest.raises(ValueError, match=r"llguidance can't read this tokenizer .* Constraints need a byte-level"):
        Grammars(CharTokenizer(["a", "b"]))
    with pytest.raises(ValueError, match=r"tokenizer.*259.*200"):
        Grammars(TOKENIZERS["byte"], 200)
    without_end = as_pretrained(TOKENIZERS["byte"])
    without_end.eos_ids = ()
    with pytest.raises(ValueError, match="needs a tokenizer with an end token"):
        Grammars(without_end)


def test_reports_a_missing_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ModuleNotFoundError, match=r"'transformer-zoo\[serve\]'"):
        Grammars(TOKENIZERS["byte"])


def test_rejects_constraints_that_do_not_fit_the_call(stream, of_bytes):
    with pytest.raises(ValueError, match=r"eos_id.*got \[2\]"):
        stream.generate([5], max_new_tokens=2, eos_id=2, constraint=of_bytes.regex("a"))
    with pytest.raises(ValueError, match="for 259 token ids, but the model has 301"):
        stream.generate([5], max_new_tokens=2, constraint=Grammars(TOKENIZERS["byte"]).regex("a"))
    suppress = Sampling(suppress=tuple(TOKENIZERS["byte"].encode("a")))
    with pytest.raises(ValueError, match="the constraint allows no token here that the sampling does not suppress"):
        answer(stream, of_bytes.regex("a"), sampling=suppress)
