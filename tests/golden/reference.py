"""Results of the reference for the test cases: transformers on PyTorch, with weights from `case.numbers`."""

import inspect
import json

import numpy as np
import torch
import transformers
from golden.case import (
    GRIDS,
    IMAGE_GRIDS,
    MARKER,
    SUFFIX,
    Case,
    dynamic_images,
    image_patches,
    numbers,
    past_values,
    real_tokens,
    recordings,
    texts,
    tokens,
    with_images,
)
from transformers.core_model_loading import revert_weight_conversion


def build(case: Case):
    """Return the model of a case, in float32 and evaluation mode."""
    special = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    special = {} if "text_config" in case.values else special
    given = {name: value for name, value in special.items() if name not in case.values}
    config = getattr(transformers, case.config)(**given, **case.values)
    config._attn_implementation = "eager"
    return getattr(transformers, case.architecture)(config, **case.options).float().eval()


def fill(model, case: Case, directory):
    """Save a model, replace its tensors by `numbers` (seeded by their names on disk), and load it again."""
    import safetensors.numpy

    model.save_pretrained(directory)
    path = directory / "model.safetensors"
    shapes = {name: tensor.shape for name, tensor in safetensors.numpy.load_file(path).items()} | case.more
    tensors = {name: numbers(name, shape) for name, shape in shapes.items()}
    safetensors.numpy.save_file(tensors, path, {"format": "pt"})
    return reload(type(model), case, directory), {name: list(tensor.shape) for name, tensor in tensors.items()}


def reload(cls, case: Case, directory):
    """Load a model from a directory; raise ValueError for missing or unexpected tensors."""
    model, info = cls.from_pretrained(
        directory, output_loading_info=True, dtype=torch.float32, attn_implementation="eager", **case.options
    )
    faults = {name: found for name, found in info.items() if found}
    if faults:
        raise ValueError(f"the reference does not load {directory} completely: {faults}")
    return model.eval()


