"""What is asked of a hub: which files a model has, and some of them on this machine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mmengine.errors import ModelError
from mmengine.hubs.names import TITLES, HubName


@dataclass(frozen=True, slots=True)
class HubFile:
    """As the hub lists it. `sha256`: of its bytes, in lower-case hex; None where the hub does not say.
    `is_here`: in the hub's cache on this machine, whole and of this revision. `missing_bytes`: that are to
    come; none also where the cache has the same file of another revision."""

    num_bytes: int
    sha256: str | None
    is_here: bool
    missing_bytes: int


class Hub(Protocol):
    """One model at one revision. Every method raises HubError."""

    cache: Path  # the folder under which files will be

    def find(self) -> Path | None:
        """The folder of what is in the cache, without the network; None where nothing is."""

    def list_files(self) -> Mapping[str, HubFile]:
        """By name, those of the top folder. Names are the hub's: nobody has looked at them yet."""

    def fetch(self, names: Sequence[str]) -> Path:
        """Have these files of `list_files`; the folder they are in. What is cut is taken up where it was."""


class HubError(ModelError):
    """One sentence for whoever named the model. `is_network`: the hub could not be asked, so that what is in
    the cache may be taken."""

    def __init__(self, text: str, *, is_network: bool = False) -> None:
        super().__init__(text)
        self.is_network = is_network


def not_found(name: HubName) -> HubError:
    return HubError(
        f"there is no folder {name.repo}, and {TITLES[name.hub]} has no such model, or shows it to nobody "
        "without a token; check the name, or log in"
    )


def no_revision(name: HubName) -> HubError:
    return HubError(
        f"{name.repo} has no revision {name.revision} at {TITLES[name.hub]}; see its branches and tags there"
    )


def not_allowed(name: HubName, how: str) -> HubError:
    return HubError(
        f"{TITLES[name.hub]} gives {name.repo} only to those whom its owner lets in; accept its terms on its "
        f"page, and then {how}"
    )


def no_file(name: HubName, file: str) -> HubError:
    return HubError(
        f"{file}, which {name} needs, is missing at {TITLES[name.hub]}; take another revision, or tell its "
        "owner"
    )


def wrong_bytes(name: HubName, file: str) -> HubError:
    return HubError(
        f"{file} of {name} came from {TITLES[name.hub]} with other bytes than it has listed (SHA-256), and "
        "was thrown away; try again, or another mirror"
    )


def cut_off(name: HubName, reason: str) -> HubError:
    return HubError(
        f"{name} could not be fetched whole from {TITLES[name.hub]} ({reason}); call again, files that came "
        "whole are kept"
    )


def not_asked(name: HubName, reason: str) -> HubError:
    return HubError(
        f"there is no folder {name.repo}, and it could not be fetched from the hub, {TITLES[name.hub]} "
        f"({reason}); check the name and the network, or give a folder",
        is_network=True,
    )


def first_line(error: BaseException) -> str:
    """Of what a client says, with its kind."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else 'no reason given'}"
