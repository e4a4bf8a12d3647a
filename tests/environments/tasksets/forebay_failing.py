"""The page's taskset, with a reward function that fails for one task."""

import verifiers.v1 as vf
from my_sums import SumData, SumsConfig, SumTask

__all__ = ["FailingTaskset"]


class FailingTask(SumTask):
    @vf.reward(weight=0.75)
    async def exact(self, trace: vf.Trace) -> float:
        if self.data.answer == 4:
            raise LookupError("no answer is known")
        return float(trace.last_reply.strip() == str(self.data.answer))


class FailingTaskset(vf.Taskset[FailingTask, SumsConfig]):
    def load(self):
        for n in range(self.config.num_tasks):
            yield FailingTask(SumData(prompt=f"What is {n} + {n}?", answer=2 * n), self.config.task)
