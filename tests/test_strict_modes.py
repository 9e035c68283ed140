"""Tests that `open_strict` refuses a folder whose contents another user can change. `open_strict` checks
owners and modes, not access rights, so the tests also work as root.
"""

import os
import stat
from pathlib import Path

import pytest

from mmengine import strict_modes
from mmengine.strict_modes import BadModes, open_strict

OTHER = 4242


@pytest.fixture
def owners(monkeypatch):
    """Return a function that makes a path appear to belong to another user."""
    theirs, real = set(), (os.stat, os.fstat)

    def belongs(status):
        values = list(status)
        values[stat.ST_UID] = OTHER
        return os.stat_result(values)

    def of(status):
        return belongs(status) if (status.st_dev, status.st_ino) in theirs else status

    monkeypatch.setattr(os, "stat", lambda *given, **named: of(real[0](*given, **named)))
    monkeypatch.setattr(os, "fstat", lambda fd: of(real[1](fd)))

    def give_away(path):
        status = os.lstat(path)
        theirs.add((status.st_dev, status.st_ino))

    return give_away


def opened(path, **options):
    fd = open_strict(path, **options)
    try:
        return Path(os.readlink(f"/proc/self/fd/{fd}"))
    finally:
        os.close(fd)


def test_missing_folders_are_made_for_their_owner_alone(tmp_path):
    with pytest.raises(FileNotFoundError):
        open_strict(tmp_path / "a")
    before = os.umask(0)
    try:
        assert opened(tmp_path / "a" / "b", make=True) == tmp_path / "a" / "b"
    finally:
        os.umask(before)
    assert all(path.stat().st_mode & 0o777 == 0o700 for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_each_folder_on_the_way_is_looked_at(tmp_path, mode, place):
    folders = [tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "c"]
    folders[2].mkdir(parents=True)
    assert opened(folders[2]) == folders[2]
    folders[place].chmod(mode)
    with pytest.raises(BadModes, match=f"^{folders[place]} can be written by others: chmod go-w"):
        open_strict(folders[2])
    folders[place].chmod(mode | stat.S_ISVTX)
    if place < 2:
        assert opened(folders[2]) == folders[2]
    else:
        with pytest.raises(BadModes, match="can be written by others"):
            open_strict(folders[2])


def test_what_belongs_to_another_user_is_refused(tmp_path, owners):
    (tmp_path / "a" / "b").mkdir(parents=True)
    owners(tmp_path / "a")
    for path in (tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "new"):
        with pytest.raises(BadModes, match=f"^{tmp_path / 'a'} belongs to another user"):
            open_strict(path, make=True)
    assert not (tmp_path / "a" / "new").exists()


def test_links_are_followed_and_looked_at(tmp_path, owners):
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "absolute").symlink_to(tmp_path / "real")
    (tmp_path / "relative").symlink_to("real/deep/../deep")
    assert (
        opened(tmp_path / "absolute" / "deep") == opened(tmp_path / "relative") == tmp_path / "real" / "deep"
    )
    (tmp_path / "real").chmod(0o777)
    for name in ("absolute/deep", "relative"):
        with pytest.raises(BadModes, match=f"^{tmp_path / 'real'} can be written by others"):
            open_strict(tmp_path / name)
    (tmp_path / "real").chmod(0o700)
    owners(tmp_path / "absolute")
    with pytest.raises(BadModes, match=f"^{tmp_path / 'absolute'} belongs to another user"):
        open_strict(tmp_path / "absolute" / "deep")


def test_links_that_lead_nowhere_end(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="symbolic links"):
        open_strict(tmp_path / "a", make=True)
    with pytest.raises(NotADirectoryError):
        open_strict(tmp_path / "file")


def test_nothing_stays_open(tmp_path, monkeypatch):
    # `open_strict` closes the descriptors of the parent folders, also if it refuses the folder.
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a").chmod(0o777)
    opened(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        opened(tmp_path)
        with pytest.raises(BadModes):
            open_strict(tmp_path / "a" / "b")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_link_put_in_place_of_a_folder_is_not_followed(tmp_path, monkeypatch):
    """Between the check and the opening, the test replaces the folder by a link."""
    (tmp_path / "a").mkdir()
    (tmp_path / "theirs").mkdir()
    real = strict_modes._Walk._open

    def swapped(walk, name):
        if name == "a":
            (tmp_path / "a").rmdir()
            (tmp_path / "a").symlink_to(tmp_path / "theirs")
        real(walk, name)

    monkeypatch.setattr(strict_modes._Walk, "_open", swapped)
    with pytest.raises(OSError):
        open_strict(tmp_path / "a")
