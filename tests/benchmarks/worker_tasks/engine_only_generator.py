"""One call of an engine, and a reward that costs nothing."""

from costs import costs_of_passage

from forebay.generators.base import BaseGenerator, single_turn

TASK_TYPE = "engine_only"


async def reward(_):
    return 1.0


def run_rollout(data):
    generator = BaseGenerator.from_payload(data)
    generator.entry(f"{data['input_file']}.first", single_turn, reward)
    with costs_of_passage(generator):
        generator.entry(data["input_file"], single_turn, reward)
