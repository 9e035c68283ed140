"""A misbehaving decoder for tests of decoder processes. The text in each media item names the fault."""

import ctypes
import os
import time

import numpy as np

from mmengine.errors import InvalidMedia
from mmengine.models.media_decoding import DecodedMedia

MODULES = ("torch", "tokenizers", "jinja2", "transformers")


def decoder(settings):
    if settings == b"does not start":
        os._exit(3)
    return decode


def decode(media):
    data = media.data[0] if isinstance(media.data, tuple) else media.data
    what, _, number = bytes(data).decode().partition(" ")
    match what:
        case "rows":  # returns `number` bytes, and the process id
            rows = np.full((int(number) // 1024, 1024), os.getpid() % 251, np.uint8)
            return DecodedMedia(rows, (1, os.getpid(), os.nice(0)), (0.5,))
        case "times":  # returns the frame times that the process received
            fps, indices, total = media.times
            return DecodedMedia(np.zeros((1, 8), np.uint8), (total, *indices), (), 1.5, interval=1 / fps)
        case "crash":
            ctypes.string_at(0)
        case "killed":
            os.kill(os.getpid(), 9)
        case "spin":
            while True:
                pass
        case "sleep":
            time.sleep(1000)
        case "eat":
            kept = []
            while True:
                kept.append(np.ones(2**22, np.uint8))
        case "eaten":  # reports a MemoryError as unreadable data
            try:
                np.ones(2**40, np.uint8)
            except MemoryError:
                raise InvalidMedia("it is damaged") from None
        case "leave":
            os._exit(0)
        case "refuse":
            raise InvalidMedia(f"{media.where} is no image")
        case "bug":
            raise KeyError(what)
        case "lie":  # the shape claims more data than the array has
            rows = np.zeros((512, 1024), np.uint8)
            return DecodedMedia(_Lying(rows), (1, 1, 1))
        case "modules":
            import sys  # the modules loaded so far

            found = [name for name in MODULES if name in sys.modules]
            raise InvalidMedia(f"{found} {sorted(os.environ)}")
    raise AssertionError(what)


class _Lying:
    """An array whose `shape` claims twice its rows."""

    def __init__(self, rows):
        self.rows, self.shape, self.nbytes = rows, (2 * rows.shape[0], rows.shape[1]), rows.nbytes

    def reshape(self, _):
        return self.rows.reshape(-1)
