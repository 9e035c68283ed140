"""`mmengine log kv-events`: prints or publishes the KV events in a log, for routers."""

import os
from typing import Annotated

import typer

from mmengine.cli.logs.findings import reported
from mmengine.cli.logs.printing import Folder, existing, print_json

HELP = (
    "Print or publish the KV cache's changes in the format of vLLM's KV events (for Dynamo, llm-d).\n\n"
    "With --publish the command follows the log while it is written, and sends each batch by ZeroMQ. Without "
    "it the batches are printed, a JSON object per line.\n\n"
    "[bold]Example[/bold]\n\n  mmengine log kv-events run.log\n\n"
    "  mmengine log kv-events run.log --publish tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5558"
)


def kv_events(
    folder: Folder,
    publish: Annotated[
        str, typer.Option(help="Endpoint to publish to, such as tcp://*:5557; its readers can read prompts.")
    ] = "",
    replay: Annotated[str, typer.Option(help="Endpoint for requests to repeat batches.")] = "",
    topic: Annotated[str, typer.Option(help="Topic prefix of each message.")] = "",
    beside: Annotated[bool, typer.Option("--beside", hidden=True)] = False,
) -> None:
    if not publish:
        _print(folder)
        return
    from mmengine.cli.kv_events import check_installed  # Lazy imports, for a fast --help.

    check_installed()
    from mmengine.cli.loading import say
    from mmengine.serve.requests.kv_publisher import KvPublisher

    publisher, parent = KvPublisher(folder, publish, replay, topic), os.getppid()
    try:
        say(f"KV events at {' and '.join(filter(None, publisher.endpoints))}")
        publisher.run(lambda: not beside or os.getppid() == parent)
    finally:
        publisher.close()


def _print(folder: Folder) -> None:
    import msgspec

    from mmengine.replay.kv_events.batches import batches

    with reported(existing(folder)) as findings:
        for batch in batches(folder, findings=findings):
            ts, events, rank = msgspec.msgpack.decode(batch.payload)
            print_json({"seq": batch.seq, "ts": ts, "events": events, "data_parallel_rank": rank})
