"""DistilBERT: BERT with half as many layers, without token types, and with a ReLU in its classifier."""

from __future__ import annotations

from transformer.config._model import TransformerConfig
from transformer.config._parts import HeadTransform
from transformer.nn.models._encoders import Embedder, MaskedLM
from transformer.zoo._family import Family, Head, variants
from transformer.zoo._fields import ACTIVATIONS, Field, Unread, sizes, training_fields
from transformer.zoo.families._bert import BERT_CONSTANTS, OLD_NORMS, first_token_head, masked_transform
from transformer.zoo.weights._rules import Rule, linear, modules, norm


def _rules(config: TransformerConfig) -> list[Rule]:
    embeddings = "distilbert.embeddings."
    return [
        Rule(f"{embeddings}word_embeddings.weight", "embedding/embedding"),
        Rule(f"{embeddings}position_embeddings.weight", "encoder/position_table"),
        *norm(f"{embeddings}LayerNorm", "encoder/embedding_norm"),
        *modules("distilbert.transformer.layer.{layer}.", "encoder/{layer}/", _LAYER),
    ]


_LAYER = {
    **{f"self_attention/{name}": f"attention.{name[0]}_lin" for name in ("query", "key", "value")},
    "self_attention/out": "attention.out_lin",
    "attention_norm": "sa_layer_norm",
    "feed_forward/up": "ffn.lin1",
    "feed_forward/down": "ffn.lin2",
    "feed_forward_norm": "output_layer_norm",
}

_MASKED_LM = (r"vocab_(transform|layer_norm|projector)\.(weight|bias)",)

_VARIANTS = {
    "distilbert-base-uncased": (66_985_530, 30_522),
    "distilbert-base-cased": (65_812_036, 28_996),
    "distilbert-base-multilingual-cased": (135_445_755, 119_547),
}
_CLASSIFIER = {"distilbert-base-uncased-finetuned-sst-2-english": (66_955_010, 30_522)}

DISTILBERT = Family(
    name="distilbert",
    title="DistilBERT",
    citation="Sanh et al. 2019, arXiv 1910.01108",
    heads={
        "DistilBertForMaskedLM": Head(
            model=MaskedLM,
            constants={"output.bias": True},
            fields=(masked_transform("activation"),),
            rules=(
                *linear("vocab_transform", "head_transform/dense"),
                *norm("vocab_layer_norm", "head_transform/norm"),
                *linear("vocab_projector", "output"),
                Rule("vocab_projector.bias", "output_bias"),
            ),
        ),
        "DistilBertForSequenceClassification": first_token_head(
            "pre_classifier", "classifier", transform=HeadTransform(activation="relu", norm=False), ignored=_MASKED_LM
        ),
        "DistilBertModel": Head(model=Embedder, base=True, ignored=(*_MASKED_LM, r"(pre_)?classifier\.(weight|bias)")),
    },
    constants=BERT_CONSTANTS | {"norm.epsilon": 1e-12},
    fields=(
        Field("vocab_size", "vocab_size", 30_522),
        Field("max_position_embeddings", "position.max_length", 512),
        *sizes(d_model=("dim", 768), num_layers=("n_layers", 6), num_heads=("n_heads", 12)),
        Field("hidden_dim", "feed_forward.d_ff", 3072),
        Field("activation", "feed_forward.activation", "gelu", ACTIVATIONS),
        Field("tie_word_embeddings", "embedding.tie", True),
        *training_fields("dropout", "attention_dropout", rates=0.1),
        # `sinusoidal_pos_embds` only describes the initial position table; the files always contain the table.
        Unread(("sinusoidal_pos_embds", "qa_dropout", "seq_classif_dropout", "tie_weights_", "output_past")),
    ),
    rules=_rules,
    prefix="distilbert.",
    ignored=(r"(distilbert\.)?embeddings\.position_ids",),
    copies={"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
    old_names=OLD_NORMS,
    variants={
        **variants("distilbert/", _VARIANTS, ("vocab_size",)),
        **variants("distilbert/", _CLASSIFIER, ("vocab_size",), "DistilBertForSequenceClassification"),
    },
)
