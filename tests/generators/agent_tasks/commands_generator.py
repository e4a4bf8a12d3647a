"""Agents that are programs, and verifiers: each does what its row says."""

import sys
from pathlib import Path

from forebay.generators.agent import AgentGenerator, Limits, Verifier

TASK_TYPE = "commands"
HERE = Path(__file__).parent


def run_rollout(data):
    generator = AgentGenerator.from_payload(data)
    generator.run_agent(
        data["input_file"],
        [sys.executable, str(HERE / "program.py")],
        Verifier([sys.executable, str(HERE / "program_verifier.py")]),
        limits=Limits(wall_s=float(data.get("wall_s", 60)), output_bytes=1_000),
        env={"COLOUR": "blue", "TELL": data["tell"]},
    )
