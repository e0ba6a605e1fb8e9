"""The barrier that makes the sync regime reproducible."""

import asyncio


class WaveGate:
    """Lets episodes take a turn together: nobody generates until every live episode is ready to.

    However long tools took, the engine then sees the same requests in the same order on every run, so the
    same batches, so the same bits. Members are released in the order of their ids.
    """

    def __init__(self) -> None:
        self._live: set[int] = set()
        self._waiting: dict[int, asyncio.Future[None]] = {}

    def join(self, member: int) -> None:
        self._live.add(member)

    def leave(self, member: int) -> None:
        """End a member's part; it may have been the one that the others waited for."""
        self._live.discard(member)
        self._release_if_complete()

    async def wait(self, member: int) -> None:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._waiting[member] = future
        # Not at once: the last to arrive would run on ahead of the others.
        loop.call_soon(self._release_if_complete)
        try:
            await future
        finally:
            self._waiting.pop(member, None)

    def _release_if_complete(self) -> None:
        if len(self._waiting) < len(self._live):
            return
        waiting, self._waiting = self._waiting, {}
        for member in sorted(waiting):
            if not waiting[member].done():
                waiting[member].set_result(None)
