"""The response schemas for /v1/files and /v1/batches in the OpenAPI document, in OpenAI's format."""

from typing import Literal

from mmengine.server.chat.parsed_request import Json
from mmengine.server.chat.response_schemas import Page, ResponseSchema


class FileObject(ResponseSchema):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Literal["batch", "vision", "user_data", "batch_output"]
    status: Literal["processed"]
    status_details: None


class FileDeleted(ResponseSchema):
    id: str
    object: Literal["file"]
    deleted: bool


class FileObjects(Page):
    data: list[FileObject]


class BatchError(ResponseSchema):
    """An error in a batch's input file. `line`: 1-based line number."""

    code: str
    message: str
    line: int | None
    param: str | None


class BatchErrors(ResponseSchema):
    object: Literal["list"]
    data: list[BatchError]


class RequestCounts(ResponseSchema):
    total: int
    completed: int
    failed: int


class BatchObject(ResponseSchema):
    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating",
        "in_progress",
        "finalizing",
        "completed",
        "failed",
        "expired",
        "cancelling",
        "cancelled",
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchObjects(Page):
    data: list[BatchObject]


class Upload(ResponseSchema):
    """An upload's form fields."""

    file: str
    purpose: Literal["batch", "vision", "user_data"]


def described_upload(schema: Json) -> Json:
    """Return an upload's schema, with `file` as binary data, and with the optional form fields for the file's
    expiry.
    """
    properties = schema["properties"]
    assert isinstance(properties, dict)
    properties["file"] = {"type": "string", "contentMediaType": "application/octet-stream"}
    properties["expires_after[anchor]"] = {"enum": ["created_at"]}
    properties["expires_after[seconds]"] = {"type": "string", "pattern": "^[0-9]+$"}
    return schema
