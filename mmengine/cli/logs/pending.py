"""`mmengine log pending`: lists the requests that had not ended when the log ended."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mmengine.cli.logs.decoding import TokenizerFile, decoder_of
from mmengine.cli.logs.findings import reported
from mmengine.cli.logs.printing import Folder, Json, clean, console, existing, print_json

if TYPE_CHECKING:  # Heavy; loaded when a command runs.
    from mmengine.replay.queries.pending import PendingRequest

HELP = (
    "List the requests that had not ended when the log ended, and the tokens that they had so far.\n\n"
    "After a crash these are the requests to send again. An mmengine server resumes them itself. After a "
    "crash of vLLM with mmengine_vllm.Scheduler, clients must send them again.\n\n"
    "[bold]Examples[/bold]\n\n"
    "  mmengine log pending run.log\n\n"
    "  mmengine log pending run.log --json --tokenizer MODEL   with the text of each answer"
)


def pending(folder: Folder, tokenizer: TokenizerFile = None, json_output: Json = False) -> None:
    import msgspec  # Lazy: help needs neither import.

    from mmengine.replay.queries.pending import pending_requests

    existing(folder)
    decode = None if tokenizer is None else decoder_of(tokenizer)
    with reported(folder) as findings:
        requests = pending_requests(folder, findings)
        if not json_output:
            _print(requests, decode)
            return
        for request in requests:
            text = {} if decode is None else {"output_text": decode(request.output_tokens)}
            print_json({**msgspec.to_builtins(request), **text})


def _print(requests: "list[PendingRequest]", decode: Callable[[Sequence[int]], str] | None) -> None:
    from rich.table import Table

    if not requests:
        print("all requests have ended")
        return
    table = Table(box=None)
    for name in ("request", "state"):
        table.add_column(name)
    for name in ("prompt tokens", "output tokens", "max_tokens"):
        table.add_column(name, justify="right")
    if decode is not None:
        table.add_column("text")
    for request in requests:
        cells = [clean(request.request_id), request.state, str(request.prompt_tokens)]
        cells += [str(len(request.output_tokens)), str(request.max_tokens)]
        if decode is not None:
            cells.append(clean(decode(request.output_tokens)))
        table.add_row(*cells)
    console().print(table)
    print(f"{len(requests)} requests have not ended")
