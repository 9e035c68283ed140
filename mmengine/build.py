"""Puts an engine together. The one file that knows both the core and the runtime."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mmengine.config import EngineConfig
from mmengine.core.continuation import OpenLog, open_log
from mmengine.core.engine import EngineCore
from mmengine.core.resume import Resume, ResumeState
from mmengine.core.state.policy import policy_of
from mmengine.errors import ConfigError, ModelError
from mmengine.models.loader import resolve_folder
from mmengine.models.plugin import ModelPlugin, ModelSpec, Processor, Tokenizer, VisionLanguageModel
from mmengine.models.registry import plugin_for
from mmengine.runtime.device.dtypes import DTYPES
from mmengine.runtime.device.gpus import current, why_no_gpu
from mmengine.runtime.device.threads import choose_threads
from mmengine.runtime.drafting.drafters import head_folder, head_for, make_drafters, with_drafts
from mmengine.runtime.drafting.eagle3.loading import load_head
from mmengine.runtime.executor import TorchExecutor
from mmengine.runtime.parallel.ranks import Ranks
from mmengine.runtime.sampling.stops import StopWatcher
from mmengine.runtime.startup.sizing import resolve
from mmengine.structured_output.backends import GRAMMAR_BACKENDS
from mmengine.structured_output.base import Compiled
from mmengine.structured_output.grammars import Grammars
from mmengine.structured_output.rows import RowMatchers


@dataclass(slots=True)
class Built:
    """An engine and its parts. `config` has every size filled in."""

    core: EngineCore
    processor: Processor
    plugin: ModelPlugin
    executor: TorchExecutor
    config: EngineConfig
    spec: ModelSpec
    folder: Path
    device: str
    dtype: str
    grammars: Grammars
    resumed: ResumeState | None = None  # of the log that is continued; the core waits for `recover`
    num_threads: int = 1  # of torch, in the whole process, since this was built
    threads_before: int = 1

    def close(self) -> None:
        """Close the core. The host program has its number of threads back, unless somebody else has set
        another one meanwhile."""
        if torch.get_num_threads() == self.num_threads:
            torch.set_num_threads(self.threads_before)
        self.grammars.close()
        self.core.close()


def build(
    model: str | Path | None = None,
    *,
    config: EngineConfig | None = None,
    device: str = "auto",
    dtype: str = "auto",
    attention: str = "auto",
    log: Path | None = None,
    resume: Resume | None = None,
    stop_watcher_factory: Callable[[Tokenizer], StopWatcher] | None = None,
    compile_grammar: Callable[[str], Compiled] | None = None,
) -> Built:
    """Load a model (a folder, a hub id, or None for the embedded checkpoint) and make its engine.

    `log`: a folder for the event log; None keeps the last events in memory. `resume`: continue the log
    that stands there, if there is one; the caller then owes the core a `recover`. `compile_grammar` stands
    in for the grammar engine's own in tests. Raises ModelError, ConfigError, LogError.
    """
    config = config or EngineConfig()
    config.check()
    policy_of(config)  # raises for one that nobody knows, before weights are read
    GRAMMAR_BACKENDS.load(config.grammar_backend)  # likewise for one that is not installed
    opened = open_log(log, resume, config) if log is not None else None  # a refusal comes at once
    try:
        with current(device):
            return _build(
                model,
                config,
                device,
                dtype,
                attention,
                opened,
                resume,
                stop_watcher_factory,
                compile_grammar,
            )
    except BaseException:
        if opened is not None:
            opened.sink.close()
        raise


def _build(
    model: str | Path | None,
    config: EngineConfig,
    device: str,
    dtype: str,
    attention: str,
    opened: OpenLog | None,
    resume: Resume | None,
    stop_watcher_factory: Callable[[Tokenizer], StopWatcher] | None,
    compile_grammar: Callable[[str], Compiled] | None,
) -> Built:
    folder = resolve_folder(model)
    plugin = plugin_for(folder)
    device = _device(device)
    dtype = _dtype(dtype, device, folder)
    processor = plugin.load_processor(folder)
    fingerprints = {"weights": plugin.fingerprint(folder), "processor": processor.fingerprint}
    backend = f"{torch.device(device).type}/{attention}"
    backend += f"/tensor_parallel {config.tensor_parallel}" if config.tensor_parallel > 1 else ""
    backend += "/batch_invariant" if config.batch_invariant else ""
    fingerprints |= {"dtype": dtype, "backend": backend}
    if opened is not None:
        opened.check_fingerprints(fingerprints, resume)
    ranks = _ranks(config, folder, device, dtype, attention)
    try:
        return _assemble(
            config,
            plugin,
            processor,
            folder,
            device if ranks is None else str(ranks.device),
            dtype,
            attention,
            fingerprints,
            opened,
            ranks,
            stop_watcher_factory,
            compile_grammar,
        )
    except BaseException:
        if ranks is not None:
            ranks.close()
        raise


def _ranks(config: EngineConfig, folder: Path, device: str, dtype: str, attention: str) -> Ranks | None:
    """The other ranks of a model that is cut, on their way."""
    if config.tensor_parallel == 1:
        return None
    return Ranks.begin(
        config.tensor_parallel,
        folder,
        device=device,
        dtype=dtype,
        attention=attention,
        step_timeout_s=config.step_timeout_s,
        num_threads=config.num_threads,
    )


def _assemble(
    config: EngineConfig,
    plugin: ModelPlugin,
    processor: Processor,
    folder: Path,
    device: str,
    dtype: str,
    attention: str,
    fingerprints: dict[str, str],
    opened: OpenLog | None,
    ranks: Ranks | None,
    stop_watcher_factory: Callable[[Tokenizer], StopWatcher] | None,
    compile_grammar: Callable[[str], Compiled] | None,
) -> Built:
    resumed = opened.resumed if opened is not None else None
    network = _network(config, plugin, folder, device, dtype, ranks)
    head = head_folder(config, network.spec, folder, torch.device(device), DTYPES[dtype])
    config = with_drafts(config, head) if resumed is None else resumed.config_for(config)
    head = head_for(config, head)
    if resumed is None:
        where, eos = torch.device(device), processor.eos_token_ids
        config = resolve(config, network, head, DTYPES[dtype], where, eos)
    if ranks is not None:
        ranks.meet()
    grammars = _grammars(processor.tokenizer, config, network.spec, compile_grammar)
    matchers = RowMatchers(
        grammars.backend, grammars.compiled, network.spec.vocab_size, grammars.closer, grammars.draft_grammars
    )
    make_executor = TorchExecutor if ranks is None else ranks.executor
    executor = make_executor(
        network,
        plugin.positions,
        config,
        device,
        DTYPES[dtype],
        attention,
        stop_watcher_factory(processor.tokenizer) if stop_watcher_factory else None,
        matchers,
        make_drafters(config, matchers),
        load_head(head, network, torch.device(device), DTYPES[dtype]) if head is not None else None,
    )
    make_core = EngineCore if opened is None else opened.core
    core = make_core(config, executor, fingerprints=fingerprints)
    if ranks is not None:
        ranks.start(core)
    threads = choose_threads(config.num_threads, network.spec.hidden_size, ranks=config.tensor_parallel)
    before = torch.get_num_threads()
    torch.set_num_threads(threads.count)
    return Built(
        core,
        processor,
        plugin,
        executor,
        config,
        network.spec,
        folder,
        device,
        dtype,
        grammars,
        resumed,
        threads.count,
        before,
    )


def _network(
    config: EngineConfig, plugin: ModelPlugin, folder: Path, device: str, dtype: str, ranks: Ranks | None
) -> VisionLanguageModel:
    asked: dict[str, Any] = {} if ranks is None else {"shard": ranks.shard}
    asked |= {"batch_invariant": True} if config.batch_invariant else {}
    if torch.device(device).type == "cuda":
        gc.collect()  # engines that were closed, and their weights, may go in circles
    return plugin.load_model(folder, device=device, dtype=dtype, **asked)


def _grammars(
    tokenizer: Tokenizer,
    config: EngineConfig,
    spec: ModelSpec,
    compile_grammar: Callable[[str], Compiled] | None,
) -> Grammars:
    backend = GRAMMAR_BACKENDS.load(config.grammar_backend)(
        tokenizer.token_bytes, tokenizer.encode, tokenizer.special_ids, config.eos_token_ids, spec.vocab_size
    )
    return Grammars(backend, deadline_s=config.grammar_timeout_s, compile=compile_grammar)


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"{name!r} is no device; use auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported; use auto, cpu, cuda or cuda:N")
    problem = why_no_gpu(device) if device.type == "cuda" else None
    if problem is not None:
        raise ConfigError(f"device {name} cannot be used: {problem}")
    return name


def _dtype(name: str, device: str, folder: Path) -> str:
    """auto: float32 for the embedded checkpoint on a CPU, whatever its file stores; else bfloat16."""
    if name in DTYPES:
        return name
    if name != "auto":
        raise ConfigError(f"{name!r} is no dtype; use auto, {' or '.join(DTYPES)}")
    try:
        embedded = folder == resolve_folder(None).resolve()
    except ModelError:
        embedded = False
    return "float32" if embedded and device == "cpu" else "bfloat16"
