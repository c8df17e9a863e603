"""A vision-language model on generated pictures: it reads a picture and writes the sentence that describes it.

Usage: python train.py configs/shapes_caption.py

On 2 CPU cores: about 16 minutes (with other work on the machine). Expected: 97.6 % of the 1,000 test pictures get
exactly their sentence, by greedy decoding (one seed; none before training). No scene of the test occurs in training.
"""

from transformer.config import (
    EmbeddingOptions,
    Execution,
    FeedForwardOptions,
    ImageTokens,
    LearnedOptions,
    NormOptions,
    ParameterOptions,
    Patches,
    RotaryOptions,
    StackOptions,
    TransformerConfig,
)
from transformer.data import ShapesCaptions
from transformer.training import EvaluationConfig, LoggingConfig, OptimizerConfig, Recipe, TrainingConfig


def get_config() -> Recipe:
    sizes = {"d_model": 128, "num_heads": 4, "feed_forward.d_ff": 256}
    encoder = TransformerConfig(
        **sizes,
        num_layers=3,
        feed_forward=FeedForwardOptions(activation="quick_gelu"),
        norm=NormOptions(epsilon=1e-5),
        position=LearnedOptions(),
        embedding=EmbeddingOptions(norm=True),
        stack=StackOptions(final_norm=False),
        input=Patches(image_height=32, image_width=32, patch_size=8, use_bias=False),
    )
    images = ImageTokens(encoder=encoder, unused_layers=0, projector="mlp")
    return Recipe(
        name="shapes_caption",
        model=TransformerConfig(
            **sizes,
            num_layers=2,
            feed_forward=FeedForwardOptions(activation="silu", gated=True),
            norm=NormOptions(kind="rms_norm"),
            parameters=ParameterOptions(use_bias=False),
            position=RotaryOptions(),
            embedding=EmbeddingOptions(scale=False, tie=False),
            input=images,
        ),
        data=ShapesCaptions(image_tokens=images.count, max_length=34, train_examples=48_000, batch_size=64),
        execution=Execution(scan=False),
        optimizer=OptimizerConfig(
            name="muon", learning_rate=5e-3, warmup_steps=50, weight_decay=0.1, final_fraction=0.0
        ),
        training=TrainingConfig(steps=2400),
        evaluation=EvaluationConfig(every=300),
        logging=LoggingConfig(every=50),
    )
