"""Train with verl's own trainer on a run of Forebay: all but the actor, the engines and verl's validation is verl's.

Prints, as JSON, what the actor was given, what verl logged, and what is left in TransferQueue.
"""

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas
import ray
import transfer_queue as tq
from hydra import compose, initialize_config_module
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.trainer.ppo.v1.trainer_separate_async import HybridEngineMode, PPOTrainerSeparateAsync
from verl.utils import tensordict_utils
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.import_utils import load_class_from_fqn
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from forebay.core.errors import InvalidInput

OVERRIDES = [
    "trainer.v1.trainer_mode=separate_async",
    "actor_rollout_ref.hybrid_engine=False",
    "trainer.v1.sampler.custom_sampler.path=pkg://forebay.client.verl",
    "trainer.v1.sampler.custom_sampler.name=ReplayBuffer",
    "+actor_rollout_ref.rollout.agent.agent_loop_manager_class=forebay.client.verl.AgentLoopManager",
    "algorithm.rollout_correction.bypass_mode=True",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
    "actor_rollout_ref.rollout.n=3",
    "actor_rollout_ref.model.path=/models/tiny",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "trainer.v1.separate_async.parameter_sync_step=2",
    "data.train_batch_size=4",
    "data.dataloader_num_workers=0",
    "trainer.val_before_train=False",
    "trainer.logger=[file]",
    # The controller and each storage unit take a processor of Ray's: with more than it has, `tq.init` hangs for ever.
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=2",
]


LOSS_FIELDS = ("old_log_probs", "advantages", "response_mask")
seen: list[Any] = []
"""The rows that the actor was given, by key, without those of verl's own padding."""


class Actor:
    """Stands in for the actor on GPUs: its logprob is -0.5 everywhere, its model is the list of trained samples."""

    def __init__(self, config: Any, kill_at: int | None) -> None:
        self._dispatch_info = {"actor": [0]}
        self._config, self._kill_at = omega_conf_to_dataclass(config), kill_at
        self.model: list[str] = []

    def update_actor(self, batch: Any) -> Any:
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id)
        rows = [[key, tag, plain(row)] for key, tag, row in zip(batch.keys, batch.tags, data, strict=True)]
        seen.extend(row for row in rows if not row[1].get("is_padding"))
        self.model += [row["extra_fields"]["sample_uid"] for _, tag, row in rows if not tag.get("is_padding")]
        if batch.tags[0]["global_steps"] == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        old, advantages, mask = (data[name].to_padded_tensor(0.0) for name in LOSS_FIELDS)
        _, metrics = get_policy_loss_fn("vanilla")(old, 0 * old - 0.5, advantages, mask, config=self._config)
        return {"metrics": {**metrics, "mfu": 0.0}}

    def save_checkpoint(self, path: str, *_: Any, **__: Any) -> None:
        Path(path).mkdir(parents=True)
        (Path(path) / "model.json").write_text(json.dumps(self.model))

    def load_checkpoint(self, local_path: str, **_: Any) -> None:
        self.model = json.loads((Path(local_path) / "model.json").read_text())


class Trainer(PPOTrainerSeparateAsync):
    """verl's trainer without what ``_setup`` places on GPUs."""

    kill_at: int | None = None

    def _setup(self) -> None:
        self.tokenizer, self.processor = SimpleNamespace(eos_token_id=0, pad_token_id=0), None
        self._init_dataloader()
        self._init_dump_executor()
        self.actor_rollout_wg = Actor(self.config.actor_rollout_ref.actor, self.kill_at)
        self.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
        self.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 1)
        self.standalone_checkpoint_manager = SimpleNamespace(update_weights=lambda _: {})
        self.distillation_config, self.current_mode = None, HybridEngineMode.TRAINER
        self._load_checkpoint()


def plain(row: Any) -> dict[str, Any]:
    return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in row.items()}


def make_config(folder: str, overrides: list[str]) -> Any:
    files = [f"data.{name}_files={folder}/prompts.parquet" for name in ("train", "val")]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", [*OVERRIDES, *files, f"trainer.default_local_dir={folder}/models", *overrides])


def make_manager(config: Any, llm_client: Any) -> Any:
    """As verl's ``TaskRunnerV1`` makes it."""
    named = {"config": config, "llm_client": llm_client, "teacher_client": None, "reward_loop_worker_handles": []}
    return load_class_from_fqn(config.actor_rollout_ref.rollout.agent.agent_loop_manager_class).create(**named)


def refusal(config: Any) -> str:
    """What is raised for a configuration, by the trainer's constructor, the manager or the first sample."""
    try:
        trainer = get_trainer_cls(config.trainer.v1.trainer_mode)(config)
        make_manager(config, None)
        trainer.replay_buffer.sample(1, "train", 2)
    except (InvalidInput, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def validated(trainer: Any, manager: Any) -> list[list[str]]:
    """The keys that verl's own manager gets of a validation, and those that the sampler then returns."""
    prompts = trainer._next_train_batch(1)
    tensordict_utils.assign_non_tensor_data(prompts, "validate", True)
    got: list[str] = []

    def generate(prompts: Any) -> None:
        got.extend(prompts["uid"])
        tag = {"global_steps": 1, "status": "finished"}
        tq.kv_put(key=got[0], partition_id="val", tag={**tag, "is_prompt": True})
        tq.kv_put(key=f"{got[0]}_0_0", partition_id="val", tag=tag)

    manager.__dict__["_verls"] = SimpleNamespace(generate_sequences=generate)
    manager.generate_sequences(prompts)
    return [got, trainer.replay_buffer.sample(1, "val", 1)[0].keys]


def main(
    folder: str, overrides: list[str], engines: list[str], kill_at: int | None = None, refused: Sequence[str] = ()
) -> None:
    os.chdir(folder)
    pandas.DataFrame({"prompt": [[{"role": "user", "content": "?"}]] * 40}).to_parquet("prompts.parquet")
    os.environ["VERL_FILE_LOGGER_PATH"] = f"{folder}/log.jsonl"
    refusals = [refusal(make_config(folder, [*overrides, each])) for each in refused]
    config = make_config(folder, overrides)
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    tq.init(config.transfer_queue)
    Trainer.kill_at = kill_at
    trainer = Trainer(config)
    trainer.init()
    router = ray.remote(GlobalRequestLoadBalancer).remote(servers=dict.fromkeys(engines))
    manager = make_manager(config, SimpleNamespace(_load_balancer=router))
    trainer.fit(manager)
    told = {
        "seen": seen,
        "model": trainer.actor_rollout_wg.model,
        "log": [json.loads(line)["data"] for line in Path("log.jsonl").read_text().splitlines()],
        "left": tq.kv_list(),
        "validated": validated(trainer, manager),
        "refusals": refusals,
    }
    tq.close()
    ray.shutdown()
    print(json.dumps(told))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
