"""The hook host: the child process that runs the hooks of a run's generator file and of installed plugins.

It ends when its parent closes the connection or dies.
"""

import copy
import inspect
import json
import sys
from collections.abc import Awaitable, Iterator
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.core.errors import HookFailed
from forebay.core.ids import InstanceId
from forebay.core.processes.parent_link import ParentLink
from forebay.hooks import answer_checks, defaults, group_sequence, host_messages
from forebay.hooks.manager import HookManager
from forebay.hooks.plugin_loading import load_hooks
from forebay.hooks.types import Contract, Group, Item, Sizes

if TYPE_CHECKING:
    from asyncio import Runner


class Completer:
    """Waits for awaitable answers."""

    def __init__(self) -> None:
        self._runner: Runner | None = None

    def __call__(self, answer: Any) -> Any:
        """Return ``answer``, or its result if it is awaitable."""
        if not inspect.isawaitable(answer):
            return answer
        if self._runner is None:
            import asyncio  # a third of a host's imports, and most hooks are plain functions

            # One loop for all calls, because a client that a hook keeps open is bound to its loop.
            self._runner = asyncio.Runner()
        # A runner accepts only coroutines, but a hook may return any awaitable.
        return self._runner.run(_awaited(answer))

    def close(self) -> None:
        """Cancel running tasks and close the loop."""
        if self._runner is not None:
            self._runner.close()


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer


class Host:
    """Answers requests one at a time."""

    def __init__(self, setup: host_messages.Setup, server: ParentLink[host_messages.ToHost]) -> None:
        self._server = server
        self._reward_range = setup.reward_range
        self._asked = ""
        self._complete = Completer()
        self._hooks = HookManager(setup.task_type, complete=self._complete, on_ask=self._announce)
        self._choice = load_hooks(
            self._hooks,
            task_type=setup.task_type,
            contract=setup.contract,
            normaliser=setup.normaliser,
            reward_range=setup.reward_range,
            module_path=Path(setup.module_path) if setup.module_path else None,
            python_path=setup.python_path,
            loads_plugins=setup.loads_plugins,
            complete=self._complete,
        )
        self._implementations = self._hooks.implementations()
        self._has_own_filter = any(who.startswith("file ") for who in self._implementations["filter_item"])

    def hello(self) -> host_messages.Hello:
        """Return the message that describes the loaded hooks."""
        return host_messages.Hello(self._implementations, self._choice.decided)

    def serve(self) -> None:
        """Answer requests until the server closes the connection."""
        for request in self._requests():
            # The server forgets the last hook with each request, so the first hook must be announced again.
            self._asked = ""
            try:
                reply = self._answer(request)
            except HookFailed as error:
                reply = failure_message(error)
            self._server.send(reply)
        self._complete.close()

    def _requests(self) -> Iterator[host_messages.ToHost]:
        with suppress(EOFError):
            while True:
                yield self._server.receive()

    def _announce(self, hook: str) -> None:
        # Announced once per run of equal hooks, because a filter is called for each item.
        if hook != self._asked:
            self._asked = hook
            self._server.send(host_messages.Asking(hook))

    def _answer(self, request: host_messages.ToHost) -> host_messages.FromHost:
        match request:
            case host_messages.Judge():
                return self._judge(request)
            case host_messages.Process():
                return self._process(request)
            case host_messages.MetaInfo():
                return self._describe(request)
            case host_messages.Notify():
                self._hooks.notify(request.event, json.loads(request.payload))
                return host_messages.Notified()
            case host_messages.Setup():
                raise answer_checks.failure("setup", "the host is already set up")

    def _judge(self, request: host_messages.Judge) -> host_messages.Judged:
        verdict = self._hooks.is_valid_group(_group(request), Sizes(*request.sizes))
        return host_messages.Judged(verdict.is_valid, verdict.is_finished, self._choice.decided)

    def _process(self, request: host_messages.Process) -> host_messages.MadeRows:
        group, sizes = _group(request), Sizes(*request.sizes)
        contract = self._contract_for(group, sizes)
        # Read first, because users' hooks may change the items.
        sources = [(group_sequence.uid_of(item), group_sequence.num_tokens(item)) for item in group[1]]
        with defaults.foreign_ids(group_sequence.foreign_ids(group[1], request.rollout_ids)):
            outcome = group_sequence.process(
                self._hooks, group, sizes, contract, self._reward_range, has_own_filter=self._has_own_filter
            )
        if request.bodies is None:
            done = group_sequence.index_rows(outcome)
        else:
            # Items that are not plain JSON are noticed only here: the last user's hook let them pass.
            culprit = group_sequence.last_outside(self._implementations, contract) or self._asked
            done = group_sequence.full_rows(outcome, sources, culprit)
        return host_messages.MadeRows(done, self._choice.decided)

    def _contract_for(self, group: Group, sizes: Sizes) -> Contract:
        """Return the contract. If a salvaged group arrives before any verdict, calls ``is_valid_group`` to learn it."""
        if self._choice.decided is None:
            # Copied, because users' hooks may change the group, which is still needed.
            self._hooks.is_valid_group(copy.deepcopy(group), sizes)
        return self._choice.current

    def _describe(self, request: host_messages.MetaInfo) -> host_messages.Described:
        temp_data: dict[InstanceId, list[Item]] = {}
        for instance_id, bodies in request.groups:
            temp_data.setdefault(json.loads(instance_id), []).extend(group_sequence.full_items(bodies))
        hook = "get_group_data_meta_info"
        return host_messages.Described(answer_checks.encode(hook, self._hooks.get_group_data_meta_info(temp_data)))


def failure_message(error: HookFailed) -> host_messages.Failed:
    """Convert ``error`` to a message."""
    # Lone surrogates in users' texts cannot be sent as UTF-8.
    parts = (error.hook, error.message.removeprefix(f"hook {error.hook} failed: "), error.traceback)
    return host_messages.Failed(*(part.encode(errors="backslashreplace").decode() for part in parts))


def main() -> None:
    """Set up the host, report its hooks, and serve requests."""
    # A busy host does not notice a closed socket, so the link also makes the kernel end it with its parent.
    server = ParentLink[host_messages.ToHost](sys.argv[1:], host_messages.ToHost)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # what a hook has printed is in the log when the host is killed
    setup = server.receive()
    assert isinstance(setup, host_messages.Setup)
    try:
        host = Host(setup, server)
    except HookFailed as error:
        server.send(failure_message(error))
        return
    server.send(host.hello())
    host.serve()


def _group(request: host_messages.Judge | host_messages.Process) -> Group:
    instance_id: InstanceId = json.loads(request.instance_id)
    if request.bodies is None:
        return instance_id, group_sequence.index_items(instance_id, request.rewards, request.rollout_ids, request.forks)
    return instance_id, group_sequence.full_items(request.bodies)


if __name__ == "__main__":
    main()
