"""Several turns with a simulated user, which the environment ``user-sim`` of verifiers plays with a model."""

import verifiers.v1 as vf

__all__ = ["TalksTaskset"]


class TalkData(vf.TaskData):
    wish: str


class TalkTask(vf.Task[TalkData]):
    @vf.reward
    async def granted(self, trace: vf.Trace) -> float:
        return float(self.data.wish in trace.last_reply)

    @vf.reward(weight=0.1)
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class TalksTaskset(vf.Taskset[TalkTask, vf.TasksetConfig]):
    def load(self):
        yield TalkTask(TalkData(prompt="You want tea.", wish="tea", system_prompt="You serve."), self.config.task)
