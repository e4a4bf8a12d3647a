"""The link to slime's own rollout buffer, or to any address without a run key: samples one by one, nothing else."""

from forebay.core.binary_sample import as_json
from forebay.generators.buffer_link.abc import (
    ACKNOWLEDGED,
    BUSY,
    REPEAT,
    BufferBusy,
    ClosedGroups,
    Link,
    LinkRefused,
    Progress,
    Verdict,
    retry_after_s,
)
from forebay.generators.job.schedule import Plan


class SlimeLink(Link):
    """Writes to ``{url}/buffer/write``; knows no plan, no progress and no feed."""

    has_feed = False
    takes_failed = False

    async def plan(self, fallback: Plan) -> Plan:
        return fallback

    async def write(self, samples: list[bytes]) -> list[Verdict]:
        verdicts = []
        for sample in samples:
            try:
                verdicts.append(await self._write_one(sample))
            except BufferBusy:
                # What was acknowledged before must not be offered again: the buffer may not know duplicates.
                if not verdicts:
                    raise
                verdicts += [REPEAT] * (len(samples) - len(verdicts))
                break
        return verdicts

    async def _write_one(self, sample: bytes) -> Verdict:
        headers = {"Content-Type": "application/json"}
        response = await self._try("POST", "buffer/write", content=as_json(sample), headers=headers)
        if response is None or response.status_code in BUSY:
            raise BufferBusy(retry_after_s(response))
        return Verdict(problem=f"{response.status_code}: {response.text[:500]}") if response.is_error else ACKNOWLEDGED

    async def report(self, progress: Progress) -> None:
        """There is nobody to tell."""

    async def closed_groups(self, told: ClosedGroups) -> ClosedGroups:  # noqa: ARG002 - there is no feed
        raise LinkRefused("this buffer does not tell which groups it closed", hint="ask has_feed first")
