"""An engine builder without a model. Other processes import the builder as tests.fleet.echo:build."""

from tests.serve.serve_fakes import builder
from tests.server.running import SlowEcho

build = builder(executor_class=SlowEcho)
