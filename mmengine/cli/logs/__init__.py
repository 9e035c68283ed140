"""The commands of `mmengine log`, one module each. They work without a model and without torch."""

import typer

from mmengine.cli.commands import Command, Group
from mmengine.cli.logs import (
    debug,
    diff,
    export,
    fsck,
    kv_events,
    minimize,
    pending,
    redact,
    report,
    rerun,
    show,
    verify,
    why,
)

log_app = typer.Typer(
    cls=Group,
    help="Inspect, verify and convert an event log. Needs neither a model nor a GPU.",
    epilog="Start with: mmengine log show DIR, then mmengine log why DIR REQUEST. Each command has --help.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
log_app.command(cls=Command, help=verify.HELP)(verify.verify)
log_app.command(cls=Command, help=show.HELP)(show.show)
log_app.command(cls=Command, help=why.HELP)(why.why)
log_app.command(cls=Command, help=pending.HELP)(pending.pending)
log_app.command(cls=Command, help=debug.HELP)(debug.debug)
log_app.command(cls=Command, help=diff.HELP)(diff.diff)
log_app.command(cls=Command, help=export.HELP)(export.export)
log_app.command(cls=Command, help=redact.HELP)(redact.redact)
log_app.command(cls=Command, help=minimize.HELP)(minimize.minimize)
log_app.command(cls=Command, help=fsck.HELP)(fsck.fsck)
log_app.command(cls=Command, help=report.HELP)(report.report)
log_app.command(cls=Command, help=rerun.HELP)(rerun.rerun)
log_app.command("kv-events", cls=Command, help=kv_events.HELP)(kv_events.kv_events)
