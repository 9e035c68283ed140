"""Finds config.json fields that transformers' model reads, but a plugin silently ignores."""

import ast
from importlib.util import find_spec
from pathlib import Path

# Fields that change no logits at inference, in any model.
CHANGES_NOTHING = {
    "_attn_implementation",
    "attention_dropout",
    "initializer_range",
    "output_router_logits",
    "pad_token_id",
    "router_aux_loss_coef",
}
CONFIGS = ("config", "text_config", "vision_config")


class Noted(dict):
    """A JSON object. Reading a field, also in a nested object, adds the field's name to `asked`."""

    def __init__(self, values, asked):
        super().__init__((name, self._noted(value, asked)) for name, value in values.items())
        self._asked = asked

    @staticmethod
    def _noted(value, asked):
        return Noted(value, asked) if isinstance(value, dict) else value

    def get(self, name, default=None):
        self._asked.add(name)
        return super().get(name, default)

    def __getitem__(self, name):
        self._asked.add(name)
        return super().__getitem__(name)


def read_by_transformers(model):
    """Return the field names that a transformers modeling file reads from a config."""
    folder = Path(find_spec("transformers").origin).parent / "models" / model
    found = set()
    for node in ast.walk(ast.parse((folder / f"modeling_{model}.py").read_text())):
        if isinstance(node, ast.Attribute):
            of = getattr(node.value, "id", getattr(node.value, "attr", ""))
            found |= {node.attr} if of in CONFIGS else set()
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr":
            of, name = node.args[0], node.args[1]
            if getattr(of, "id", getattr(of, "attr", "")) in CONFIGS and isinstance(name, ast.Constant):
                found.add(name.value)
    assert len(found) > 10, "the modeling file's code has changed; adapt this function"
    return found


def ignored(model, asked):
    """Return the fields that transformers' model reads, without the fields in `asked`."""
    return read_by_transformers(model) - asked - CHANGES_NOTHING - set(CONFIGS)
