"""Parts of the GPU check that describe the device and test correctness.

Each part runs in its own process. speed_parts.py and transformers_parts.py measure speed. No part has run on
a GPU yet.
"""

import importlib.util
import platform
import subprocess
import sys
from functools import partial
from importlib import metadata
from pathlib import Path

import torch

from benchmarks.gpu.bits import compare_bits
from benchmarks.gpu.drafts import compare_chains
from benchmarks.gpu.graphs import compare_encoder_graphs, compare_graphs
from benchmarks.gpu.kernels import compare_layers, compare_sampling
from benchmarks.gpu.run import PartReporter, Work
from benchmarks.gpu.tokens import Verdict, compare_backends, compare_tokens, compare_transformers
from benchmarks.gpu.wide import compare_wide
from mmengine.errors import ConfigError
from mmengine.gpu import sampling
from mmengine.gpu.text_ops import text_ops
from mmengine.models.plugin import ModelSpec
from mmengine.runtime.attention import flashinfer_capability
from mmengine.runtime.attention.registry import make_backend
from mmengine.runtime.device.cuda import CudaDevice
from mmengine.runtime.kv.pool import KVPool
from mmengine.version import __version__

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("tests/gpu", "tests/runtime/test_runtime_masking.py", "tests/qwen3_vl/test_qwen3_vl_fused_text.py")
PACKAGES = ("transformers", "triton", "flashinfer-python", "numpy")


def device(tell: PartReporter) -> None:
    """Report the package versions and the device.

    For an unusable device, report only the reason.
    """
    if not tell.dry:
        problem = CudaDevice.problem(None)
        if problem is not None:
            tell.skip("the device", problem)
            return
        free, total = torch.cuda.mem_get_info()
        tell.fact("memory", f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
    for name in PACKAGES:
        try:
            tell.fact(name, metadata.version(name))
        except metadata.PackageNotFoundError:
            tell.fact(name, "not installed")
    tell.fact("python", platform.python_version())
    tell.fact("torch", torch.__version__)
    tell.fact("cuda", torch.version.cuda)
    tell.fact("mmengine", __version__)
    tell.fact("device", "cpu (dry run)" if tell.dry else torch.cuda.get_device_name())


def compiling(dry: bool) -> dict[str, Work]:
    """Return {name: part} for the parts that compile FlashInfer's kernels.

    These parts can run in parallel. The dict is empty in a dry run and without FlashInfer.
    """
    if dry or flashinfer_capability.package_problem() is not None:
        return {}
    return {
        "norms and gate": _compile_text_ops,
        "decode": partial(_compile_attention, 16),
        "prefill": partial(_compile_attention, 32),
    }


def _compile_text_ops(tell: PartReporter) -> None:
    tell.fact("layer operations", text_ops(torch.device("cuda"), torch.bfloat16).by)


def _compile_attention(num_heads: int, tell: PartReporter) -> None:
    """Compile attention for the 2B model (`num_heads` 16) or the 8B model (32)."""
    spec = ModelSpec(1, num_heads, 8, 128, 64, 64, 4096, 0, 1)
    make_backend("flashinfer", spec, KVPool(spec, 2, 16, torch.bfloat16, CudaDevice()))


def _dtype(tell: PartReporter) -> torch.dtype:
    return torch.float32 if tell.dry else torch.bfloat16


def tokens(tell: PartReporter) -> None:
    for verdict in compare_tokens(tell.device, 4 if tell.dry else 24):
        tell.check(verdict)


def tokens_beside_transformers(tell: PartReporter) -> None:
    tell.check(compare_transformers(tell.device, 4 if tell.dry else 24))


def backends(tell: PartReporter) -> None:
    verdicts, skipped = compare_backends(tell.device, _dtype(tell), 4 if tell.dry else 16)
    for verdict in verdicts:
        tell.check(verdict)
    for name, why in skipped.items():
        tell.skip(name, why)


def kernels(tell: PartReporter) -> None:
    tell.fact("sampling", sampling.describe(torch.device(tell.device)))
    tell.check(compare_layers(tell.device, _dtype(tell), tell.dry))
    tell.check(compare_sampling(tell.device, *((20, 300) if tell.dry else (500, 151_936))))


def bits(tell: PartReporter) -> None:
    try:
        tell.check(compare_bits(tell.device, _dtype(tell), tell.dry))
    except ConfigError as error:
        tell.skip("equal bits, batched or alone", str(error))


def captured(tell: PartReporter) -> None:
    device, dtype = tell.device, _dtype(tell)
    for what, compare in (
        # With two KV heads, FlashInfer decodes on tensor cores for eight query heads, but not for four.
        ("captured steps, 4 heads", partial(compare_graphs, device, dtype, 4)),
        ("captured steps, 8 heads", partial(compare_graphs, device, dtype, 8)),
        ("captured images", partial(compare_encoder_graphs, device, dtype, 96 if tell.dry else 512)),
        ("captured drafts", partial(compare_chains, device, dtype)),
    ):
        try:
            tell.check(compare())
        except ConfigError as error:
            tell.skip(what, str(error))


def wide(tell: PartReporter) -> None:
    for num_heads in (4, 8):
        verdict, how = compare_wide(tell.device, _dtype(tell), num_heads, 3 if tell.dry else 24)
        tell.check(verdict)
        tell.fact(f"backend and graph counts, {num_heads} heads", how)


def tests(tell: PartReporter) -> None:
    """Run the kernel tests with pytest; they use the GPU if there is one."""
    if tell.dry:
        tell.skip("tests of the kernels", "`make test` runs them without a GPU")
        return
    missing = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    if missing:
        tell.skip("tests of the kernels", f"{' and '.join(missing)} not installed")
        return
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", *TESTS],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()[-300:]]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    tell.check(Verdict("tests of the kernels", lines[-1], done.returncode == 0, failed[:8]))
