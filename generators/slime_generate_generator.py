"""The built-in task ``slime_generate``: runs unchanged custom generate and reward functions written for slime.

``generate`` names a function ``async (args, sample, sampling_params)`` that returns slime's ``Sample``, or a list of
samples for sub-agents. ``reward`` names a function ``async (args, sample)``, which gets the list if there is one.
``agent`` names an agent function of miles, in place of ``generate``. The server must be able to import slime or miles.
"""

import inspect
import itertools
import zlib
from argparse import Namespace
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from importlib import import_module
from typing import Any
from urllib.parse import quote, urlsplit
from uuid import uuid4
from weakref import WeakValueDictionary

from forebay.client.slime.samples import slime_module
from forebay.core.errors import EngineError, InvalidInput
from forebay.core.weight_versions import number_of
from forebay.generators.agent import AgentGenerator, AgentTask
from forebay.generators.base import AgentFailed, BaseGenerator
from forebay.generators.rollouts.samples import plain

TASK_TYPE = "slime_generate"

Json = dict[str, Any]
Function = Callable[..., Awaitable[Any]]

DEFAULTS: Json = {
    "apply_chat_template": False,
    "apply_chat_template_kwargs": {},
    "ci_test": False,
    "custom_rm_path": None,
    "group_rm": False,
    "label_key": "label",
    "mask_offpolicy_in_partial_rollout": False,
    "metadata_key": "metadata",
    "partial_rollout": False,
    "reward_key": None,
    "rm_type": None,
    "rollout_num_gpus": 1,
    "rollout_num_gpus_per_engine": 1,
    "rollout_seed": 42,
    "rollout_skip_special_tokens": False,
    "rollout_stop": None,
    "rollout_stop_token_ids": None,
    "rollout_temperature": 1.0,
    "rollout_top_k": -1,
    "rollout_top_p": 1.0,
    "sglang_dp_size": 1,
    "sglang_speculative_algorithm": None,
    "tool_key": "tools",
    "use_distributed_post": False,
    "use_rollout_routing_replay": False,
}
"""Defaults of slime's arguments that its helpers read. ``args`` in the start payload adds or overrides them."""
SAMPLING = ("temperature", "top_p", "top_k", "stop")
FINISH_REASONS = {"truncated": "length"}
"""Finish reasons by slime's status; "stop" for all other statuses."""


def run_rollout(data: Json) -> None:
    """Run the functions that the start payload names, with slime's arguments from ``args``."""
    generator = AgentGenerator.from_payload(data)
    reward = load_function("reward", data["reward"]) if data.get("reward") else None
    function = load_function("agent" if data.get("agent") else "generate", data.get("agent") or data.get("generate"))
    args = slime_args(data, generator)
    if data.get("agent"):
        agent = AgentFunction(args, function, reward, generator.sampling_params)
        generator.run_agent(data["input_file"], agent.run, agent.reward, data.get("num_epoch", 1), hidden=())
    else:
        generate = GenerateFunction(args, function, reward, is_evaluation=bool(data.get("evaluation")))
        generator.entry(data["input_file"], generate.rollout, generate.reward, data.get("num_epoch", 1))


def load_function(field: str, path: object) -> Function:
    """Import ``module:function``, or ``module.function`` in slime's notation. Raises ``InvalidInput``."""
    module, _, name = str(path or "").replace(":", ".").rpartition(".")
    try:
        function: Function = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        hint = f"--set {field}=module:function; its module, and slime or miles, must be on the server's PYTHONPATH"
        raise InvalidInput(f"{field} {path!r}: {error}", hint=hint, field=field) from error
    return function


def slime_args(data: Json, generator: BaseGenerator) -> Namespace:
    """Build slime's arguments from the start payload. Raises ``InvalidInput``."""
    given = data.get("args") or {}
    if not isinstance(given, dict):
        raise InvalidInput(f"args must be an object with arguments of slime (got {given!r:.100})", field="args")
    params = generator.sampling_params
    own = {
        "hf_checkpoint": data.get("tokenizer_path"),
        "n_samples_per_prompt": generator.num_repeat_per_sample,
        "rollout_max_response_len": generator.max_tokens,
        "sglang_server_concurrency": generator.num_process,
        **{f"rollout_{name}": params[name] for name in SAMPLING if name in params},
    }
    args = Namespace(**DEFAULTS | own | given)
    if args.group_rm:
        hint = "let the reward function score one sample; hooks see whole groups"
        raise InvalidInput("slime_generate has no group_rm: each rollout is scored by itself", hint=hint, field="args")
    with suppress(ImportError):  # an agent function of miles may not need slime
        slime_module("utils.http_utils").init_http_client(args)  # slime's `post` needs this client
    return args


