"""Whether a file's text says that a verifier judges all of its agents."""

import ast

import pytest

from forebay.generators.discovery.agent_judges import needs_agents_folder

IMPORT = "from forebay.generators.agent import AgentGenerator, Verifier"
OTHER_IMPORT = "from judges import Verifier"
SURE = [
    "g.run_agent(rows, agent, Verifier(['check']))",
    "g.run_agent(rows, agent, num_epoch=2, judge=Verifier(['check']))",
    "judge = Verifier(['check'])\ndef run_rollout(data):\n    AgentGenerator(data).run_agent(rows, agent, judge)",
]
IN_DOUBT = [
    "",
    "Verifier(['check'])",
    "g.run_agent(rows, agent)",
    "g.run_agent(rows, agent, reward_func)",
    "g.run_agent(rows, agent, judge_of(Verifier))",
    "g.run_agent(rows, agent, *more)",
    "judge = Verifier(['check'])\njudge = reward_func\ng.run_agent(rows, agent, judge)",
    "judge = Verifier(['check'])\nfor judge in judges:\n    g.run_agent(rows, agent, judge)",
    "judge = Verifier(['check'])\ndef run(judge):\n    g.run_agent(rows, agent, judge)",
    "judge = Verifier(['check'])\ndef judge(item): ...\ng.run_agent(rows, agent, judge)",
    "from judges import judge\nif x:\n    judge = Verifier(['check'])\ng.run_agent(rows, agent, judge)",
    "g.run_agent(rows, agent, Verifier(['check']))\ng.run_agent(rows, agent, reward_func)",
    "g.run_agent(rows, agent, Verifier(['check'])) if x else g.entry(rows, rollout, reward_func)",
]


@pytest.mark.parametrize("source", SURE)
def test_a_verifier_is_seen(source: str) -> None:
    assert needs_agents_folder(ast.parse(f"{IMPORT}\n{source}"))
    assert not needs_agents_folder(ast.parse(f"{OTHER_IMPORT}\n{source}"))


@pytest.mark.parametrize("source", IN_DOUBT)
def test_in_doubt_it_is_none(source: str) -> None:
    assert not needs_agents_folder(ast.parse(f"{IMPORT}\n{source}"))
