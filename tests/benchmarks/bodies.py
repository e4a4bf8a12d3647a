"""Samples of a given size."""

import json


def sample_body(number: int, num_bytes: int, group_size: int = 8, prefix: str = "") -> bytes:
    """A sample of about ``num_bytes`` bytes; every ``group_size`` numbers make a group with two rewards."""
    turns = max(1, num_bytes // 2_048)
    text = "the quick brown fox jumps over the lazy dog; "
    content = (text * (num_bytes // turns // len(text) + 1))[: max(1, num_bytes // turns - 34)]
    return json.dumps(
        {
            "uid": f"{prefix}uid-{number}",
            "instance_id": f"{prefix}instance-{number // group_size}",
            "messages": [{"role": "assistant", "content": content}] * turns,
            "reward": float(number % 2),
            "extra_info": {"finish_reason": "stop", "timestamp": "1700000000.0"},
        }
    ).encode()
