"""Routes by which an operator loads LoRA adapters and unloads them, as vLLM names them.

They are there with an admin key alone, and read nothing outside of the folder that the server was given.
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

ADMIN = "admin"  # who came with an admin key, among the owners of calls
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
MAX_PATH_CHARS = 4096  # of `lora_path`, as the system's own


class LoadBody(msgspec.Struct, forbid_unknown_fields=True):
    """`lora_path`: a folder below the root, relative to it or whole. `load_inplace`: also where the name is
    taken."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadBody(msgspec.Struct, forbid_unknown_fields=True):
    lora_name: str
    lora_int_id: int | None = None  # vLLM's own number, which means nothing here


class AdapterDone(msgspec.Struct):
    """`status`: loaded or unloaded."""

    status: str
    lora_name: str


_B = TypeVar("_B")
_load = msgspec.json.Decoder(LoadBody).decode
_unload = msgspec.json.Decoder(UnloadBody).decode


class AdapterRoutes:
    """`root`: below which folders are read; "": none is."""

    def __init__(
        self, engine: ServedEngine, names: ModelNames, admission: Admission, root: str, keys: ApiKeys | None
    ):
        self._engine, self._names, self._admission = engine, names, admission
        self._root = Path(root).resolve() if root else None
        self._keys = keys if keys is not None and keys.any else None

    def check_key(self, headers: dict[bytes, bytes]) -> str:
        """Who calls. Raises ApiError."""
        if self._root is None or self._keys is None:
            text = "adapters are loaded at the start (--lora); for calls that load them, start with"
            raise ApiError(ErrorCode.NO_LORA_ROOT, f"{text} --lora-root and --admin-key-file")
        if self._keys.owner_of(headers) is None:
            text = "loading adapters takes an admin key; send it as Authorization: Bearer …"
            raise ApiError(ErrorCode.INVALID_API_KEY, text, headers={"www-authenticate": "Bearer"})
        return ADMIN

    async def load(self, request: Request) -> ASGIApp:
        body = await self._body(request, _load)
        name = body.lora_name
        if name in self._names.model_names:
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"{name!r:.80} is a name of the model; give the adapter another",
                FieldPath("lora_name"),
            )
        if name in self._names.adapter_names and not body.load_inplace:
            text = f"the adapter {name!r:.80} is loaded already; give load_inplace, or another name"
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
        """Raises ApiError."""
        with self._admission.reserve(request.scope[OWNER]) as reservation:
            data = b"".join(await self._admission.bodies.read(request.scope, request.receive, reservation))
            return await asyncio.to_thread(decode_body, data, decode)

    def _folder(self, path: str) -> Path:
        """Below the root, and so are the files in it, wherever links lead. Raises ApiError."""
        assert self._root is not None
        if len(path) <= MAX_PATH_CHARS:
            with suppress(OSError, RuntimeError, ValueError):  # a long name, a link to itself, a null byte
                folder = (self._root / path).resolve()
                within = [folder, *((folder / name).resolve() for name in (CONFIG_FILE, WEIGHTS_FILE))]
                if all(each.is_relative_to(self._root) for each in within) and folder.is_dir():
                    return folder
        raise ApiError(
            ErrorCode.INVALID_VALUE,
            f"{FIELD} {path!r:.120} is no folder below --lora-root",
            FieldPath("lora_path"),
        )


def _said(status: str, name: str) -> Response:
    return Response(msgspec.json.encode(AdapterDone(status, name)), media_type="application/json")
