"""The families there are: one line each."""

from __future__ import annotations

from transformer.zoo.bart import BART
from transformer.zoo.bert import BERT
from transformer.zoo.distilbert import DISTILBERT
from transformer.zoo.family import Family
from transformer.zoo.gemma2 import GEMMA2
from transformer.zoo.gemma3 import GEMMA3
from transformer.zoo.gpt2 import GPT2
from transformer.zoo.llama import LLAMA
from transformer.zoo.marian import MARIAN
from transformer.zoo.mistral import MISTRAL
from transformer.zoo.mixtral import MIXTRAL
from transformer.zoo.modernbert import MODERNBERT
from transformer.zoo.qwen2 import QWEN2
from transformer.zoo.qwen3 import QWEN3
from transformer.zoo.qwen3_moe import QWEN3_MOE
from transformer.zoo.roberta import ROBERTA
from transformer.zoo.t5 import T5
from transformer.zoo.umt5 import UMT5
from transformer.zoo.vit import VIT

ENTRIES: dict[str, Family] = {
    family.name: family
    for family in (
        GPT2,
        LLAMA,
        BERT,
        T5,
        VIT,
        MISTRAL,
        ROBERTA,
        MODERNBERT,
        BART,
        MARIAN,
        DISTILBERT,
        QWEN2,
        QWEN3,
        GEMMA2,
        GEMMA3,
        MIXTRAL,
        QWEN3_MOE,
        UMT5,
    )
}
"""families by name; a model that several can hold is saved as the first of them"""
