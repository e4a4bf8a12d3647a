"""What the buffer holds: the hooks of one run, wherever they are answered."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Self, cast

import msgspec

from forebay.core.errors import ForebayError, HookFailed
from forebay.core.group import SLIME_REWARD_RANGE, Normaliser, RewardRange
from forebay.core.processes.child_link import MAX_MESSAGE_BYTES
from forebay.hooks import answer_checks, defaults, group_sequence, host_messages
from forebay.hooks.contract import ContractChoice
from forebay.hooks.host_client import HostClient
from forebay.hooks.host_output import LIMIT_BYTES
from forebay.hooks.manager import BUILT_IN
from forebay.hooks.plugin_loading import installed_plugins
from forebay.hooks.specs import CONTRACT_HOOKS, NOTIFICATIONS, READ_HOOKS
from forebay.hooks.types import Contract, Event, HookInput, Processed, Sizes, Stage, Verdict

_GROUP_HOOKS = ("is_valid_group", *CONTRACT_HOOKS["A"], *CONTRACT_HOOKS["B"])
_NOTIFY_GRACE_S = 5.0
_MAX_NOTIFICATIONS = 1_000
_MAX_META_BYTES = 16 << 20
"""Of meta info as JSON, which is decoded in one piece on the loop."""

logger = logging.getLogger(__name__)
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode


class HookRunner:
    """The hooks of one run. Built-in behaviour is answered in process; everything else in one hook host, started when
    first needed.

    ``user_hooks`` are the hooks that the generator file at ``module_path`` has (see ``check_hooks``); without any,
    the file is not loaded. ``python_path`` goes behind the host's. ``contract`` is what the payload or the file
    declares, ``normaliser`` what the built-in ``normalize_group_data`` goes by, ``reward_range`` which rewards built-in
    hooks keep (None: every finite one). One request to the host may take ``time_limit_s``, loading it
    ``start_limit_s``. What hooks print goes to ``log_path``, which keeps the newest ``log_limit_bytes``, else to
    standard error. A host whose answer is longer than ``max_answer_bytes`` is killed.
    """

    def __init__(
        self,
        *,
        task_type: str,
        contract: Contract | None = None,
        normaliser: Normaliser = "grpo",
        reward_range: RewardRange | None = SLIME_REWARD_RANGE,
        module_path: Path | None = None,
        python_path: Sequence[Path] = (),
        user_hooks: Collection[str] = (),
        plugins: bool = True,
        time_limit_s: float = 60.0,
        start_limit_s: float = 120.0,
        log_path: Path | None = None,
        log_limit_bytes: int = LIMIT_BYTES,
        max_answer_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        # A file without hooks is never loaded into a host: it may import torch, which takes seconds.
        self._file = module_path if user_hooks else None
        self._user_hooks = frozenset(user_hooks)
        self._plugins = [point.name for point in installed_plugins()] if plugins else []
        choice = ContractChoice(contract, has_transform="transform_group" in self._user_hooks)
        self._choice = choice
        self._normaliser = normaliser
        self.reward_range = reward_range
        paths = [str(path) for path in python_path]
        setup = host_messages.Setup(
            task_type, contract, normaliser, str(self._file or ""), paths, bool(self._plugins), reward_range
        )
        self._host = HostClient(
            setup,
            time_limit_s=time_limit_s,
            start_limit_s=start_limit_s,
            log_path=log_path,
            log_limit_bytes=log_limit_bytes,
            max_answer_bytes=max_answer_bytes,
        )
        self._notifier = Notifier(self._deliver)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._notifier.close(_NOTIFY_GRACE_S)
        await self._host.close()

    def refuse(self, error: ForebayError) -> AbstractContextManager[None]:
        """Within this, ``judge``, ``process`` and ``meta_info`` raise ``error`` at once where users' code would answer.

        Those that have begun do so as well: nobody wants their answers any more. Everything else goes on.
        """
        return self._host.refuse(error)

    @property
    def contract(self) -> Contract | None:
        """The contract in force; None while the generator file's first answer is awaited."""
        if self._host.hello is not None:
            return self._host.hello.contract
        return None if "is_valid_group" in self._user_hooks else self._choice.decided

    def in_host(self, stage: Stage) -> bool:
        """Whether anything but the built-in behaviour may answer at ``stage``. "judge" and "process" go together.

        Installed plugins count until the host has been started and said what they implement.
        """
        if self._file is None and not self._plugins:
            return False
        hooks = ("get_group_data_meta_info",) if stage == "meta_info" else _GROUP_HOOKS
        return any(self._is_outside(hook) for hook in hooks)

    def implementations(self) -> dict[str, list[str]]:
        """Hook → who answers, the one asked first in front: "plugin NAME", "file NAME", "built-in".

        What a plugin implements is not known before the host was started.
        """
        if self._host.hello is not None:
            return self._host.hello.implementations
        return {hook: self._expected(hook) for hook in READ_HOOKS + NOTIFICATIONS}

    async def judge(self, group: HookInput, sizes: Sizes) -> Verdict:
        """Ask ``is_valid_group``. Raises ``HookFailed``.

        Slots whose samples failed are not counted in ``sizes``: hooks cannot ask for them.
        """
        if not self.in_host("judge"):
            return defaults.judge(group.rewards, sizes, self._choice.current)
        hook = "is_valid_group"
        await self._host.ready(is_refusable=True)
        # Where only later hooks are the user's, the columns are enough to judge by.
        bodies = await group.bodies() if self._is_outside(hook) else None
        request = host_messages.Judge(_key(group), group.rewards, group.rollout_ids, bodies, _fields(sizes))
        reply = cast(host_messages.Judged, await self._host.ask(request, hook, is_refusable=True))
        self._host.decide(reply.contract)
        return Verdict(reply.is_valid, reply.is_finished)

    async def process(self, group: HookInput, sizes: Sizes) -> Processed:
        """Ask for the rows of a group: filter, normalise and pad (A), or transform (B). Raises ``HookFailed``."""
        if not self.in_host("process"):
            return defaults.process(group, sizes, self._choice.current, self._normaliser, self.reward_range)
        hello = await self._host.ready(is_refusable=True)
        bodies = await group.bodies() if _needs_bodies(hello) else None
        request = host_messages.Process(
            _key(group), group.rewards, group.rollout_ids, bodies, _fields(sizes), group.forks
        )
        # The name is blamed only if the host dies before it has announced a hook.
        reply = cast(host_messages.Rows, await self._host.ask(request, "is_valid_group", is_refusable=True))
        self._host.decide(reply.contract)
        return Processed(reply.rows, reply.num_kept, reply.is_filtered, reply.is_out_of_range)

    async def meta_info(self, groups: Sequence[HookInput]) -> dict[str, Any]:
        """Ask ``get_group_data_meta_info`` about ``groups``. Raises ``HookFailed``."""
        hook = "get_group_data_meta_info"
        if self.in_host("meta_info"):
            await self._host.ready(is_refusable=True)
        if not self._is_outside(hook):
            rewards = [reward for group in groups for reward in group.rewards]
            return defaults.meta_info(len({group.instance_id for group in groups}), len(rewards), rewards)
        request = host_messages.MetaInfo([(_key(group), await group.bodies()) for group in groups])
        reply = cast(host_messages.Described, await self._host.ask(request, hook, is_refusable=True))
        if len(reply.meta_info) > _MAX_META_BYTES:
            what = f"its answer is longer than {_MAX_META_BYTES} bytes ({len(reply.meta_info)})"
            raise answer_checks.failure(hook, what)
        try:
            return _decode_object(reply.meta_info)
        except (msgspec.DecodeError, RecursionError) as error:  # half a surrogate pair, which no reply can hold
            raise answer_checks.failure(hook, f"it returned what is not plain JSON: {error}") from None

    def notify(self, event: Event, **payload: Any) -> None:
        """Tell plugins of an event, later and in order. Never blocks, never raises."""
        if self._is_outside(event):
            self._notifier.put(event, payload)

    async def _deliver(self, event: str, payload: bytes) -> None:
        # Which plugins implement the event is known only once the host has loaded them.
        await self._host.ready()
        if self._is_outside(event):
            await self._host.ask(host_messages.Notify(event, payload), event)

    def _is_outside(self, hook: str) -> bool:
        """Whether more than the built-in behaviour implements ``hook``, as far as is known."""
        if self._host.hello is not None:
            return set(self._host.hello.implementations[hook]) - {BUILT_IN} != set()
        # Before a host has loaded the plugins, each of them may implement anything.
        return bool(self._plugins) or (self._file is not None and hook in self._user_hooks)

    def _expected(self, hook: str) -> list[str]:
        file = [f"file {self._file.name}"] if self._file is not None and hook in self._user_hooks else []
        return file + ([BUILT_IN] if hook in READ_HOOKS else [])


