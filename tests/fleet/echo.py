"""`build`: an engine without a model, by a path that another process can import."""

from tests.serve.serve_fakes import builder
from tests.server.running import SlowEcho

build = builder(executor_class=SlowEcho)
