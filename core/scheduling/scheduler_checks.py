"""Checks whether a run's scheduler can work with its settings and with the run's engines."""

from collections.abc import Sequence

from forebay.core.addresses import engine_root
from forebay.core.errors import InvalidInput
from forebay.core.scheduling.policy import check_policy
from forebay.core.scheduling.scheduler import SETTINGS_OF, Scheduler

TWO_KINDS = frozenset({"probe"})
"""Policies that use some engines for long answers and the others for the rest."""


def check_scheduler(scheduler: Scheduler, named: Sequence[str]) -> None:
    """Check the settings and the addresses in ``remote_engine_url``. Raises ``InvalidInput``.

    A single address may be a router with many engines, which ``check_engines`` checks.
    """
    check_policy(scheduler.policy)
    _check_unread(scheduler)
    if scheduler.policy in TWO_KINDS and len(named) > 1:
        _check_heavy(scheduler, [engine_root(url) for url in named])


def check_engines(scheduler: Scheduler, named: Sequence[str], found: Sequence[str]) -> None:
    """Check ``found``, the engines behind the ``named`` addresses. Raises ``InvalidInput``."""
    roots = [engine_root(url) for url in named]
    if scheduler.policy not in TWO_KINDS or len(roots) != 1:
        return
    if list(found) == roots:
        raise InvalidInput(
            f"the policy {scheduler.policy!r} needs at least two engines, but this run has one",
            hint="name several in remote_engine_url, or a router whose workers can be reached",
            field="scheduler.policy",
        )
    _check_heavy(scheduler, found)


def _check_heavy(scheduler: Scheduler, urls: Sequence[str]) -> None:
    heavy = scheduler.heavy
    unknown = [url for url in heavy if url not in urls] if isinstance(heavy, list) else []
    if unknown:
        raise InvalidInput(
            f"scheduler.heavy names {unknown[0]!r:.200}, which is not an engine of the run",
            hint=f"its engines are {', '.join(urls)}"[:500],
            field="scheduler.heavy",
        )
    if isinstance(heavy, list) and set(heavy) >= set(urls):
        raise InvalidInput(
            "scheduler.heavy names every engine of the run, so none is left for short answers",
            hint="leave at least one out, or give a share like 0.25",
            field="scheduler.heavy",
        )


def _check_unread(scheduler: Scheduler) -> None:
    # A setting without effect would otherwise go unnoticed.
    read = SETTINGS_OF.get(scheduler.policy)
    given = scheduler.model_fields_set - {"policy"}
    unread = sorted(given - set(read)) if read is not None else []
    if unread:
        others = [name for name, settings in SETTINGS_OF.items() if unread[0] in settings]
        raise InvalidInput(
            f"the policy {scheduler.policy!r} does not use {unread[0]}",
            hint=f"it uses {', '.join(read or ())}; {unread[0]} is for {', '.join(others) or 'policies of others'}",
            field=f"scheduler.{unread[0]}",
        )
