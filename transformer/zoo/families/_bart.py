"""BART: encoder-decoder, post-norm, learned positions, normalized embeddings."""

from __future__ import annotations

from dataclasses import dataclass

from transformer.config._model import TransformerConfig
from transformer.config._positions import LearnedOptions
from transformer.nn.models._seq2seq import Seq2Seq
from transformer.zoo._family import Family, Head, Variant
from transformer.zoo._fields import ACTIVATIONS, Codec, Field, FieldError, Fields, Fixed, Unread
from transformer.zoo.weights._rules import Rule, modules, norm, row, without_first

UNUSED_ROWS = 2
"""Unused rows at the start of a position table: position 0 is row 2."""

ATTENTION = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "out_proj"}
"""Maps of attention, and their tensor names in BART and many encoders."""


def stack_rules() -> list[Rule]:
    """Return the rules for encoder and decoder layers of BART and of families with the same tensor names."""
    rules = []
    for stack in ("encoder", "decoder"):
        layer, ours = f"model.{stack}.layers.{{layer}}.", f"{stack}/{{layer}}/"
        rules += [
            *attention_rules(f"{layer}self_attn", f"{ours}self_attention"),
            *norm(f"{layer}self_attn_layer_norm", f"{ours}attention_norm"),
            *attention_rules(f"{layer}encoder_attn", f"{ours}cross_attention"),
            *norm(f"{layer}encoder_attn_layer_norm", f"{ours}cross_attention_norm"),
            *modules(layer, ours, FEED_FORWARD),
        ]
    return rules


def attention_rules(tensor: str, parameter: str) -> list[Rule]:
    """Return the rules for attention whose tensors are named q_proj, k_proj, v_proj and out_proj."""
    return modules(f"{tensor}.", f"{parameter}/", ATTENTION)


FEED_FORWARD = {"feed_forward/up": "fc1", "feed_forward/down": "fc2", "feed_forward_norm": "final_layer_norm"}
"""Modules of a feed-forward sublayer, and their tensor names in BART and OPT."""

_STACKS, _TABLE = ("encoder", "decoder"), without_first(UNUSED_ROWS)
_RULES = [
    Rule("model.shared.weight", "embedding/embedding"),
    *(Rule(f"model.{stack}.embed_positions.weight", f"{stack}/position_table", _TABLE) for stack in _STACKS),
    *(rule for stack in _STACKS for rule in norm(f"model.{stack}.layernorm_embedding", f"{stack}/embedding_norm")),
    *stack_rules(),
]

LOGITS_BIAS = Rule("final_logits_bias", "output_bias", row(1))
"""Rule for the bias of the logits."""


@dataclass(frozen=True)
class BothStacks(Codec):
    """A size that config.json specifies for each stack: `encoder_<name>` and `decoder_<name>`."""

    name: str
    attribute: str

    @property
    def names(self) -> tuple[str, ...]:
        return (f"encoder_{self.name}", f"decoder_{self.name}")

    def read(self, values: Fields, changes: Fields) -> Fields:
        encoder, decoder = (values.get(name) for name in self.names)
        for name, size in zip(self.names, (encoder, decoder), strict=True):
            if type(size) is not int:
                raise FieldError(f"{name} must be an integer, got {size!r:.80}")
        name = self.attribute.rpartition(".")[2]
        return {self.attribute: decoder, f"stack.encoder_{name}": None if encoder == decoder else encoder}

    def write(self, config: TransformerConfig) -> Fields:
        sizes = [config.source_encoder, config]
        sizes = [one.feed_forward_width if self.attribute == "feed_forward.d_ff" else one.num_heads for one in sizes]
        return dict(zip(self.names, sizes, strict=True))


class StackLayers(Codec):
    """`encoder_layers` and `decoder_layers`; `num_hidden_layers` must equal `encoder_layers`."""

    names = ("encoder_layers", "decoder_layers", "num_hidden_layers")

    def read(self, values: Fields, changes: Fields) -> Fields:
        encoder, decoder = values["encoder_layers"], values["decoder_layers"]
        if values.get("num_hidden_layers", encoder) != encoder:
            raise FieldError(f"num_hidden_layers is {values['num_hidden_layers']}, but encoder_layers is {encoder}")
        return {"num_layers": encoder, "stack.num_encoder_layers": encoder, "stack.num_decoder_layers": decoder}

    def write(self, config: TransformerConfig) -> Fields:
        return {"encoder_layers": config.encoder_layers, "decoder_layers": config.decoder_layers}