class GenerateFunction:
    """Runs a custom generate function as a rollout function, and a custom reward function on its samples."""

    def __init__(self, args: Namespace, generate: Function, reward: Function | None, *, is_evaluation: bool) -> None:
        self._args, self._generate, self._reward = args, generate, reward
        takes_evaluation = "evaluation" in inspect.signature(generate).parameters
        self._options = {"evaluation": is_evaluation} if takes_evaluation else {}
        self._numbers = itertools.count()
        self._finished: WeakValueDictionary[str, SlimeTrajectory] = WeakValueDictionary()
        """Trajectories by uid, until their rollout has its reward."""

    async def rollout(self, client: Any, messages: list[Json], sampling_params: Json) -> tuple[list[Json], str]:
        """Call the generate function for one rollout."""
        del sampling_params  # slime's names for them are in the arguments
        rollout = client.rollout
        args = Namespace(**vars(self._args) | _router(rollout.engine_url))
        row = deepcopy(rollout.row)  # functions may change it, and the whole group shares it
        sample = slime_module("utils.types").Sample(
            index=next(self._numbers),
            group_index=zlib.crc32(rollout.rollout_id.rpartition("-")[0].encode()),
            prompt=_prompt(args, row, messages),
            label=row.get(args.label_key),
            metadata=_metadata(args, row),
        )
        sample.session_id = str(uuid4())  # not a field of `Sample` in earlier releases of slime
        made = await self._generate(args, sample, _sglang_params(args), **self._options)
        rollout.trajectory = trajectory = SlimeTrajectory(made, messages)
        self._finished[rollout.uid] = trajectory
        main = trajectory.slime_samples[-1]
        rollout.extra_info["metadata"] = main.metadata
        return trajectory.messages(main), FINISH_REASONS.get(main.status.value, "stop")

    async def reward(self, item: Json) -> float:
        """Return the mean reward of the rollout's samples, after scoring those without one."""
        if item["uid"] not in self._finished:
            raise InvalidInput("slime_generate can score only rollouts that it has just generated, not recorded ones")
        trajectory = self._finished[item["uid"]]
        samples = trajectory.slime_samples
        await self._judge([sample for sample in samples if sample.reward is None], is_list=trajectory.is_list)
        return sum(float(sample.get_reward_value(self._args)) for sample in samples) / len(samples)

    async def _judge(self, samples: Sequence[Any], *, is_list: bool) -> None:
        if not samples:
            return
        if self._reward is None:
            hub = slime_module("rollout.rm_hub")
            rewards = [await hub.async_rm(self._args, sample) for sample in samples]
        else:
            rewards = await self._reward(self._args, samples) if is_list else [await self._reward(self._args, *samples)]
        for sample, reward in zip(samples, rewards, strict=True):
            sample.reward = reward


class SlimeTrajectory:
    """slime's samples of one rollout as its trajectory: forks first, the main one last."""

    def __init__(self, made: Any, prompt: list[Json]) -> None:
        """Raises ``EngineError`` for an aborted sample, and ``AgentFailed`` for one that failed or has no tokens."""
        self.is_list = isinstance(made, list)
        self.slime_samples: list[Any] = list(made) if self.is_list else [made]
        self.counters: Counter[str] = Counter()
        self._prompt = prompt
        if not self.slime_samples:
            raise AgentFailed("the generate function returned no sample")
        for sample in self.slime_samples:
            _check(sample)

    def messages(self, sample: Any) -> list[Json]:
        """Return prompt and response as messages."""
        prompt = sample.prompt if isinstance(sample.prompt, list) else self._prompt
        return [*prompt, {"role": "assistant", "content": sample.response}]

    def sample_fields(self) -> list[Json]:
        """Return the fields of Forebay's samples."""
        return [self._fields(sample) for sample in self.slime_samples]

    def _fields(self, sample: Any) -> Json:
        """Return the tokens of prompt and response with mask and logprobs, which are 0 in the prompt."""
        length = sample.response_length
        before = [0] * (len(sample.tokens) - length)
        mask = [1] * length if sample.loss_mask is None else list(sample.loss_mask)
        fields: Json = {
            "messages": self.messages(sample),
            "tokens": list(sample.tokens),
            "response_length": length,
            "loss_mask": before + ([0] * length if sample.remove_sample else mask),
        }
        if sample.rollout_log_probs is not None:
            fields["logprobs"] = before + list(sample.rollout_log_probs)
        versions = sorted({number for name in sample.weight_versions if (number := number_of(str(name))) is not None})
        return plain({**fields, "weight_versions": versions} if versions else fields)  # type: ignore[no-any-return]


