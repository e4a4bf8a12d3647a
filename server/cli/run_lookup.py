"""Which run somebody means who gives its id, its name, or no more than the beginning of either."""

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from forebay.core.errors import InvalidInput, RunNotFound

MAX_CANDIDATES = 20
"""How many runs an error lists that could be meant."""

View = dict[str, Any]


def pick_run(views: Sequence[View], given: str) -> View:
    """The one of ``views`` (oldest first) that ``given`` names.

    That is the run with this id; else the newest of this name; else the only one that has an id or a name which begins
    so, where several runs of one name are its newest. Raises ``InvalidInput`` if ``given`` is empty or begins several,
    ``RunNotFound`` if it begins none.
    """
    if not given:
        raise InvalidInput("RUN is empty", hint="give a run's id or name; `forebay status` lists them")
    by_id = {view["run_id"]: view for view in views}
    by_name = {view["name"]: view for view in views}  # of several under one name the newest stays
    for exact in (by_id, by_name):
        if given in exact:
            return exact[given]
    begun = {
        view["run_id"]: view for known in (by_id, by_name) for text, view in known.items() if text.startswith(given)
    }
    if not begun:
        near = get_close_matches(given, [text for text in (*by_id, *by_name) if text], n=3)
        meant = f"do you mean {' or '.join(near)}? " if near else ""
        message = f"the server knows no run {given!r}"
        raise RunNotFound(given, message=message, hint=f"{meant}`forebay status` lists the runs")
    if len(begun) > 1:
        hint = "give more of the id, or the whole name"
        raise InvalidInput(f"{given!r} could be any of {_listed(list(begun.values()))}", hint=hint)
    return next(iter(begun.values()))


def _listed(views: Sequence[View]) -> str:
    lines = [f"  {view['run_id']}  {view['name'] or '-'}  {view['task_type']}" for view in views[-MAX_CANDIDATES:]]
    num_left = len(views) - len(lines)
    return "\n".join([f"{len(views)} runs:", *lines, *([f"  and {num_left} older ones"] if num_left else [])])
