"""An agent that is a program: it gets its address from the environment, and a verifier checks its working folder."""

import sys
from pathlib import Path

from forebay.generators.agent import AgentGenerator, Limits, Verifier

TASK_TYPE = "shell_agent"
AGENT = [sys.executable, str(Path(__file__).with_name("shell_agent.py"))]
VERIFY = """
import json, pathlib, sys
label = json.load(sys.stdin)["label"]
answer = pathlib.Path("answer.txt")
print(json.dumps({"reward": float(answer.exists() and answer.read_text().strip() == label)}))
"""


def run_rollout(data):
    generator = AgentGenerator.from_payload(data)
    verifier = Verifier([sys.executable, "-I", "-c", VERIFY], limits=Limits(wall_s=20))
    limits = Limits(wall_s=120, cpu_s=60, file_bytes=1 << 24)
    generator.run_agent(data["input_file"], AGENT, verifier, data.get("num_epoch", 1), limits=limits)
