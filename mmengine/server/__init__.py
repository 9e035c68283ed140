"""HTTP before an AsyncEngine. Needs the extra `serve`; nothing below `mmengine.server` knows of it."""
