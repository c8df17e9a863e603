"""BERT: encoder, post-norm, learned positions, token types, normalized embeddings."""

from __future__ import annotations

from transformer.config._parts import HeadTransform
from transformer.config._positions import LearnedOptions
from transformer.nn.models._encoders import Classifier, Embedder, MaskedLM
from transformer.zoo._family import LAYER_NORM, Family, Head, variants
from transformer.zoo._fields import ACTIVATIONS, LARGE, Codec, Field, Fixed, Labels, Unread, sizes, training_fields
from transformer.zoo.weights._rules import MATRIX, SAME, Relation, Rule, WithUnread, linear, modules, norm

REPEATED = WithUnread(lambda parameter: parameter)
"""One parameter stored as two equal tensors: the first is loaded, both are saved."""

BERT_CONSTANTS = LAYER_NORM | {"norm.position": "post", "position": LearnedOptions(), "embedding.norm": True}
"""Constants of BERT and the families derived from it."""

TANH_POOLER = HeadTransform(activation="tanh", norm=False)
"""Transform of the hidden state of the first token (the "pooler"), on which a classifier's output layer acts."""

OLD_NORMS = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
"""Tensor names of norms in files converted from the original TensorFlow release."""


def encoder_rules(prefix: str, positions: Relation = SAME) -> list[Rule]:
    """Return the rules for the encoder of BERT and of families with the same names; `positions` relates the tables."""
    embeddings, layer, ours = f"{prefix}embeddings.", f"{prefix}encoder.layer.{{layer}}.", "encoder/{layer}/"
    return [
        Rule(f"{embeddings}word_embeddings.weight", "embedding/embedding"),
        Rule(f"{embeddings}position_embeddings.weight", "encoder/position_table", positions),
        Rule(f"{embeddings}token_type_embeddings.weight", "token_type_embedding/embedding"),
        *norm(f"{embeddings}LayerNorm", "encoder/embedding_norm"),
        *modules(layer, ours, _LAYER),
    ]


_LAYER = {
    **{f"self_attention/{name}": f"attention.self.{name}" for name in ("query", "key", "value")},
    "self_attention/out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "feed_forward/up": "intermediate.dense",
    "feed_forward/down": "output.dense",
    "feed_forward_norm": "output.LayerNorm",
}


def masked_lm_rules(head: str, transform: str, layer_norm: str) -> tuple[Rule, ...]:
    """Return the rules for a masked-language-model head. The output map is tied (except for its bias) or untied."""
    return (
        *linear(f"{head}{transform}", "head_transform/dense"),
        *norm(f"{head}{layer_norm}", "head_transform/norm"),
        Rule(f"{head}bias", "output_bias"),
        Rule(f"{head}decoder.weight", "output/kernel", MATRIX),
        Rule((f"{head}decoder.bias", f"{head}bias"), "output/bias", REPEATED),
    )


def first_token_head(
    dense: str, output: str, *, transform: HeadTransform = TANH_POOLER, ignored: tuple[str, ...] = ()
) -> Head:
    """Return a classifier that applies the maps `dense` and `output` to the hidden state of the first token."""
    return Head(
        model=Classifier,
        constants={"output.pooling": "first", "output.transform": transform},
        fields=(Labels(),),
        rules=(*linear(dense, "head_transform/dense"), *linear(output, "output")),
        ignored=ignored,
    )


def base_head(prefix: str, ignored: tuple[str, ...]) -> Head:
    """Return the model without a head. Files of models built with `add_pooling_layer=False` lack its pooler."""
    pooler = f"{prefix}pooler.dense"
    return Head(
        model=Embedder,
        base=True,
        rules=tuple(linear(pooler, "pooler/dense")),
        optional={f"{pooler}.weight": {"output.pooler": TANH_POOLER}},
        ignored=ignored,
    )


LAYER_FIELDS = (
    *sizes(d_model=("hidden_size", 768), num_layers=("num_hidden_layers", 12)),
    *sizes(num_heads=("num_attention_heads", 12)),
    Field("intermediate_size", "feed_forward.d_ff", 3072),
    Field("hidden_act", "feed_forward.activation", "gelu", ACTIVATIONS),
    Field("layer_norm_eps", "norm.epsilon", 1e-12),
)
"""Fields for the layers of BERT and ViT."""


def encoder_fields() -> tuple[Codec, ...]:
    """Return the fields that BERT and its derivatives share, except those for positions."""
    return (
        Field("vocab_size", "vocab_size"),
        *LAYER_FIELDS,
        Field("type_vocab_size", "embedding.token_types", 2),
        Field("tie_word_embeddings", "embedding.tie", True),
        *training_fields("hidden_dropout_prob", "attention_probs_dropout_prob", rates=0.1),
        Fixed("position_embedding_type", ("absolute",)),
        Unread(
            ("output_past", "directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers")
            + ("pooler_size_per_head", "pooler_type")
        ),
    )


_MASKED_TRANSFORMS = {theirs: HeadTransform(activation=ours, norm=True) for theirs, ours in ACTIVATIONS.items()}


def masked_transform(name: str) -> Field:
    """Return the field for the activation of a masked-language-model head, which config.json names like the layers'."""
    return Field(name, "output.transform", "gelu", _MASKED_TRANSFORMS)


_MASKED_LM = (
    r"cls\.predictions\.(bias|decoder\.(weight|bias)|transform\.(dense|LayerNorm)\.(weight|bias|gamma|beta))",
)

_VARIANTS = {
    "bert-base-uncased": (109_514_298, 30_522),
    "bert-base-cased": (108_340_804, 28_996),
    "bert-large-uncased": (335_174_458, 30_522, LARGE),
    "bert-large-cased": (333_610_308, 28_996, LARGE),
    "bert-base-multilingual-cased": (177_974_523, 119_547),
}

BERT = Family(
    name="bert",
    title="BERT",
    citation="Devlin et al. 2018, arXiv 1810.04805",
    heads={
        "BertForMaskedLM": Head(
            model=MaskedLM,
            constants={"output.bias": True},
            fields=(masked_transform("hidden_act"),),
            rules=masked_lm_rules("cls.predictions.", "transform.dense", "transform.LayerNorm"),
        ),
        "BertForSequenceClassification": first_token_head("bert.pooler.dense", "classifier", ignored=_MASKED_LM),
        "BertModel": base_head("bert.", (*_MASKED_LM, r"classifier\.(weight|bias)")),
    },
    constants=BERT_CONSTANTS,
    fields=(*encoder_fields(), Field("max_position_embeddings", "position.max_length", 512)),
    rules=encoder_rules("bert."),
    prefix="bert.",
    ignored=(
        r"(bert\.)?embeddings\.position_ids",
        r"(bert\.)?pooler\.dense\.(weight|bias)",
        r"cls\.seq_relationship\.(weight|bias)",
    ),
    copies={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    old_names=OLD_NORMS,
    variants=variants("google-bert/", _VARIANTS, ("vocab_size",)),
)
