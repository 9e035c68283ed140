"""An engine without a model for tests of adapters. An adapter's weights file contains any short text, and the
executor's answers begin with the adapter's name.
"""

from types import SimpleNamespace

from mmengine.checkpoint.peft import CONFIG_FILE, WEIGHTS_FILE
from mmengine.errors import ModelError
from tests.serve.serve_fakes import EchoExecutor, builder


class Adapted(EchoExecutor):
    """An executor whose answer begins with the name of the request's adapter."""

    def dispatch(self, plan):
        for admission in plan.admitted:
            self.said = admission.request.adapter
            if self.said is not None:
                assert self.said.digest in self.known and self.said.digest in plan.adapters
        super().dispatch(plan)

    def answer_to(self, prompt):
        name = b"" if self.said is None else self.said.name.encode() + b": "
        return name + super().answer_to(prompt)


def read_adapter(model, folder, max_bytes, value_bytes):
    """Return an adapter whose digest is the content of the folder's weights file."""
    data = (folder / WEIGHTS_FILE).read_bytes()
    if b"broken" in data:
        raise ModelError(f"{folder / WEIGHTS_FILE} is broken")
    return SimpleNamespace(digest=data.ljust(32), num_bytes=lambda size: len(data), is_visual=False)


def made(folder, name, content=None):
    (folder / name).mkdir(parents=True)
    (folder / name / CONFIG_FILE).write_text("{}")
    (folder / name / WEIGHTS_FILE).write_bytes((content or name).encode())
    return folder / name


def adapted_builder(**settings):
    build = builder(executor_class=Adapted, max_loras=2, **settings)

    def with_plugin(*given, takes_adapters=False, **options):
        found = build(*given, **options)
        found.plugin = SimpleNamespace(read_adapter=read_adapter)
        return found

    return with_plugin
