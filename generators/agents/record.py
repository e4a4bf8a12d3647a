"""What the gateway recorded of an agent, as a rollout's trajectory; and whose fault it is when there is none."""

from collections import Counter
from typing import Any

from forebay.core.errors import EngineError
from forebay.generators.agents.gateway import RolloutRecord
from forebay.generators.agents.task import AgentResult
from forebay.generators.failures import AgentFailed, EngineWaitOver, EnvironmentFailed, RolloutFailed


class RecordedSample:
    """A sample that the gateway made: its fields as they came."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def fields(self) -> dict[str, Any]:
        return self._fields


class RecordedTrajectory:
    """Stands in place of what the rollout's own client would have recorded: forks first, the main one last."""

    def __init__(self, record: RolloutRecord) -> None:
        self._samples = [RecordedSample(sample) for sample in record.samples]
        self.counters = Counter(record.counters)

    def samples(self) -> list[RecordedSample]:
        return self._samples


def checked_result(record: RolloutRecord, result: AgentResult | None, error: BaseException | None) -> AgentResult:
    """The result of an agent that did its work. Raises what tells whose fault it is that another did not."""
    last = record.failures[-1] if record.failures else {}
    is_last_word = last.get("call") == record.num_calls  # an agent may end well all the same, with what it had
    if isinstance(error, EngineWaitOver):
        raise error
    # Before the agent's own error: what it raised may be no more than its way to pass on that the engine failed.
    if last.get("kind") in ("engine", "environment") and (error is not None or is_last_word or not record.samples):
        if last["kind"] == "environment":
            raise EnvironmentFailed(str(last.get("message"))) from error
        raise EngineError(str(last.get("message")), status_code=last.get("status")) from error
    if isinstance(error, RolloutFailed):
        raise error
    if error is not None:
        raise AgentFailed(f"the agent raised {error!r:.1000}") from error
    if not record.samples:
        why = f": {last.get('message')}" if last else ", it made no call: does it use the base_url that it was given?"
        raise AgentFailed(f"the agent has no answer of the model{why}")
    assert result is not None
    return result
