"""A simulated internet on the loopback interface: hosts with names, certificates and scripted behaviour, on
real sockets.

127.0.0.1 stands for a public address, and 127.0.0.2 for a private address. Connections to both are counted.
"""

import contextlib
import io
import ipaddress
import socket
import ssl
import threading

import trustme
from PIL import Image

from mmengine.processing.fetch.addresses import is_public
from mmengine.processing.fetch.fetcher import MediaFetcher
from mmengine.processing.fetch.limits import FetchLimits

PUBLIC, PRIVATE = "127.0.0.1", "127.0.0.2"
NAME, OTHER, UNSURE = "pictures.example.org", "other.example.net", "wrong.example.com"


def png(size=(32, 32), colour=(200, 30, 30)):
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return file.getvalue()


def answer(body, *headers, status="200 OK"):
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def redirect(location, status="302 Found"):
    return answer(b"", f"Location: {location}", status=status)


class Internet:
    """The simulated internet. `pages` maps a path to the bytes of a whole response, or to a function that
    gets the connection. `names` maps a host name to its list of addresses, or to a list of address lists for
    successive lookups.
    """

    def __init__(self):
        authority = trustme.CA()
        self.pages, self.heads, self.lookups = {}, [], []
        self.names = {name: [PUBLIC] for name in (NAME, OTHER, UNSURE)}
        self.num_connected = {PUBLIC: 0, PRIVATE: 0}
        self.client_tls = ssl.create_default_context()
        authority.configure_trust(self.client_tls)
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert(NAME, OTHER, PUBLIC).configure_cert(self._tls)
        self._closing = threading.Event()
        self._sockets = []
        self.port = self._listen(PUBLIC, 0, secure=True)
        self._listen(PRIVATE, self.port, secure=True)
        self.plain_port = self._listen(PUBLIC, 0, secure=False)
        self._listen(PRIVATE, self.plain_port, secure=False)

    def _listen(self, address, port, secure):
        one = socket.create_server((address, port))
        self._sockets.append(one)
        threading.Thread(target=self._accept, args=(one, address, secure), daemon=True).start()
        return one.getsockname()[1]

    def _accept(self, one, address, secure):
        while True:
            try:
                connection, _ = one.accept()
            except OSError:
                return
            self.num_connected[address] += 1
            threading.Thread(target=self._serve, args=(connection, secure), daemon=True).start()

    def _serve(self, connection, secure):
        connection.settimeout(20)
        with contextlib.suppress(OSError, ssl.SSLError), connection:
            if secure:
                connection = self._tls.wrap_socket(connection, server_side=True)
            with connection:
                head = b""
                while b"\r\n\r\n" not in head and not head.startswith(b"\x16"):  # A TLS handshake.
                    if not (data := connection.recv(4096)):
                        return
                    head += data
                self.heads.append(head.decode("latin-1"))
                path = head.split(b" ")[1].decode("latin-1") if head.startswith(b"GET") else ""
                page = self.pages.get(path, answer(b"", status="404 No"))
                if callable(page):
                    page(connection, self._closing)
                else:
                    connection.sendall(page)

    def resolve(self, name):
        self.lookups.append(name)
        found = self.names.get(name)
        if not found:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        if isinstance(found[0], list):
            found = found.pop(0) if len(found) > 1 else found[0]
        return [ipaddress.ip_address(address) for address in found]

    def fetcher(self, is_allowed=None, **limits):
        ports = self.port, self.plain_port
        return MediaFetcher(
            FetchLimits(**{"ports": ports, "timeout_s": 5.0, **limits}),
            resolve=self.resolve,
            is_allowed=is_allowed or _is_public_here,
            tls=self.client_tls,
        )

    def url(self, path, host=NAME, scheme="https"):
        port = self.port if scheme == "https" else self.plain_port
        return f"{scheme}://{host}:{port}{path}"

    def close(self):
        self._closing.set()
        for one in self._sockets:
            one.close()


def _is_public_here(address):
    return str(address) == PUBLIC or is_public(address)


def fetch(fetcher, *names):
    """Return the fetched bytes in the order of `names`. Raises the first refusal."""
    fetching = fetcher.begin(names)
    try:
        fetching.wait()
        if fetching.error is not None:
            raise fetching.error[1]
        return [fetching.found[name] for name in names]
    finally:
        fetching.release()
