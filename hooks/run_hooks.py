"""The buffer's interface to the hooks of one run, built-in or in a hook host."""

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
"""Maximum size of meta info as JSON, because the event loop decodes it in one piece."""

logger = logging.getLogger(__name__)
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode


class HookRunner:
    """The hooks of one run. Built-in hooks run in this process; one hook host, started when needed, runs all others.

    ``user_hooks`` are the hooks of the generator file at ``module_path`` (see ``check_hooks``); without any, the file
    is not loaded. ``python_path`` is appended to the host's. ``contract`` is declared by the payload or the file.
    ``normaliser`` selects the formula of the built-in ``normalize_group_data``. ``reward_range`` limits the rewards
    that built-in hooks keep (None: every finite one). A request to the host may take ``time_limit_s``, its start
    ``start_limit_s``. Output of hooks goes to ``log_path``, which keeps the newest ``log_limit_bytes``, or to standard
    error. A host with an answer above ``max_answer_bytes`` is killed.
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
        # A file without hooks is never loaded into a host, because it may import torch, which takes seconds.
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
        """Inside this context, ``judge``, ``process`` and ``meta_info`` raise ``error`` where users' code would answer.

        Calls in progress also raise it at once, because their answers are no longer needed. Everything else continues.
        """
        return self._host.refuse(error)

    @property
    def contract(self) -> Contract | None:
        """The current contract; None until the generator file's first answer."""
        if self._host.hello is not None:
            return self._host.hello.contract
        return None if "is_valid_group" in self._user_hooks else self._choice.decided

    def in_host(self, stage: Stage) -> bool:
        """Whether anything but the built-in hooks may answer at ``stage``. "judge" and "process" are treated alike.

        Until the host has started and reported their hooks, installed plugins count as implementing all hooks.
        """
        if self._file is None and not self._plugins:
            return False
        hooks = ("get_group_data_meta_info",) if stage == "meta_info" else _GROUP_HOOKS
        return any(self._is_outside(hook) for hook in hooks)

    def implementations(self) -> dict[str, list[str]]:
        """Return the implementers of each hook in call order: "plugin NAME", "file NAME", "built-in".

        Plugins are included only once the host has started.
        """
        if self._host.hello is not None:
            return self._host.hello.implementations
        return {hook: self._expected(hook) for hook in READ_HOOKS + NOTIFICATIONS}

    async def judge(self, group: HookInput, sizes: Sizes) -> Verdict:
        """Call ``is_valid_group``. Raises ``HookFailed``.

        ``sizes`` excludes slots whose samples failed, because hooks do not see those samples.
        """
        if not self.in_host("judge"):
            return defaults.judge(group.rewards, sizes, self._choice.current)
        hook = "is_valid_group"
        await self._host.ready(is_refusable=True)
        # If only later hooks are the user's, the columns are enough for the verdict.
        bodies = await group.bodies() if self._is_outside(hook) else None
        request = host_messages.Judge(_key(group), group.rewards, group.rollout_ids, bodies, _fields(sizes))
        reply = cast(host_messages.Judged, await self._host.ask(request, hook, is_refusable=True))
        self._host.decide(reply.contract)
        return Verdict(reply.is_valid, reply.is_finished)

    async def process(self, group: HookInput, sizes: Sizes) -> Processed:
        """Return the rows of a group: filter, normalise and pad (A), or transform (B). Raises ``HookFailed``."""
        if not self.in_host("process"):
            return defaults.process(group, sizes, self._choice.current, self._normaliser, self.reward_range)
        hello = await self._host.ready(is_refusable=True)
        bodies = await group.bodies() if _needs_bodies(hello) else None
        request = host_messages.Process(
            _key(group), group.rewards, group.rollout_ids, bodies, _fields(sizes), group.forks
        )
        # This name is reported only if the host dies before it has announced a hook.
        reply = cast(host_messages.MadeRows, await self._host.ask(request, "is_valid_group", is_refusable=True))
        self._host.decide(reply.contract)
        return reply.processed

    async def meta_info(self, groups: Sequence[HookInput]) -> dict[str, Any]:
        """Call ``get_group_data_meta_info`` with ``groups``. Raises ``HookFailed``."""
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
        except (msgspec.DecodeError, RecursionError) as error:  # lone surrogates, which a reply cannot contain
            raise answer_checks.failure(hook, f"it returned a value that is not plain JSON: {error}") from None

    def notify(self, event: Event, **payload: Any) -> None:
        """Notify plugins of an event, later and in order. Never blocks and never raises."""
        if self._is_outside(event):
            self._notifier.put(event, payload)

    async def _deliver(self, event: str, payload: bytes) -> None:
        # Only a started host knows which plugins implement the event.
        await self._host.ready()
        if self._is_outside(event):
            await self._host.ask(host_messages.Notify(event, payload), event)

    def _is_outside(self, hook: str) -> bool:
        """Whether anything but the built-in behaviour implements ``hook``, or might do so."""
        if self._host.hello is not None:
            return set(self._host.hello.implementations[hook]) - {BUILT_IN} != set()
        # Until a host has loaded the plugins, each of them may implement anything.
        return bool(self._plugins) or (self._file is not None and hook in self._user_hooks)

    def _expected(self, hook: str) -> list[str]:
        file = [f"file {self._file.name}"] if self._file is not None and hook in self._user_hooks else []
        return file + ([BUILT_IN] if hook in READ_HOOKS else [])


class Notifier:
    """Delivers events in order from a bounded queue, so that callers never wait.

    If the queue is full, events are dropped, and this is logged.
    """

    def __init__(self, deliver: Callable[[str, bytes], Awaitable[None]]) -> None:
        self._deliver = deliver
        self._waiting: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue(_MAX_NOTIFICATIONS)
        self._num_dropped = 0
        self._task: asyncio.Task[None] | None = None

    def put(self, event: str, payload: dict[str, Any]) -> None:
        """Queue an event. ``payload`` values that are not JSON are sent as ``str``. Needs a running event loop."""
        if self._task is None:  # created only now, because few of thousands of runs have events to deliver
            self._task = asyncio.create_task(self._run())
        try:
            self._waiting.put_nowait((event, json.dumps(payload, default=str).encode()))
        except asyncio.QueueFull:
            self._num_dropped += 1
            # Logged once, to limit the log. The total is logged at the end.
            if self._num_dropped == 1:
                logger.warning("plugins are slower than events arrive: notifications are being dropped")
        except Exception:  # no payload may break the code that reports an event
            logger.exception("notification %s could not be encoded", event)

    async def close(self, grace_s: float) -> None:
        """Deliver queued events for at most ``grace_s`` seconds, and stop."""
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
    """Whether processing a group needs the bodies of its samples, not only their rewards."""
    if hello.contract is None:
        return True
    return group_sequence.last_outside(hello.implementations, hello.contract) is not None


def _key(group: HookInput) -> bytes:
    return answer_checks.encode_json(group.instance_id)


def _fields(sizes: Sizes) -> tuple[int, int, int]:
    return sizes.group_size, sizes.min_valid_group_size, sizes.min_valid_item_size
