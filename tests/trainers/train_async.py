"""Train with TRL's real AsyncGRPOTrainer, as often as asked, and print what its loss was given."""

import json
import sys
import threading
from typing import Any

import cpu_attention
from dying import OPTIONS, Dying
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from forebay.client import BufferClient
from forebay.client.trl import RolloutWorker, async_worker, last_checkpoint
from forebay.core.errors import ForebayError

assert cpu_attention
async_worker.STOP_S = 60.0  # on a busy machine it may take longer to release what was not trained on


class NoTransfer:
    """Sends no weights: the engine of these runs is the test."""

    def send_weights(self, iterator: Any) -> None:
        for _ in iterator:
            pass

    def pause(self) -> None:
        pass

    init_weight_transfer = resume = destroy = pause


class Watched(AsyncGRPOTrainer):
    """Keeps the loss terms of each sample: the token, its old logprob, the advantage."""

    seen: list[Any]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        terms = [inputs[name][0].tolist() for name in ("token_index", "old_log_probs", "advantages", "segment_id")]
        samples: dict[int, list[Any]] = {}
        for index, logprob, advantage, sample in zip(*terms, strict=True):
            token = int(inputs["shift_labels"][0][index])
            samples.setdefault(sample, []).append([token, logprob, advantage])
        self.seen += [{"step": self.state.global_step + 1, "terms": each} for each in samples.values()]
        return super().compute_loss(model, inputs, *args, **kwargs)


def train(
    url: str, run_id: str, model: str, folder: str, config: dict[str, Any], *,
    dies_after: int | None = None, without: str = "", times: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """One training, from the last checkpoint in its folder: the samples of its loss, TRL's log, or an error."""
    try:
        with BufferClient(url, as_tensors=True) as client:
            client.attach(run_id)
            worker = RolloutWorker(client)
            args = AsyncGRPOConfig(folder, **{**OPTIONS, "dtype": "float32", "token_budget": 0, **config})
            arguments = {name: value for name, value in worker.arguments.items() if name != without}
            trainer = Watched(model, args=args, weight_transfer=NoTransfer(), **arguments)
            trainer.seen = []
            trainer.add_callback(Dying(trainer, dies_after))
            for _ in range(times):
                trainer.train(resume_from_checkpoint=last_checkpoint(folder))
            threads, groups = [thread.name for thread in threading.enumerate()], client.stats().groups
    except ForebayError as error:
        return {"kind": type(error).__name__, "field": error.field, "message": str(error)}
    return {"seen": trainer.seen, "log": trainer.state.log_history, "threads": threads, "groups": groups}


print(json.dumps([train(**each) for each in json.loads(sys.argv[1])["trainings"]]))