def _check(sample: Any) -> None:
    status, length = sample.status.value, sample.response_length
    if status == "aborted":
        raise EngineError("the generate function returned an aborted sample")
    if status == "failed":
        raise AgentFailed("the generate function returned a failed sample")
    arrays = {"loss_mask": sample.loss_mask, "rollout_log_probs": sample.rollout_log_probs}
    wrong = [f"{name} has {len(array)}" for name, array in arrays.items() if array is not None and len(array) != length]
    if wrong or not 0 < length < len(sample.tokens):
        sizes = ", ".join([f"{len(sample.tokens)} tokens", *wrong])
        raise AgentFailed(f"the generate function returned a sample with response_length {length}, but {sizes}")


def _router(engine_url: str) -> Json:
    url = urlsplit(engine_url)
    port = url.port or (443 if url.scheme == "https" else 80)
    return {"sglang_router_ip": url.hostname, "sglang_router_port": port}


def _prompt(args: Namespace, row: Json, messages: list[Json]) -> object:
    """Return the prompt like slime's data set: a text or messages; with ``--apply-chat-template``, rendered text."""
    if not args.apply_chat_template:
        return row["prompt"] if isinstance(row["prompt"], str) else messages
    tokenizer = slime_module("rollout.sglang_rollout").GenerateState(args).tokenizer
    more = {"tools": row.get(args.tool_key), **(args.apply_chat_template_kwargs or {})}
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **more)


def _metadata(args: Namespace, row: Json) -> Json:
    tools = {"tools": row[args.tool_key]} if row.get(args.tool_key) else {}
    return {**(row.get(args.metadata_key) or {}), **tools}


def _sglang_params(args: Namespace) -> Json:
    return {
        "temperature": args.rollout_temperature,
        "top_p": args.rollout_top_p,
        "top_k": args.rollout_top_k,
        "max_new_tokens": args.rollout_max_response_len,
        "stop": args.rollout_stop,
        "stop_token_ids": args.rollout_stop_token_ids,
        "skip_special_tokens": args.rollout_skip_special_tokens,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }


class AgentFunction:
    """Runs an agent function of miles as an agent. The gateway is its engine and records its calls."""

    def __init__(self, args: Namespace, agent: Function, reward: Function | None, sampling_params: Json) -> None:
        self._args, self._agent, self._reward, self._params = args, agent, reward, sampling_params

    async def run(self, task: AgentTask) -> Json:
        """Call the agent function; its return value is merged into the sample's metadata."""
        url = urlsplit(task.base_url.removesuffix("/v1"))
        base_url = url._replace(netloc=f"agent:{quote(task.api_key, safe='')}@{url.netloc}").geturl()
        metadata = _metadata(self._args, deepcopy(dict(task.row)))
        given = task.row["prompt"] if isinstance(task.row["prompt"], str) else task.prompt
        returned = await self._agent(
            base_url=base_url, prompt=given, request_kwargs=dict(self._params), metadata=metadata
        )
        return {**metadata, **(returned or {})}

    async def reward(self, item: Json) -> float:
        """Return the reward of a sample with prompt, response, label and metadata."""
        types = slime_module("utils.types")
        *prompt, answer = item["messages"]
        sample = types.Sample(
            prompt=prompt,
            response=str(answer.get("content") or ""),
            label=item.get(self._args.label_key),
            metadata=item["agent"]["output"],
            status=types.Sample.Status("truncated" if item["finish_reason"] == "length" else "completed"),
        )
        judge = self._reward or slime_module("rollout.rm_hub").async_rm
        sample.reward = await judge(self._args, sample)
        return float(sample.get_reward_value(self._args))
