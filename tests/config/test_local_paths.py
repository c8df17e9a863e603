"""Tests of the distinction between local and remote paths."""

import pathlib
import re

import pytest

from transformer.config._checks import ConfigError
from transformer.config._local_paths import is_remote, local_path

REMOTE = ("s3://b/x", "gs://b", "GS://b/x", "hf://me/x", "file:///x", "a.b+c-1://x", "gs:///x")
LOCAL = (
    "x",
    "/x",
    "./s3://b",
    "runs/a:b",
    "a:b",
    "a:/b",
    "C:/x",
    "C://x",
    r"C:\x",
    "://x",
    "1a://x",
    "~/x",
    "x//y",
    "",
)


@pytest.mark.parametrize("path", REMOTE)
def test_a_path_with_a_url_scheme_is_remote(path):
    assert is_remote(path)
    with pytest.raises(ConfigError, match=rf"^--workdir must be a local path.*got {re.escape(path)}\b.*Mount"):
        local_path(path, "--workdir")


@pytest.mark.parametrize("path", LOCAL)
def test_other_paths_are_local(path):
    assert not is_remote(path)
    assert local_path(path, "--workdir") == pathlib.Path(path)


def test_a_url_in_a_path_object_is_still_remote():
    """`pathlib` joins the slashes of s3://b into one."""
    assert str(pathlib.Path("s3://b/x")) == "s3:/b/x"
    with pytest.raises(ConfigError, match="got s3://b/x"):
        local_path(pathlib.Path("s3://b/x"), "--workdir")
    assert not is_remote(pathlib.Path("C:/x"))
    assert not is_remote(pathlib.Path("a:b"))


@pytest.mark.parametrize("scheme", ["http", "HTTPS"])
def test_a_url_asks_the_user_to_download_it(scheme):
    with pytest.raises(ConfigError, match=rf"^FILE must be a local path, but {scheme}://e\.org/x is a URL.*Download"):
        local_path(f"{scheme}://e.org/x", "FILE")
