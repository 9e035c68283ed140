"""Runs `mmengine serve` as a process that dies at chosen points.

    python -m tests.durable.server_process FOLDER ENGINE ARGUMENTS

ARGUMENTS are options of `mmengine serve`. A step takes at least 5 ms. At its start, the engine's process
creates a file in FOLDER. The process dies at kill points (faults.py), and its disk can be full
(full_disk.py).

ENGINE `embedded`: each engine process is new and loads the included checkpoint. `echo`: the executor only
repeats the prompt, and each engine process is forked from a process with all modules imported. A new process
would take a second, too long for a thousand kills.
"""

import atexit
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

STEP_S = 0.005
# This environment variable names a file with the number of seconds by which the wall clock is wrong.
CLOCK = "DURABLE_CLOCK"
SEGMENT_BYTES = SNAPSHOT_BYTES = 2**16  # small: each round begins a segment and takes a snapshot


def begin(folder, engine):
    """Prepare the engine's process. No other function may run earlier in the engine's process."""
    from tests.durable import full_disk
    from tests.durable.faults import Faults

    full_disk.install(folder)
    Faults(folder).install()
    life = len(list(folder.glob("life-*")))
    (folder / f"life-{life}.new").write_text(str(os.getpid()))
    (folder / f"life-{life}.new").rename(folder / f"life-{life}")
    (_echo if engine == "echo" else _paced)()


def _set_clock(path):
    told = time.time

    def wrong():
        return told() + float(path.read_text())

    time.time = wrong
    time.time_ns = lambda: int(wrong() * 1e9)


def _paced():
    from mmengine.serve.engine.engine import Engine

    step = Engine.step

    def paced(self, **options):
        time.sleep(STEP_S)
        return step(self, **options)

    Engine.step = paced


def _echo():
    from mmengine.cli import serve, supervisor
    from mmengine.core.resume import Resume
    from mmengine.serve.async_engine.async_engine import AsyncEngine
    from tests.serve import serve_fakes as fakes

    class Saying(fakes.EchoExecutor):
        """Repeats the prompt, with logprobs if the request wants them."""

        def answer_to(self, prompt):
            return prompt

        def dispatch(self, plan):
            super().dispatch(plan)
            result, rows = self._results[-1], plan.rows[plan.sample].tolist()
            wanted = [self._rows[row].sampling.logprobs is not None for row in rows]
            result.logprobs = tuple(
                (index, [(token, -0.5), ((token ^ 1) % 256, -1.5)])
                for index, token in enumerate(result.token_ids.tolist())
                if wanted[index]
            )

        def collect(self):
            time.sleep(STEP_S)
            return super().collect()

        def close(self):
            """Do nothing, so that unfinished answers stay in the log."""

    def engine(model, log, config, progress, beats, loras):
        build = fakes.builder(
            executor_class=Saying,
            log_options={"segment_bytes": SEGMENT_BYTES},
            max_num_seqs=96,
            num_blocks=4000,
            max_model_len=600,
            max_waiting=300,
            snapshot_bytes=SNAPSHOT_BYTES,
        )
        told = build if beats is None else serve.then(build, lambda found: beats.report_built())
        resume = Resume(mode=log.recovery, force=log.force_resume, cause=supervisor.ended_by())
        return AsyncEngine(builder=told, log=log.log, resume=resume)

    serve._engine = engine


class Forked:
    """Replaces the supervisor's subprocess.Popen. Forks this process, which has imported all modules."""

    def __init__(self, command, env, pass_fds, process_group):
        self.returncode = None
        self.pid = os.fork()
        if self.pid:
            return
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.setpgid(0, 0)
            last = 2
            for fd in [*sorted(pass_fds), os.sysconf("SC_OPEN_MAX")]:
                os.closerange(last + 1, fd)
                last = fd
            os.environ.clear()
            os.environ.update(env)
            _, folder, engine, *sys.argv[1:] = command
            begin(Path(folder), engine)
            code = _run()
        except BaseException:
            import traceback

            traceback.print_exc()
            code = 1
        atexit._run_exitfuncs()
        sys.stderr.flush()
        os._exit(code)


def _run():
    from mmengine.cli.main import main

    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def main():
    folder, engine, *arguments = sys.argv[1:]
    from mmengine.cli import supervisor

    sys.argv = ["mmengine", *arguments]
    if CLOCK in os.environ:  # before any module stores time.time as a default
        _set_clock(Path(os.environ[CLOCK]))
    if supervisor.is_supervised():
        begin(Path(folder), engine)
    elif engine == "echo":
        import mmengine.server.chat.media_fetch  # noqa: F401  (so that each fork has the module)
        import tests.serve.serve_fakes  # noqa: F401

        supervisor.COMMAND = ("forked", folder, engine)
        supervisor.subprocess = SimpleNamespace(Popen=Forked)
    else:
        supervisor.COMMAND = (sys.executable, "-m", "tests.durable.server_process", folder, engine)
    sys.exit(_run())


if __name__ == "__main__":
    main()
