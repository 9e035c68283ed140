"""Optional dependencies: the modules in pyproject.toml's extra `engine`, and commands that install extras."""

# Import names of the packages in the extra `engine`. Log commands, replay and simulation run without these
# packages.
ENGINE_MODULES = frozenset(
    [
        "av",
        "h11",
        "huggingface_hub",
        "idna",
        "jinja2",
        "llguidance",
        "PIL",
        "safetensors",
        "tokenizers",
        "torch",
    ]
)


def install_hint(*extras: str) -> str:
    """Return the command that installs `extras` from a checkout of this repository."""
    return f"pip install '.[{','.join(extras)}]' from a checkout"


def engine_hint(error: ImportError) -> str | None:
    """Return how to install a missing module of the extra `engine`, or None for any other module."""
    module = (error.name or "").partition(".")[0]
    if module not in ENGINE_MODULES:
        return None
    return f"the engine needs {module}, which is not installed: {install_hint('engine')}"
