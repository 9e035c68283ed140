"""Run a benchmark: `python -m benchmarks NAME [arguments]`. Without a name, list all benchmarks.

`python benchmarks NAME` also works, from any directory. Benchmarks start worker processes in this form, with
a dotted module name such as `cpu.day_one_side` as NAME.
"""

import ast
import runpy
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
PROGRAMS = {
    "throughput": "throughput",
    "half_billion": "cpu.half_billion",
    "rivals_cpu": "rivals.rivals_cpu",
    "gguf_cpu": "rivals.gguf_cpu",
    "images_cpu": "rivals.images_cpu",
    "day_one": "cpu.day_one",
    "attention_layers": "cpu.attention_layers",
    "batch_invariant": "cpu.batch_invariant",
    "block_store": "cpu.block_store",
    "deltas": "cpu.deltas",
    "experts": "cpu.experts",
    "linears": "cpu.linears",
    "lora": "cpu.lora",
    "quantised": "quantised.quantised",
    "quantised_error": "quantised.quantised_error",
    "gguf_types": "quantised.gguf_types",
    "gguf_blocks": "quantised.gguf_blocks",
    "spec": "drafts.spec",
    "drafts_real": "drafts.drafts_real",
    "structured": "structured.structured",
    "structured_coverage": "structured_coverage",
    "structured_decode": "structured.structured_decode",
    "structured_generations": "structured.structured_generations",
    "field_confidence": "structured.field_confidence",
    "field_calibration": "structured.field_calibration",
    "functions": "structured.functions",
    "step_cost": "core.step_cost",
    "stress": "core.stress",
    "conformance": "core.conformance",
    "log": "core.log",
    "log_debug": "core.log_debug",
    "rerun_calibration": "core.rerun_calibration",
    "resume": "core.resume",
    "report_page": "core.report_page",
    "serve": "server.serve",
    "serve_durable": "server.serve_durable",
    "serve_traced": "server.serve_traced",
    "batch_killed": "server.batch_killed",
    "embeddings": "pooling.embeddings",
    "embedding_parity": "pooling.parity",
    "preparation": "media.preparation",
    "sessions": "media.sessions",
    "hosted": "any_model.hosted",
    "gpu_bring": "gpu_bring",
}


def path_of(module: str) -> Path:
    """Return the path of a module. `module`: a dotted name relative to this package."""
    return FOLDER.joinpath(*module.split(".")).with_suffix(".py")


def describe(module: str) -> str:
    """Return the first paragraph of the module's docstring, without importing the module."""
    docstring = ast.get_docstring(ast.parse(path_of(module).read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.split("\n\n")[0].split())


def main() -> int:
    """Run the program that the first argument names, or list the programs."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print("Usage: python -m benchmarks NAME [arguments]; `NAME --help` lists the arguments.\n")
        width = max(map(len, PROGRAMS))
        for name, module in PROGRAMS.items():
            print(f"  {name:<{width}}  {describe(module)}")
        return 0
    name = sys.argv.pop(1)
    module = PROGRAMS.get(name, name)
    if not path_of(module).is_file():
        print(f"there is no benchmark {name!r}; `python -m benchmarks` lists them", file=sys.stderr)
        return 2
    runpy.run_module(f"benchmarks.{module}", run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    # `python benchmarks` puts this folder first on sys.path, but imports need the repository's root.
    if not sys.path or Path(sys.path[0]).resolve() != FOLDER.parent:
        sys.path.insert(0, str(FOLDER.parent))
    sys.exit(main())
