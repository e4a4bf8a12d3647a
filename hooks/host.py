"""The hook host: the child process in which a run's generator file and the installed plugins answer.

Started as ``python -m forebay.hooks.host FD``, with one end of a socket pair. It ends when the other end is closed, and
with its parent. What users' code prints goes where standard error goes, never into the socket.
"""

import copy
import ctypes
import json
import os
import signal
import socket
import sys
from pathlib import Path

from forebay.core.errors import HookFailed
from forebay.core.ids import InstanceId
from forebay.hooks import answers, pipeline, wire
from forebay.hooks.completion import Completer
from forebay.hooks.loading import load_hooks
from forebay.hooks.manager import HookManager
from forebay.hooks.types import Contract, Group, Item, Sizes

_PR_SET_PDEATHSIG = 1


class Channel:
    """The child's end of the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._stream = sock.makefile("rb")

    def receive(self) -> wire.ToHost | None:
        """The next message; None when the server has closed its end."""
        header = self._stream.read(wire.HEADER_BYTES)
        if len(header) < wire.HEADER_BYTES:
            return None
        length = wire.body_length(header)
        body = self._stream.read(length)
        return wire.decode_to_host(body) if len(body) == length else None

    def send(self, message: wire.FromHost) -> None:
        """Write one message."""
        self._sock.sendall(wire.frame(message))


class Host:
    """Answers requests, one at a time."""

    def __init__(self, setup: wire.Setup, channel: Channel) -> None:
        self._channel = channel
        self._asked = ""
        self._complete = Completer()
        self._hooks = HookManager(setup.task_type, complete=self._complete, on_ask=self._announce)
        self._choice = load_hooks(
            self._hooks,
            task_type=setup.task_type,
            contract=setup.contract,
            normaliser=setup.normaliser,
            module_path=Path(setup.module_path) if setup.module_path else None,
            python_path=setup.python_path,
            loads_plugins=setup.loads_plugins,
            complete=self._complete,
        )
        self._implementations = self._hooks.implementations()

    def hello(self) -> wire.Hello:
        """What was loaded."""
        return wire.Hello(self._implementations, self._choice.decided)

    def serve(self) -> None:
        """Answer until the server closes its end."""
        while (request := self._channel.receive()) is not None:
            self._asked = ""
            try:
                reply = self._answer(request)
            except HookFailed as error:
                reply = told_failure(error)
            self._channel.send(reply)
        self._complete.close()

    def _announce(self, hook: str) -> None:
        if hook != self._asked:
            self._asked = hook
            self._channel.send(wire.Asking(hook))

    def _answer(self, request: wire.ToHost) -> wire.FromHost:
        match request:
            case wire.Judge():
                return self._judge(request)
            case wire.Process():
                return self._process(request)
            case wire.MetaInfo():
                return self._describe(request)
            case wire.Notify():
                self._hooks.notify(request.event, json.loads(request.payload))
                return wire.Told()
            case wire.Setup():
                raise answers.failure("setup", "the host is set up already")

    def _judge(self, request: wire.Judge) -> wire.Judged:
        verdict = self._hooks.is_valid_group(_group(request), Sizes(*request.sizes))
        return wire.Judged(verdict.is_valid, verdict.is_finished, self._choice.decided)

    def _process(self, request: wire.Process) -> wire.Rows:
        group, sizes = _group(request), Sizes(*request.sizes)
        contract = self._contract_for(group, sizes)
        uids = [item.get("uid") for item in group[1]]
        outcome = pipeline.process(self._hooks, group, sizes, contract)
        if request.bodies is None:
            done = pipeline.index_rows(outcome)
        else:
            culprit = pipeline.last_outside(self._implementations, contract) or self._asked
            done = pipeline.full_rows(outcome, uids, culprit)
        return wire.Rows(done.rows, done.num_kept, done.is_filtered, self._choice.decided)

    def _contract_for(self, group: Group, sizes: Sizes) -> Contract:
        """The contract. When a salvaged group comes before any was judged, ``is_valid_group`` is asked to learn it."""
        if self._choice.decided is None:
            self._hooks.is_valid_group(copy.deepcopy(group), sizes)
        return self._choice.current

    def _describe(self, request: wire.MetaInfo) -> wire.Described:
        temp_data: dict[InstanceId, list[Item]] = {}
        for instance_id, bodies in request.groups:
            temp_data.setdefault(json.loads(instance_id), []).extend(pipeline.full_items(bodies))
        hook = "get_group_data_meta_info"
        return wire.Described(answers.encode(hook, self._hooks.get_group_data_meta_info(temp_data)))


def told_failure(error: HookFailed) -> wire.Failed:
    """``error`` as a message. A lone surrogate in it would not travel."""
    parts = (error.hook, error.message.removeprefix(f"hook {error.hook} failed: "), error.traceback)
    return wire.Failed(*(part.encode(errors="backslashreplace").decode() for part in parts))


def main() -> None:
    """Set up, say hello, serve."""
    channel = Channel(_open_socket(int(sys.argv[1])))
    _die_with_parent()
    setup = channel.receive()
    if not isinstance(setup, wire.Setup):
        return
    try:
        host = Host(setup, channel)
    except HookFailed as error:
        channel.send(told_failure(error))
        return
    channel.send(host.hello())
    host.serve()


def _group(request: wire.Judge | wire.Process) -> Group:
    instance_id: InstanceId = json.loads(request.instance_id)
    if request.bodies is None:
        return instance_id, pipeline.index_items(instance_id, request.rewards, request.rollout_ids, request.forks)
    return instance_id, pipeline.full_items(request.bodies)


def _open_socket(descriptor: int) -> socket.socket:
    os.set_inheritable(descriptor, False)  # a program that a hook starts must not keep the socket open
    return socket.socket(fileno=descriptor)


def _die_with_parent() -> None:
    """Be killed when the server dies while a hook is busy, and end of the socket goes unseen."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
