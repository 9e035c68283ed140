"""The interface of model hubs, and their errors. A hub lists a model's files and downloads them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mmengine.errors import ErrorCode, ModelError
from mmengine.hubs.names import TITLES, HubName


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file that a hub lists.

    `sha256`: the file's hash in lower-case hex; None if the hub lists no hash. `is_here`: whether the hub's
    cache on this machine contains the whole file at this revision. `missing_bytes`: bytes still to download;
    0 if the cache contains the file's contents from any revision.
    """

    num_bytes: int
    sha256: str | None
    is_here: bool
    missing_bytes: int


class Hub(Protocol):
    """One revision of one model at a hub. Any method may raise HubError."""

    cache: Path  # The root folder of the hub's cache.

    def find(self) -> Path | None:
        """Return the model's folder in the cache, or None if nothing is cached. Does not use the network."""

    def list_files(self, *, folders: bool = False) -> Mapping[str, HubFile]:
        """Return the files in the model's top folder by name. The hub's names may be unsafe as paths.

        `folders`: also return the files in subfolders, by their path with "/".
        """

    def fetch(self, names: Sequence[str]) -> Path:
        """Fetch the files `names`, which must be names from `list_files`, and return their folder. Resumes an
        interrupted download.
        """


class HubError(ModelError):
    """An error at the hub, with a message for the user.

    `is_network`: the hub did not answer, and callers may use cached files. The code MODEL_NOT_FETCHED means
    that a retry may succeed.
    """

    def __init__(self, text: str, *, is_network: bool = False, code: ErrorCode | None = None) -> None:
        super().__init__(text, code=code)
        self.is_network = is_network


def not_found(name: HubName) -> HubError:
    return HubError(
        f"there is no folder {name.repo}, and {TITLES[name.hub]} has no such model, or shows it only with "
        "a token; check the name, or log in"
    )


def no_revision(name: HubName) -> HubError:
    return HubError(
        f"{name.repo} has no revision {name.revision} at {TITLES[name.hub]}; see its branches and tags there"
    )


def not_allowed(name: HubName, how: str) -> HubError:
    return HubError(
        f"access to {name.repo} at {TITLES[name.hub]} is restricted; accept the terms on the model's page, "
        f"then {how}"
    )


def no_file(name: HubName, file: str) -> HubError:
    return HubError(
        f"{file}, which {name} needs, is missing at {TITLES[name.hub]}; use another revision, or ask the "
        "model's owner"
    )


def wrong_bytes(name: HubName, file: str) -> HubError:
    return HubError(
        f"{file} of {name} was deleted, because it does not match the SHA-256 that {TITLES[name.hub]} lists; "
        "try again, or use another mirror",
        code=ErrorCode.MODEL_NOT_FETCHED,
    )


def cut_off(name: HubName, reason: str) -> HubError:
    return HubError(
        f"{name} could not be fetched completely from {TITLES[name.hub]} ({reason}); try again, complete "
        "files are kept",
        code=ErrorCode.MODEL_NOT_FETCHED,
    )


def not_asked(name: HubName, reason: str) -> HubError:
    return HubError(
        f"there is no folder {name.repo}, and it could not be fetched from the hub, {TITLES[name.hub]} "
        f"({reason}); check the name and the network, or give a folder",
        is_network=True,
    )


def first_line(error: BaseException) -> str:
    """Return the first line of a client's error, with the error's class name."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else 'no reason given'}"
