"""An engine builder without a model, which other processes can import by its path."""

from tests.serve.serve_fakes import builder
from tests.server.running import SlowEcho

build = builder(executor_class=SlowEcho)
