"""Tests of remote paths in Python: every public function with a path refuses a scheme first, and writes nothing."""

import dataclasses
import importlib
import inspect
import pathlib

import pytest

from transformer.config import ConfigError
from transformer.data import prepare
from transformer.data.kinds import DATA, PLACES
from transformer.training import train

ROOMS = ("config", "data", "inference", "media", "training", "viz", "viz.studies", "zoo", "zoo.weights", "cli.runtime")
OWN = {"TensorInfo", "LoadedModel", "OpenedModel", "Pretrained", "check_devices"}
"""Results whose paths were checked before, and the root directory of the machine."""
METHODS = ("__init__", "save", "load", "add_adapter")


def functions_with_paths():
    """Return (function, parameter) of each public function with a parameter for a path, by name."""
    found = {}
    for room in ROOMS:
        module = importlib.import_module(f"transformer.{room}")
        for name in module.__all__:
            member = getattr(module, name)
            if inspect.isclass(member):
                members = {f"{name}.{method}": getattr(member, method, None) for method in METHODS}
            else:
                members = {name: member}
            for label, function in members.items():
                if not inspect.isfunction(function) or label.removesuffix(".__init__") in OWN:
                    continue
                for parameter in inspect.signature(function).parameters.values():
                    if "Path" in str(parameter.annotation):
                        found[f"{room}.{label}.{parameter.name}"] = (function, parameter.name)
    return found


FUNCTIONS = functions_with_paths()


@pytest.mark.parametrize("as_object", [False, True], ids=["text", "Path"])
@pytest.mark.parametrize(("function", "name"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_each_public_function_rejects_a_url_scheme(function, name, as_object, tmp_path, monkeypatch):
    """The check comes before anything else, so that the other arguments do not matter."""
    monkeypatch.chdir(tmp_path)
    remote = pathlib.Path("s3://b/x") if as_object else "s3://b/x"
    positional, options = [], {}
    for parameter in inspect.signature(function).parameters.values():
        value = remote if parameter.name == name else "x" if "str" in str(parameter.annotation) else None
        if parameter.kind is parameter.VAR_POSITIONAL:
            positional += [value]
        elif parameter.kind is not parameter.VAR_KEYWORD and (
            parameter.default is parameter.empty or parameter.name == name
        ):
            options |= {parameter.name: value}
    if positional:
        positional, options = [*options.values(), *positional], {}
    with pytest.raises(ConfigError, match=r"must be a local path.*got s3://b/x"):
        inspect.unwrap(function)(*positional, **options)  # without the checks of shapes
    assert list(tmp_path.iterdir()) == []


def test_the_search_finds_public_functions():
    assert len(FUNCTIONS) > 30


def data_paths():
    for kind in DATA.values():
        for field in dataclasses.fields(kind):
            if field.name in PLACES:
                yield kind, field.name


@pytest.mark.parametrize(("kind", "field"), list(data_paths()), ids=lambda one: getattr(one, "kind", one))
def test_each_path_of_the_data_is_checked(kind, field):
    given = {one.name: "x" for one in dataclasses.fields(kind) if one.default is dataclasses.MISSING}
    given |= {"paths": ("x",)} if "paths" in given else {}
    given |= {"target_path": "x"} if kind.kind == "parallel_text" else {}
    if "source_language" in given:
        given |= {"source_language": "de", "target_language": "en", "name": "wmt14_translate/de-en"}
    given |= {"image_tokens": 1} if "image_tokens" in given else {}
    config = kind(**given)
    object.__setattr__(config, field, ("s3://b/x",) if field.endswith("paths") else "s3://b/x")
    with pytest.raises(ConfigError, match=f"--data.{field.replace('_', '-')} must be a local path"):
        prepare(config)


def test_training_checks_the_data_before_it_creates_the_workdir(tmp_path):
    from configs.number_words import get_config

    recipe = get_config()
    recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, data_dir="gs://b/x"))
    with pytest.raises(ConfigError, match=r"--data.data-dir must be a local path"):
        train(recipe, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_the_variable_of_tfds_is_checked(monkeypatch):
    from transformer.data.files._tfds import data_dir

    monkeypatch.setenv("TFDS_DATA_DIR", "gs://b/x")
    with pytest.raises(ConfigError, match="TFDS_DATA_DIR must be a local path"):
        data_dir(None)
    assert data_dir("x") == pathlib.Path("x")
