"""The base generator: turns a file of task rows into samples in the buffer, group by group."""

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from forebay.core.errors import InvalidInput
from forebay.core.fields import read_flag
from forebay.core.ids import InstanceId
from forebay.core.lazy_names import lazy_names
from forebay.core.starts.asked_arrays import AskedArrays
from forebay.generators.failures import ENGINE_WAIT_S, AgentFailed, EnvironmentFailed, JudgeFailed
from forebay.generators.failures import retry_budgets as read_budgets
from forebay.generators.job.input_rows import RowFile
from forebay.generators.rollouts.samples import plain
from forebay.generators.rollouts.single_turn import query_single_turn, single_turn

if TYPE_CHECKING:
    from openai import OpenAI

    from forebay.core.scheduling.oversampling import Oversampling
    from forebay.core.scheduling.scheduler import Scheduler
    from forebay.generators.buffer_link.slime import SampleSender
    from forebay.generators.job.reporter import Totals
    from forebay.generators.rewards import RewardFunc
    from forebay.generators.rollouts.attempts import RolloutFunc
    from forebay.generators.rollouts.rollout import Rollout
    from forebay.generators.rollouts.samples import SampleArrays

__all__ = [
    "AgentFailed",
    "BaseGenerator",
    "EnvironmentFailed",
    "JudgeFailed",
    "Rollout",
    "Totals",
    "query_single_turn",
    "single_turn",
]

logger = logging.getLogger(__name__)

AUTO, SPARE = "auto", "spare"
FIRST_PLACES = 16
"""Initial slots per engine with ``num_process`` "auto" or "spare"."""
PAYLOAD_NAMES = {
    "group_timeout_seconds": "group_timeout_s",
    "group_deadline_seconds": "group_deadline_s",
    **{name: name for name in ("task_type", "sampling_params", "skip_instance_ids", "max_tokens", "num_process")},
    **{name: name for name in ("num_repeat_per_sample", "queue_size", "model", "api_key", "run_id", "shuffle_seed")},
    **{name: name for name in ("max_attempts", "retry_budgets", "reward_timeout_s", "num_reward_workers")},
    **{name: name for name in ("oversampling", "scheduler", "capture", "template_path")},
    **{name: name for name in ("policy_models", "arrays", "engine_wait_s")},
}
"""Payload fields that ``from_payload`` uses besides the two addresses, and the argument that each becomes."""


