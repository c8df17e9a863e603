"""Embeddings, classification and scores of texts, for pretrained weights and runs, and their commands."""

import dataclasses
import json
import shutil
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from golden import case as golden_case
from golden import ours
from inference_parts import write_models
from tokenizers import decoders, models, pre_tokenizers

from transformer.__main__ import main
from transformer.data.tokenizers._pretrained import PretrainedTokenizer
from transformer.generate import Sampling
from transformer.inference import SentenceSettings, classify, embed, export, open_model, score, sentence_settings
from transformer.inference._embed import encode_sentences
from transformer.inference._generate import continue_texts
from transformer.inference._text_inputs import encode_texts
from transformer.zoo import load_pretrained

LONG, SHORT = "the big cat sat on the small mat under a tree", "a dog ran"


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Tiny models with tokenizers: language model, encoder-decoder, classifier, encoder."""
    return write_models(tmp_path_factory.mktemp("weights"))


def changed(directory, tmp_path, file, values):
    """Copy a directory, and change fields (or replace the array) of one of its JSON files."""
    copy = shutil.copytree(directory, tmp_path / "changed")
    (copy / file).parent.mkdir(exist_ok=True)
    old = json.loads((copy / file).read_text()) if (copy / file).exists() else {}
    (copy / file).write_text(json.dumps(old | values if isinstance(values, dict) else values))
    return copy


@pytest.fixture
def run(capsys):
    """Run a command line; return its exit code, lines of stdout, and stderr."""

    def call(*words):
        code = main([str(word) for word in words])
        out, err = capsys.readouterr()
        return code, out.splitlines(), err

    return call


def hidden(directory, text):
    """Return the hidden states (T, D) of a single text."""
    loaded = load_pretrained(directory)
    tokens = np.array([loaded.tokenizer.encode_source(text)])

    @jax.jit
    def apply(params, tokens):
        return loaded.model.apply({"params": params}, tokens, method=type(loaded.model).hidden)

    return np.asarray(apply(loaded.params, tokens))[0]


class TestEmbed:
    @pytest.mark.programs(7, reason="a model is opened, and two lengths are read together and alone")
    @pytest.mark.parametrize("name", ["encoder", "writer"])
    def test_batched_texts_of_different_lengths_equal_single_texts(self, directories, name):
        opened = open_model(directories[name])
        alone = [hidden(directories[name], text) for text in (LONG, SHORT)]
        picks = {"mean": lambda x: x.mean(0), "first": lambda x: x[0], "last": lambda x: x[-1]}
        for pooling, pick in picks.items():
            vectors = embed(opened, [LONG, SHORT], SentenceSettings(pooling=pooling))
            np.testing.assert_allclose(vectors, [pick(x) for x in alone], atol=2e-5)

    def test_the_encoder_limits_the_input_length_of_an_encoder_decoder(self, directories):
        opened = open_model(directories["translator"])
        (expected,), (found,) = (embed(one, [LONG]) for one in (opened, dataclasses.replace(opened, context=2)))
        np.testing.assert_array_equal(found, expected)

    def test_prints_one_array_per_line(self, directories, run):
        code, lines, err = run("embed", "text", directories["encoder"], "--text", LONG, "--text", SHORT)
        assert (code, err) == (0, "")
        vectors = [json.loads(line) for line in lines]
        np.testing.assert_allclose(vectors[1], hidden(directories["encoder"], SHORT).mean(0), atol=2e-5)
        assert len(vectors) == 2
        code, lines, err = run("embed", "text", directories["encoder"], "--text", SHORT, "--json")
        found = json.loads("\n".join(lines))
        np.testing.assert_allclose(
            found["results"][0]["vector"], vectors[1], atol=2e-6
        )  # the row contains other texts, too
        assert found["pooling"] == "mean"

    @pytest.mark.programs(7, reason="the package computes single operations outside of jit")
    def test_follows_the_pooling_settings_of_the_directory(self, directories, run, tmp_path):
        directory = tmp_path / "sentences"
        export(open_model(directories["encoder"]), directory)
        (directory / "1_Pooling").mkdir()
        kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
        modules = [
            {"idx": i, "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (kind, path) in enumerate(kinds.items())
        ]
        (directory / "modules.json").write_text(json.dumps(modules))
        pooling = {"word_embedding_dimension": 12, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
        (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
        (directory / "sentence_bert_config.json").write_text('{"max_seq_length": 5, "do_lower_case": true}')
        settings = sentence_settings(directory)
        assert settings == SentenceSettings("first", True, 5, True)
        with pytest.warns(UserWarning, match="is truncated to 5"):
            (vector,) = embed(open_model(directory), [LONG.upper()], settings)
        export(open_model(directory), tmp_path / "again")  # keeps the settings of the authors
        assert sentence_settings(tmp_path / "again") == settings
        first = hidden(directories["encoder"], "the big cat")[0]
        np.testing.assert_allclose(vector, first / np.linalg.norm(first), atol=2e-5)

        modules[2]["type"] = "sentence_transformers.models.Dense"
        (directory / "modules.json").write_text(json.dumps(modules))
        code, _, err = run("embed", "text", directory, "--text", SHORT)
        assert code == 2
        assert "requires a module Dense" in err
        (directory / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
        code, _, err = run("embed", "text", directory, "--text", SHORT)
        assert "requires pooling by pooling_mode_max_tokens" in err

    @pytest.mark.parametrize(
        ("limits", "expected"),
        [
            ({"tokenizer_config.json": {"model_max_length": 7}}, 7),
            ({"tokenizer_config.json": {"model_max_length": 7}, "sentence_bert_config.json": {"max_seq_length": 9}}, 9),
            ({"tokenizer_config.json": {"model_max_length": 10**30}}, None),
            ({"tokenizer_config.json": {"model_max_length": 1e30}}, None),
            ({"sentence_bert_config.json": {"transformer_task": "feature-extraction"}}, None),
        ],
    )
    @pytest.mark.parametrize("modules", [True, False])
    def test_reads_the_length_limit_from_either_file(self, directories, tmp_path, modules, limits, expected):
        """sentence-transformers 6 writes it into tokenizer_config.json; a model without modules.json has only that."""
        directory = shutil.copytree(directories["encoder"], tmp_path / "limited")
        if modules:
            kinds = [{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": "1"}]
            (directory / "modules.json").write_text(json.dumps(kinds))
            (directory / "1").mkdir()
            (directory / "1" / "config.json").write_text('{"pooling_mode": "mean"}')
        for name, values in limits.items():
            old = json.loads((directory / name).read_text()) if (directory / name).exists() else {}
            (directory / name).write_text(json.dumps(old | values))
        if not modules:
            expected = 7 if expected == 9 else expected
        assert sentence_settings(directory).max_length == expected

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_a_long_text_is_truncated_at_the_configured_side(self, directories, side):
        """The special tokens around the text stay, as in transformers."""
        opened = open_model(directories["encoder"])
        files = dict(opened.tokenizer.files)
        content = json.loads(files["tokenizer.json"])
        content["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "B", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
            + [{"SpecialToken": {"id": "E", "type_id": 0}}] * 2,
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {
                name: {"id": name, "ids": [i], "tokens": [opened.tokenizer.vocabulary[i]]}
                for name, i in (("B", 0), ("E", 1))
            },
        }
        config = json.loads(files.get("tokenizer_config.json", "{}")) | {"truncation_side": side}
        files |= {"tokenizer.json": json.dumps(content).encode(), "tokenizer_config.json": json.dumps(config).encode()}
        tokenizer = PretrainedTokenizer(files, opened.tokenizer.vocab_size)
        inner = tokenizer.encode(LONG)
        with pytest.warns(UserWarning, match="is truncated to 7"):
            ((ids, kinds),) = encode_texts(dataclasses.replace(opened, vocabulary=tokenizer), [LONG], 7)
        assert ids == [0, *(inner[:4] if side == "right" else inner[-4:]), 1, 1]
        assert len(kinds) == len(ids)

    def test_the_first_dimensions_are_kept(self, directories, tmp_path):
        """Matryoshka embeddings: the vector is cut after its normalization, as in sentence-transformers."""
        file, values = "config_sentence_transformers.json", {"truncate_dim": 5}
        directory = changed(directories["encoder"], tmp_path, file, values)
        kinds = [{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": "1"}, {"type": "a.Normalize"}]
        (directory / "modules.json").write_text(json.dumps(kinds))
        (directory / "1").mkdir()
        (directory / "1" / "config.json").write_text('{"pooling_mode": "mean"}')
        opened, settings = open_model(directory), sentence_settings(directory)
        whole = embed(opened, [SHORT], dataclasses.replace(settings, dimensions=None))
        assert np.linalg.norm(whole) == pytest.approx(1, abs=1e-5)
        np.testing.assert_array_equal(embed(opened, [SHORT], settings), whole[:, :5])
        (directory / file).write_text('{"truncate_dim": 0}')
        with pytest.raises(ValueError, match=r"truncate_dim .* integer of at least 1, got 0"):
            sentence_settings(directory)

    def test_lower_case_applies_to_the_prompt_and_to_single_characters(self, directories):
        """The library of the tokenizers writes a sigma at the end of a word as any other."""
        opened, settings = open_model(directories["encoder"]), SentenceSettings(lower_case=True, prompt="THE ")
        seen = []
        watched = types.SimpleNamespace(encode_source=lambda text: seen.append(text) or [1])
        encode_sentences(dataclasses.replace(opened, vocabulary=watched), ["ΟΔΟΣ Cat"], settings)
        assert seen == ["the οδοσ cat"]

    @pytest.mark.parametrize(
        ("file", "values", "message"),
        [
            ("modules.json", [3], "must contain objects with a type and a path, got 3"),
            ("modules.json", [{"type": "a.Pooling", "path": [1]}], "must contain objects with a type and a path"),
            ("sentence_bert_config.json", {"max_seq_length": 0}, "must be an integer of at least 1, got 0"),
            ("1/config.json", {"pooling_mode": [1]}, "requires pooling by [1]: expected exactly one of cls, mean"),
            (
                "1/config.json",
                {"pooling_mode": "mean", "include_prompt": False},
                "excludes its prompt from the pooling",
            ),
            (
                "config_sentence_transformers.json",
                {"default_prompt_name": "q", "prompts": {}},
                "requires the prompt 'q'",
            ),
        ],
    )
    def test_reports_files_with_invalid_settings(self, directories, run, tmp_path, file, values, message):
        directory = changed(directories["encoder"], tmp_path, file, values)
        modules = [{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": "1"}]
        prompt = {"default_prompt_name": "q", "prompts": {"q": "the "}}
        others = {"modules.json": modules, "1/config.json": {"pooling_mode": "mean"}}
        for name, content in (others | {"config_sentence_transformers.json": prompt}).items():
            if name != file:
                (directory / name).parent.mkdir(exist_ok=True)
                (directory / name).write_text(json.dumps(content))
        code, lines, err = run("embed", "text", directory, "--text", SHORT)
        assert (code, lines) == (2, [])
        assert message in err

    @pytest.mark.parametrize("length", [-1, 0, 3.5, "many"])
    def test_rejects_an_invalid_context_length(self, tmp_path, length):
        record = golden_case.golden("llama")["lm"]
        fields = record["config"] | {"max_position_embeddings": length}
        with pytest.raises(ValueError, match=rf"max_position_embeddings.*1.*got {length!r}"):
            open_model(ours.write(tmp_path / "odd", record | {"config": fields}))


class TestClassify:
    def test_probabilities_equal_the_model(self, directories, run):
        opened = open_model(directories["classifier"])
        found = classify(opened, [LONG, SHORT])
        ids, types = opened.tokenizer.encode_model(SHORT)
        apply = jax.jit(opened.model.apply)
        logits = apply({"params": opened.params}, np.array([ids]), token_types=np.array([types]))
        expected = np.exp(np.asarray(logits, np.float64))[0]
        expected /= expected.sum()
        np.testing.assert_allclose(list(found[1].probabilities.values()), expected, atol=1e-5)
        assert found[1].label == opened.labels[expected.argmax()]
        code, lines, _ = run("classify", "text", directories["classifier"], "--text", SHORT)
        assert code == 0
        assert lines == [f"{found[1].label}\t{found[1].probability:.4f}\t{SHORT}"]

    def test_only_classifiers_predict_classes(self, directories, run):
        code, _, err = run("classify", "text", directories["writer"], "--text", SHORT)
        assert code == 2
        assert "contains a model of the class CausalLM, which is not a classifier" in err

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"id2label": {"0": "a", "1": "a", "2": "b"}}, "must give each of the classes 0 to 2 a unique name"),
            ({"id2label": {"0": "a", "1": "b", "7": "c"}}, "must give each of the classes 0 to 2 a unique name"),
            ({"id2label": ["a", "b", "c"]}, "must give each of the classes 0 to 2 a unique name, got ['a', "),
            ({"problem_type": "multi_label_classification"}, "does not choose one of several classes: it has 3 "),
            ({"problem_type": "regression"}, "independent outputs (problem_type regression)"),
        ],
    )
    def test_class_names_come_from_the_config(self, directories, run, tmp_path, changes, message):
        directory = changed(directories["classifier"], tmp_path, "config.json", changes)
        code, lines, err = run("classify", "text", directory, "--text", SHORT)
        assert (code, lines) == (2, [])
        assert message in err

    def test_ignores_token_types_missing_from_the_model(self, directories, run, tmp_path):
        tokenizer = json.loads((directories["classifier"] / "tokenizer.json").read_text())
        for part in tokenizer["post_processor"]["single"]:
            next(iter(part.values()))["type_id"] = 2
        directory = changed(directories["classifier"], tmp_path, "tokenizer.json", tokenizer)
        code, _, err = run("classify", "text", directory, "--text", SHORT)
        assert code == 2
        assert "text 0 has the token type 2, but the model has only 2 types" in err


class TestScore:
    def test_scores_are_sums_of_log_probabilities(self, directories, run):
        opened = open_model(directories["writer"])
        tokens = np.array(opened.tokenizer.encode_source(SHORT))
        logits = np.asarray(jax.jit(opened.model.apply)({"params": opened.params}, tokens[None]), np.float64)[0, :-1]
        each = logits[np.arange(len(logits)), tokens[1:]] - np.logaddexp.reduce(logits, -1)
        (found,) = score(opened, [SHORT])
        assert found.tokens == 3
        np.testing.assert_allclose(found.log_likelihood, float(each.sum()), rtol=1e-5)
        code, lines, _ = run("score", directories["writer"], "--text", SHORT, "--json")
        assert code == 0
        (result,) = json.loads("\n".join(lines))["results"]
        np.testing.assert_allclose(result["perplexity"], np.exp(-found.log_likelihood / 3))

    def test_a_long_text_is_read_in_windows(self, directories):
        """Each token is scored once, with at least half of the context before it."""
        opened = open_model(directories["writer"])
        text = " ".join([LONG] * 9)
        ids = opened.tokenizer.encode_source(text)
        assert len(ids) > opened.context
        (found,) = score(opened, [text])
        assert found.tokens == len(ids) - 1
        assert np.isfinite(found.log_likelihood)

    def test_an_encoder_decoder_scores_given_a_source(self, directories, run):
        opened = open_model(directories["translator"])
        (found,) = score(opened, [SHORT], [LONG])
        (other,) = score(opened, [SHORT], [SHORT])
        assert found.tokens == other.tokens == 4  # including the end token
        assert found.log_likelihood != other.log_likelihood
        code, _, err = run("score", directories["translator"], "--text", SHORT)
        assert code == 2
        assert "1 texts need 1 sources, got 0" in err


class TestGenerate:
    @pytest.mark.parametrize("name", ["writer", "translator"])
    def test_a_weights_directory_generates_text(self, directories, run, name):
        words = ("generate", directories[name], "--prompt", SHORT, "--max-new-tokens", 5, "--temperature", 0)
        code, lines, err = run(*words)
        assert (code, err) == (0, "")
        assert lines
        code, again, _ = run(*words, "--json")
        found = json.loads("\n".join(again))
        assert found["architecture"] in ("GPT2LMHeadModel", "T5ForConditionalGeneration")
        assert found["results"][0]["prompt"] == SHORT

    def test_keeps_a_space_between_prompt_and_continuation(self, directories):
        """Decoders such as Metaspace remove the first space of a text."""
        library = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "▁the": 1, "▁cat": 2}, unk_token="<unk>"))
        library.pre_tokenizer, library.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        tokenizer = PretrainedTokenizer({"tokenizer.json": library.to_str().encode()}, 37)
        opened = dataclasses.replace(open_model(directories["writer"]), vocabulary=tokenizer)
        params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), opened.params)
        params["embedding"]["embedding"][2] = 1.0
        params["decoder"]["final_norm"]["bias"][:] = 1.0
        opened = dataclasses.replace(opened, params=params)  # always predicts token 2
        (found,) = continue_texts(opened, ["the cat"], max_new_tokens=2, sampling=Sampling(temperature=0.0), seed=0)
        assert found.output == " cat cat"

    def test_reports_an_encoder_decoder_without_a_start_token(self, directories, run, tmp_path):
        directory = changed(directories["translator"], tmp_path, "config.json", {"decoder_start_token_id": None})
        code, _, err = run("generate", directory, "--prompt", SHORT)
        assert code == 2
        assert "has no decoder_start_token_id, the first token of a target. Add it." in err

    def test_uses_the_recommended_generation_settings(self, directories, run, tmp_path):
        """Every target starts with the forced token, and bad words are never generated."""
        words = ("--prompt", SHORT, "--max-new-tokens", 5, "--temperature", 0, "--json")
        plain = open_model(directories["translator"])
        directory = changed(directories["translator"], tmp_path, "config.json", {"forced_bos_token_id": 7})
        opened = open_model(directory)
        assert opened.target_start == [plain.bos_id, 7]
        code, lines, _ = run("generate", directory, *words)
        assert code == 0
        written = json.loads("\n".join(lines))["results"][0]["output"]
        (begun,) = opened.tokenizer.tokens(opened.tokenizer.encode(written.split()[0]))[:1]
        word = opened.tokenizer.encode(begun)[0]
        (directory / "generation_config.json").write_text(json.dumps({"bad_words_ids": [[word], [1, 2]]}))
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            code, lines, err = run("generate", directory, *words)
        assert code == 0, err
        assert "bad_words_ids of several tokens" in "".join(err)
        assert begun not in json.loads("\n".join(lines))["results"][0]["output"].split()
        assert open_model(directory).suppressed == (word,)

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"forced_bos_token_id": "7"}, "forced_bos_token_id in"),
            ({"suppress_tokens": [-1]}, "suppress_tokens in"),
            ({"bad_words_ids": 5}, "must contain lists of token ids, got 5"),
            ({"bad_words_ids": [[10**6]]}, "must contain token ids from 0 to 36"),
        ],
    )
    def test_reports_ids_that_are_not_tokens(self, directories, run, tmp_path, values, message):
        directory = changed(directories["translator"], tmp_path, "config.json", values)
        code, _, err = run("generate", directory, "--prompt", SHORT)
        assert code == 2
        assert message in err

    def test_an_encoder_cannot_generate(self, directories, run):
        code, _, err = run("generate", directories["encoder"], "--prompt", SHORT)
        assert code == 2
        assert "contains a model of type Embedder." in err


class TestConvert:
    @pytest.mark.programs(46, reason="each parameter is converted and checked outside of jit")
    def test_converts_the_dtype_and_writes_several_files(self, directories, run, tmp_path):
        out = tmp_path / "half"
        words = ("convert", directories["classifier"], out, "--dtype", "bfloat16", "--max-shard-gib", 2e-6)
        code, lines, err = run(*words)
        assert (code, err) == (0, "")
        assert lines[0].startswith("BERT: Devlin et al.")
        assert (out / "model.safetensors.index.json").exists()
        opened, before = open_model(out), open_model(directories["classifier"])
        assert opened.labels == before.labels
        assert opened.tokenizer.state() == before.tokenizer.state()
        expected = jax.tree.map(lambda leaf: np.asarray(leaf).astype(jnp.bfloat16), before.params)
        jax.tree.map(np.testing.assert_array_equal, opened.params, expected)
        code, _, err = run(*words)
        assert code == 2
        assert "half" in err

    @pytest.mark.programs(34, reason="each parameter is converted and checked outside of jit")
    def test_reports_values_outside_the_range_of_a_dtype(self, directories):
        opened = open_model(directories["encoder"])
        params = jax.tree.map(lambda leaf: leaf, opened.params)
        params["embedding"]["embedding"] = jnp.asarray(np.asarray(params["embedding"]["embedding"]) * np.float32(1e6))
        opened = dataclasses.replace(opened, params=params)
        with pytest.raises(ValueError, match=r"embedding/embedding.*float16"):
            export(opened, directories["encoder"].with_name("narrow"), dtype="float16")
        assert not directories["encoder"].with_name("narrow").exists()

    @pytest.mark.parametrize("size", ["nan", "inf", "0"])
    def test_rejects_file_sizes_that_are_not_positive(self, directories, run, tmp_path, size):
        code, _, err = run("convert", directories["encoder"], tmp_path / "out", "--max-shard-gib", size)
        assert code == 2
        assert "--max-shard-gib must be a number above 0, got" in err


class TestList:
    def test_lists_families_variants_and_sizes(self, run):
        code, lines, _ = run("list")
        assert code == 0
        assert any(line.split() == ["gpt2", "124M", "openai-community/gpt2"] for line in lines)
        code, lines, _ = run("list", "--json")
        assert json.loads("\n".join(lines))["llama"]["variants"]["llama-3.1-8b"]["parameters"] == 8_030_261_248


@pytest.mark.parametrize(("name", "use"), [("encoder", embed), ("classifier", classify), ("writer", score)])
def test_non_finite_results_are_an_error(directories, name, use):
    opened = open_model(directories[name])
    opened = dataclasses.replace(
        opened, params=jax.tree.map(lambda leaf: np.full(leaf.shape, np.inf, leaf.dtype), opened.params)
    )
    with pytest.raises(ValueError, match=r"0.*float32"):
        use(opened, [SHORT])


def test_reports_a_missing_tokenizer(directories, run, tmp_path):
    export(open_model(directories["writer"]), tmp_path / "bare")
    (tmp_path / "bare" / "tokenizer.json").unlink()
    (tmp_path / "bare" / "integrity.json").unlink()
    code, _, err = run("score", tmp_path / "bare", "--text", SHORT)
    assert code == 2
    assert "has no tokenizer.json" in err
