"""`build` makes an engine without a model. Other processes can import `build` by its path."""

from tests.serve.serve_fakes import builder
from tests.server.running import SlowEcho

build = builder(executor_class=SlowEcho)