def inputs_of(model, case: Case, padding: str) -> dict[str, torch.Tensor]:
    """Return the inputs for the reference."""
    config = model.config
    if hasattr(config, "image_token_index"):
        return _with_images(config, case, padding)
    if hasattr(config, "vision_start_token_id"):
        return _with_dynamic_images(config, case, padding)
    if hasattr(config, "text_config"):
        ids, real = texts(case.length, config.text_config.vocab_size, padding)
        given = {"input_ids": torch.tensor(ids, dtype=torch.long), **_pixels(config.vision_config)}
        return given if padding == "none" else given | {"attention_mask": torch.tensor(real, dtype=torch.long)}
    if model.main_input_name == "pixel_values":
        return _pixels(config)
    if model.main_input_name == "input_values":
        return {"input_values": torch.tensor(recordings())}
    if model.main_input_name == "past_values":
        return {"past_values": torch.tensor(past_values(config.context_length, config.num_input_channels))}
    if model.main_input_name == "input_features":
        shape = (2, config.num_mel_bins, 2 * config.max_source_positions)
        frames = np.random.RandomState(5).standard_normal(shape).astype(np.float32)
        target = torch.tensor(tokens(2, config.vocab_size, 2, case.length - 4), dtype=torch.long)
        return {"input_features": torch.tensor(frames), "decoder_input_ids": target}
    real = real_tokens(padding, 2, case.length)
    ids = tokens(1, config.vocab_size, 2, case.length) * real + (1 - real) * (config.pad_token_id or 0)
    given = {"input_ids": torch.tensor(ids, dtype=torch.long)}
    if padding != "none":
        given["attention_mask"] = torch.tensor(real, dtype=torch.long)
    if padding == "left" and "position_ids" in inspect.signature(model.forward).parameters:
        given["position_ids"] = torch.tensor(np.maximum(real.cumsum(1) - 1, 0), dtype=torch.long)
    if "decoder_input_ids" in inspect.signature(model.forward).parameters:
        vocab_size = getattr(config, "decoder_vocab_size", None) or config.vocab_size
        target = tokens(2, vocab_size, 2, case.length - 4)
        given["decoder_input_ids"] = torch.tensor(target, dtype=torch.long)
    if getattr(config, "type_vocab_size", 1) > 1:
        given["token_type_ids"] = torch.tensor(np.arange(case.length) >= case.length // 2).long().expand(2, -1)
    return given


def _with_images(config, case: Case, padding: str) -> dict[str, torch.Tensor]:
    """Return the inputs of a vision-language model: three images in two rows."""
    real = real_tokens(padding, 2, case.length)
    ids = tokens(1, config.text_config.vocab_size, 2, case.length) * real
    vision = config.vision_config
    count = getattr(config, "mm_tokens_per_image", None) or (vision.image_size // vision.patch_size) ** 2
    ids = torch.tensor(with_images(ids, count), dtype=torch.long)
    given = {"input_ids": ids, **_pixels(vision, images=3)}
    if padding != "none":
        given["attention_mask"] = torch.tensor(real, dtype=torch.long)
    if padding == "left":
        given["position_ids"] = torch.tensor(np.maximum(real.cumsum(1) - 1, 0), dtype=torch.long)
    if config.model_type == "gemma3":
        given["token_type_ids"] = (ids == MARKER).long()
    if config.model_type == "paligemma":  # 0 is the prefix
        given["token_type_ids"] = (torch.arange(case.length) >= case.length - SUFFIX).long().expand(2, -1)
    return given


def _with_dynamic_images(config, case: Case, padding: str) -> dict[str, torch.Tensor]:
    """Return the inputs of a model that reads images of any size: three images in two rows."""
    real, vision = real_tokens(padding, 2, case.length), config.vision_config
    ids = with_images(tokens(1, config.text_config.vocab_size, 2, case.length) * real, 4)
    given = {"input_ids": torch.tensor(ids, dtype=torch.long), "mm_token_type_ids": torch.tensor(ids == MARKER).int()}
    size, merge, patches = vision.patch_size, vision.spatial_merge_size, []
    for image in dynamic_images(size * merge, vision.in_channels):
        # (height, width, channels) -> (token rows, token columns, rows, columns, channels, frames, size, size)
        rows, columns = image.shape[0] // size // merge, image.shape[1] // size // merge
        cut = image.reshape(rows, merge, size, columns, merge, size, -1).transpose(0, 3, 1, 4, 6, 2, 5)
        cut = np.repeat(cut[:, :, :, :, :, None], vision.temporal_patch_size, axis=5)
        patches.append(cut.reshape(rows * columns * merge**2, -1))
    given["pixel_values"] = torch.tensor(np.concatenate(patches))
    given["image_grid_thw"] = torch.tensor([(1, rows * merge, columns * merge) for rows, columns in IMAGE_GRIDS])
    return given if padding == "none" else given | {"attention_mask": torch.tensor(real, dtype=torch.long)}


def _pixels(config, images: int = 2) -> dict[str, torch.Tensor]:
    if hasattr(config, "num_patches"):
        values, real = image_patches(config.patch_size**2 * config.num_channels)
        return {
            "pixel_values": torch.tensor(values),
            "pixel_attention_mask": torch.tensor(real),
            "spatial_shapes": torch.tensor(GRIDS),
        }
    size = config.image_size if isinstance(config.image_size, list | tuple) else (config.image_size,) * 2
    pixels = np.random.RandomState(5).standard_normal((images, config.num_channels, *size)).astype(np.float32)
    return {"pixel_values": torch.tensor(pixels)}


def _both_encoders(model, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the hidden states of texts and images after the final norms, and the vectors of both."""
    output = model(**given)
    image = output.vision_model_output.last_hidden_state
    if model.config.model_type == "clip":  # the reference normalizes only the first position
        image = model.vision_model.post_layernorm(image)
    text = output.text_model_output.last_hidden_state
    return {"hidden": text, "image_hidden": image, "texts": output.text_embeds, "images": output.image_embeds}


def hidden_states(model, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the hidden states of the last layer, after the final norm."""
    if model.config.model_type == "dinov3_vit":  # its base_model is the stack of layers, without embeddings
        return model(**given).last_hidden_state
    if model.config.model_type == "llama4_text":  # its base_model is the model with its head
        return model.model(**given).last_hidden_state
    if "decoder_input_ids" not in given or model.base_model is not model:
        return model.base_model(**given).last_hidden_state
    # T5 models have no base model that contains both stacks.
    mask = given.get("attention_mask")
    context = model.encoder(input_ids=given["input_ids"], attention_mask=mask).last_hidden_state
    target = {"input_ids": given["decoder_input_ids"], "encoder_attention_mask": mask}
    return model.decoder(**target, encoder_hidden_states=context).last_hidden_state


def run(model, case: Case, padding: str) -> dict[str, np.ndarray]:
    """Return hidden states of the last layer (after the final norm), and logits if the model has a head."""
    given = inputs_of(model, case, padding)
    with torch.no_grad():
        dual = hasattr(model, "logit_scale")
        results = _both_encoders(model, given) if dual else {"hidden": hidden_states(model, given)}
        output = model(**given)
    if (logits := _logits(model, output)) is not None:
        results["logits"] = logits
    if model.main_input_name == "input_ids" and getattr(output, "pooler_output", None) is not None:
        results["pooler_output"] = output.pooler_output
    return {name: value.float().numpy() for name, value in results.items()}


def _logits(model, output):
    if hasattr(output, "logits_per_image"):
        return output.logits_per_image
    pooled = output.pooler_output if model.main_input_name == "pixel_values" and "pooler_output" in output else None
    names = ("prediction_outputs", "prediction_logits", "regression_outputs", "prediction_output", "logits")
    return next((output[name] for name in names if name in output), pooled)


def gradients(model, case: Case) -> dict[str, np.ndarray]:
    """Return the gradient of mean(log-probabilities * fixed random numbers) by every tensor, by name on disk."""
    model.zero_grad()
    logits = _logits(model, model(**inputs_of(model, case, "none")))
    direction = np.random.RandomState(3).standard_normal(tuple(logits.shape)).astype(np.float32)
    (torch.nn.functional.log_softmax(logits, -1) * torch.tensor(direction)).mean().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: gradient.numpy() for name, gradient in revert_weight_conversion(model, found).items()}


def generated(model, case: Case) -> list[list[int]]:
    """Return the tokens that the reference generates greedily."""
    given = inputs_of(model, case, "none")
    given.pop("decoder_input_ids", None)
    start = given.get("input_ids")
    if model.config.model_type == "paligemma":
        given["token_type_ids"] = torch.zeros_like(start)  # the whole prompt is the prefix
    # Whisper overrides `generate` to split audio and suppress tokens. Compare the generic implementation instead.
    out = transformers.GenerationMixin.generate(
        model,
        **given,
        max_new_tokens=case.new_tokens,
        min_new_tokens=case.new_tokens,
        do_sample=False,
        eos_token_id=None,
    )
    written = out[:, 1:] if model.config.is_encoder_decoder else out[:, start.shape[1] :]
    return written.tolist()


def config_of(directory) -> dict:
    """Return the config.json that the reference wrote."""
    return json.loads((directory / "config.json").read_text())
