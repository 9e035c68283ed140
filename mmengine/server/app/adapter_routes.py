"""Routes that load and unload LoRA adapters, with the same paths as in vLLM.

The routes require an admin key, and refuse folders outside --lora-root.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from mmengine.checkpoint.peft import CONFIG_FILE, WEIGHTS_FILE
from mmengine.errors import FIELD, ConfigError, ErrorCode, FieldPath, InvalidRequest, ModelError
from mmengine.serve.async_engine.served_engine import ServedEngine
from mmengine.server.http.admission import OWNER, Admission
from mmengine.server.http.auth import ApiKeys
from mmengine.server.http.errors import ApiError, decode_body
from mmengine.server.http.model_names import ModelNames

ADMIN = "admin"  # Owner of calls with an admin key.
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
MAX_PATH_CHARS = 4096  # Limit for `lora_path`: Linux's PATH_MAX.


class LoadBody(msgspec.Struct, forbid_unknown_fields=True):
    """A body for a call that loads an adapter.

    `lora_path`: a folder below --lora-root, as an absolute path or relative to --lora-root. `load_inplace`:
    replace a loaded adapter with the same name.
    """

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadBody(msgspec.Struct, forbid_unknown_fields=True):
    lora_name: str
    lora_int_id: int | None = None  # Accepted for vLLM's clients, without effect.


class AdapterDone(msgspec.Struct):
    """The response to a call that loads or unloads an adapter. `status`: loaded or unloaded."""

    status: str
    lora_name: str


_B = TypeVar("_B")
_load = msgspec.json.Decoder(LoadBody).decode
_unload = msgspec.json.Decoder(UnloadBody).decode


class AdapterRoutes:
    """The routes for adapters. `root`: the folder that contains all adapters. If `root` is "", no adapter can
    be loaded.
    """

    def __init__(
        self, engine: ServedEngine, names: ModelNames, admission: Admission, root: str, keys: ApiKeys | None
    ):
        self._engine, self._names, self._admission = engine, names, admission
        self._root = Path(root).resolve() if root else None
        self._keys = keys if keys is not None and keys.any else None

    def check_key(self, headers: dict[bytes, bytes]) -> str:
        """Check the admin key, and return the call's owner. Raises ApiError."""
        if self._root is None or self._keys is None:
            text = "calls may not load adapters: start the server with --lora-root and --admin-key-file"
            raise ApiError(ErrorCode.NO_LORA_ROOT, text)
        if self._keys.owner_of(headers) is None:
            text = "loading adapters requires an admin key; send it as Authorization: Bearer …"
            raise ApiError(ErrorCode.INVALID_API_KEY, text, headers={"www-authenticate": "Bearer"})
        return ADMIN

    async def load(self, request: Request) -> ASGIApp:
        body = await self._body(request, _load)
        name = body.lora_name
        if name in self._names.model_names:
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"{name!r:.80} is already a name of the model; use another name for the adapter",
                FieldPath("lora_name"),
            )
        if name in self._names.adapter_names and not body.load_inplace:
            text = f"the adapter {name!r:.80} is already loaded; set load_inplace, or use another name"
            raise ApiError(ErrorCode.INVALID_VALUE, text, FieldPath("lora_name"))
        folder = await asyncio.to_thread(self._folder, body.lora_path)
        try:
            await self._engine.load_adapter(name, str(folder))
        except (ModelError, ConfigError, InvalidRequest) as error:
            raise ApiError(ErrorCode.INVALID_ADAPTER, str(error), FieldPath("lora_path")) from None
        return _said("loaded", name)

    async def unload(self, request: Request) -> ASGIApp:
        body = await self._body(request, _unload)
        try:
            await self._engine.unload_adapter(body.lora_name)
        except InvalidRequest as error:
            raise ApiError(ErrorCode.MODEL_NOT_FOUND, str(error), FieldPath("lora_name")) from None
        return _said("unloaded", body.lora_name)

    async def _body(self, request: Request, decode: Callable[[bytes], _B]) -> _B:
        """Read and decode a body. Raises ApiError."""
        with self._admission.reserve(request.scope[OWNER]) as reservation:
            data = b"".join(await self._admission.bodies.read(request.scope, request.receive, reservation))
            return await asyncio.to_thread(decode_body, data, decode)

    def _folder(self, path: str) -> Path:
        """Return the adapter's folder. Raises ApiError if the folder or a file is outside the root after
        resolving symbolic links.
        """
        assert self._root is not None
        if len(path) <= MAX_PATH_CHARS:
            # resolve() raises for a name that is too long, a link to itself, or a null byte.
            with suppress(OSError, RuntimeError, ValueError):
                folder = (self._root / path).resolve()
                within = [folder, *((folder / name).resolve() for name in (CONFIG_FILE, WEIGHTS_FILE))]
                if all(each.is_relative_to(self._root) for each in within) and folder.is_dir():
                    return folder
        raise ApiError(
            ErrorCode.INVALID_VALUE,
            f"{FIELD} {path!r:.120} is not a folder below --lora-root",
            FieldPath("lora_path"),
        )


def _said(status: str, name: str) -> Response:
    return Response(msgspec.json.encode(AdapterDone(status, name)), media_type="application/json")
