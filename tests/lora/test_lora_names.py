"""Names of adapters: what each stands for, and from which folder its content is read."""

import shutil

import pytest

from mmengine.serve.engine import Engine
from tests.lora.adapted_fakes import adapted_builder, made


@pytest.fixture
def engine():
    with Engine(builder=adapted_builder(), loras={}) as one:
        yield one


def load(engine, name, folder):
    engine.adapters.load(engine.adapters.read(name, folder))


def read_again(engine, name):
    """The digest of what the executor would read for a name now."""
    return engine.built.executor.known[engine.adapters.named(name).digest]().digest


@pytest.mark.parametrize("gone", ["older", "newer"])
def test_a_content_with_two_names_is_read_from_the_folder_of_the_one_that_stays(engine, tmp_path, gone):
    folders = {name: made(tmp_path, name, "same") for name in ("older", "newer")}
    for name, folder in folders.items():
        load(engine, name, folder)
    stays = ({*folders} - {gone}).pop()
    engine.adapters.unload(gone)
    shutil.rmtree(folders[gone])
    assert read_again(engine, stays) == b"same".ljust(32)
    engine.adapters.unload(stays)
    assert not engine.built.executor.known


def test_another_content_under_a_name_leaves_the_first_to_its_other_name(engine, tmp_path):
    load(engine, "other", made(tmp_path, "other", "same"))
    load(engine, "mine", made(tmp_path, "mine", "same"))
    load(engine, "mine", made(tmp_path, "new"))
    shutil.rmtree(tmp_path / "mine")
    assert read_again(engine, "other") == b"same".ljust(32)
    assert read_again(engine, "mine") == b"new".ljust(32)


def test_loading_what_a_name_stands_for_reads_it_from_there_again(engine, tmp_path):
    mine, other = (made(tmp_path, name, "same") for name in ("mine", "other"))
    load(engine, "mine", mine)
    load(engine, "other", other)
    shutil.rmtree(other)
    load(engine, "mine", mine)
    assert read_again(engine, "other") == b"same".ljust(32)
