"""Pause the engines of a run while its weights change; every worker is called directly.

Checked against SGLang 0.5.23, which has three pause modes for the calls in flight:

========  ====================================================================================================
abort     they end with their tokens so far (finish reason ``abort``), and the caller continues from there
retract   they resume after the pause; their cache is dropped and recomputed with the new weights
in_place  they resume after the pause with the cache of the old weights: their logprobs match no single policy
========  ====================================================================================================

vLLM has ``abort`` and ``in_place``, which it calls ``keep``; its pauses return once nothing is computed.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import httpx

from forebay.core.backoff import Backoff
from forebay.core.errors import EngineError, EngineUnavailable, WeightUpdateFailed
from forebay.core.weight_versions import PauseMode, name_apart
from forebay.engines.detect import dialect_by
from forebay.engines.router_workers import ADMIN_TIMEOUT_S, WorkerAdmin

PROBE_S = 0.05
IDLE_TIMEOUT_S = 60.0
RESUME_FIRST_S, RESUME_MAX_S = 0.1, 5.0

Step = Callable[[WorkerAdmin], Awaitable[None]]


async def workers_of(http: httpx.AsyncClient, urls: Sequence[str]) -> list[WorkerAdmin]:
    """Return the servers to call: those at ``urls`` (without ``/v1``); for a router, each of its workers once.

    Raises ``EngineUnavailable`` if one does not answer, ``InvalidInput`` if one cannot be paused,
    ``WeightUpdateFailed`` if one rejects the request.
    """
    try:
        async with asyncio.timeout(ADMIN_TIMEOUT_S):
            listed = await asyncio.gather(*(_behind(http, url) for url in urls))
            admins = {admin.url: admin for admins in listed for admin in admins}
            await asyncio.gather(*(admin.check_pauses() for admin in admins.values()))
    except EngineUnavailable:
        raise
    except EngineError as error:
        raise WeightUpdateFailed("looking for the workers", ", ".join(urls), str(error)) from error
    except TimeoutError:
        raise EngineUnavailable(f"not all engines at {', '.join(urls)} answered within {ADMIN_TIMEOUT_S:g} s") from None
    return list(admins.values())


async def pause(admins: Sequence[WorkerAdmin], mode: PauseMode, timeout_s: float = IDLE_TIMEOUT_S) -> None:
    """Pause all workers. Raises ``WeightUpdateFailed``, after which some may be paused."""

    async def pause_one(admin: WorkerAdmin) -> None:
        # SGLang answers an aborting pause only once it is idle.
        async with asyncio.timeout(timeout_s):
            await admin.pause(mode)

    await _at_all(admins, "pausing", pause_one)


async def wait_idle(admins: Sequence[WorkerAdmin], mode: PauseMode, timeout_s: float = IDLE_TIMEOUT_S) -> None:
    """Return once no paused worker computes anything.

    With ``abort`` the calls have ended. In the other modes they are kept, and SGLang still counts them as load. Raises
    ``WeightUpdateFailed``.
    """
    await _at_all(admins, "waiting for calls to end", lambda admin: _idle(admin, mode, timeout_s))


async def flush(admins: Sequence[WorkerAdmin], mode: PauseMode) -> None:
    """Clear the cache of all idle workers, except in mode ``in_place``, whose paused calls need it.

    ``update`` does so itself. Raises ``WeightUpdateFailed``.
    """
    # Calls paused in place resume with their cache.
    if mode != "in_place":
        await _at_all(admins, "flushing the cache", lambda admin: admin.flush_cache())


async def update(admins: Sequence[WorkerAdmin], model_path: str, version: int, mode: PauseMode) -> str:
    """Load the weights in the folder ``model_path`` at all paused workers. Returns their new name.

    Raises ``WeightUpdateFailed``.
    """
    flushes, name = mode != "in_place", await _name_for(admins, version, mode)
    await _at_all(admins, "loading weights", lambda each: each.update_weights(model_path, name, flushes_cache=flushes))
    return name


async def name_weights(admins: Sequence[WorkerAdmin], version: int, mode: PauseMode) -> str:
    """Name the weights that all workers were given. Returns the name. Raises ``WeightUpdateFailed``."""
    name = await _name_for(admins, version, mode)
    await _at_all(admins, "naming the weights", lambda admin: admin.set_weight_version(name))
    return name


async def _name_for(admins: Sequence[WorkerAdmin], version: int, mode: PauseMode) -> str:
    """Return a name for the version that differs, over a kept cache, from the names of the weights that filled it."""
    present: list[str | None] = []

    async def ask(admin: WorkerAdmin) -> None:
        info = await admin.model_info()
        present.append(info.weight_version if info is not None else None)

    # Under the same name, a call that resumes with other weights would look unchanged.
    if mode == "in_place":
        await _at_all(admins, "asking for its weights", ask)
    return name_apart(version, present)


async def resume(admins: Sequence[WorkerAdmin], timeout_s: float) -> list[str]:
    """Resume all workers, retrying those that do not answer. Returns the workers that never did."""
    have_resumed = await asyncio.gather(*(_resume(admin, timeout_s) for admin in admins))
    return [admin.url for admin, has_resumed in zip(admins, have_resumed, strict=True) if not has_resumed]


async def _behind(http: httpx.AsyncClient, url: str) -> list[WorkerAdmin]:
    listed = await WorkerAdmin(http, url).workers()
    if listed is None:
        return [await admin_at(http, url)]
    return [WorkerAdmin(http, worker.url) for worker in listed if worker.speaks_http]


async def admin_at(http: httpx.AsyncClient, url: str) -> WorkerAdmin:
    """Return the administrative calls to the server at ``url``, whatever its kind. Raises ``EngineUnavailable``."""
    return (await dialect_by(http, url)).admin(http, url)


async def _idle(admin: WorkerAdmin, mode: PauseMode, timeout_s: float) -> None:
    if admin.is_idle_once_paused:
        return
    if mode == "abort":
        async with asyncio.timeout(timeout_s):
            await _abort_until_idle(admin)
    else:
        await admin.pass_scheduler()


async def _abort_until_idle(admin: WorkerAdmin) -> None:
    num_idle = 0
    while num_idle < 2:  # one idle report is not enough: a call may be on its way to the scheduler
        load = await admin.load()
        if load is None:
            return
        num_idle = num_idle + 1 if load.idle else 0
        if not load.idle:
            await admin.abort_all()
        await asyncio.sleep(PROBE_S)


async def _resume(admin: WorkerAdmin, timeout_s: float) -> bool:
    pauses = Backoff(RESUME_FIRST_S, RESUME_MAX_S, is_exact=True)
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while not await _has_resumed(admin):
                await pauses.wait()
            return True
    return False


async def _has_resumed(admin: WorkerAdmin) -> bool:
    try:
        await (await admin_at(admin.http, admin.url)).resume()  # the caller may not know the kind any more
    except (EngineUnavailable, TimeoutError):
        return False
    except EngineError as error:
        # A 4xx is final: the server does not support resuming, so it is not paused either.
        return error.status_code is not None and error.status_code < 500
    return True


async def _at_all(admins: Sequence[WorkerAdmin], what: str, step: Step) -> None:
    """Run ``step`` at all workers at once and wait for all; raises the first failure with its worker."""
    results = await asyncio.gather(*map(step, admins), return_exceptions=True)
    failed = [(admin.url, result) for admin, result in zip(admins, results, strict=True) if result is not None]
    for url, error in failed:
        if not isinstance(error, EngineError | TimeoutError):
            raise error
        raise WeightUpdateFailed(what, url, str(error) or "no answer in time", len(failed), len(admins)) from error
