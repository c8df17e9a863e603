"""Folders that all workers share: made once, copied for each user, and made again after a failure."""

import multiprocessing
import time

import pytest
from shared_folders import copy_once_made, kept_in


def make(folder):
    with open(folder.parent / "calls", "a") as calls:
        calls.write("made\n")
    time.sleep(0.2)  # the others wait for the lock meanwhile
    (folder / "text").write_text("as made")


def use(root, target):
    with kept_in(root):
        copy_once_made("a model", make, target)


def test_several_processes_make_one_folder(tmp_path):
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=use, args=(tmp_path, tmp_path / f"user {number}")) for number in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert (tmp_path / "calls").read_text() == "made\n"
    assert all((tmp_path / f"user {number}" / "text").read_text() == "as made" for number in range(3))


def test_a_user_changes_only_its_copy(tmp_path):
    with kept_in(tmp_path):
        first = copy_once_made("a model", make, tmp_path / "first")
        (first / "text").write_text("changed")
        assert (copy_once_made("a model", make, tmp_path / "second") / "text").read_text() == "as made"
        copy_once_made("another model", make, tmp_path / "third")
    assert (tmp_path / "calls").read_text() == "made\n" * 2


def test_after_a_failure_the_next_user_tries_again(tmp_path):
    def fail(folder):
        (folder / "half").write_text("")
        raise OSError("no space left")

    with kept_in(tmp_path):
        with pytest.raises(OSError, match="no space"):
            copy_once_made("a model", fail, tmp_path / "first")
        second = copy_once_made("a model", make, tmp_path / "second")
    assert [path.name for path in second.iterdir()] == ["text"]
