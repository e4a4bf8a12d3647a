"""Functions as slime's users write them: two turns with a tool between, sub-agents, a reward, an agent of miles."""

import copy
from typing import Any

from slime.utils.http_utils import post
from slime.utils.types import Sample


async def ask(args: Any, text: str, sampling_params: dict[str, Any]) -> str:
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/v1/chat/completions"
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": sampling_params["max_new_tokens"]}
    return str((await post(url, body))["choices"][0]["message"]["content"])


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = True) -> Sample:
    assert not args.partial_rollout
    assert not evaluation
    prompt, response, mask = sample.prompt, "", list[int]()
    for observation in (" [found] ", ""):
        said = await ask(args, prompt + response, sampling_params)
        response += said + observation
        mask += [1] * len(said) + [0] * len(observation)
    sample.tokens = list((prompt + response).encode())
    sample.response, sample.response_length, sample.loss_mask = response, len(response), mask
    sample.rollout_log_probs = [-0.5 * bit for bit in mask]
    sample.metadata["turns"] = 2
    sample.status = Sample.Status.TRUNCATED if "long" in prompt else Sample.Status.COMPLETED
    if "aborted" in prompt:
        sample.status = Sample.Status.ABORTED
    if "torn" in prompt:
        sample.loss_mask = mask[1:]
    return sample


async def generate_forks(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    made = await generate(args, sample, sampling_params, evaluation=False)
    fork = copy.deepcopy(made)
    fork.response = "a fork"
    fork.rollout_id = made.rollout_id = made.index
    return [fork, made]


async def generate_anywhere(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool) -> Sample:
    sample.metadata["evaluation"] = evaluation
    return await generate(args, sample, sampling_params, evaluation=False)


async def reward(args: Any, sample: Sample | list[Sample], **kwargs: Any) -> Any:
    if isinstance(sample, list):
        return [await reward(args, each) for each in sample]
    assert isinstance(sample, Sample)
    return {"score": float(str(sample.label) in sample.response), "length": len(sample.response)}


async def agent(base_url: str, prompt: Any, request_kwargs: dict[str, Any], metadata: dict[str, Any]) -> dict[str, Any]:
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    told = await post(f"{base_url}/v1/chat/completions", {"model": "default", "messages": messages, **request_kwargs})
    return {"said": told["choices"][0]["message"]["content"]}


async def agent_reward(args: Any, sample: Sample, **kwargs: Any) -> float:
    return float(sample.metadata["said"] == sample.response and str(sample.label) in sample.response)
