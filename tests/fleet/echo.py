"""`build` makes an engine without a model; other processes can import it by path."""

from tests.serve.serve_fakes import builder
from tests.server.running import SlowEcho

build = builder(executor_class=SlowEcho)
