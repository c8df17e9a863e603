"""The registry of all supported model families. Each family is one file: variants and conversion rules."""

from __future__ import annotations

from transformer.zoo._family import Family
from transformer.zoo.families._bart import BART
from transformer.zoo.families._bert import BERT
from transformer.zoo.families._blenderbot import BLENDERBOT
from transformer.zoo.families._bloom import BLOOM
from transformer.zoo.families._clip import CLIP
from transformer.zoo.families._deepseek_v3 import DEEPSEEK_V3
from transformer.zoo.families._deit import DEIT
from transformer.zoo.families._dinov2 import DINOV2, DINOV2_WITH_REGISTERS
from transformer.zoo.families._dinov3 import DINOV3
from transformer.zoo.families._distilbert import DISTILBERT
from transformer.zoo.families._gemma import GEMMA
from transformer.zoo.families._gemma2 import GEMMA2
from transformer.zoo.families._gemma3 import GEMMA3
from transformer.zoo.families._gemma3_images import GEMMA3_IMAGES
from transformer.zoo.families._gemma4 import GEMMA4
from transformer.zoo.families._glm import GLM, GLM4
from transformer.zoo.families._gpt2 import GPT2
from transformer.zoo.families._gpt_neox import GPT_NEOX
from transformer.zoo.families._gpt_oss import GPT_OSS
from transformer.zoo.families._hubert import HUBERT
from transformer.zoo.families._llama import LLAMA
from transformer.zoo.families._llama4 import LLAMA4
from transformer.zoo.families._llava import LLAVA
from transformer.zoo.families._marian import MARIAN
from transformer.zoo.families._mistral import MISTRAL
from transformer.zoo.families._mixtral import MIXTRAL
from transformer.zoo.families._modernbert import MODERNBERT
from transformer.zoo.families._olmo2 import OLMO2
from transformer.zoo.families._opt import OPT
from transformer.zoo.families._paligemma import PALIGEMMA
from transformer.zoo.families._patchtst import PATCHTST
from transformer.zoo.families._phi3 import PHI3
from transformer.zoo.families._qwen2 import QWEN2
from transformer.zoo.families._qwen3 import QWEN3
from transformer.zoo.families._qwen3_moe import QWEN3_MOE
from transformer.zoo.families._qwen3_next import QWEN3_NEXT
from transformer.zoo.families._qwen_vl import QWEN2_5_VL, QWEN2_VL
from transformer.zoo.families._roberta import ROBERTA
from transformer.zoo.families._siglip import SIGLIP, SIGLIP2
from transformer.zoo.families._smollm3 import SMOLLM3
from transformer.zoo.families._starcoder2 import STARCODER2
from transformer.zoo.families._t5 import T5
from transformer.zoo.families._umt5 import UMT5
from transformer.zoo.families._vit import VIT
from transformer.zoo.families._wav2vec2 import WAV2VEC2
from transformer.zoo.families._whisper import WHISPER

__all__ = ["ENTRIES"]

ENTRIES: dict[str, Family] = {
    family.name: family
    for family in (
        *(GPT2, LLAMA, BERT, T5, VIT, MISTRAL, ROBERTA, MODERNBERT, BART, MARIAN, BLENDERBOT, BLOOM, DISTILBERT),
        *(OPT, QWEN2, QWEN3, GEMMA2, GEMMA3, GEMMA4, MIXTRAL, QWEN3_MOE, QWEN3_NEXT, LLAMA4, GPT_NEOX, OLMO2, PHI3),
        *(GPT_OSS, DEEPSEEK_V3, UMT5, WHISPER, PATCHTST, STARCODER2, DEIT, DINOV2, DINOV2_WITH_REGISTERS, DINOV3),
        *(CLIP, SIGLIP, SIGLIP2, WAV2VEC2, HUBERT, SMOLLM3, GLM, GLM4, GEMMA, GEMMA3_IMAGES, PALIGEMMA, LLAVA),
        *(QWEN2_VL, QWEN2_5_VL),
    )
}
"""Families by name. A model that several families can represent is saved as the first of them."""
