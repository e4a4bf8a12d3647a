"""The worker of TRL's ``AsyncGRPOTrainer`` that takes its samples from a run."""

import queue
import threading
from collections import deque
from contextlib import suppress
from itertools import count
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback

from forebay.client.model import Batch
from forebay.client.tensors.batch_groups import SlotRow
from forebay.client.trainer.buffer_client import BufferClient
from forebay.client.trainer.marked_steps import LeasedStep, MarkedSteps, Unusable
from forebay.client.trl.grpo import check_args, check_begun, check_trl
from forebay.client.trl.rows import trained_rows
from forebay.core.errors import ForebayError, InvalidInput
from forebay.core.outcome import reward_parts_of
from forebay.core.parts import numpy_module

POLL_S, STOP_S = 1.0, 5.0
"""Longest waits: for room in TRL's queue before the worker looks whether it was stopped, and for its end."""
MAX_UNUSABLE = 32
"""Unusable groups in a row after which the training fails: each read is for one group."""


class TrlRolloutWorker(TrainerCallback):  # type: ignore[misc]
    """A run's groups for ``AsyncGRPOTrainer``, and the callback that marks each optimiser step before TRL saves it::

        worker = RolloutWorker(client)
        trainer = AsyncGRPOTrainer(model, args=config, **worker.arguments)
        trainer.train(resume_from_checkpoint=last_checkpoint(config.output_dir))

    ``client`` is attached to the run. Every row of a group is a sample, forks included; its advantage is the row's
    normalised ``reward``. Groups that TRL cannot train on are passed over, logged, and counted as
    ``forebay/unusable_total``. The run's ``max_staleness`` decides which groups are too old.
    """

    def __init__(self, client: BufferClient) -> None:
        """Raise ``InvalidInput`` if the installed TRL is too old."""
        check_trl()
        self._client = client
        # TRL drops samples that lay in its queue while the weights changed: one sample at most lies there.
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(1)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self._leased: dict[int, Batch] = {}
        """Batches of one group, by TRL's number of the group: a checkpoint names batches."""
        self._num_left: dict[int, int] = {}
        """Rows that were not trained on yet, by group."""
        self._collated: deque[list[int]] = deque()
        """The group of each row, by micro-batch."""
        self._first_version = 0
        """The version of the weights with which the training began: TRL counts from 0 again when it resumes."""
        self._version = 0
        self._next_step = 0
        """The optimiser step that a read is for, as the server shows it; 0 before the training begins."""
        self._token_budget = 0
        self._numbers = count()
        self._thread = threading.Thread(target=self._work, name="forebay-rollouts", daemon=True)
        self._is_stopped = threading.Event()
        self._error: Exception | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """``rollout_worker``, ``callbacks``, and a ``train_dataset`` that TRL demands and never reads."""
        # Without a length: from one, TRL would compute when to stop.
        dataset = Dataset.from_dict({"prompt": [""]}).to_iterable_dataset()
        return {"rollout_worker": self, "callbacks": [self], "train_dataset": dataset}

    def start(self) -> None:
        """Begin to read groups. Raises ``InvalidInput`` if TRL was not given the callback."""
        check_begun(has_begun=self._next_step > 0)
        self._thread.start()

    def stop(self) -> None:
        """Release what was not trained on."""
        self._is_stopped.set()
        if self._thread.is_alive():  # a read in progress ends when the client is closed
            self._thread.join(STOP_S)

    def update_model_version(self, model_version: int) -> None:
        """Announce the version of the weights that TRL has just sent to the engines."""
        self._version = model_version
        self._client.set_weight_version(self._first_version + model_version)

    def check_health(self, stale_after_s: float) -> None:
        """Raise the error that ended the worker, such as ``RunEnded``."""
        del stale_after_s  # a server that does not answer is an error, and slow rollouts are none
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            while not self._is_stopped.is_set():
                step = LeasedStep(self._client, self._next_step)
                [(group, rows)] = step.collect(1, self._groups_of, MAX_UNUSABLE)
                self.metrics_queue.put({"forebay/unusable_total": float(len(step.unusable))})
                for item in rows:
                    self._put(item, group)
        except Exception as error:  # noqa: BLE001 - TRL asks for it in its own thread
            self._error = error
        self._is_stopped.wait()
        with suppress(ForebayError):  # the rewind of the next training releases the rest
            self._client.release([*self._leased.values()])

    def _groups_of(self, batch: Batch) -> list[tuple[int, list[SlotRow]] | Unusable]:
        """The group of a batch, if it can be used; otherwise it belongs to the next step that is marked."""
        rows, group = trained_rows(batch, self._token_budget), next(self._numbers)
        self._leased[group], self._num_left[group] = batch, 0 if isinstance(rows, Unusable) else len(rows)
        self.metrics_queue.put(self._client.metrics(batch))
        return [rows if isinstance(rows, Unusable) else (group, rows)]

    def _put(self, item: SlotRow, group: int) -> None:
        while not self._is_stopped.is_set():
            with suppress(queue.Full):
                self.rollout_buffer.put(_sample(item, group, self._version), timeout=POLL_S)
                return

    def on_init_end(self, args: Any, _state: Any, _control: Any, **_: Any) -> None:
        """Raise ``InvalidInput`` without a token budget: before the training begins, TRL would ask vLLM for it."""
        if args.token_budget is None:
            raise InvalidInput("token_budget must be set, or TRL asks a vLLM server for it", field="token_budget")

    def on_train_begin(self, args: Any, state: Any, _control: Any, train_dataloader: Any, **_: Any) -> None:
        """Check the trainer's arguments, and rewind the run to the loaded checkpoint. Raises ``InvalidInput``."""
        if not state.is_world_process_zero:
            return
        if self._is_stopped.is_set():  # TRL starts the worker of a trainer once
            hint = "make another RolloutWorker, and another AsyncGRPOTrainer with it"
            raise InvalidInput("a RolloutWorker is for one training", hint=hint)
        why = "must be 2 or more: the run's own max_staleness decides"
        check_args(self._client, args, state, ("max_staleness", args.max_staleness < 2, why))
        self._token_budget, self._first_version = args.token_budget, state.global_step // args.weight_sync_steps
        self._next_step = state.global_step + 1
        MarkedSteps(self._client).begin(self._next_step)
        # TRL collates one micro-batch ahead, and counts it as trained. The n-th call collates the n-th micro-batch.
        loader = train_dataloader.base_dataloader  # accelerate's wrapper has a collate_fn, too, and never calls it
        collate = loader.collate_fn

        def watched(examples: Any) -> Any:
            self._collated.append([sample["group_id"] for row in examples[0] for sample in row.samples])
            return collate(examples)

        loader.collate_fn = watched

    def on_step_end(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Mark the optimiser step with the groups whose last row it trained on."""
        if not state.is_world_process_zero:
            return
        self._next_step = state.global_step + 1
        for _micro_batch in range(args.gradient_accumulation_steps):
            for group in self._collated.popleft():
                self._num_left[group] -= 1
        trained = [group for group, num_left in [*self._num_left.items()] if not num_left]
        self._client.checkpoint(state.global_step, [self._leased[group] for group in trained])
        for group in trained:
            del self._leased[group], self._num_left[group]


def _sample(item: SlotRow, group_id: int, model_version: int) -> Any:
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample  # loads aiohttp and more

    row, mask = item.row, item.arrays.loss_mask.astype("int64")
    parts = {f"rewards/{name}": part for name, part in reward_parts_of(row).items()}  # as TRL names them
    return RolloutSample(
        prompt=row["messages"][:-1],
        completion=row["messages"][-1:],
        input_ids=item.arrays.ids.astype("int64"),
        completion_mask=mask,
        # TRL has no guard against NaN, which tokens have that were not sampled.
        old_log_probs=numpy_module().where(mask, item.arrays.logprobs, 0.0).astype("float32"),
        advantage=float(row["reward"]),
        model_version=model_version,
        group_id=group_id,
        metrics={"reward": float(row["raw_reward"]), **parts},
    )
