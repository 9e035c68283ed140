"""The live page in a single file: the report's drawing code, and the code that follows a log."""

from importlib.resources import files

from mmengine.replay.report.page import hash_of

# shared with the report's page
SHARED = ("data.js", "view.js", "lanes.js", "tracks.js", "panel.js", "input.js")
OWN = ("columns.js", "stream.js", "playground.js", "live.js")


def live_page() -> tuple[str, str]:
    """Return the HTML and its content security policy: its own script and style, and connections to this
    server.
    """
    report, here = files("mmengine.replay.report"), files("mmengine.server.live")
    style = (report / "page.css").read_text("utf-8") + (here / "live.css").read_text("utf-8")
    parts = [(report / name).read_text("utf-8") for name in SHARED]
    parts += [(here / name).read_text("utf-8") for name in OWN]
    script = '(() => {\n"use strict";\n' + "\n".join(parts) + "\n})();\n"
    policy = (
        f"default-src 'none'; script-src {hash_of(script)}; style-src {hash_of(style)}; connect-src 'self'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    html = (here / "live.html").read_text("utf-8")
    return html.replace("<!--STYLE-->", style).replace("<!--SCRIPT-->", script), policy
