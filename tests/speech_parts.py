"""Tiny speech models with random weights, their files, and sounds."""

import json

import jax
import numpy as np
from golden.case import numbers
from golden.sizes import AUDIO
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from transformer.zoo import ENTRIES, abstract_params
from transformer.zoo.weights._conversion import parameter_shapes, saved_tensors
from transformer.zoo.weights._files import write_weights

RATE = 16_000
POSITIONS = 50
"""Encoder positions of a window of one second."""
END, START = 256, 257
LANGUAGES = {"<|en|>": 258, "<|es|>": 259, "<|de|>": 260}
TASKS = {"translate": 261, "transcribe": 262}
NO_SPEECH, NO_TIMESTAMPS = 263, 264
FIRST_TIME = NO_TIMESTAMPS + 1
VOCAB_SIZE = FIRST_TIME + POSITIONS + 1
GENERATION = {
    "decoder_start_token_id": START,
    "eos_token_id": END,
    "pad_token_id": END,
    "bos_token_id": END,
    "is_multilingual": True,
    "lang_to_id": LANGUAGES,
    "task_to_id": TASKS,
    "no_timestamps_token_id": NO_TIMESTAMPS,
    "max_initial_timestamp_index": 10,
    "suppress_tokens": [3, 5, START, *LANGUAGES.values(), *TASKS.values(), NO_SPEECH],
    "begin_suppress_tokens": [32, END],
    "max_length": 40,
}
CONFIG = {
    "model_type": "whisper",
    "architectures": ["WhisperForConditionalGeneration"],
    "vocab_size": VOCAB_SIZE,
    "num_mel_bins": 8,
    "d_model": 16,
    **{f"{stack}_{name}": size for stack in ("encoder", "decoder") for name, size in (("layers", 1), ("ffn_dim", 24))},
    **{f"{stack}_attention_heads": 2 for stack in ("encoder", "decoder")},
    "max_source_positions": POSITIONS,
    "max_target_positions": 40,
    "is_encoder_decoder": True,
    "pad_token_id": END,
    "bos_token_id": END,
    "eos_token_id": END,
    "decoder_start_token_id": START,
}
FEATURES = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 8, "chunk_length": 1}


def tokenizer() -> Library:
    """Return a tokenizer of 256 bytes and the special tokens of Whisper; timestamps are not special, as in Whisper."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Library(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    names = ["<|endoftext|>", "<|startoftranscript|>", *LANGUAGES, *(f"<|{task}|>" for task in TASKS)]
    library.add_special_tokens([*names, "<|nospeech|>", "<|notimestamps|>"])
    times = [f"<|{step * 0.02:.2f}|>" for step in range(POSITIONS + 1)]
    library.add_tokens([AddedToken(time, normalized=False) for time in times])
    return library


CTC_CONFIG = AUDIO | {
    "model_type": "wav2vec2",
    "architectures": ["Wav2Vec2ForCTC"],
    "vocab_size": 9,
    "conv_dim": [6, 7],
    "conv_kernel": [10, 4],
    "conv_stride": [10, 4],
    "feat_extract_norm": "layer",
    "do_stable_layer_norm": True,
}
CTC_VOCABULARY = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "|": 4, "A": 5, "B": 6, "C": 7, "'": 8}
CTC_FEATURES = {"feature_extractor_type": "Wav2Vec2FeatureExtractor", "do_normalize": True}


def write_ctc(directory, *, salt="", vocabulary=CTC_VOCABULARY, features=CTC_FEATURES, tensors=None, **changes):
    """Write a tiny wav2vec 2.0 with CTC and random weights, and return the directory.

    Args:
        directory: created if missing.
        salt: selects other random weights.
        vocabulary: vocab.json.
        features: preprocessor_config.json.
        tensors: names of tensors that are zero.
        **changes: fields of config.json.
    """
    directory.mkdir(parents=True, exist_ok=True)
    values = random_tensors(config := CTC_CONFIG | changes, salt)
    write_weights(directory, config, values | {name: 0 * values[name] for name in tensors or ()})
    settings = {"tokenizer_class": "Wav2Vec2CTCTokenizer", "pad_token": "<pad>"}
    files = {"vocab.json": vocabulary, "tokenizer_config.json": settings, "preprocessor_config.json": features}
    for file, content in files.items():
        (directory / file).write_text(json.dumps(content))
    return directory


def random_tensors(config, salt):
    """Return random weights of the model that a config.json describes, by the names of its tensors."""
    family = ENTRIES[config["model_type"]]
    name, head = family.head_of(config)
    model = head.model(family.read(config, head))
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract_params(model))
    links = family.links(model, name, parameter_shapes(zeros))
    shapes = {tensor: make().shape for tensor, make in saved_tensors(links, zeros)}
    return {tensor: numbers(salt + tensor, shape) for tensor, shape in shapes.items()}


def write_whisper(directory, *, salt="", scale=1.0, generation=GENERATION, features=FEATURES, **changes):
    """Write a tiny Whisper with random weights, and return the directory.

    Args:
        directory: created if missing.
        salt: selects other random weights.
        scale: factor of the embeddings, which are also the output layer: larger values give less uniform probabilities.
        generation: generation_config.json.
        features: preprocessor_config.json.
        **changes: fields of config.json.
    """
    config = CONFIG | changes
    directory.mkdir(parents=True, exist_ok=True)
    tensors = random_tensors(config, salt)
    tensors["model.decoder.embed_tokens.weight"] *= scale
    write_weights(directory, config, tensors)
    for file, values in {"generation_config.json": generation, "preprocessor_config.json": features}.items():
        (directory / file).write_text(json.dumps(values))
    tokenizer().save(str(directory / "tokenizer.json"))
    return directory


def sound(seconds, seed=0):
    """Return noise whose loudness and pitch change, (N,), float32."""
    generator, time = np.random.default_rng(seed), np.arange(round(seconds * RATE)) / RATE
    tone = np.sin(2 * np.pi * (300 + 200 * np.sin(2 * np.pi * 1.7 * time + seed)) * time)
    noise = generator.normal(size=len(time))
    return (0.2 * tone * np.sin(2 * np.pi * 0.9 * time) + 0.05 * noise).astype(np.float32)
