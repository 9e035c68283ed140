"""Separates the pipeline constructor's keywords into the model, Engine arguments and call defaults."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmengine.config import EngineConfig
from mmengine.errors import ConfigError
from mmengine.hubs.names import parse_name
from mmengine.serve.engine.engine import Engine
from mmengine.serve.pipeline.call_options import OWN, is_processing_option
from mmengine.serve.pipeline.generation_options import is_generation_option
from mmengine.setting_names import FOREIGN, advice_for

ENGINE = ("config", "log", "attention", "loras", "resume")
# transformers' keywords that are accepted without effect if the value is None or listed here. The listed
# values ask for no behaviour that this pipeline lacks.
_AGREES: dict[str, tuple[object, ...]] = {
    "framework": ("pt",),
    "low_cpu_mem_usage": (True, False),
    "token": (True,),
    "trust_remote_code": (True, False),
    "use_auth_token": (True,),
    "use_fast": (True,),
}


@dataclass(frozen=True, slots=True)
class Construction:
    """A pipeline's checked constructor arguments.

    `engine` has keywords for Engine, and `defaults` has options that apply to every call.
    """

    model: Any
    engine: dict[str, Any]
    defaults: dict[str, Any]

    @classmethod
    def of(cls, model: Any, keywords: Mapping[str, Any]) -> "Construction":
        """Separate the keywords. Raises ConfigError for a keyword with an unsupported value."""
        given = _unfolded(keywords)
        revision = given.pop("revision", None)
        engine = {
            name: given.pop(name) for name in (*ENGINE, *EngineConfig.__struct_fields__) if name in given
        }
        config = engine.get("config")
        if config is not None and not isinstance(config, EngineConfig):
            raise ConfigError(f"config must be an mmengine.EngineConfig, not a {type(config).__name__}")
        dtypes = given.pop("torch_dtype", None), given.pop("dtype", None)
        dtype = dtypes[0] if dtypes[1] is None else dtypes[1]
        device = _device(given.pop("device", None), given.pop("device_map", None))
        for name, value in list(given.items()):
            # A call accepts and ignores `tokenizer`, which transformers uses there only for stop strings. In
            # the constructor, transformers would replace the model's tokenizer, which this pipeline does not
            # support.
            is_foreign = name in FOREIGN and (name == "tokenizer" or not _is_call_option(name))
            if is_foreign and given.pop(name) is not None and value not in _AGREES.get(name, ()):
                raise ConfigError(f"{name}={value!r:.80} is not supported: {advice_for(name)}")
        if isinstance(model, Engine):
            _check_engine(model, {"revision": revision, **engine}, device, dtype_name(dtype))
            return cls(model, {}, given)
        placed = {"device": device, "dtype": dtype_name(dtype)}
        return cls(_with_revision(model, revision), placed | engine, given)

    def check_defaults(self, template_variables: Iterable[str]) -> None:
        """Raise ConfigError for a default that no call can use.

        `template_variables` has the variable names that the chat template reads.
        """
        if self.defaults.get("chat_template") is not None:
            return  # a custom chat template may read any variable
        known = {*template_variables, "tools", "documents", "chat_template"}
        for name, value in self.defaults.items():
            if value is not None and name not in known and not _is_call_option(name):
                advice = advice_for(name, [*OWN, *ENGINE, *known, "device", "dtype"])
                raise ConfigError(
                    f"unknown argument {name!r:.80}: {advice or 'leave it out'}; neither the pipeline, the "
                    "engine nor the chat template has it"
                )


def _unfolded(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords after moving entries from transformers' `model_kwargs` to the top level."""
    given = {name: value for name, value in keywords.items() if name != "model_kwargs"}
    inner = keywords.get("model_kwargs")
    if inner is None:
        return given
    if not isinstance(inner, Mapping):
        raise ConfigError(f"model_kwargs must be a dict, not a {type(inner).__name__}")
    for name in inner:
        if given.get(name) is not None:
            raise ConfigError(f"{name} is given twice, by itself and in model_kwargs")
        if name not in (*ENGINE, *EngineConfig.__struct_fields__, "revision", "dtype", "device", *FOREIGN):
            raise ConfigError(
                f"model_kwargs: {name!r:.80} is not supported: {advice_for(name) or 'leave it out'}"
            )
    return {**given, **inner}


def _is_call_option(name: str) -> bool:
    return name in OWN or is_generation_option(name) or is_processing_option(name)


def _device(device: Any, device_map: Any) -> str:
    """Return the device's name from `device` and `device_map`. Raises ConfigError for several devices."""
    if device_map is None:
        return device_name(device)
    if device is not None:
        raise ConfigError("device and device_map exclude each other; give device")
    if isinstance(device_map, Mapping):
        places = {device_name(place) for place in device_map.values()}
        if len(places) == 1 and "disk" not in places:
            return places.pop()
    elif isinstance(device_map, int) or str(device_map).partition(":")[0] in ("auto", "cpu", "cuda"):
        return device_name(device_map)
    raise ConfigError(f"device_map={device_map!r:.80} is not supported: {advice_for('device_map')}")


def device_name(device: Any) -> str:
    """Return the engine's name for a device that is given as a number, a name or a torch device."""
    if device is None:
        return "auto"
    if isinstance(device, int):
        return "cpu" if device < 0 else f"cuda:{device}"
    return str(device)


def dtype_name(dtype: Any) -> str:
    """Return the engine's name for a dtype, such as "bfloat16" for torch.bfloat16."""
    return "auto" if dtype is None else str(dtype).removeprefix("torch.")


def _check_engine(engine: Engine, options: Mapping[str, Any], device: str, dtype: str) -> None:
    """Raise ConfigError for keywords that an existing engine cannot follow, such as a different device."""
    wrong = [name for name, value in options.items() if value is not None]
    built = engine.built
    if device != "auto" and device.partition(":")[0] != str(built.device).partition(":")[0]:
        wrong.append("device")
    if dtype not in ("auto", str(built.dtype)):
        wrong.append("dtype")
    if wrong:
        raise ConfigError(
            f"{wrong[0]} has no effect on an existing Engine; pass it to mmengine.Engine instead"
        )


def _with_revision(model: Any, revision: Any) -> Any:
    """Return the folder or the hub id that Engine loads, with its revision.

    The weights of a loaded transformers model are loaded again from the same source and commit.
    """
    name = model
    if not (model is None or isinstance(model, (str, Path))):
        name = getattr(model, "name_or_path", "")
        if not name:
            raise ConfigError(
                f"model must be a folder, a hub id or an mmengine.Engine, not a {type(model).__name__} "
                "object that does not say from where it was loaded"
            )
        revision = revision or getattr(getattr(model, "config", None), "_commit_hash", None)
        if Path(name).exists():
            return name
    if revision is None:
        return name
    known = parse_name(name) if isinstance(name, str) and not Path(name).expanduser().exists() else None
    if known is None:
        shown = "the included checkpoint" if name is None else f"{str(name)[:100]!r}, which is no hub id,"
        raise ConfigError(f"revision={revision!r:.80}: {shown} has no revisions; leave revision out")
    if known.revision not in (None, revision):
        raise ConfigError(f"model {str(name)[:200]!r} and revision={revision!r:.80} name different revisions")
    return name if known.revision else f"{name}@{revision}"
