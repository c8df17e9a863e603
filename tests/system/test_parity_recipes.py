"""Every recipe, trained and converted on the command line, can be loaded in transformers and computes the same there.

Downloaded data is replaced by a few lines of the same kind. The models are those of the recipes with smaller sizes.
"""

import json
import re
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from finetune_parts import bert_directory, write_sst2
from golden.case import NULLABLE

from transformer.__main__ import main
from transformer.generate import Sampling, generate
from transformer.inference import open_model
from transformer.nn.models import Forecaster, Seq2Seq, VisionClassifier, VisionLanguageModel

pytestmark = pytest.mark.parity

ROOT = Path(__file__).resolve().parents[2]
EXPORTS = {
    "digits_vit": r"ViT has no counterpart .*pooling is 'mean', ViT has 'first'",
    "etth1": "PatchTSTForPrediction",
    "finetune_classifier": "BertForSequenceClassification",
    "gpt2_124m": "GPT2LMHeadModel",
    "llama3_70b": "LlamaForCausalLM",
    "llama3_8b": "LlamaForCausalLM",
    "llama_1b": "LlamaForCausalLM",
    "mixtral_8x7b": "MixtralForCausalLM",
    "mlm": r"output.transform is None, (?P<family>BERT|RoBERTa|ModernBERT) has HeadTransform",
    "multi30k": r"norm.kind is 'rms_norm', Blenderbot has 'layer_norm'",
    "number_chat": "GPTNeoXForCausalLM",
    "number_dpo": "GPTNeoXForCausalLM",
    "number_grpo": "GPTNeoXForCausalLM",
    "number_text": "GPTNeoXForCausalLM",
    "number_words": "BlenderbotForConditionalGeneration",
    "sentence_pairs": "MarianMTModel",
    "shakespeare": "GPTNeoXForCausalLM",
    "shakespeare_cpu": "GPTNeoXForCausalLM",
    "shakespeare_fast": "Qwen3ForCausalLM",
    "shakespeare_gpu": "Starcoder2ForCausalLM",
    "shakespeare_no_attention": "GPTNeoXForCausalLM",
    "shapes_caption": "LlavaForConditionalGeneration",
    "shapes_clip": r"CLIP has no counterpart",
    "sst2": r"pooling is 'mean', GPT-2 has 'last'",
    "text_corpus": "GPTNeoXForCausalLM",
    "text_file": "GPTNeoXForCausalLM",
    "wmt14_base": "MarianMTModel",
    "wmt14_big": "MarianMTModel",
}
"""the architecture that a recipe is converted to, or a pattern for the error message"""

BLOCKED = [name for name, target in EXPORTS.items() if not target.isidentifier()]
OPENED = [name for name in EXPORTS if name not in BLOCKED]
AUTO = {
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "LlavaForConditionalGeneration": "AutoModelForImageTextToText",
    "ForConditionalGeneration": "AutoModelForSeq2SeqLM",
    "MTModel": "AutoModelForSeq2SeqLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForImageClassification": "AutoModelForImageClassification",
    "ForPrediction": "PatchTSTForPrediction",  # no AutoModel supports it
}
"""class that loads an architecture in transformers, by the end of its name"""