class BaseGenerator:
    """Runs a rollout function on every row of a file and sends the samples to the buffer, group by group.

    The first nine arguments are those of slime's class. ``remote_engine_url`` may name several engines (a list, or
    separated by commas). Rollouts wait while ``queue_size`` finished samples wait to be written. ``num_process``
    rollouts run at once; with "auto", as many as the engines process without queueing; with
    "spare", one per engine while calls queue there. ``sampling_params`` go to every
    rollout, with ``max_tokens`` unless they set their own. ``max_attempts`` limits the attempts per rollout, and
    ``retry_budgets`` sets the retries per kind of failure. ``group_timeout_s`` and ``group_deadline_s`` apply if the
    buffer does not set its own. ``shuffle_seed`` shuffles the rows, differently in each epoch. ``oversampling`` starts
    more rollouts than needed, and ``scheduler`` chooses the next rollout and its engine; a server's settings override
    both. With ``capture`` False, engines are not asked for tokens. ``template_path`` is the folder of the model's
    tokenizer and chat template, for routers with unreachable workers. ``policy_models`` lists the models whose tokens
    are trained on (default: the models of all calls), and ``arrays`` the arrays per token to ask engines for. The
    coroutine function ``sample_arrays`` returns further arrays of a finished sample, forks included. A rollout waits up
    to ``engine_wait_s`` seconds while no engine answers. Numbers may be strings. Raises ``InvalidInput``.

    Subclasses written for slime find the members of slime's class: ``client``, ``send_data_to_buffer`` and ``run``. If
    a subclass overrides ``run``, ``entry`` calls it once per epoch. The attribute ``skip_instance_ids`` repeats each id
    once per sample, as slime's loops expect; ``listed_ids`` is the argument as given.
    """

    def __init__(
        self,
        remote_engine_url: str | Sequence[str],
        remote_buffer_url: str,
        num_repeat_per_sample: int | str = 1,
        queue_size: int | str = 1_000,
        num_process: int | str = 10,
        task_type: str = "math",
        max_tokens: int | str = 4_096,
        num_repeats: int | str = 1,
        skip_instance_ids: Sequence[InstanceId] | None = None,
        *,
        sampling_params: Mapping[str, Any] | None = None,
        run_id: str | None = None,
        model: str | None = None,
        api_key: str | None = None,
        shuffle_seed: int | str | None = None,
        max_attempts: int | str = 3,
        reward_timeout_s: float | str = 30.0,
        num_reward_workers: int | str | None = None,
        group_timeout_s: float | str = 300.0,
        group_deadline_s: float | str = 3_600.0,
        retry_budgets: Mapping[str, int | str] | None = None,
        oversampling: "Mapping[str, Any] | Oversampling | None" = None,
        scheduler: "Mapping[str, Any] | Scheduler | None" = None,
        capture: bool | str = True,
        template_path: str | Path | None = None,
        policy_models: Sequence[str] | None = None,
        arrays: Sequence[str] | None = None,
        engine_wait_s: float | str = ENGINE_WAIT_S,
        sample_arrays: "SampleArrays | None" = None,
    ) -> None:
        self.remote_engine_url = remote_engine_url
        self.remote_buffer_url = remote_buffer_url
        self.num_repeat_per_sample = _count("num_repeat_per_sample", num_repeat_per_sample)
        self.queue_size = _count("queue_size", queue_size)
        self.adjusts_places = num_process in (AUTO, SPARE)
        self.leaves_room = num_process == SPARE
        self.num_process = places_of(num_process)
        self.task_type = task_type
        self.max_tokens = _count("max_tokens", max_tokens)
        self.num_repeats = _count("num_repeats", num_repeats)
        self.listed_ids = list(skip_instance_ids or ())
        self.skip_instance_ids = self.listed_ids * self.num_repeat_per_sample
        self.sampling_params = _sampling_params(sampling_params or {}, self.max_tokens)
        self.run_id = run_id
        self.model = model
        self.api_key = api_key
        self.shuffle_seed = None if shuffle_seed is None else _count("shuffle_seed", shuffle_seed, minimum=0)
        self.max_attempts = _count("max_attempts", max_attempts)
        self.reward_timeout_s = seconds_of("reward_timeout_s", reward_timeout_s)
        num_rewarding = (os.cpu_count() or 1) if self.adjusts_places else self.num_process
        self.num_reward_workers = _count("num_reward_workers", num_reward_workers or num_rewarding)
        self.group_timeout_s = seconds_of("group_timeout_s", group_timeout_s)
        self.group_deadline_s = seconds_of("group_deadline_s", group_deadline_s)
        self.retry_budgets = read_budgets(retry_budgets, self.max_attempts)
        self.oversampling = _oversampling(oversampling, self.num_repeat_per_sample)
        self.scheduler = _scheduler(scheduler, remote_engine_url)
        self.capture = read_flag("capture", capture)
        self.template_path = template_path
        self.policy_models = policy_models
        self.arrays = AskedArrays.parse(arrays)
        self.engine_wait_s = seconds_of("engine_wait_s", engine_wait_s)
        self.sample_arrays = sample_arrays
        self._num_passes = 0
        self._sender: tuple[int, SampleSender] | None = None

    @classmethod
    def from_payload(cls, data: Mapping[str, Any], **overrides: Any) -> Self:
        """Create the generator from a start payload, as passed to ``run_rollout``. ``overrides`` win.

        Raises ``InvalidInput``, also if the payload names no engine.
        """
        if not data.get("remote_engine_url"):
            hint = "start it with --engine-url, or remote_engine_url in the body"
            raise InvalidInput("the run was started without an engine", hint=hint, field="remote_engine_url")
        given = {ours: data[name] for name, ours in PAYLOAD_NAMES.items() if data.get(name) is not None}
        return cls(data["remote_engine_url"], data["remote_buffer_url"], **{**given, **overrides})

    def entry(
        self, input_file: str | Path, rollout_func: "RolloutFunc", reward_func: "RewardFunc", num_epoch: int | str = 1
    ) -> "Totals | None":
        """Pass over the file ``num_epoch`` times; return when the buffer has every sample or the run was stopped.

        If a subclass overrides ``run``, calls that ``num_epoch`` times instead and returns None.

        ``rollout_func(client, messages, sampling_params)`` returns ``(messages, finish_reason)``, and
        ``reward_func(item)`` returns a number, or a mapping with the total as ``reward`` and named parts. Either may be
        ``async``. An ``async`` rollout function gets an ``AsyncOpenAI`` client; any other runs in a thread with an
        ``OpenAI`` client. A reward function that is not ``async`` runs in another process. Raises ``InputRefused`` for
        an invalid row, after writing all samples of the rows before it.
        """
        if type(self).run is not BaseGenerator.run:
            for _ in range(_count("num_epoch", num_epoch)):
                self.run(input_file, rollout_func, reward_func)
            return None
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(self.run_async(input_file, rollout_func, reward_func, num_epoch))
        raise RuntimeError("entry() cannot run in a running event loop: use `await generator.run_async(...)`")

    async def run_async(
        self, input_file: str | Path, rollout_func: "RolloutFunc", reward_func: "RewardFunc", num_epoch: int | str = 1
    ) -> "Totals":
        """Pass over the file like ``entry``, for callers inside an event loop."""
        num_epochs = _count("num_epoch", num_epoch) * self.num_repeats
        if self.num_repeats > 1:
            logger.warning("num_repeats=%d multiplies the epochs: %d in all", self.num_repeats, num_epochs)
        return await self._pass_over(input_file, rollout_func, reward_func, range(num_epochs))

    async def _pass_over(
        self, input_file: str | Path, rollout_func: "RolloutFunc", reward_func: "RewardFunc", epochs: range
    ) -> "Totals":
        # Imported only now: the engine code takes a second to import, and inspecting a generator file does not need it.
        from forebay.generators.job import run_job

        rows = RowFile(input_file, self.shuffle_seed)
        return await run_job.run(self, rows, epochs, rollout_func, reward_func)

    @property
    def is_lead(self) -> bool:
        """Whether this process leads the run. False in a worker, where ``run_rollout`` is called as well."""
        from forebay.generators.job.composition import composition

        return composition().member is None

    # --- for subclasses written for slime

    def run(self, input_file: str | Path, rollout_func: "RolloutFunc", reward_func: "RewardFunc") -> str:
        """Pass over the file again, ``num_repeats`` times. Returns "finished" when the buffer has every sample.

        A subclass may override this and write samples with ``send_data_to_buffer``.
        """
        first, self._num_passes = self._num_passes, self._num_passes + 1
        epochs = range(first * self.num_repeats, self._num_passes * self.num_repeats)
        asyncio.run(self._pass_over(input_file, rollout_func, reward_func, epochs))
        return "finished"

    @cached_property
    def client(self) -> "OpenAI":
        """Client of the first engine, for calls outside of rollout functions.

        It can be passed to worker processes of any start method. Its calls are not recorded: samples get their tokens
        from the client passed to a rollout function, or through the gateway (``"capture": true``).
        """
        from forebay.generators.rollouts.client import make_own_client

        given = self.remote_engine_url
        return make_own_client((given.split(",") if isinstance(given, str) else given)[0], self.api_key)

    def send_data_to_buffer(self, data: Mapping[str, Any]) -> None:
        """Write one finished sample and return when it is on the buffer's disk.

        Waits while the buffer is full or does not answer. A refused sample is only logged. Raises ``RunGone`` once the
        run is over, and ``TypeError`` for values that JSON cannot hold.
        """
        from forebay.generators.buffer_link.slime import SampleSender

        # A forked process needs its own connections.
        if self._sender is None or self._sender[0] != os.getpid():
            self._sender = os.getpid(), SampleSender(self.remote_buffer_url)
        self._sender[1].send(dict(data))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out connections, because a method of a subclass may be the target of a worker process."""
        return {**{name: value for name, value in vars(self).items() if name != "client"}, "_sender": None}


# Lazy, because their modules are slow to import.
__getattr__, __dir__ = lazy_names(
    __name__,
    {"Rollout": "forebay.generators.rollouts.rollout", "Totals": "forebay.generators.job.reporter"},
)


def places_of(num_process: int | str) -> int:
    """Return the number of concurrent rollouts; for "auto" and "spare", the initial one. Raises ``InvalidInput``."""
    return FIRST_PLACES if num_process in (AUTO, SPARE) else _count("num_process", num_process)


def _count(name: str, value: int | str, minimum: int = 1) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        raise InvalidInput(f"{name} must be a whole number (got {value!r:.100})", field=name) from None
    if number < minimum:
        raise InvalidInput(f"{name} must be at least {minimum} (got {number})", field=name)
    return number


def seconds_of(name: str, value: float | str) -> float:
    """Return a setting of more than 0 seconds as a number. Raises ``InvalidInput``."""
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        raise InvalidInput(f"{name} must be a number of seconds (got {value!r:.100})", field=name) from None
    if not 0 < seconds < float("inf"):
        raise InvalidInput(f"{name} must be more than 0 seconds (got {seconds})", field=name)
    return seconds


def _oversampling(given: "Mapping[str, Any] | Oversampling | None", group_size: int) -> "Oversampling | None":
    if not given:
        return None
    # Imported only now: it imports pydantic, for which an inspected generator file need not wait.
    from forebay.core.scheduling.oversampling import Oversampling, parse_oversampling

    oversampling = given if isinstance(given, Oversampling) else parse_oversampling(given)
    return oversampling.checked(group_size)


def _scheduler(given: "Mapping[str, Any] | Scheduler | None", engines: str | Sequence[str]) -> "Scheduler | None":
    if not given:
        return None
    from forebay.core.scheduling.scheduler import Scheduler, parse_scheduler
    from forebay.core.scheduling.scheduler_checks import check_scheduler

    scheduler = given if isinstance(given, Scheduler) else parse_scheduler(given)
    named = engines.split(",") if isinstance(engines, str) else list(engines)
    check_scheduler(scheduler, [url for url in named if url.strip()])
    return scheduler


def _sampling_params(given: Mapping[str, Any], max_tokens: int) -> dict[str, Any]:
    """Return a copy with ``max_tokens`` set; the number may be a string, as slime's client sends it."""
    params: dict[str, Any] = plain(dict(given))
    # Newer models accept only the second name; either one sets the limit.
    limits = [name for name in ("max_tokens", "max_completion_tokens") if params.get(name) is not None]
    for name in limits:
        params[name] = _count(name, params[name])
    return params if limits else {**params, "max_tokens": max_tokens}
