"""Checks API keys in constant time. The key file can be read again while the server runs."""

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from mmengine.bounded_files import read_bounded
from mmengine.errors import ConfigError

MAX_KEYS = 10_000
MAX_KEY_BYTES = 1024
MAX_FILE_BYTES = 2 * MAX_KEYS * MAX_KEY_BYTES  # Includes comments.
ENVIRONMENT = "MMENGINE_API_KEY"
ADMIN_ENVIRONMENT = "MMENGINE_ADMIN_KEY"


class ApiKeys:
    """The API keys from a file and from an environment variable. Without keys, every call is allowed.

    Each line in the file is a key; lines that start with # are comments.
    """

    def __init__(self, path: Path | None, variable: str = ENVIRONMENT):
        self._path, self._variable = path, variable
        self._digests: list[bytes] = []
        self._salts: dict[str, str] = {}  # Maps an owner to the cache salt.
        self._secret = secrets.token_bytes(32)
        self._tenants: dict[str, str] = {}  # Maps an owner to the tenant from the previous process.
        self.read()

    def read(self) -> None:
        """Read the keys again. Raises ConfigError if reading fails; the previous keys then stay valid."""
        keys = [os.environ.get(self._variable, "").strip()]
        if self._path is not None:
            try:
                data = read_bounded(self._path, MAX_FILE_BYTES)
                lines = data.decode("utf-8-sig").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                why = error.strerror if isinstance(error, OSError) else "not UTF-8"
                raise ConfigError(f"the API keys in {self._path} cannot be read ({why})") from None
            keys += [line.strip() for line in lines if not line.lstrip().startswith("#")]
            if not any(keys):
                raise ConfigError(
                    f"{self._path} holds no API key; without a key every call would be allowed: add a key"
                )
        keys = [key for key in keys if key]
        if len(keys) > MAX_KEYS or any(len(key.encode()) > MAX_KEY_BYTES for key in keys):
            raise ConfigError(f"at most {MAX_KEYS} API keys of up to {MAX_KEY_BYTES} bytes are supported")
        self._digests = [_digest(key.encode()) for key in keys]
        self._salts = {_owner(digest): _digest(b"cache salt" + digest).hex()[:32] for digest in self._digests}

    @property
    def any(self) -> bool:
        return bool(self._digests)

    @property
    def are_several(self) -> bool:
        return len(self._digests) > 1

    def owner_of(self, headers: dict[bytes, bytes]) -> str | None:
        """Return the owner of the key in `Authorization: Bearer …` or `x-api-key`.

        The owner is the beginning of the key's digest, which hides the key. Returns None for an unknown key,
        and "" without keys. The time does not depend on the key, because the key is compared with every known
        key.
        """
        if not self._digests:
            return ""
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            given = headers.get(b"x-api-key", b"")
        digest, found = _digest(given.strip()[: MAX_KEY_BYTES + 1]), False
        for each in self._digests:
            found |= hmac.compare_digest(each, digest)
        return _owner(digest) if found else None

    def tenant_of(self, owner: str) -> str:
        """Return the tenant for an owner's requests, or "" without keys.

        The scheduler divides capacity fairly among tenants. The tenant is the owner's hash, keyed with this
        process's secret, so that a published log does not show owners. An owner with recovered requests keeps
        the previous tenant.
        """
        if owner in self._tenants:
            return self._tenants[owner]
        return hmac.digest(self._secret, owner.encode(), "sha256").hex()[:16] if owner else ""

    def keep_tenant(self, owner: str, tenant: str) -> None:
        """Set the owner's tenant to the tenant of a recovered request or session. With two tenants, the owner
        would get two shares of the capacity.
        """
        if owner and tenant:
            self._tenants.setdefault(owner, tenant)

    def salt_of(self, owner: str) -> str:
        """Return the cache salt for an owner's requests, or "" without keys. Clients with other keys cannot
        compute the salt.
        """
        return self._salts.get(owner, owner and self.tenant_of(owner))


def _owner(digest: bytes) -> str:
    return digest.hex()[:16]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
