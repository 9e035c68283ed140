"""`mmengine log`: what a log can be asked. Needs neither a model nor torch. One file a verb."""

import typer

from mmengine.cli.logs import (
    diff,
    export,
    fsck,
    kv_events,
    minimize,
    redact,
    report,
    rerun,
    show,
    verify,
    why,
)

log_app = typer.Typer(
    help="Ask an event log what happened, and whether it is true. No model and no GPU is needed.",
    epilog="Start with: mmengine log show DIR, then mmengine log why DIR REQUEST. Each verb has --help.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
log_app.command(help=verify.HELP)(verify.verify)
log_app.command(help=show.HELP)(show.show)
log_app.command(help=why.HELP)(why.why)
log_app.command(help=diff.HELP)(diff.diff)
log_app.command(help=export.HELP)(export.export)
log_app.command(help=redact.HELP)(redact.redact)
log_app.command(help=minimize.HELP)(minimize.minimize)
log_app.command(help=fsck.HELP)(fsck.fsck)
log_app.command(help=report.HELP)(report.report)
log_app.command(help=rerun.HELP)(rerun.rerun)
log_app.command("kv-events", help=kv_events.HELP)(kv_events.kv_events)
