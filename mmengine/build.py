"""Builds an engine from its parts. Only this module imports both the core (decisions) and the runtime."""

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import structlog
import torch

from mmengine.block_store.registry import BLOCK_STORES
from mmengine.checkpoint.model_files import is_gguf, model_weight_files
from mmengine.config import EngineConfig
from mmengine.core.continuation import OpenLog, open_log
from mmengine.core.engine import EngineCore
from mmengine.core.resume import Resume, ResumeState
from mmengine.core.state.policy import policy_of
from mmengine.errors import ConfigError, ModelError
from mmengine.models.loader import resolve_folder
from mmengine.models.plugin import ModelPlugin, ModelSpec, Processor, Tokenizer, VisionLanguageModel
from mmengine.models.read_ahead import reading_ahead
from mmengine.models.reader import holds_codes
from mmengine.models.registry import choose_plugin
from mmengine.request import GrammarRequest
from mmengine.runtime.device.cpu import available_memory
from mmengine.runtime.device.dtypes import DTYPES, name_of
from mmengine.runtime.device.placement import Placement
from mmengine.runtime.device.registry import open_device
from mmengine.runtime.device.threads import choose_threads
from mmengine.runtime.drafting.drafters import (
    find_head,
    head_for,
    load_any_head,
    make_drafters,
    with_drafts,
)
from mmengine.runtime.executor import TorchExecutor
from mmengine.runtime.kv.store_client import StoreClient
from mmengine.runtime.parallel.ranks import Ranks
from mmengine.runtime.sampling.stops import StopWatcher
from mmengine.runtime.startup.encoder_pace import with_encoder_pace
from mmengine.runtime.startup.sizing import block_bytes_of, resolve
from mmengine.structured_output.engines.backends import GRAMMAR_BACKENDS
from mmengine.structured_output.engines.base import Compiled
from mmengine.structured_output.rows.grammars import Grammars
from mmengine.structured_output.rows.rows import RowMatchers

MAX_LORAS = 8  # adapters per step if adapters are enabled and max_loras is not set

operator_log = structlog.get_logger("mmengine.operators")


@dataclass(slots=True)
class Built:
    """An engine and its components. `config`: the settings, with automatic values replaced."""

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
    resumed: ResumeState | None = None  # the state to continue from; call `core.recover` before `core.step`
    kv_bytes: int = 0  # size of the KV pool
    free_bytes: int = 0  # device memory left after weights and KV pool
    num_threads: int = 1  # torch's thread count in this process
    threads_before: int = 1  # torch's thread count before the engine was built
    store: StoreClient | None = None  # the block store

    def close(self) -> None:
        """Close the grammars, the core and the block store. Restore torch's thread count, unless the caller
        has changed the count since `build`.
        """
        if torch.get_num_threads() == self.num_threads:
            torch.set_num_threads(self.threads_before)
        self.grammars.close()
        try:
            self.core.close()
        finally:
            if self.store is not None:
                self.store.close()


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
    compile_grammar: Callable[[GrammarRequest], Compiled] | None = None,
    takes_adapters: bool = False,
) -> Built:
    """Load a model (a folder, a hub id, or None for the included checkpoint) and build its engine.

    `log`: a folder for the event log; None keeps only the last events, in memory. `resume`: how to continue
    an existing log in `log`; None: an existing log is an error. After a continuation the caller must call the
    core's `recover`. `compile_grammar`: a replacement for the grammar engine's compiler, for tests.
    `takes_adapters`: True replaces `max_loras` 0 with MAX_LORAS, except if the engine continues a log. Raises
    ModelError, ConfigError, LogError.
    """
    config = config or EngineConfig()
    config.check()
    # These checks are fast, so they come before the weights are read.
    policy_of(config)
    GRAMMAR_BACKENDS.load(config.grammar_backend)
    opened = open_log(log, resume, config) if log is not None else None
    if takes_adapters and not config.max_loras and (opened is None or opened.resumed is None):
        config = msgspec.structs.replace(config, max_loras=MAX_LORAS)
    try:
        folder = resolve_folder(model)
        plugin, refusal = choose_plugin(folder, config.model_impl)
        if refusal:
            operator_log.warning("transformers' modules serve the model", refusal=refusal)
        placement = _placement(device, dtype, attention, folder, config)
        _check_quantize(config, placement)
        with placement.device.current(), _weights_ahead(folder):
            return _build(
                folder, plugin, config, placement, opened, resume, stop_watcher_factory, compile_grammar
            )
    except BaseException:
        if opened is not None:
            opened.sink.close()
        raise


