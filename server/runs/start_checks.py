"""Checks of a start before its run may begin."""

import asyncio
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.core.addresses import engine_urls, is_http_url
from forebay.core.errors import EngineError, InputRefused, InvalidInput
from forebay.core.fields import read_flag
from forebay.core.ids import InstanceId, read_instance_id
from forebay.core.run import Origin, RunSettings
from forebay.core.scheduling.scheduler_checks import TWO_KINDS, check_engines, check_scheduler
from forebay.core.settings import Settings
from forebay.core.starts.asked_arrays import AskedArrays
from forebay.core.starts.evaluate import Evaluates
from forebay.core.starts.run_start import RunStart
from forebay.engines.chat_template import check_template
from forebay.engines.detect import DetectedEngine
from forebay.engines.sglang import SGLangEngine
from forebay.generators.base import places_of
from forebay.generators.discovery.info import GeneratorInfo
from forebay.generators.failures import retry_budgets
from forebay.generators.job.input_rows import validate_rows
from forebay.replay.options import ReplayOptions
from forebay.server.runs.array_checks import ENGINE_WAIT_S, array_warnings, check_arrays
from forebay.server.runs.input_files import InputFiles
from forebay.server.runs.worker_checks import check_workers

ROWS_BEFORE_REPLY = 1_000
MAX_START_ID_LENGTH = 200
SLIME_NUM_EPOCH = 10
"""Default number of passes over the input for starts over slime's routes, as in slime's buffer."""
SLIME_SETTINGS = (
    "min_valid_group_size_ratio",
    "min_valid_item_size_ratio",
    "group_timeout_seconds",
    "min_timeout_group_size_ratio",
    "max_buffer_size",
)
"""Settings that slime's buffer reads; its generators find the defaults in their data."""


@dataclass(frozen=True, slots=True)
class StartRequest:
    """A start payload, its own fields checked."""

    start: RunStart
    name: str
    origin: Origin
    task_type: str
    settings: RunSettings
    listed: list[InstanceId]
    """``skip_instance_ids``."""
    input_file: str | None
    lists_ids: bool
    """Whether the payload has ``skip_instance_ids`` at all."""
    start_id: str
    """A native start repeated with this id is the same start; "" if the caller gave none."""
    defaults: dict[str, Any]
    """Fields of the payload that come from the server's defaults, not from the caller."""
    replay: ReplayOptions | None
    """The replay that the start asks for; None without one."""
    source: str = ""
    """The id of the replayed run, or the path of the file."""
    evaluates: Evaluates | None = None
    """What the run evaluates; None for other runs."""
    warnings: list[str] = field(default_factory=list)
    """Warnings of ``StartCheck.check``."""

    @property
    def is_fed(self) -> bool:
        """Whether the server alone replays the run, without a process or an engine."""
        return self.replay is not None and not self.replay.needs_process

    @property
    def keeps_deliveries(self) -> bool:
        """Whether batches stay with their readers: a native trainer without a list rewinds explicitly."""
        return self.origin == "native" and not self.lists_ids

    @property
    def payload(self) -> dict[str, Any]:
        """The payload without the list."""
        return self.start.payload

    @classmethod
    def parse(
        cls, given: dict[str, Any], name: str, origin: Origin, defaults: dict[str, Any], source: str = ""
    ) -> "StartRequest":
        """Parse what the caller has ``given``, with the server's ``defaults`` and slime's. Raises ``InvalidInput``."""
        payload = with_slime_defaults({**defaults, **given}, origin)
        task_type = payload.get("task_type")
        if not isinstance(task_type, str) or not task_type:
            raise InvalidInput("task_type is missing: a string that selects a generator", field="task_type")
        if "num_repeat_per_sample" not in payload and "group_size" not in payload:
            raise InvalidInput(
                "num_repeat_per_sample (the group size) is missing",
                hint="forebay start --group-size N, or num_repeat_per_sample in the body; for example 8",
                field="num_repeat_per_sample",
            )
        input_file = payload.get("input_file")
        if input_file is not None and not isinstance(input_file, str):
            raise InvalidInput(f"input_file must be a path (got {input_file!r})", field="input_file")
        read_flag("capture", payload.get("capture"))  # only for its errors: the run's payload keeps the value
        listed = _listed(payload)
        return cls(
            start=RunStart.of(payload, listed),
            name=name,
            origin=origin,
            task_type=task_type,
            settings=RunSettings.parse(payload, origin),
            listed=listed,
            input_file=input_file or None,
            lists_ids=payload.get("skip_instance_ids") is not None,
            start_id=_start_id(payload),
            defaults=defaults,
            replay=ReplayOptions.parse(payload.get("replay")),
            source=source,
        )