class Notifier:
    """Passes events on, in order, from a bounded queue, so that whoever reports an event never waits.

    What finds the queue full is dropped, and that is logged.
    """

    def __init__(self, deliver: Callable[[str, bytes], Awaitable[None]]) -> None:
        self._deliver = deliver
        self._waiting: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue(_MAX_NOTIFICATIONS)
        self._num_dropped = 0
        self._task: asyncio.Task[None] | None = None

    def put(self, event: str, payload: dict[str, Any]) -> None:
        """Queue an event; ``payload`` values that are not JSON go as their ``str``. Needs a running event loop."""
        if self._task is None:  # only now: of thousands of runs, few have anything to deliver
            self._task = asyncio.create_task(self._run())
        try:
            self._waiting.put_nowait((event, json.dumps(payload, default=str).encode()))
        except asyncio.QueueFull:
            self._num_dropped += 1
            # Once: the log would fill as fast as the queue did. Their number is logged at the end.
            if self._num_dropped == 1:
                logger.warning("plugins are slower than events come: notifications are being dropped")
        except Exception:  # a notification must not break what it reports, whatever the payload
            logger.exception("notification %s could not be encoded", event)

    async def close(self, grace_s: float) -> None:
        """Deliver what is queued, for at most ``grace_s`` seconds, and stop."""
        if self._task is None:
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(self._waiting.join(), grace_s)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._num_dropped:
            logger.warning("%d notifications were dropped", self._num_dropped)

    async def _run(self) -> None:
        while True:
            event, payload = await self._waiting.get()
            try:
                await self._deliver(event, payload)
            except HookFailed as error:
                logger.warning("%s\n%s", error, error.traceback)
            finally:
                self._waiting.task_done()


def _needs_bodies(hello: host_messages.Hello) -> bool:
    """Whether the samples must be seen whole to process a group: not where only their rewards are looked at."""
    if hello.contract is None:
        return True
    return group_sequence.last_outside(hello.implementations, hello.contract) is not None


def _key(group: HookInput) -> bytes:
    return answer_checks.encode_json(group.instance_id)


def _fields(sizes: Sizes) -> tuple[int, int, int]:
    return sizes.group_size, sizes.min_valid_group_size, sizes.min_valid_item_size
