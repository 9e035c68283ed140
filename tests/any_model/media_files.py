"""Converts a chat's images and videos to `data:` URLs with losslessly encoded files, which a log can
store.
"""

import base64
import io
from fractions import Fraction

import av


def with_files(chat, fps=1.0):
    """Return the chat with `data:` URLs. `fps`: frames per second of the videos."""
    content = chat[0]["content"]
    if isinstance(content, str):
        return chat
    return [{"role": "user", "content": [_file(part, fps) for part in content]}]


def _file(part, fps):
    if part["type"] == "image":
        file = io.BytesIO()
        part["image"].save(file, "PNG")
        return {"type": "image_url", "image_url": {"url": _url("image/png", file)}}
    return {**part, "video": video_url(part["video"], fps)} if part["type"] == "video" else part


def video_url(frames, fps):
    """Return the `data:` URL of a video file with the frames' exact pixels."""
    file = io.BytesIO()
    with av.open(file, "w", format="mov") as container:
        stream = container.add_stream("png", rate=Fraction(fps))
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "rgb24"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, "rgb24")))
        container.mux(stream.encode(None))
    return _url("video/quicktime", file)


def _url(kind, file):
    return f"data:{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
