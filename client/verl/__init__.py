"""The two classes that verl's trainer loads to train on a run of Forebay; both share the client of their process.

``config.py`` checks verl's configuration and translates it into a start; ``records.py`` turns rows into verl's records.
Steps are marked as in ``forebay.client.trainer.marked_steps``. verl and torch are imported only where they are used.
"""

import time
from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any, Self

from forebay.client.trainer.buffer_client import DEFAULT_URL
from forebay.client.verl.config import VerlConfig, check_config, check_sampler, start_fields, training_at, wrong
from forebay.client.verl.records import groups_of

__all__ = ["AgentLoopManager", "ReplayBuffer"]

PARTITION = "train"
"""The part of verl's TransferQueue that holds what is trained on; validation has its own."""


class AgentLoopManager:
    """verl's ``agent_loop_manager_class``: generates with a run, which it starts or resumes on verl's engines."""

    def __init__(self, config: VerlConfig, llm_client: Any, **others: Any) -> None:
        """Raise ``InvalidInput`` for a configuration that cannot work."""
        check_config(config)
        self._config, self._llm_client, self._others = config, llm_client, others
        self._training = training_at(config.trainer.v1.sampler.sampler_kwargs.get("url", DEFAULT_URL))
        self._step: int | None = None
        """verl's step whose weights were announced last."""

    @classmethod
    def create(cls, **given: Any) -> Self:
        """Make the manager, with verl's arguments. Raises ``InvalidInput``."""
        return cls(**given)

    def generate_sequences(self, prompts: Any) -> None:
        """Validate prompts with verl's own manager. For prompts to train on, begin their step: the run has its own.

        Raises ``StartRefused``, ``InvalidInput``, ``ServerUnreachable``.
        """
        import transfer_queue
        from verl.utils import tensordict_utils

        if tensordict_utils.get(prompts, "validate"):
            self._verls.generate_sequences(prompts)
            return
        # verl has stored them as pending: they would grow without end, and a resume would generate them again. A resume
        # also restores rows of the step that was saved.
        stored = (transfer_queue.kv_list(PARTITION) or {}).get(PARTITION, {})
        transfer_queue.kv_clear(keys=list(stored), partition_id=PARTITION)
        self._begin(int(prompts["global_steps"]))

    @cached_property
    def _verls(self) -> Any:
        """verl's own manager, whose workers are not started unless the training validates."""
        from verl.trainer.ppo.v1 import AgentLoopManagerTQ

        return AgentLoopManagerTQ.create(config=self._config, llm_client=self._llm_client, **self._others)

    def _begin(self, step: int) -> None:
        if step == self._step:
            return
        if self._step is None:
            self._find_or_start(step)
        # verl never tells engines the version of its weights, so the announced one counts: after step s, it is s.
        self._training.steps.client.set_weight_version(step - 1)
        self._step = step

    def _find_or_start(self, step: int) -> None:
        import ray

        # Only the router actor of verl's client knows the engines.
        addresses = ray.get(self._llm_client._load_balancer.get_all_servers.remote())
        fields, steps = start_fields(self._config, addresses), self._training.steps
        start = partial(steps.client.start, **fields)
        if steps.find(fields["name"], fields["task_type"], fields["group_size"]):
            steps.begin(step, start)
            # A new process has engines at other addresses: the run starts again with them, and keeps its groups.
            start(run_id=steps.client.run_id)
        else:
            start()
        rollout = self._config.actor_rollout_ref.rollout
        self._training.max_tokens = rollout.max_model_len or rollout.prompt_length + rollout.response_length


class ReplayBuffer:
    """verl's ``custom_sampler``: leases groups of a run for each step; validation samples from verl's own buffer.

    It has no ``wait_for_sampleable``, so verl refuses ``hybrid_rollout.enable_switch``, which cannot work with a run.
    """

    def __init__(self, *, trainer_mode: str, sampler_kwargs: Mapping[str, Any], **others: Any) -> None:
        """The arguments are those of verl's class. Raises ``InvalidInput``."""
        check_sampler(trainer_mode, others["max_off_policy_strategy"], sampler_kwargs)
        # Without its extra `verl-core`, verl lacks packages that this import needs.
        from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

        self._verls = ReplayBufferAsync(trainer_mode=trainer_mode, sampler_kwargs=sampler_kwargs, **others)
        self._training = training_at(sampler_kwargs.get("url", DEFAULT_URL))

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Return verl's ``KVBatchMeta`` with the rows of ``batch_size`` groups, and metrics for verl's log.

        The number of rows differs: a failed rollout has none, a fork has its own. verl pads its batches itself.
        Raises ``RunEnded`` when the run has too few groups left; they stay in the buffer.
        """
        import transfer_queue
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict

        if partition_id != PARTITION:
            batch, metrics = self._verls.sample(global_steps, partition_id, batch_size)
            return batch, metrics
        steps, max_tokens = self._training.steps, self._training.max_tokens
        if not max_tokens:
            field = "+actor_rollout_ref.rollout.agent.agent_loop_manager_class"
            raise wrong(field, None, "forebay.client.verl.AgentLoopManager", "it starts the run")
        begun_s = time.monotonic()
        with steps.step(global_steps) as step:
            groups = step.collect(batch_size, partial(groups_of, step=global_steps, max_tokens=max_tokens))
            records = [record for group in groups for record in group]
            named = {"keys": [each.key for each in records], "tags": [each.tag for each in records]}
            fields = list_of_dict_to_tensordict([each.fields for each in records])
            transfer_queue.kv_batch_put(partition_id=PARTITION, fields=fields, **named)
        own = {"forebay/unusable_groups": len(step.unusable), "forebay/wait_s": time.monotonic() - begun_s}
        metrics = steps.client.metrics(step.batches[0]) | own
        return transfer_queue.KVBatchMeta(partition_id=PARTITION, **named), metrics
