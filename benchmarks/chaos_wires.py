"""Lines between clusters and their hub that can be cut, for `benchmarks/chaos.py`."""

from __future__ import annotations

import asyncio
import threading
import time

_START_S = 60.0


class Wires:
    """A line of each cluster to the hub, which can be cut, or go silent."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._open: dict[str, set[asyncio.StreamWriter]] = {}
        self._is_cut: dict[str, bool] = {}
        self._flows: dict[str, asyncio.Event] = {}
        self.moved_bytes: dict[str, int] = {}
        self.goal = 0
        """The hub' port."""
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def add(self, name: str) -> int:
        """A line; the port at which it begins."""
        future = asyncio.run_coroutine_threadsafe(self._add(name), self._loop)
        return future.result(_START_S)

    async def _add(self, name: str) -> int:
        self._open[name], self._is_cut[name], self.moved_bytes[name] = set(), False, 0
        self._flows[name] = asyncio.Event()
        self._flows[name].set()

        async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._take(name, reader, writer)

        server = await asyncio.start_server(take, "127.0.0.1", 0)
        port: int = server.sockets[0].getsockname()[1]
        return port

    async def _take(
        self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writers = [writer]
        try:
            if not self._is_cut[name]:
                far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.goal)
                writers.append(far_writer)
                self._open[name].update(writers)
                await asyncio.gather(
                    self._pump(name, reader, far_writer), self._pump(name, far_reader, writer)
                )
        except OSError:
            pass
        finally:
            for each in writers:
                each.transport.abort()
            self._open[name].difference_update(writers)

    async def _pump(
        self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while data := await reader.read(2**14):
            await self._flows[name].wait()
            self.moved_bytes[name] += len(data)
            writer.write(data)
            await writer.drain()
        writer.transport.abort()

    def cut(self, name: str) -> None:
        """Reset what is open, and let nothing through."""

        def do() -> None:
            self._is_cut[name] = True
            for writer in list(self._open[name]):
                writer.transport.abort()

        self._loop.call_soon_threadsafe(do)

    def silence(self, name: str) -> None:
        """Let nothing through, and say nothing of it."""
        self._loop.call_soon_threadsafe(self._flows[name].clear)

    def mend(self, name: str) -> None:
        """As it was."""

        def do() -> None:
            self._is_cut[name] = False
            self._flows[name].set()

        self._loop.call_soon_threadsafe(do)

    def wait_for_transfer(self, name: str, least_bytes: int, limit_s: float) -> None:
        """Wait until so much has moved: a transfer is under way."""
        goal, end = self.moved_bytes[name] + least_bytes, time.monotonic() + limit_s
        while self.moved_bytes[name] < goal and time.monotonic() < end:
            time.sleep(0.005)