# Data of the same kind with a few lines that replaces downloaded data, as constructor calls of its config.
STAND_INS = {
    "TinyShakespeare": "TextFile(path='{folder}/text.txt', tokenizer=data.tokenizer, sequence_length=16)",
    "TextFiles": "TextFile(path='{folder}/text.txt', tokenizer=data.tokenizer, sequence_length=16)",
    "ETTh1": "SeriesFile(path='{folder}/series.csv', context_length=data.context_length, horizon=data.horizon)",
    "SST2Sentences": "LabeledText(path='{folder}/sst2/train.tsv', tokenizer=data.tokenizer)",
    "MaskedSST2": "MaskedText(path='{folder}/text.txt', tokenizer=data.tokenizer)",
    "Multi30k": "ParallelText(source_path='{folder}/text.txt', target_path='{folder}/text.txt', "
    "tokenizer=data.tokenizer)",
    "TFDSTranslation": "ParallelText(source_path='{folder}/text.txt', target_path='{folder}/text.txt', "
    "tokenizer=data.tokenizer)",
}
RECIPE = """
import dataclasses, runpy
from transformer.data import *
from transformer.data import {stand_in}

def get_config():
    recipe = runpy.run_path({path!r})["get_config"]()
    data = recipe.data
    return dataclasses.replace(recipe, data={data})
"""
WORDS = ["--training.steps", "2", "--optimizer.warmup-steps", "1", "--parallel.devices", "1"]
WORDS += ["--evaluation.every", "None", "--evaluation.batches", "1", "--evaluation.samples", "0"]
WORDS += ["--logging.tensorboard", "False", "--logging.progress", "none", "--data.batch-size", "4"]
SMALL = ["--model.d-model", "24", "--model.num-heads", "4", "--model.num-layers", "2", "--model.dtype", "float32"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a few lines of data."""
    place = tmp_path_factory.mktemp("data")
    (place / "text.txt").write_text("".join(f"line {number} of the text: but soft!\n" for number in range(90)))
    steps = np.random.default_rng(0).standard_normal((2200, 7)).cumsum(0)
    rows = "".join(f"hour {number},{','.join(f'{x:.3f}' for x in row)}\n" for number, row in enumerate(steps))
    (place / "series.csv").write_text("date,a,b,c,d,e,f,g\n" + rows)
    write_sst2(place / "sst2")
    return place


def options_of(name, folder):
    """Return the command-line options for this recipe."""
    from transformer.training._overrides import load_recipe_file

    recipe = load_recipe_file(ROOT / "configs" / f"{name}.py")[0]
    words = list(WORDS)
    if name == "finetune_classifier":
        return [*words, "--init", str(bert_directory(folder / "bert")), "--data.manual-dir", str(folder / "sst2")]
    if recipe.task in ("dpo", "grpo"):  # they start from a trained model
        start = folder / "number_text"
        if not start.exists():
            assert main(["train", "number_text", "--workdir", str(start), *options_of("number_text", folder)]) == 0
        return [*words, "--init", str(start), "--data.train-examples", "200"]
    if name != "etth1":
        words += SMALL
    if recipe.model.attention.num_kv_heads is not None:
        words += ["--model.attention.num-kv-heads", "2"]
    if recipe.model.feed_forward.d_ff is not None and name != "digits_vit":  # else 4 d_model, which convert fills in
        words += ["--model.feed-forward.d-ff", "40"]
    if recipe.model.max_length is not None and recipe.task == "causal_lm":
        words += ["--model.position.max-length", "16"]
    if recipe.model.vocab_size is not None:
        words += ["--model.vocab-size", "None"]
    if recipe.lora is not None:
        words += ["--lora", "None"]
    if recipe.task == "causal_lm":
        words += ["--data.sequence-length", "16", "--data.eval-batch-size", "4"]
    if getattr(recipe.data, "batch_tokens", None) is not None:
        words += ["--data.batch-tokens", "None"]
    if (vocabulary := getattr(recipe.data, "tokenizer", None)) is not None and vocabulary.vocab_size is not None:
        words += ["--data.tokenizer.vocab-size", "300"]
    match type(recipe.data).__name__:
        case "TextFile":
            words += ["--data.path", str(folder / "text.txt")]
        case "ParallelText":
            words += ["--data.source-path", str(folder / "text.txt"), "--data.target-path", str(folder / "text.txt")]
        case "NumberWords":
            words += ["--data.max-digits", "2", "--data.train-examples", "200", "--data.data-dir", str(folder / "tfds")]
        case "NumberText" | "NumberChat" | "NumberPreferences" | "NumberPrompts" | "ShapesCaptions":
            words += ["--data.train-examples", "200"]
    return words


def recipe_file(name, folder):
    """Return the file of the recipe, or of a copy with different data."""
    from transformer.training._overrides import load_recipe_file

    path = ROOT / "configs" / f"{name}.py"
    data = type(load_recipe_file(path)[0].data).__name__
    if data not in STAND_INS:
        return path
    written = folder / f"{name}.py"
    stand_in = STAND_INS[data].format(folder=folder)
    # The copy has the name of the recipe, and differs only in its data.
    written.write_text(RECIPE.format(path=str(path), data=stand_in, stand_in=stand_in.partition("(")[0]))
    return written


def converted(name, folder, tmp_path, capsys):
    """Train and convert a recipe. Return (exit code of convert, workdir, output directory, captured output)."""
    if name == "digits_vit":
        pytest.importorskip("sklearn")
    run, out = tmp_path / "run", tmp_path / "out"
    words = [str(recipe_file(name, folder)), "--workdir", str(run), *options_of(name, folder)]
    assert main(["train", *words]) == 0, capsys.readouterr().err
    capsys.readouterr()
    with warnings.catch_warnings():  # tokenizer.json cannot express its normalization
        warnings.filterwarnings("ignore", "the tokenizer was not saved: this tokenizer normalizes prompts")
        code = main(["convert", str(run), str(out)])
    return code, run, out, capsys.readouterr()


def test_every_recipe_declares_its_export_architecture():
    """Every recipe is in the table above and in that of the documentation."""
    assert set(EXPORTS) == {path.stem for path in (ROOT / "configs").glob("*.py")}
    page = (ROOT / "docs" / "pretrained.md").read_text(encoding="utf-8")
    documented = dict(re.findall(r"^\| `(\w+)` \| (?:`(\w+)`|none:.*) \|$", page, flags=re.M))
    assert documented == {name: "" if name in BLOCKED else target for name, target in EXPORTS.items()}


def inputs_of(model):
    """Return inputs of a model (batch size 2) as NumPy arrays, by their names in transformers."""
    config, random = model.config, np.random.default_rng(1)
    if isinstance(model, Forecaster):
        shape = (2, config.series.context_length, config.series.channels)
        return {"past_values": random.standard_normal(shape).astype(np.float32)}
    if isinstance(model, VisionClassifier):
        patches = config.patches
        shape = (2, patches.image_height, patches.image_width, patches.channels)
        return {"pixel_values": random.standard_normal(shape).astype(np.float32)}
    tokens = {"input_ids": random.integers(4, config.vocab_size, (2, 13)).astype(np.int32)}
    if isinstance(model, VisionLanguageModel):
        images = config.image_tokens
        text = np.where(tokens["input_ids"] == images.token_id, 4, tokens["input_ids"])
        shape = (2, images.patches.image_height, images.patches.image_width, images.patches.channels)
        return {
            "input_ids": np.concatenate([np.full((2, images.count), images.token_id, np.int32), text], 1),
            "pixel_values": random.standard_normal(shape).astype(np.float32),
        }
    if isinstance(model, Seq2Seq):
        tokens["decoder_input_ids"] = random.integers(4, config.vocab_size, (2, 7)).astype(np.int32)
    return tokens


@pytest.mark.parametrize("name", OPENED)
def test_an_exported_recipe_computes_the_same_in_transformers(transformers, folder, tmp_path, capsys, name):
    import torch

    code, run, out, captured = converted(name, folder, tmp_path, capsys)
    assert code == 0, captured.err
    architecture = json.loads((out / "config.json").read_text())["architectures"][0]
    assert architecture == EXPORTS[name]
    opener = next(opener for end, opener in AUTO.items() if architecture.endswith(end))
    theirs, info = getattr(transformers, opener).from_pretrained(
        out, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert type(theirs).__name__ == architecture
    assert not {kind: found for kind, found in info.items() if found}, info

    opened = open_model(run, step="newest")
    inputs = inputs_of(opened.model)
    arguments = [jnp.asarray(array) for array in inputs.values()]
    named = {"images": arguments.pop()[:, None]} if isinstance(opened.model, VisionLanguageModel) else {}
    expected = jax.jit(opened.model.apply)({"params": opened.params}, *arguments, **named)
    given = {name: torch.tensor(array) for name, array in inputs.items()}
    given = {name: array.long() if name.endswith("_ids") else array for name, array in given.items()}
    if "pixel_values" in given:
        given["pixel_values"] = given["pixel_values"].permute(0, 3, 1, 2)
    with torch.no_grad():
        output = theirs.eval()(**given)
    got = getattr(output, "prediction_outputs", getattr(output, "logits", None)).numpy()
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5 * np.abs(expected).max())

    if opened.vocabulary is not None and name != "number_words":
        text = {"finetune_classifier": "a good film", "shapes_caption": "a large red ring"}.get(name, "line 7")
        tokenizer = transformers.AutoTokenizer.from_pretrained(out)
        assert tokenizer(text, add_special_tokens=False).input_ids == opened.tokenizer.encode(text)
    if name in ("number_words", "shakespeare_cpu"):
        assert_writes_the_same(theirs, opened, torch)


def assert_writes_the_same(theirs, opened, torch):
    """Check that greedy decoding gives the same tokens, with the settings in the directory."""
    text = opened.tokenizer.encode("forty two" if isinstance(opened.model, Seq2Seq) else "line 4")
    arguments = {"prompts": [text]}
    if isinstance(opened.model, Seq2Seq):
        arguments = {"sources": [text], "bos_id": opened.bos_id}
    ours = generate(opened.model, opened.params, **arguments, max_new_tokens=9, sampling=Sampling(temperature=0.0))
    written = theirs.generate(torch.tensor([text]), do_sample=False, max_new_tokens=9, num_beams=1, eos_token_id=-1)
    assert written[0, 1 if isinstance(opened.model, Seq2Seq) else len(text) :].tolist() == ours[0]


@pytest.mark.parametrize("name", BLOCKED)
def test_a_recipe_without_export_architecture_is_a_one_line_error(folder, tmp_path, capsys, name):
    code, _, out, captured = converted(name, folder, tmp_path, capsys)
    assert code == 2
    assert re.search(EXPORTS[name], captured.err)
    assert "the model can't be saved as any supported architecture of the transformers library" in captured.err
    assert len(captured.err) < 800
    assert not out.exists()


@pytest.mark.parametrize(("family", "field"), sorted(NULLABLE))
def test_transformers_accepts_the_exported_null_values(transformers, family, field):
    transformers.AutoConfig.for_model(family, **{field: None})