@dataclass(frozen=True)
class Former(Fixed):
    """An obsolete field of older files. It must have one of the given values and is not written."""

    def write(self, config: TransformerConfig) -> Fields:
        return {}


def bart_fields(*, pre_norm: bool = False) -> tuple[Codec, ...]:
    """Return the fields that BART, Marian and Blenderbot share. Only Blenderbot is pre-norm."""
    return (
        Field("d_model", "d_model"),
        StackLayers(),
        BothStacks("ffn_dim", "feed_forward.d_ff"),
        BothStacks("attention_heads", "num_heads"),
        Field("activation_function", "feed_forward.activation", "gelu", ACTIVATIONS),
        Field("scale_embedding", "embedding.scale", False),
        # Not supported, because implementations disagree on untied embeddings: some share one table between the
        # stacks, others have one table per stack.
        Fixed("tie_word_embeddings", (True,)),
        Field("dropout", "dropout_rate", 0.1),
        Field("attention_dropout", "attention.dropout_rate", 0.0),
        Field("init_std", "parameters.initializer_range", 0.02),
        Fixed("is_encoder_decoder", (True,)),
        Former("normalize_before", (pre_norm,)),
        Former("add_final_layer_norm", (pre_norm,)),
        Former("add_bias_logits", (False,)),
        Unread(
            ("activation_dropout", "classif_dropout", "encoder_layerdrop", "decoder_layerdrop", "output_past")
            + ("force_bos_token_to_be_generated", "initializer_range", "forced_eos_token_id"),
            # Written as null, because the default of the reference forces its own last token.
            {"forced_eos_token_id": None},
        ),
    )


BART_COPIES = {
    "model.encoder.embed_tokens.weight": "model.shared.weight",
    "model.decoder.embed_tokens.weight": "model.shared.weight",
    "lm_head.weight": "model.shared.weight",
}
"""Copies of the embedding table, which source, target and logits share."""


def stack_sizes(width: int, layers: int, heads: int) -> Fields:
    """Return the sizes of a variant under the names of BART, with feed-forward layers of four times the width."""
    own = {"layers": layers, "ffn_dim": 4 * width, "attention_heads": heads}
    return {"d_model": width} | {f"{stack}_{name}": own[name] for stack in ("encoder", "decoder") for name in own}


def _variant(name: str, parameters: int, architecture: str, vocab: int, width: int, layers: int, heads: int) -> Variant:
    sizes = {"vocab_size": vocab, "max_position_embeddings": 1024} | stack_sizes(width, layers, heads)
    # The published parameter counts include the unused rows of both position tables, but not the bias of the logits.
    parameters -= 2 * UNUSED_ROWS * width
    parameters += vocab if architecture == "BartForConditionalGeneration" else 0
    return Variant(hub=f"facebook/{name}", parameters=parameters, fields=sizes, architecture=architecture)


BART = Family(
    name="bart",
    title="BART",
    citation="Lewis et al. 2019, arXiv 1910.13461",
    heads={
        "BartForConditionalGeneration": Head(model=Seq2Seq, constants={"output.bias": True}, rules=(LOGITS_BIAS,)),
        # Published without the bias of the logits, which is zero in the other checkpoints.
        "BartModel": Head(model=Seq2Seq, base=True),
    },
    constants={"norm.kind": "layer_norm", "norm.epsilon": 1e-5, "norm.position": "post", "embedding.norm": True}
    | {"position": LearnedOptions(), "parameters.use_bias": True},
    fields=(
        Field("vocab_size", "vocab_size"),
        Field("max_position_embeddings", "position.max_length", 1024),
        *bart_fields(),
        Former("normalize_embedding", (True,)),
        Former("static_position_embeddings", (False,)),
        Former("extra_pos_embeddings", (2,)),
    ),
    rules=_RULES,
    prefix="model.",
    ignored=(r"(model\.)?(encoder|decoder)\.version",),
    copies=BART_COPIES,
    variants={
        "bart-base": _variant("bart-base", 139_420_416, "BartModel", 50_265, 768, 6, 12),
        "bart-large": _variant("bart-large", 406_291_456, "BartModel", 50_265, 1024, 12, 16),
        "bart-large-cnn": _variant("bart-large-cnn", 406_290_432, "BartForConditionalGeneration", 50_264, 1024, 12, 16),
    },
)
