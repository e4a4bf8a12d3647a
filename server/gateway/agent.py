"""Who calls the gateway: the agent of a rollout, or a generator that is captured."""

from typing import Protocol

from forebay.server.gateway.dialect import Memory
from forebay.server.gateway.sessions import Session


class Agent(Protocol):
    """What its calls have in common."""

    @property
    def session(self) -> Session: ...

    @property
    def memory(self) -> Memory: ...