def with_slime_defaults(payload: dict[str, Any], origin: Origin) -> dict[str, Any]:
    """Add slime's defaults to the payload of a start over slime's routes."""
    if origin == "native":
        return payload
    settings = {name: RunSettings.model_fields[name].default for name in SLIME_SETTINGS}
    missing = {"num_epoch": SLIME_NUM_EPOCH, **settings}
    return payload | {name: value for name, value in missing.items() if payload.get(name) is None}


def _start_id(payload: dict[str, Any]) -> str:
    start_id = payload.get("start_id") or ""
    if not isinstance(start_id, str) or len(start_id) > MAX_START_ID_LENGTH:
        raise InvalidInput(f"start_id must be a string of up to {MAX_START_ID_LENGTH} characters", field="start_id")
    return start_id


def _listed(payload: dict[str, Any]) -> list[InstanceId]:
    listed = payload.get("skip_instance_ids")
    if listed is None:
        return []
    if not isinstance(listed, list) or not all(map(_is_id, listed)):
        raise InvalidInput("skip_instance_ids must be a list of strings and numbers", field="skip_instance_ids")
    return [read_instance_id(each) for each in listed]


def _is_id(value: object) -> bool:
    # True is an int in Python, and would count as instance 1.
    is_plain = isinstance(value, str | int) and not isinstance(value, bool)
    return is_plain or (isinstance(value, float) and math.isfinite(value))


def _check_engines(payload: dict[str, Any]) -> None:
    for url in engine_urls(payload):
        if not is_http_url(url):
            raise InvalidInput(
                f"remote_engine_url must be an HTTP address (got {url!r})",
                hint="for example http://127.0.0.1:30000",
                field="remote_engine_url",
            )


def _check_engine_given(request: StartRequest) -> None:
    # Only built-in tasks are known to call an engine: a user's file may know its own.
    if not engine_urls(request.payload):
        raise InvalidInput(
            f"task type {request.task_type!r} needs an engine, but remote_engine_url names none",
            hint="forebay start --engine-url http://127.0.0.1:30000, or remote_engine_url in the body",
            field="remote_engine_url",
        )


