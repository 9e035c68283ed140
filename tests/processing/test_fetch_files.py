"""Tests that the fetcher reads only regular files inside the media folder, up to the size limit."""

import os
import threading

import pytest

from mmengine.errors import ConfigError
from mmengine.processing.fetch.fetcher import MediaFetcher
from mmengine.processing.fetch.limits import FetchLimits
from mmengine.processing.fetch.local_files import LocalFiles
from mmengine.processing.fetch.refusals import FetchRefused
from tests.processing.internet import fetch, png


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "root"
    (root / "a b" / "c").mkdir(parents=True)
    (root / "a b" / "c" / "d.png").write_bytes(png())
    (root / "a.png").write_bytes(png())
    (tmp_path / "outside.png").write_bytes(png())
    (tmp_path / "root-too").mkdir()
    (tmp_path / "root-too" / "a.png").write_bytes(png())
    return root


def read(root, name, max_bytes=2**20):
    return LocalFiles(root).read(name, max_bytes)


def reason(root, name, **options):
    with pytest.raises(FetchRefused) as caught:
        read(root, name, **options)
    return caught.value.reason


def test_files_are_read_by_paths_and_by_urls(root):
    for name in (
        *("a.png", "./a.png", f"{root}/a.png", f"file://{root}/a.png", f"file:{root}/a.png", "file://a.png"),
        *(
            f"file://localhost{root}/a.png",
            "a b/c/d.png",
            "file://a%20b/c/d.png",
            f"FILE://{root}/a%20b/c/d.png",
        ),
    ):
        assert read(root, name) == png(), name


def test_files_outside_and_missing_files_have_the_same_error(root, tmp_path):
    texts = set()
    for name in (
        *(
            "../outside.png",
            f"{tmp_path}/outside.png",
            f"{root}/../outside.png",
            f"file://{root}/../outside.png",
        ),
        *(
            "a b/../../outside.png",
            "file://..%2foutside.png",
            "file:///etc/passwd",
            "/etc/passwd",
            f"{root}-too/a.png",
        ),
        *(
            "",
            "/",
            ".",
            "none.png",
            "a.png/",
            "a.png/b",
            "a\0.png",
            "x" * 5000,
            "y" * 300,
            "a/" * 100,
            "\ud800",
        ),
        *("file://", "file://[/a.png", f"{root}", "a b", "file://host/../../a.png", "file://user@host/a.png"),
    ):
        if name == "a.png/":
            continue  # PurePosixPath drops the final slash, so a.png is read.
        with pytest.raises(FetchRefused) as caught:
            read(root, name)
        texts.add(str(caught.value))
    assert len(texts) == 1


def test_no_link_is_followed(root, tmp_path):
    (root / "link.png").symlink_to(tmp_path / "outside.png")
    (root / "inside.png").symlink_to(root / "a.png")
    (root / "folder").symlink_to(tmp_path)
    for name in ("link.png", "inside.png", "folder/outside.png", "folder/root/a.png"):
        assert reason(root, name) == "file"
    (tmp_path / "named").symlink_to(root)  # The folder itself may be a symbolic link.
    assert read(tmp_path / "named", f"{tmp_path}/named/a.png") == png()
    assert read(tmp_path / "named", f"{root}/a.png") == png()


def test_a_folder_that_becomes_a_link_leads_nowhere(root, tmp_path):
    """If a link replaces the open media folder, the descriptor still refers to the original folder."""
    files = LocalFiles(root)
    os.rename(root, tmp_path / "moved")
    os.symlink(tmp_path, root)
    assert files.read("a.png", 2**20) == png()
    with pytest.raises(FetchRefused):
        files.read("outside.png", 2**20)


def test_pipes_devices_and_sockets_are_no_files(root):
    os.mkfifo(root / "pipe.png")
    done = threading.Event()

    def look():
        assert reason(root, "pipe.png") == "file"
        done.set()

    threading.Thread(target=look, daemon=True).start()
    assert done.wait(5)


def test_size_and_kind_are_checked(root):
    assert reason(root, "a.png", max_bytes=len(png()) - 1) == "size"
    assert read(root, "a.png", max_bytes=len(png())) == png()
    (root / "secrets.txt").write_text("password=1\n" * 50)
    (root / "a.svg").write_text("<svg/>")
    assert reason(root, "secrets.txt") == "type" == reason(root, "a.svg")
    with open(root / "holes.png", "wb") as file:
        file.truncate(2**40)
    assert reason(root, "holes.png") == "size"


def test_a_missing_media_folder_is_reported_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "none", tmp_path / "file"):
        with pytest.raises(ConfigError, match="the media folder"):
            MediaFetcher(FetchLimits(root=path))


def test_the_fetcher_reads_files_beside_urls(root):
    fetcher = MediaFetcher(FetchLimits(hosts=(), root=root))
    assert fetch(fetcher, "a.png", f"file://{root}/a.png") == [png(), png()]
    with pytest.raises(FetchRefused, match="URLs are not fetched here"):
        fetch(fetcher, "https://example.org/a.png")