def _weights_ahead(folder: Path) -> AbstractContextManager[None]:
    try:
        return reading_ahead(model_weight_files(folder), available_memory())
    except ModelError:  # reading the weights raises this error again
        return nullcontext()


def _build(
    folder: Path,
    plugin: ModelPlugin,
    config: EngineConfig,
    placement: Placement,
    opened: OpenLog | None,
    resume: Resume | None,
    stop_watcher_factory: Callable[[Tokenizer], StopWatcher] | None,
    compile_grammar: Callable[[GrammarRequest], Compiled] | None,
) -> Built:
    processor = plugin.load_processor(folder)
    fingerprints = {"weights": plugin.fingerprint(folder), "processor": processor.fingerprint}
    backend = f"{placement.device.kind}/{placement.attention}"
    backend += f"/tensor_parallel {config.tensor_parallel}" if config.tensor_parallel > 1 else ""
    backend += "/batch_invariant" if config.batch_invariant else ""
    held = "" if config.quantize == "none" else f"/{config.quantize}"
    held += "" if config.activations == "model" else f"/activations {config.activations}"
    fingerprints |= {"dtype": name_of(placement.dtype) + held, "backend": backend}
    if opened is not None:
        opened.check_fingerprints(fingerprints, resume)
    ranks = _ranks(config, folder, placement)
    try:
        return _assemble(
            config,
            plugin,
            processor,
            folder,
            placement if ranks is None else ranks.placement,
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


def _ranks(config: EngineConfig, folder: Path, placement: Placement) -> Ranks | None:
    """Start the other ranks of a tensor-parallel model. Returns None if the model has only one rank."""
    if config.tensor_parallel == 1:
        return None
    return Ranks.begin(
        config.tensor_parallel,
        folder,
        placement=placement,
        step_timeout_s=config.step_timeout_s,
        num_threads=config.num_threads,
    )


def _assemble(
    config: EngineConfig,
    plugin: ModelPlugin,
    processor: Processor,
    folder: Path,
    placement: Placement,
    fingerprints: dict[str, str],
    opened: OpenLog | None,
    ranks: Ranks | None,
    stop_watcher_factory: Callable[[Tokenizer], StopWatcher] | None,
    compile_grammar: Callable[[GrammarRequest], Compiled] | None,
) -> Built:
    resumed = opened.resumed if opened is not None else None
    network = _network(config, plugin, folder, placement, ranks)
    threads = choose_threads(config.num_threads, network.spec.hidden_size, ranks=config.tensor_parallel)
    head = find_head(config, network.spec, plugin, folder, placement)
    config = with_drafts(config, head) if resumed is None else resumed.config_for(config)
    head = head_for(config, head)
    if config.max_loras and not (hasattr(network, "adapter") and hasattr(plugin, "read_adapter")):
        raise ConfigError(f"max_loras is {config.max_loras}, and this model family does not support adapters")
    if resumed is None:
        config = resolve(config, network, head, placement, processor.eos_token_ids)
        config = with_encoder_pace(config, network, threads.count)
    if ranks is not None:
        ranks.meet()
    grammars = _grammars(processor.tokenizer, config, network.spec, compile_grammar)
    matchers = RowMatchers(
        grammars.backend, grammars.compiled, network.spec.vocab_size, grammars.closer, grammars.draft_grammars
    )
    make_executor = TorchExecutor if ranks is None else ranks.executor
    executor = make_executor(
        network,
        getattr(network, "positions", plugin.positions),
        config,
        placement,
        stop_watcher_factory(processor.tokenizer) if stop_watcher_factory else None,
        matchers,
        make_drafters(config, matchers),
        load_any_head(head, config, network, placement) if head is not None else None,
    )
    make_core = EngineCore if opened is None else opened.core
    store = _store(config, executor, fingerprints)
    core = make_core(config, executor, fingerprints=fingerprints, remote=store)
    if store is not None:
        store.connect(core.inbox.put)
    if ranks is not None:
        ranks.start(core)
    before = torch.get_num_threads()
    torch.set_num_threads(threads.count)
    kv_bytes = config.num_blocks * block_bytes_of(config, network.spec, head, placement.dtype)
    free = placement.device.memory()[0] - (0 if placement.device.has_own_memory else kv_bytes)
    return Built(
        core,
        processor,
        plugin,
        executor,
        config,
        network.spec,
        folder,
        placement.device.name,
        name_of(placement.dtype),
        grammars,
        resumed,
        kv_bytes=kv_bytes,
        free_bytes=max(0, free),
        num_threads=threads.count,
        threads_before=before,
        store=store,
    )


def _store(config: EngineConfig, executor: TorchExecutor, fingerprints: dict[str, str]) -> StoreClient | None:
    """Return a client for the block store, or None without a store. Raises ConfigError for an unknown or
    unusable store.
    """
    if not config.block_store:
        return None
    made = BLOCK_STORES.load(config.block_store)(config.block_store_path, config.block_store_bytes)
    return executor.use_store(made, config, fingerprints)


def _network(
    config: EngineConfig, plugin: ModelPlugin, folder: Path, placement: Placement, ranks: Ranks | None
) -> VisionLanguageModel:
    asked: dict[str, Any] = {} if ranks is None else {"shard": ranks.shard}
    asked |= {"batch_invariant": True} if config.batch_invariant else {}
    asked |= {"quantize": config.quantize} if config.quantize != "none" else {}
    asked |= {"activations": config.activations} if config.activations != "model" else {}
    if placement.device.has_own_memory:
        gc.collect()  # frees the weights of closed engines
    where = str(placement.device.torch_device)
    return plugin.load_model(folder, device=where, dtype=name_of(placement.dtype), **asked)


def _check_quantize(config: EngineConfig, placement: Placement) -> None:
    """Raise ConfigError if the device or dtype does not support the quantisation in the settings."""
    name, asked = ("quantize", config.quantize) if config.quantize != "none" else ("activations", "int8")
    if name == "activations" and config.activations == "model":
        return
    where = placement.device.torch_device
    if (
        placement.dtype != torch.bfloat16
        or not holds_codes(where, placement.dtype)
        or config.tensor_parallel > 1
    ):
        raise ConfigError(
            f"{name} {asked} holds weights as codes on one CPU in bfloat16, by compiled kernels "
            f"(mmengine env says whether there are any), and this is {where} in {name_of(placement.dtype)}"
            + (f", cut over {config.tensor_parallel}" if config.tensor_parallel > 1 else "")
            + f"; leave out {name}"
        )


def _grammars(
    tokenizer: Tokenizer,
    config: EngineConfig,
    spec: ModelSpec,
    compile_grammar: Callable[[GrammarRequest], Compiled] | None,
) -> Grammars:
    backend = GRAMMAR_BACKENDS.load(config.grammar_backend)(
        tokenizer.token_bytes, tokenizer.encode, tokenizer.special_ids, config.eos_token_ids, spec.vocab_size
    )
    return Grammars(backend, deadline_s=config.grammar_timeout_s, compile=compile_grammar)


def _placement(device: str, dtype: str, attention: str, folder: Path, config: EngineConfig) -> Placement:
    """Return the placement for the model in `folder`.

    The dtype "auto" means bfloat16, with two exceptions. For the included checkpoint, "auto" means the
    device's fastest dtype. For a GGUF file, "auto" means float32 if the device can multiply float32 by
    quantised weights. The exception for GGUF files requires the default `quantize`, `activations` and
    `tensor_parallel`.
    """
    opened = open_device(device)
    if dtype == "auto":
        rounds = config.quantize != "none" or config.activations != "model" or config.tensor_parallel > 1
        keeps_float32 = is_gguf(folder) and not rounds and holds_codes(opened.torch_device, torch.float32)
        dtype = opened.embedded_dtype if _is_embedded(folder) else "float32" if keeps_float32 else "bfloat16"
    if dtype not in DTYPES:
        raise ConfigError(f"{dtype!r} is not a supported dtype; use auto, {' or '.join(DTYPES)}")
    return Placement(opened, DTYPES[dtype], attention)


def _is_embedded(folder: Path) -> bool:
    try:
        return folder == resolve_folder(None).resolve()
    except ModelError:
        return False
