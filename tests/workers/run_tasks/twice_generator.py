"""Two jobs, one after the other."""

from forebay.generators.base import BaseGenerator, query_single_turn

TASK_TYPE = "twice"


def reward(item):
    return float(item["uid"].endswith("1"))


def run_rollout(data):
    generator = BaseGenerator.from_payload(data)
    if not generator.is_lead:
        print("a worker\n", end="", flush=True)  # in one piece: both are threads of one process
    assert generator.run(data["input_file"], query_single_turn, reward) == "finished"
    assert generator.run(data["input_file"], query_single_turn, reward) == "finished"
