"""Serves the debugger's page on 127.0.0.1 until the process is interrupted."""

import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from mmengine.replay.debug.commands.session import Session
from mmengine.server.debug.app import DebugApp

HOST = "127.0.0.1"


def serve_debugger(session: Session, name: str, port: int, listening: Callable[[str], None]) -> None:
    """Serve the page of a session. `name`: the log's name. `port`: 0 for a free port. `listening` is called
    with the page's address. Raises OSError if the port is in use.
    """
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, port))
        listener.listen()
        port = listener.getsockname()[1]
        app = DebugApp(session, name, port)
        config = uvicorn.Config(app, log_level="error", access_log=False, lifespan="off", ws="none")
        listening(f"http://{HOST}:{port}/{app.token}/")
        _Server(config, app).run(sockets=[listener])


class _Server(uvicorn.Server):
    """A server that interrupts the running command on Ctrl-C. In a long log, a command can take minutes."""

    def __init__(self, config: uvicorn.Config, app: DebugApp):
        super().__init__(config)
        self._app = app

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._app.interrupt()
        super().handle_exit(sig, frame)