class StartCheck:
    """Checks a start's fields, and its input file as its generator will need it."""

    def __init__(self, settings: Settings, files: InputFiles) -> None:
        self._settings = settings
        self._files = files

    async def check(self, request: StartRequest, generator: GeneratorInfo) -> None:
        """Check what can be checked before the reply. Raises ``InputRefused``, ``InvalidInput``.

        Sets ``request.warnings``.
        """
        if request.is_fed:  # it uses neither its input nor an engine
            return
        _check_replay(request, generator)
        _check_oversampling(request, generator)
        _check_scheduler(request, generator)
        check_workers(request.settings, engine_urls(request.payload), generator, self._settings)
        if generator.imports_base:
            _check_engines(request.payload)
            await _check_found_engines(request)
            # Only for their errors.
            retry_budgets(request.payload.get("retry_budgets"), max_attempts=1)
            if (num_process := request.payload.get("num_process")) is not None:
                places_of(num_process)
            await self._check_template(request.payload.get("template_path"))
        asked = AskedArrays.parse(request.settings.arrays)
        check_arrays(asked, request.payload, generator)
        request.warnings[:] = await array_warnings(asked, engine_urls(request.payload), _api_key(request))
        if request.input_file is None:
            if generator.imports_base and generator.needs_input:
                raise InputRefused(
                    "input_file is missing: a file with one JSON object per line",
                    hint="forebay start --input-file FILE, or input_file in the body",
                    field="input_file",
                )
        else:
            await self._files.threads.call(self._check_file, request.input_file, has_rows=generator.imports_base)
        if generator.source == "built-in":
            _check_engine_given(request)

    def _check_file(self, given: str, *, has_rows: bool) -> None:
        path = self._files.allowed(given)
        try:
            with self._files.limits.open(path) as file:
                file.read(1)
        except OSError as error:
            raise InputRefused(
                f"input_file {given!r} cannot be read: {error.strerror}",
                hint="relative paths start at the server's working directory; it must be a regular file",
                field="input_file",
            ) from None
        if has_rows:
            self._check_rows(path, ROWS_BEFORE_REPLY)

    def _check_rows(self, path: Path, first: int | None) -> None:
        problem = validate_rows(path, first, self._files.limits)
        if problem is not None:
            raise problem.as_error()

    async def check_rest(self, request: StartRequest, generator: GeneratorInfo) -> None:
        """Check the whole input file. Raises ``InputRefused``."""
        if request.input_file is not None and generator.imports_base:
            await self._files.threads.call_patiently(self._check_all, request.input_file)

    def _check_all(self, given: str) -> None:
        self._check_rows(self._files.allowed(given), None)

    async def _check_template(self, path: object) -> None:
        if path is None:
            return
        if not isinstance(path, str) or not path:
            raise InvalidInput(f"template_path must be the path of a folder (got {path!r})", field="template_path")
        await self._files.threads.call(lambda: check_template(self._files.allowed(path, "template_path")))


def _check_replay(request: StartRequest, generator: GeneratorInfo) -> None:
    options = request.replay
    if options is not None and options.needs_process and not generator.imports_base:
        name, value = ("mode", options.mode) if options.mode != "only" else ("rewards", options.rewards)
        raise InvalidInput(
            f"replay.{name} {value!r} does nothing for {generator.path.name}, which starts its rollouts itself",
            hint='mode "only" with the recorded rewards, or a generator that uses forebay.generators.base',
            field=f"replay.{name}",
        )


def _check_oversampling(request: StartRequest, generator: GeneratorInfo) -> None:
    if request.settings.oversampling is not None and not generator.imports_base:
        raise InvalidInput(
            f"oversampling does nothing for {generator.path.name}, which starts its rollouts itself",
            hint="leave it out, or let the generator use forebay.generators.base.BaseGenerator",
            field="oversampling",
        )


def _check_scheduler(request: StartRequest, generator: GeneratorInfo) -> None:
    scheduler = request.settings.scheduler
    if scheduler is None:
        return
    if not generator.imports_base:
        raise InvalidInput(
            f"scheduler does nothing for {generator.path.name}, which starts its rollouts itself",
            hint="leave it out, or let the generator use forebay.generators.base.BaseGenerator",
            field="scheduler",
        )
    check_scheduler(scheduler, engine_urls(request.payload))


async def _check_found_engines(request: StartRequest) -> None:
    """Check that a single address is a router, if the policy needs several engines and the address answers."""
    scheduler, named = request.settings.scheduler, engine_urls(request.payload)
    if scheduler is None or scheduler.policy not in TWO_KINDS or len(named) != 1:
        return
    try:
        async with asyncio.timeout(ENGINE_WAIT_S), DetectedEngine(named[0], api_key=_api_key(request)) as engine:
            found = await engine.found()
            urls = [found.url] if not isinstance(found, SGLangEngine) else await found.workers()
    except (EngineError, TimeoutError):
        return  # then the run process reports it, once the address answers
    check_engines(scheduler, named, urls)


def _api_key(request: StartRequest) -> str | None:
    given = request.payload.get("api_key")
    return given if isinstance(given, str) else None
