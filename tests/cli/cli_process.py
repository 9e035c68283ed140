"""Running the command in a process of its own."""

import subprocess
import sys

HEAVY = ("torch", "transformers", "PIL", "av", "tokenizers", "llguidance", "xgrammar")


def run_cli(*arguments, blocked=(), env=None, cwd=None):
    """Run the command in a process of its own and say which heavy modules it loaded."""
    code = (
        "import sys\n"
        f"for name in {list(blocked)!r}: sys.modules[name] = None\n"
        "import atexit\n"
        f"heavy = {[*HEAVY, 'numpy', 'rich.console']!r}\n"
        "found = lambda: [name for name in heavy if sys.modules.get(name)]\n"
        "atexit.register(lambda: print('LOADED', found(), file=sys.stderr))\n"
        f"sys.argv = ['mmengine', *{list(arguments)!r}]\n"
        "from mmengine.cli.main import main\n"
        "main()\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env, cwd=cwd
    )


def loaded(result):
    line = next(line for line in result.stderr.splitlines() if line.startswith("LOADED"))
    return line.removeprefix("LOADED ")
