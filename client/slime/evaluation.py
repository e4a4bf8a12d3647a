"""Evaluation for slime: one run per data set, in which every sample counts."""

import hashlib
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

from forebay.client.calls.flow import Json, answered, decoded, json_call
from forebay.client.calls.transport import Transport
from forebay.client.model import Row, RunStats
from forebay.client.slime.args import SlimeArgs, buffer_url, run_name, start_fields
from forebay.client.slime.samples import Usable, to_slime, usable_row
from forebay.client.tensors.batch_groups import own_names
from forebay.client.trainer.buffer_client import BufferClient
from forebay.core.errors import BodiesGone, ForebayError, InvalidInput, RunEnded
from forebay.core.starts.run_start import EVALUATION_FIELDS

logger = logging.getLogger(__name__)

POLL_S = 1.0
RETRY_FOR_S = 120.0
WORKING = ("validating", "running")
LONGEST_NAME = 64
GROUPS_AT_ONCE = 64
"""Groups of an evaluation that are acked in one batch."""


@dataclass(frozen=True, slots=True)
class EvalSet:
    """One data set from slime's arguments; None stands for the value used in training."""

    name: str
    path: str
    num_samples: int
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None


def evaluate(args: SlimeArgs, rollout_id: int) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Rewards, truncations and samples of each data set, in the form that slime logs, and the number of failed samples.

    Failed samples are omitted: a failure is not a reward of 0. With ``--log-passrate``, which counts whole groups,
    the other samples of their groups are omitted too. When all data sets are done, the groups of all of them are acked;
    if one fails, none is. Raises ``RunEnded`` for a run that did not finish.
    """
    data, metrics, run_ids = {}, {}, []
    for eval_set in eval_sets(args):
        logger.info("rollout %d: evaluating on %s", rollout_id, eval_set.name)
        run_ids.append(_run(args, eval_set))
        data[eval_set.name], failed = _results(args, eval_set, run_ids[-1])
        metrics[f"eval/{eval_set.name}/failed_samples"] = failed
    _let_go(args, run_ids)
    return data, metrics


def eval_sets(args: SlimeArgs) -> list[EvalSet]:
    """``eval_datasets`` of slime's configuration file, else ``--eval-prompt-data NAME PATH …``."""
    default = getattr(args, "n_samples_per_eval_prompt", None) or 1
    configured = getattr(args, "eval_datasets", None)
    if configured:
        return [_of_config(each, default) for each in configured]
    pairs = getattr(args, "eval_prompt_data", None) or []
    if not pairs or len(pairs) % 2:
        raise InvalidInput(
            "no evaluation data set is given", hint="pass --eval-prompt-data NAME PATH", field="eval_datasets"
        )
    names, paths = pairs[::2], pairs[1::2]
    return [EvalSet(name, path, default, *_sampling(args, "eval_")) for name, path in zip(names, paths, strict=True)]


def _of_config(config: Any, default: int) -> EvalSet:
    num_samples = getattr(config, "n_samples_per_eval_prompt", None) or default
    return EvalSet(config.name, config.path, num_samples, *_sampling(config, ""))


def _sampling(source: Any, prefix: str) -> list[Any]:
    return [getattr(source, f"{prefix}{name}", None) for name in ("temperature", "top_p", "max_response_len")]


def _run(args: SlimeArgs, eval_set: EvalSet) -> str:
    """Run the generator on this data set until it finishes, and return the run's id."""
    with BufferClient(buffer_url(args)) as client:
        name = eval_name(args)
        for run in client.runs(name):
            if run.state in WORKING:  # left over from a training process that ended during its evaluation
                client.attach(run.run_id)
                client.stop()
        client.start(**_fields(args, eval_set) | {"name": name})
        try:
            return _finished(client).run_id
        finally:
            client.stop()


def eval_name(args: SlimeArgs) -> str:
    """The name of the evaluation runs of a training, unique to that training."""
    name = run_name(args)
    if len(name) > LONGEST_NAME - len("-eval"):
        name = f"{name[:46]}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"
    return f"{name}-eval"


