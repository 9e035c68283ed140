"""Runs a fleet replica that listens on a Unix socket: python -m tests.fleet.replica_process FOLDER NAME."""

import asyncio
import sys
from pathlib import Path

from mmengine.fleet.replica import Replica
from mmengine.serve.async_engine.async_engine import AsyncEngine
from tests.serve.serve_fakes import builder
from tests.server.running import SlowEcho


async def main(folder: Path, name: str) -> None:
    replica = Replica(
        name, AsyncEngine(builder=builder(executor_class=SlowEcho), log=folder / name), beat_s=0.1
    )

    async def answer(reader, writer):
        size = int.from_bytes(await reader.readexactly(4), "big")
        words = replica.run(await reader.readexactly(size))
        try:
            async for word in words:
                writer.write(len(word).to_bytes(4, "big") + word)
                await writer.drain()
            writer.write(bytes(4))
        except OSError:
            pass
        finally:
            await words.aclose()
            writer.close()

    hidden = folder / f".{name}"
    server = await asyncio.start_unix_server(answer, str(hidden))
    hidden.rename(folder / f"{name}.sock")
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
