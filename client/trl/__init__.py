"""TRL's trainers on the groups of a run, for TRL 1.16 and later.

``grpo.py`` has ``Rollouts``, the arguments of ``GRPOTrainer``. A call of ``rollout_func`` leases the groups of one
generation batch, marks the step that will have trained on them (``client/trainer/marked_steps.py``), and returns their
rows (``rows.py``). ``async_worker.py`` has ``RolloutWorker`` for ``AsyncGRPOTrainer``: a thread hands over rows, and
each optimiser step marks the groups that were trained on. When a training begins, a callback rewinds the run to the
loaded checkpoint.
"""

from forebay.client.trl.async_worker import TrlRolloutWorker
from forebay.client.trl.grpo import GRPOTrainer as GRPOTrainer
from forebay.client.trl.grpo import Rollouts as Rollouts
from forebay.client.trl.grpo import last_checkpoint as last_checkpoint

RolloutWorker = TrlRolloutWorker
