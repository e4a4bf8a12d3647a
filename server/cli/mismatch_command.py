"""``forebay mismatch``: how far the trainer's logprobs are from those with which tokens were sampled."""

import json
from collections import defaultdict
from collections.abc import Iterator
from enum import StrEnum
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlencode

import typer

from forebay.core.errors import ForebayError
from forebay.server.cli.client import ServerClient
from forebay.server.cli.options import DEFAULT_URL, AsJson, Token, Url
from forebay.server.cli.output import columns_table, make_console, print_json, show_table
from forebay.server.cli.run_commands import RunName

if TYPE_CHECKING:
    import numpy
    from numpy.typing import ArrayLike

    Numbers = numpy.ndarray[Any, Any]

NAME = "trainer_logprobs"
"""The array of an annotation that has the trainer's logprob of each token."""
LARGE = 0.1
"""Differences above this are counted."""

Json = dict[str, Any]


class TokensBy(StrEnum):
    """How the tokens of a step are divided."""

    VERSION = "version"
    POSITION = "position"
    TURN = "turn"


def command(
    run: RunName,
    step: Annotated[int | None, typer.Option("--step", min=0, help="Only this training step.")] = None,
    by: Annotated[
        TokensBy | None, typer.Option("--by", help="Divide by weight version, tenth of the response, or turn.")
    ] = None,
    url: Url = DEFAULT_URL,
    token: Token = "",
    as_json: AsJson = False,
) -> None:
    """Compare the trainer's logprobs, stored by client.annotate, with those of the engines that sampled the tokens."""
    found: dict[tuple[int, Any], list[Numbers]] = defaultdict(list)
    with ServerClient(url, token) as server:
        run_id = server.find_run(run)["run_id"]
        for at_step, sample, trainer in _annotated(server, f"/v1/runs/{run_id}", step):
            for key, differences in _divided(sample, trainer, by):
                found[at_step, key].append(differences)
    if not found:
        of_step = "" if step is None else f" of step {step}"
        hint = f'call client.annotate(uid, {{"{NAME}": logprobs}}, step=step) in the trainer'
        raise ForebayError(f"run {run_id} has no annotations {NAME}{of_step} for tokens with loss_mask 1", hint=hint)
    order = sorted(found, key=lambda key: (key[0], key[1] is None, key[1] or 0))
    rows = [_row(at_step, by, key, found[at_step, key]) for at_step, key in order]
    if as_json:
        print_json({"run_id": run_id, "rows": rows})
        return
    table = columns_table(*(name.replace("_", " ") for name in rows[0]))
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    show_table(make_console(), table)


def _annotated(server: ServerClient, path: str, step: int | None) -> "Iterator[tuple[int, Json, Numbers]]":
    """The step, the sample, and the logprobs of the last note with logprobs of each sample and step."""
    from forebay.client.trainer.read_arrays import side_arrays
    from forebay.core.parts import gather_rows
    from forebay.core.safetensors_format import read_blob

    last = {(note["step"], note["uid"]): note for note in _notes(server, path, step) if NAME in note.get("arrays", ())}
    by_group = itemgetter("group_id")
    for group_id, notes in groupby(sorted(last.values(), key=by_group), by_group):
        group = f"{path}/groups/{group_id}"
        bodies = {sample["uid"]: sample["body"] for sample in server.get(group, bodies="true")["samples"]}
        for note in notes:
            if body := bodies.get(note["uid"]):
                parts = {digest: read_blob(server.download(f"{group}/parts/{digest}")) for digest in note["parts"]}
                yield note["step"], body, gather_rows(side_arrays(note), parts, [NAME])[NAME].data


def _notes(server: ServerClient, path: str, step: int | None) -> Iterator[Json]:
    query: Json = {"limit": 10_000} | ({} if step is None else {"step": step})
    while page := server.download(f"{path}/annotations?{urlencode(query)}").splitlines():
        yield from (notes := list(map(json.loads, page)))
        query["after"] = notes[-1]["id"]


def _divided(sample: Json, trainer: "Numbers", by: TokensBy | None) -> "Iterator[tuple[Any, Numbers]]":
    """Trainer minus sampler, for the tokens that count, by the value that ``by`` gives them."""
    import numpy as np

    def full(given: "ArrayLike | None", default: float) -> "Numbers":
        """One value per token, given those of all tokens or of the response alone."""
        made = np.full(len(sample["tokens"]), default)
        values = np.asarray(() if given is None else given, float)  # None is NaN
        made[len(made) - len(values) :] = values
        return made

    differences = full(trainer, np.nan) - full(sample.get("logprobs"), np.nan)
    differences[full(sample.get("loss_mask"), 1) != 1] = np.nan
    counts = np.isfinite(differences)
    keys = np.full(len(counts), sample.get("weight_version") if by is TokensBy.VERSION else None, object)
    if by is TokensBy.POSITION:
        first, length = int(counts.argmax()), len(counts)
        keys[first:] = 1 + 10 * np.arange(length - first) // (length - first)
    elif by is not None:
        turns = [span for span in sample.get("token_spans") or () if span["source"] == "llm"]
        for number, span in enumerate(turns, start=1):
            keys[span["start"] : span["end"]] = number if by is TokensBy.TURN else span.get("weight_version")
    for key in set(keys[counts]):
        yield key, differences[counts & (keys == key)]


def _row(step: int, by: TokensBy | None, key: Any, parts: "list[Numbers]") -> Json:
    """Estimates of the KL divergence of the sampler from the trainer (http://joschu.net/blog/kl-approx.html)."""
    import numpy as np

    d = np.concatenate(parts)
    return {
        "step": step,
        **({by.value: "-" if key is None else key} if by else {}),
        "samples": len(parts),
        "tokens": len(d),
        "k1": float(-d.mean()) + 0.0,  # without a negative zero
        "k3": float((np.expm1(d) - d).mean()),
        "largest": float(np.abs(d).max()),
        f"above_{LARGE}": float((np.abs(d) > LARGE).mean()),
    }
