"""The ``openai`` clients that rollout functions are given, each bound to one rollout."""

from collections.abc import Callable
from typing import Any, Self

import openai

from forebay.generators.link import Backoff
from forebay.generators.rollout import EngineCalls, Rollout, is_unavailable

UNBOUND_URL = "http://engine.invalid/v1"
"""Stands in the client that the others are made from; each request is given a real address."""


class RolloutClient(openai.OpenAI):
    """The client of a rollout function that runs in a thread. ``rollout`` is the execution that it belongs to."""

    rollout: Rollout

    def copy(self, **changed: Any) -> Self:
        """As in the ``openai`` package; the copy belongs to the same rollout."""
        client = super().copy(**changed)
        client.rollout = self.rollout
        return client

    with_options = copy

    def bound_to(self, rollout: Rollout) -> Self:
        """A client for ``rollout`` over the same connections."""
        client = super().copy(base_url=f"{rollout.engine_url}/v1")
        client.rollout = rollout
        return client

    def request(self, cast_to: Any, options: Any, **how: Any) -> Any:
        """Send one call; goes on with another engine, or waits for one, when nobody answers."""
        calls, pause = self.rollout.calls, Backoff()
        while True:
            try:
                with calls.one_call(options, self.timeout) as bound:
                    reply = super().request(cast_to, bound, **how)
                self.rollout.trace.note(reply)
                return reply
            except openai.APIError as error:
                if not is_unavailable(error):
                    raise
            calls.in_loop(_replaced(calls, pause))


class AsyncRolloutClient(openai.AsyncOpenAI):
    """The client of an ``async`` rollout function. ``rollout`` is the execution that it belongs to."""

    rollout: Rollout

    def copy(self, **changed: Any) -> Self:
        """As in the ``openai`` package; the copy belongs to the same rollout."""
        client = super().copy(**changed)
        client.rollout = self.rollout
        return client

    with_options = copy

    def bound_to(self, rollout: Rollout) -> Self:
        """A client for ``rollout`` over the same connections."""
        client = super().copy(base_url=f"{rollout.engine_url}/v1")
        client.rollout = rollout
        return client

    async def request(self, cast_to: Any, options: Any, **how: Any) -> Any:
        """Send one call; goes on with another engine, or waits for one, when nobody answers."""
        calls, pause = self.rollout.calls, Backoff()
        while True:
            try:
                with calls.one_call(options, self.timeout) as bound:
                    reply = await super().request(cast_to, bound, **how)
                self.rollout.trace.note(reply)
                return reply
            except openai.APIError as error:
                if not is_unavailable(error):
                    raise
            await _replaced(calls, pause)


async def _replaced(calls: EngineCalls, pause: Backoff) -> None:
    """An engine that answers its probe and refuses its calls must not be asked in a tight loop."""
    with calls.group.working():
        await pause.wait()
        await calls.replace_engine()


def make_client(kind: Callable[..., Any], api_key: str | None) -> Any:
    """The client that those of the rollouts are copies of. The environment's key never travels to an engine."""
    return kind(base_url=UNBOUND_URL, api_key=api_key or "none", max_retries=0, timeout=None)
