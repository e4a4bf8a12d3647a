"""A recording with what exports have to cope with: turns with tools, forks, failures, images, odd messages."""

import json
from pathlib import Path
from typing import Any

import msgspec

from forebay.core.binary_sample import number_bytes, pack
from forebay.core.records.rows import GroupRow, SampleRow
from forebay.core.sample import read_any_sample
from tests.kit import Json
from tests.replay.recordings.recording_kit import (
    RecordingWriter,
    batch_record,
    group_record,
    run_record,
    sample_record,
)

CALL = {"id": "call-1", "type": "function", "function": {"name": "grep", "arguments": '{"word": "sys.exit"}'}}
PROMPT = [{"role": "system", "content": "You fix bugs."}, {"role": "user", "content": "Fix it."}]
AGENT = [
    *PROMPT,
    {"role": "assistant", "content": None, "reasoning_content": "Look first.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call-1", "content": "setup.py:3"},
    {"role": "assistant", "content": "I call sys.exit(0)."},
]
TOKENS = [1, 2, 3, 10, 11, 4, 5, 20, 21, 22]
SPANS = [
    {"source": "environment", "start": 0, "end": 3},
    {"source": "llm", "start": 3, "end": 5, "weight_version": 7, "model": "policy"},
    {"source": "tool", "start": 5, "end": 7},
    {"source": "llm", "start": 7, "end": 8, "weight_version": 7, "model": "policy"},
    {"source": "llm", "start": 8, "end": 10, "weight_version": 8, "model": "policy"},
]
MASK = [0, 0, 0, 1, 1, 0, 0, 1, 1, 1]
LOGPROBS = [0.0, 0.0, 0.0, -0.5, -0.25, 0.0, 0.0, -1.0, -2.0, -4.0]
AGENT_FIELDS: Json = {
    "messages": AGENT,
    "token_spans": SPANS,
    "extra_info": {"label": "3"},
    "reward_parts": {"exact": 1.0},
}
ODD = [
    "no object",
    {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "http://a.example/b.png"}}]},
    {"role": "assistant", "content": {"a": 1}, "tool_calls": [{"function": {"name": "f", "arguments": "not JSON"}}, 7]},
    {"role": "user"},
    {"role": "tool", "content": "of no call", "tool_call_id": "x"},
    {"role": "critic", "content": None},
]  # fmt: skip


def binary_of(**fields: Any) -> bytes:
    """A binary sample with the tokens of the agent."""
    arrays = [number_bytes(values, code) for values, code in ((TOKENS, "i"), (LOGPROBS, "f"), (MASK, "B"))]
    assert arrays[0] is not None
    return pack(msgspec.json.encode(fields), arrays[0], arrays[1], arrays[2])


def stored(group: GroupRow, slot: int, body: bytes, **changes: Any) -> SampleRow:
    """The row under which a write stores a body."""
    read = read_any_sample(body)
    start, end = read.reward_span or (0, 0)
    columns = {
        "uid": read.uid,
        "reward": read.reward,
        "error": read.error,
        "rollout_id": read.rollout_id,
        "fork": read.fork,
        "rollout_outcome": read.outcome.value,
        "oldest_version": read.oldest_version,
        "reward_start": start,
        "reward_end": end,
        "num_tokens": read.num_tokens,
        "reward_parts": read.reward_parts,
    }
    return sample_record(group, slot, **(columns | changes))


def write_agents(path: Path) -> dict[str, bytes]:
    """A file with three groups of two rollouts, delivered in the steps 11, 12 and 13; the bodies by uid."""
    bodies: dict[str, bytes] = {}

    def put(writer: RecordingWriter, group: GroupRow, slot: int, body: bytes, **changes: Any) -> None:
        row = stored(group, slot, body, **changes)
        bodies[row.uid] = body
        writer.add_sample(row, body)

    with RecordingWriter(path, run_record(name="agents", task_type="agents")) as writer:
        for number in (1, 2, 3):
            group = group_record(number)
            name = str(group.instance_id)
            own: Json = {"instance_id": name, "epoch": 0, "slot": 0, "rollout_id": f"{name}-r"}
            if number == 1:
                fork: Json = {"messages": [*PROMPT, AGENT[2]], "token_spans": SPANS[:2], "tokens": TOKENS[:5]}
                fork |= {"uid": "1-f", "fork": 1, "reward": 1.0, "loss_mask": MASK[:5], "logprobs": LOGPROBS[:5]}
                put(writer, group, 0, json.dumps(own | fork, indent=1).encode())
                put(writer, group, 0, binary_of(**own, **AGENT_FIELDS, uid="1-0", reward=1.0))
                failed = {"uid": "1-1", "messages": PROMPT, "status": "failed", "error": {"type": "E", "message": "no"}}
                put(writer, group, 1, json.dumps(own | failed | {"slot": 1}).encode())
            else:
                odd = {"uid": f"{number}-0", "instance_id": name, "messages": ODD, "reward": 0.25, "tokens": [1, 2]}
                put(writer, group, 0, json.dumps(odd)[:-1].encode() + b', "huge": 1e999}')
                surplus = {"uid": f"{number}-1", "instance_id": name, "messages": [], "reward": 0.0}
                put(writer, group, -1, json.dumps(surplus).encode(), outcome="surplus")
            writer.add_group(group)
            writer.add_batch(batch_record(number, [number], step=number + 10))
    return bodies
