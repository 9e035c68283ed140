"""Fetches models from Hugging Face, or from the mirror in HF_ENDPOINT.

Hugging Face's own client caches files, authenticates, resumes downloads, and obeys HF_HUB_OFFLINE. The client
checks only file sizes, so this module also verifies hashes.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from mmengine.hubs.hub import (
    HubError,
    HubFile,
    cut_off,
    first_line,
    no_file,
    no_revision,
    not_allowed,
    not_asked,
    not_found,
    wrong_bytes,
)
from mmengine.hubs.names import HubName

_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
LOG_IN = "set HF_TOKEN or run `hf auth login`"


class HuggingFace:
    """A model at Hugging Face. Implements Hub."""

    def __init__(self, name: HubName) -> None:
        # Imported here, because only hub models need a client.
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.file_download

        self._client, self._name = huggingface_hub, name
        self.cache = Path(huggingface_hub.constants.HF_HUB_CACHE)
        self._listed: dict[str, HubFile] = {}
        self._commit = ""

    def find(self) -> Path | None:
        name = self._name
        if (found := self._cached("config.json", name.revision)) is not None:
            return found
        # A repository with GGUF files need not have a config.json.
        folder = self.cache / self._client.file_download.repo_folder_name(
            repo_id=name.repo, repo_type="model"
        )
        commit = name.revision or "main"
        with suppress(OSError):  # A commit id has no ref file.
            commit = (folder / "refs" / commit).read_text().strip()
        snapshot = folder / "snapshots" / commit
        return snapshot if snapshot.is_dir() else None

    def list_files(self, *, folders: bool = False) -> Mapping[str, HubFile]:
        name = self._name
        with self._translated_errors(None):
            info = self._client.HfApi().model_info(name.repo, revision=name.revision, files_metadata=True)
        self._commit = str(info.sha)
        self._listed = {}
        for file in info.siblings or ():
            if "/" in file.rfilename and not folders:
                continue
            num_bytes = int(file.size or 0)
            sha256 = None if file.lfs is None else str(file.lfs.sha256).lower()
            is_here = self._cached(file.rfilename, self._commit) is not None
            has_bytes = is_here or self._has_blob(sha256 or str(file.blob_id), num_bytes)
            missing = 0 if has_bytes else num_bytes
            self._listed[file.rfilename] = HubFile(num_bytes, sha256, is_here, missing)
        return self._listed

    def fetch(self, names: Sequence[str]) -> Path:
        name, new = self._name, [file for file in names if not self._listed[file].is_here]
        if not new and (folder := self._cached(names[0], self._commit)) is not None:
            return folder
        with self._translated_errors(new[0]):
            folder = Path(
                self._client.snapshot_download(name.repo, revision=name.revision, allow_patterns=list(names))
            )
        if folder.name != self._commit:
            raise HubError(f"{name} changed at Hugging Face during the download; try again")
        for file in new:
            if not (folder / file).is_file():
                raise no_file(name, file)
            wanted = self._listed[file].sha256
            if wanted is not None and _sha256(folder / file) != wanted:
                # Delete the blob too, because later calls would accept the blob as complete.
                (folder / file).resolve().unlink()
                (folder / file).unlink(missing_ok=True)
                raise wrong_bytes(name, file)
        return folder

    def _cached(self, file: str, revision: str | None) -> Path | None:
        """Return the model's folder if the cache has the file, or None."""
        try:
            found = self._client.try_to_load_from_cache(self._name.repo, file, revision=revision)
        except (OSError, ValueError):  # Not a valid name.
            return None
        return Path(found).parents[file.count("/")] if isinstance(found, str) else None

    def _has_blob(self, etag: str, num_bytes: int) -> bool:
        """Return whether the cache has the file with this hash, downloaded for any commit.

        The cache names a large file by its SHA-256 and a small file by its Git hash (huggingface_hub's guide,
        "Understand caching").
        """
        if not _HASH.fullmatch(etag):
            return False
        folder = self._client.file_download.repo_folder_name(repo_id=self._name.repo, repo_type="model")
        try:
            return (self.cache / folder / "blobs" / etag).stat().st_size == num_bytes
        except OSError:
            return False

    @contextmanager
    def _translated_errors(self, fetched: str | None) -> Iterator[None]:
        """Turn the client's exceptions into HubError. `fetched`: the requested file, or None for the file
        list.
        """
        errors, name = self._client.errors, self._name
        try:
            yield
        except errors.GatedRepoError:
            raise not_allowed(name, LOG_IN) from None
        except errors.RevisionNotFoundError:
            raise no_revision(name) from None
        except errors.RepositoryNotFoundError:
            raise not_found(name) from None
        except errors.RemoteEntryNotFoundError as error:
            raise no_file(name, _file_of(error) or fetched or "a file") from None
        except errors.OfflineModeIsEnabled:
            raise not_asked(name, "HF_HUB_OFFLINE is set") from None
        except Exception as error:  # Errors from the hub, HTTP and the file system share no base class.
            answer = getattr(error, "response", None)
            if getattr(answer, "status_code", None) in (401, 403):
                raise not_allowed(name, LOG_IN) from error
            reason = first_line(error.__cause__ or error)
            raise (not_asked(name, reason) if fetched is None else cut_off(name, reason)) from error


def _file_of(error: Exception) -> str:
    """Return the name of the missing file: the last part of the request's URL."""
    request = getattr(getattr(error, "response", None), "request", None)
    return str(getattr(request, "url", "")).partition("?")[0].rpartition("/")[2][:100]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
