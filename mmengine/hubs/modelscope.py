"""Fetches models from ModelScope, or from the mirror in MODELSCOPE_ENDPOINT. ModelScope's own client (extra
`modelscope`) does the caching, authentication, resuming and hash checks. This client has no variable for
offline use, so HF_HUB_OFFLINE applies.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from mmengine.errors import ModelError
from mmengine.extras import install_hint
from mmengine.hubs.hub import (
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

MAIN_BRANCH = "master"
LOG_IN = "set MODELSCOPE_API_TOKEN or run `ms login`"


class ModelScope:
    """A model at ModelScope. Implements Hub."""

    def __init__(self, name: HubName) -> None:
        try:
            # Imported here, because the client is an optional dependency that only hub models need.
            import modelscope_hub
        except ImportError:
            raise ModelError(
                f"fetching {name.repo} from ModelScope needs its client: {install_hint('modelscope')}"
            ) from None
        from huggingface_hub.constants import is_offline_mode  # Lazy: only hub models need the import.

        self._client, self._name, self._is_offline = modelscope_hub, name, is_offline_mode()
        self._revision = name.revision or MAIN_BRANCH
        self._api = modelscope_hub.HubApi(modelscope_hub.HubConfig())
        self.cache = Path(self._api._config.cache_dir)
        self._listed: dict[str, HubFile] = {}

    def find(self) -> Path | None:
        try:
            found = self._api.download_repo(
                self._name.repo, "model", revision=self._revision, local_files_only=True
            )
        except self._client.HubError:
            return None
        return Path(found)

    def list_files(self, *, folders: bool = False) -> Mapping[str, HubFile]:
        name = self._name
        if self._is_offline:
            raise not_asked(name, "HF_HUB_OFFLINE is set")
        with self._told(None):
            # The client may choose between two endpoints. All later calls must use the chosen endpoint.
            endpoint = self._api.resolve_endpoint_for_read(name.repo)
            self._api = self._client.HubApi(self._client.HubConfig(endpoint=endpoint))
            files = self._api.list_repo_files(name.repo, "model", revision=self._revision, recursive=folders)
        here = self.find()
        self._listed = {}
        for file in files:
            if file.is_dir or ("/" in file.path and not folders):
                continue
            is_here = here is not None and _is_here(here / file.path, file.size, file.last_modified)
            missing = 0 if is_here else file.size
            sha256 = file.sha256 and file.sha256.lower()
            self._listed[file.path] = HubFile(file.size, sha256, is_here, missing)
        return self._listed

    def fetch(self, names: Sequence[str]) -> Path:
        for file in names:
            listed = self._listed[file]
            if not listed.is_here:
                with self._told(file):
                    self._api.download_file(
                        self._name.repo,
                        "model",
                        file,
                        revision=self._revision,
                        expected_sha256=listed.sha256,
                        file_size=listed.num_bytes,
                    )
        folder = self.find()
        if folder is None:
            raise no_file(self._name, names[0])
        return folder

    @contextmanager
    def _told(self, fetched: str | None) -> Iterator[None]:
        """Convert the client's exceptions to HubError. `fetched`: the requested file, or None for the file
        list.
        """
        client, name = self._client, self._name
        try:
            yield
        except (client.AuthenticationError, client.PermissionDeniedError):
            raise not_allowed(name, LOG_IN) from None
        except client.NotExistError:
            if fetched is not None:
                raise no_file(name, fetched) from None
            raise (no_revision(name) if self._is_known() else not_found(name)) from None
        except client.FileIntegrityError as error:
            raise wrong_bytes(name, fetched or "a file") from error
        except Exception as error:  # Errors from the hub, HTTP and the file system share no base class.
            reason = first_line(error.__cause__ or error)
            raise (not_asked(name, reason) if fetched is None else cut_off(name, reason)) from error

    def _is_known(self) -> bool:
        """Return whether the hub has the model but not the requested revision. Returns False if no
        revision was requested.
        """
        try:
            return self._name.revision is not None and self._api.repo_exists(self._name.repo, "model")
        except Exception:  # The client's errors share no base class.
            return False


def _is_here(path: Path, num_bytes: int, changed: object) -> bool:
    """Return whether a cached file has the listed size and is newer than the hub's file. Otherwise the client
    fetches the file again.
    """
    try:
        found = path.stat()
    except (OSError, ValueError):
        return False
    return (
        found.st_size == num_bytes and isinstance(changed, datetime) and found.st_mtime > changed.timestamp()
    )