def _results(args: SlimeArgs, eval_set: EvalSet, run_id: str) -> tuple[dict[str, Any], int]:
    with closing(WrittenGroups(args, run_id)) as source:
        groups, failed = _usable(args, eval_set, source)
    slots = [[[item] for item in group] for group in groups]  # forks were left out
    samples = [sample for group in to_slime(slots, args, 0) for sample in group]
    rewards = [item.reward for group in groups for item in group]
    truncated = [sample.status.name == "TRUNCATED" for sample in samples]
    return {"rewards": rewards, "truncated": truncated, "samples": samples}, failed


def _fields(args: SlimeArgs, eval_set: EvalSet) -> dict[str, Any]:
    fields = start_fields(args)
    given = {
        "temperature": eval_set.temperature,
        "top_p": eval_set.top_p,
        "max_tokens": eval_set.max_tokens,
    }
    sampling = fields["sampling_params"] | {name: value for name, value in given.items() if value is not None}
    return fields | {
        "sampling_params": sampling,
        "max_tokens": sampling.get("max_tokens", fields["max_tokens"]),
        "input_file": eval_set.path,
        "group_size": eval_set.num_samples,
        **EVALUATION_FIELDS,
        "min_timeout_group_size_ratio": 1.0,  # groups still open after the evaluation are discarded
    }


def _finished(client: BufferClient) -> RunStats:
    """Wait until the run's generator has returned, and return the run."""
    # The state is checked, not has_ended: an evaluation's groups are not read, and a run with ready groups never ends.
    while (stats := client.stats()).state in WORKING:
        time.sleep(POLL_S)
    if stats.state != "finished":
        raise RunEnded(stats.run_id, f"{stats.state}: {stats.reason}")
    return stats


def _usable(args: SlimeArgs, eval_set: EvalSet, source: "WrittenGroups") -> tuple[list[list[Usable]], int]:
    """The usable samples of each group, and the number of unusable ones."""
    groups, failed = [], 0
    for rows in source:
        group = []
        for row in rows:
            try:
                group.append(usable_row(row, args))
            except InvalidInput as error:
                logger.warning("evaluation of %s: skipping a sample: %s", eval_set.name, error)
        failed += eval_set.num_samples - len(group)
        if group and (len(group) == eval_set.num_samples or not getattr(args, "log_passrate", False)):
            groups.append(group)
    return groups, failed


def _let_go(args: SlimeArgs, run_ids: Sequence[str]) -> None:
    """Ack the groups of evaluation runs."""
    # No other client reads them, and ready groups are kept for as long as the run.
    try:
        for run_id in run_ids:
            with BufferClient(buffer_url(args)) as client:
                client.attach(run_id)
                _end_groups(client)
    except ForebayError as error:  # the evaluation has succeeded: disk space must not make it fail
        logger.warning("the samples of an evaluation were left on the server's disk: %s", error)


def _end_groups(client: BufferClient) -> None:
    num_groups = GROUPS_AT_ONCE
    with suppress(RunEnded):  # nothing is left
        while num_groups:
            batch = client.read(num_groups, wait_s=0.0)
            if batch is not None:
                client.ack(batch)
                continue
            # Fewer groups are ready than requested: request as many as there are.
            num_ready = client.stats().groups.get("ready", 0)
            num_groups = min(num_ready, num_groups - 1)  # the read may have discarded some ready groups


class WrittenGroups:
    """Every group of a run with its samples as written, independent of the read hooks."""

    def __init__(self, args: SlimeArgs, run_id: str) -> None:
        self._transport = Transport(buffer_url(args), os.environ.get("FOREBAY_TOKEN"))
        self._path = f"v1/runs/{run_id}/groups"

    def __iter__(self) -> Iterator[list[Row]]:
        after = ""
        while page := self._ask(f"{self._path}?after={after}")["groups"]:
            for group in page:
                yield self._rows(group["group_id"])
            after = page[-1]["group_id"]

    def _rows(self, group_id: str) -> list[Row]:
        samples = self._ask(f"{self._path}/{group_id}?bodies=true")["samples"]
        members = [sample for sample in samples if sample["outcome"] == "member" and not sample["fork"]]
        if not all(sample["has_body"] for sample in members):
            raise BodiesGone([group_id], hint="raise the server's max_journal_bytes to keep them for longer")
        return [own_names(sample["body"]) if sample.get("is_foreign") else sample["body"] for sample in members]

    def _ask(self, path: str) -> Json:
        call = json_call("GET", path)
        return decoded(self._transport.run(answered(call, RETRY_FOR_S)), call)

    def close(self) -> None:
        self._transport.close()
