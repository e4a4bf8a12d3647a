"""Tools over MCP: the model looks an order up before it answers."""

import verifiers.v1 as vf

__all__ = ["OrdersTaskset"]


class OrderData(vf.TaskData):
    answer: str


class OrderTools(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def look_up(self, number: int) -> str:
        """Look up what an order contains."""
        return f"order {number}: {number} apples"


class OrderTask(vf.Task[OrderData]):
    @vf.reward
    async def found(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)

    @vf.reward(weight=0.5)
    async def looked(self, trace: vf.Trace) -> float:
        return float(trace.num_turns > 1)

    @classmethod
    def toolsets(cls, config):  # noqa: ARG003 -- the signature is that of verifiers
        return [OrderTools(vf.ToolsetConfig())]


class OrdersTaskset(vf.Taskset[OrderTask, vf.TasksetConfig]):
    def load(self):
        yield OrderTask(OrderData(prompt="What is in order 3?", answer="3 apples"), self.config.task)


if __name__ == "__main__":
    OrderTools.run()
