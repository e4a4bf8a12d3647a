"""slime's ``train.py`` and ``train_async.py`` in small: generate, train, save the model, then the data source's state.

    python slime_trainer.py URL FOLDER INPUT MODE CRASH

MODE is ``sync`` or ``async``; CRASH is ``PLACE:ROLLOUT``, where the process ends without a word.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.client import slime_stand_in as slime

slime.install()

from forebay.client import slime as ours  # noqa: E402  (slime comes first, as when slime calls)


class Trainer:
    def __init__(self, url: str, folder: Path, input_file: str, crash: str) -> None:
        self.args = slime.arguments(
            url, save=str(folder), prompt_data=input_file, rollout_task_type="counted", num_epoch=1
        )
        self.model_file = folder / "model.json"
        self.data_source = slime.DataSource(folder)
        self.crash = crash
        self.trained: list[Any] = json.loads(self.model_file.read_text()) if self.model_file.exists() else []
        self.args.start_rollout_id = len(self.trained)

    def reach(self, place: str, rollout_id: int) -> None:
        if self.crash == f"{place}:{rollout_id}":
            os._exit(1)

    def generate(self, rollout_id: int) -> Any:
        output = ours.generate_rollout(self.args, rollout_id, self.data_source, evaluation=False)
        slime.train_data(self.args, output)
        self.reach("fetched", rollout_id)
        return output

    def train(self, rollout_id: int, output: Any) -> None:
        """The model remembers, for each rollout, the groups that it was trained on."""
        self.trained.append([group[0].metadata["instance_id"] for group in output.samples])
        self.reach("trained", rollout_id)

    def save(self, rollout_id: int) -> None:
        if (rollout_id + 1) % self.args.save_interval and rollout_id != self.args.num_rollout - 1:
            return
        new = self.model_file.with_suffix(".new")
        new.write_text(json.dumps(self.trained))
        new.rename(self.model_file)
        self.reach("model", rollout_id)
        self.data_source.save(rollout_id)
        self.reach("saved", rollout_id)

    def run(self, *, is_async: bool) -> None:
        first, last = self.args.start_rollout_id, self.args.num_rollout - 1
        following = self.generate(first)
        for rollout_id in range(first, last + 1):
            output = following
            if is_async and rollout_id < last:
                following = self.generate(rollout_id + 1)
            self.train(rollout_id, output)
            self.save(rollout_id)
            if not is_async and rollout_id < last:
                following = self.generate(rollout_id + 1)


def crash_with_leases(trainer: Trainer) -> None:
    """Let the place ``leased`` be within our function, between the lease and the mark."""
    real = ours.to_slime

    def to_slime(groups: Any, args: Any, first_group: int) -> Any:
        trainer.reach("leased", first_group // args.rollout_batch_size)
        return real(groups, args, first_group)

    ours.__dict__["to_slime"] = to_slime


if __name__ == "__main__":
    url, folder, input_file, mode, crash = sys.argv[1:]
    trainer = Trainer(url, Path(folder), input_file, crash)
    crash_with_leases(trainer)
    trainer.run(is_async=mode == "async")
