"""The route table for files and batches, with their OpenAPI descriptions."""

from mmengine.server.batches.file_routes import FileRoutes
from mmengine.server.batches.routes import BatchBody, BatchRoutes
from mmengine.server.batches.schemas import (
    BatchObject,
    BatchObjects,
    FileDeleted,
    FileObject,
    FileObjects,
    Upload,
)
from mmengine.server.http.route_records import NO_BODY, PAGES, READS, Operation, RouteRecord

_FILE = "/v1/files/{file_id}"
FILE_ROUTES = (
    RouteRecord(
        "POST",
        "/v1/files",
        FileRoutes.create,
        Operation(
            "Upload a file",
            FileObject,
            "The file",
            (400, 404, *READS),
            Upload,
            body_type="multipart/form-data",
        ),
    ),
    RouteRecord(
        "GET",
        "/v1/files",
        FileRoutes.list_files,
        Operation(
            "List the caller's files", FileObjects, "A page", (400, *NO_BODY), query=("purpose", *PAGES)
        ),
    ),
    RouteRecord("GET", _FILE, FileRoutes.get, Operation("Get a file", FileObject, "The file", NO_BODY)),
    RouteRecord(
        "DELETE",
        _FILE,
        FileRoutes.delete,
        Operation("Delete a file", FileDeleted, "Deleted", (409, 503, *NO_BODY)),
    ),
    RouteRecord(
        "GET",
        f"{_FILE}/content",
        FileRoutes.content,
        Operation("Download a file", "application/octet-stream", "The file's bytes", NO_BODY),
    ),
)

_BATCH = "/v1/batches/{batch_id}"
BATCH_ROUTES = (
    RouteRecord(
        "POST",
        "/v1/batches",
        BatchRoutes.create,
        Operation(
            "Answer a file of requests", BatchObject, "The batch", (400, 404, 409, 422, *READS), BatchBody
        ),
    ),
    RouteRecord(
        "GET",
        "/v1/batches",
        BatchRoutes.list_batches,
        Operation("List the caller's batches", BatchObjects, "A page", (400, *NO_BODY), query=PAGES),
    ),
    RouteRecord("GET", _BATCH, BatchRoutes.get, Operation("Get a batch", BatchObject, "The batch", NO_BODY)),
    RouteRecord(
        "POST",
        f"{_BATCH}/cancel",
        BatchRoutes.cancel,
        Operation("Cancel a batch", BatchObject, "The batch", (409, 503, *NO_BODY)),
    ),
)
