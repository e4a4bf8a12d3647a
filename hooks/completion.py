"""Completing what coroutine hooks return."""

import asyncio
import inspect
from collections.abc import Awaitable
from typing import Any


class Completer:
    """Waits for awaitable answers on one event loop, so that what a hook keeps open there lives from call to call."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def __call__(self, answer: Any) -> Any:
        """``answer``, or what it yields when awaited."""
        return self._runner.run(_awaited(answer)) if inspect.isawaitable(answer) else answer

    def close(self) -> None:
        """Cancel what still runs and close the loop."""
        self._runner.close()


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer
