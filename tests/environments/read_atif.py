"""Reads a folder of ATIF trajectories with Harbor's models and with the helper of Phoenix; prints what they found."""

import json
import sys
from pathlib import Path
from typing import Any

from harbor.models.trajectories import Trajectory
from phoenix.client.helpers.atif import upload_atif_trajectories_as_spans


class Spans:
    """In place of a client of Phoenix: keeps what is sent."""

    def __init__(self) -> None:
        self.spans = self
        self.sent: list[Any] = []

    def log_spans(self, *, spans: list[Any], **_: object) -> None:
        self.sent += spans


given = [json.loads(path.read_bytes()) for path in sorted(Path(sys.argv[1]).iterdir())]
read = [Trajectory.model_validate(each) for each in given]
client = Spans()
upload_atif_trajectories_as_spans(client, given, project_name="forebay")
print(
    json.dumps(
        {
            "unchanged": [one.to_json_dict() == other for one, other in zip(read, given, strict=True)],
            "traces": len({span["context"]["trace_id"] for span in client.sent}),
            "kinds": sorted(span["span_kind"] for span in client.sent),
        }
    )
)
