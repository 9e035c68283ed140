"""A fake model hub on the loopback interface. It implements the HTTP calls that Hugging Face's and
ModelScope's clients make for a model.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

REPO = "acme/tiny-1B"
LARGE = 1024  # Files with at least this many bytes are listed with a hash, like files in Git LFS.
CHANGED = 1_600_000_000  # Each file's modification time.


@dataclass
class FakeHub:
    """The hub's files and scripted failures. `asked`: method, path and Range header for each received
    request.
    """

    revisions: dict[str, dict[str, bytes]]
    gated: bool = False
    cut_after: dict[str, int] = field(default_factory=dict)  # Truncate the response to this many bytes, once.
    always_cut: bool = False
    sent: dict[str, bytes] = field(default_factory=dict)  # Wrong bytes to send for a file.
    gone: set[str] = field(default_factory=set)  # Files that are listed but cannot be fetched.
    listed: dict[str, int] = field(default_factory=dict)  # Sizes of further files to list.
    asked: list[str] = field(default_factory=list)
    url: str = ""

    def commit(self, revision: str) -> str:
        content = json.dumps({name: _sha256(data) for name, data in self.revisions[revision].items()})
        return hashlib.sha1(content.encode()).hexdigest()

    def files(self, revision: str) -> dict[str, bytes] | None:
        """Return the files in a branch or commit, or None if `revision` is unknown."""
        for name, files in self.revisions.items():
            if revision in (name, self.commit(name)):
                return files
        return None

    def fetched(self) -> list[str]:
        """Return the files whose bytes were requested."""
        names = (each.partition(" ")[2] for each in self.asked if each.startswith("GET"))
        return sorted({name.partition(" ")[0] for name in names if "/api/" not in name})


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@contextmanager
def running(hub: FakeHub) -> Iterator[FakeHub]:
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        path, query = unquote(parts.path), {key: value[0] for key, value in parse_qs(parts.query).items()}
        if path.startswith(("/api/v1/models/", "/openapi/")):
            self._modelscope(path, query)
        else:
            self._hugging_face(path)

    def _hugging_face(self, path: str) -> None:
        hub, model = self.hub, f"/api/models/{REPO}"
        if path == model or path.startswith((f"{model}/revision/", f"{model}/tree/")):
            revision = path.rpartition("/")[2] if path != model else "main"
            files = hub.files(revision)
            if files is None:
                return self._error(404, "RevisionNotFound")
            sizes = {name: len(data) for name, data in files.items()} | hub.listed
            if "/tree/" in path:
                return self._json(
                    [
                        {"type": "file", "path": name, "size": size, "oid": "0" * 40}
                        for name, size in sizes.items()
                    ]
                )
            siblings = []
            for name, size in sizes.items():
                entry: dict[str, object] = {"rfilename": name, "size": size, "blobId": "0" * 40}
                if size >= LARGE and name in files:
                    entry["lfs"] = {"sha256": _sha256(files[name]), "size": size, "pointerSize": 130}
                siblings.append(entry)
            name = next(each for each in hub.revisions if hub.files(revision) is hub.revisions[each])
            return self._json({"id": REPO, "sha": hub.commit(name), "siblings": siblings})
        if path.startswith(f"/{REPO}/resolve/"):
            revision, _, file = path.removeprefix(f"/{REPO}/resolve/").partition("/")
            if hub.gated:
                return self._error(403, "GatedRepo")
            files = hub.files(revision)
            if files is None or file not in files or file in hub.gone:
                return self._error(404, "EntryNotFound")
            name = next(each for each in hub.revisions if files is hub.revisions[each])
            etag = _sha256(files[file])
            return self._bytes(file, files[file], {"X-Repo-Commit": hub.commit(name), "ETag": f'"{etag}"'})
        return self._error(401, "RepoNotFound")  # Hugging Face sends 401 for private and for unknown models.

    def _modelscope(self, path: str, query: dict[str, str]) -> None:
        hub, model = self.hub, f"/api/v1/models/{REPO}"
        if path in (f"/openapi/v1/models/{REPO}", model):
            return self._json({"success": True, "Code": 200, "data": {"id": REPO}, "Data": {"Name": REPO}})
        if not path.startswith(f"{model}/repo"):
            return self._json({"Code": 404, "Message": "not found"}, 404)
        if hub.gated:
            return self._json({"Code": 403, "Message": "no access"}, 403)
        files = hub.files(query["Revision"].replace("master", "main"))
        if files is None:
            return self._json({"Code": 404, "Message": "no such revision"}, 404)
        if path == f"{model}/repo/files":
            sizes = {name: len(data) for name, data in files.items()} | hub.listed
            entries = [
                {
                    "Path": name,
                    "Name": name,
                    "Type": "blob",
                    "Size": size,
                    "Sha256": _sha256(files.get(name, b"")),
                    "CommittedDate": CHANGED,
                }
                for name, size in sizes.items()
            ]
            return self._json({"Code": 200, "Data": {"Files": entries}})
        file = query["FilePath"]
        if file not in files or file in hub.gone:
            return self._json({"Code": 404, "Message": "no such file"}, 404)
        return self._bytes(file, files[file], {})

    def _bytes(self, file: str, data: bytes, headers: dict[str, str]) -> None:
        hub, asked = self.hub, self.headers.get("Range", "")
        hub.asked.append(f"{self.command} {file} {asked}".strip())
        data = hub.sent.get(file, data)
        start = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
        body = data[start:]
        self.send_response(206 if asked else 200)
        for name, value in headers.items():
            self.send_header(name, value)
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        most = hub.cut_after.get(file) if hub.always_cut else hub.cut_after.pop(file, None)
        if most is not None:
            body = b"" if start and hub.always_cut else body[:most]
            self.close_connection = True
        self.wfile.write(body)

    def _json(self, value: object, status: int = 200) -> None:
        self.hub.asked.append(f"{self.command} {urlsplit(self.path).path}")
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)

    def _error(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()
