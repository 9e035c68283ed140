"""HTTP before an engine. Needs the extra `serve`; nothing below `mmengine.server` knows of it."""
