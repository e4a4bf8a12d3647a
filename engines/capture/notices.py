"""Warn once per run about logprobs that are missing or not the policy's."""

import logging
import math
from collections.abc import Iterable

import msgspec

from forebay.core.sample import is_policys
from forebay.engines.capture.sampling_params import Sampling
from forebay.engines.capture.turn import Turn

logger = logging.getLogger(__name__)


class CaptureNotices:
    """Checks the turns of one run while they are recorded. Thread-safe."""

    def __init__(self) -> None:
        self._has_said_sampling = False
        self._has_said_gap = False

    def note(self, turns: Iterable[Turn], run_id: str) -> None:
        """Log warnings about these turns that were not logged before."""
        for turn in turns:
            others = [span.sampling for span in turn.sampling if turn.is_policys and not is_policys(span.sampling)]
            if others and not self._has_said_sampling:
                self._has_said_sampling = True
                _say_sampling(others[0], run_id)
            num_missing = sum(map(math.isnan, turn.logprobs or ()))
            if num_missing and not self._has_said_gap:
                self._has_said_gap = True
                _say_gap(num_missing, run_id)


def _say_sampling(sampling: Sampling, run_id: str) -> None:
    unknown = [name for name, value in sampling.items() if value is None and name != "logprobs"]
    known = {name: value for name, value in sampling.items() if value is not None}
    reasons = [f"was sampled with {msgspec.json.encode(known).decode()[:500]}"] if known else []
    if unknown:
        reasons.append(f"left out {', '.join(unknown)}, and its engine does not report its default")
    if sampling.get("logprobs", "") is None:
        reasons.append("came from a vLLM that did not report its --logprobs-mode (VLLM_SERVER_DEV_MODE=1 makes it)")
    logger.warning(
        "run %s: logprobs are not all the policy's: a call %s. Send neutral parameters with each call, leave such "
        "tokens out of the loss with collate(…, only_policy_logprobs=True), or compute logprobs of your own; see "
        "docs/token_exactness.md. Each span of a sample records its sampling parameters. This is logged once per run",
        run_id,
        ", and it ".join(reasons),
    )


def _say_gap(num_missing: int, run_id: str) -> None:
    logger.warning(
        "run %s: %d sampled tokens of a call have no logprobs, and the engine could not supply them: the loss mask "
        "excludes them. The run counts such tokens as capture_unscored_tokens. This is logged once per run",
        run_id,
        num_missing,
    )
