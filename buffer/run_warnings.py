"""Warnings about a running run: in its ``warnings``, in the log, and in ``meta_info`` of its reads."""

import logging

from forebay.core.fields import read_flag
from forebay.core.outcome import MAX_REWARD_PARTS
from forebay.core.run import Run
from forebay.core.sample import Incoming

logger = logging.getLogger(__name__)

UNANNOUNCED = (
    "max_staleness is set, but no weight version is announced, so no group is stale. Announce the version that the "
    "engines have (client.set_weight_version, or PUT .../weight_version) before the first read, and each later one"
)
NO_TOKENS = (
    "samples arrive without token ids, because their engine returned none, as vLLM does: the trainer must tokenize "
    "their messages, and may get other tokens than were sampled. Use SGLang, or start the run with capture=false"
)
SEVERAL_MODELS = "rollouts request several models or an adapter, and are trained on as if all were the policy"
DROPPED_ARRAYS = (
    "a hook changed the number of tokens of samples, which are delivered without their side arrays: their rows would "
    "belong to other tokens. Change the tokens in the generator instead"
)
MANY_REWARD_PARTS = (
    f"rewards have parts of more than {MAX_REWARD_PARTS} names: the run's averages leave the later names out. Name "
    "parts by what they measure, not by the row"
)
NO_POLICY = "rollouts request no model in policy_models, so nothing in them is trained on"


def warn(run: Run, what: str, detail: str = "") -> None:
    """Warn once per text; ``detail`` is that of the first occurrence."""
    if not any(text.startswith(what) for text in run.warnings):
        run.warnings.append(what + detail)
        logger.warning("run %s (%s): %s%s", run.run_id, run.name or run.task_type, what, detail)


def for_trainer(run: Run) -> dict[str, str]:
    """Warnings for a read's ``meta_info``: those about its samples."""
    shown = (UNANNOUNCED, NO_TOKENS, SEVERAL_MODELS, NO_POLICY, DROPPED_ARRAYS)
    texts = [text for text in run.warnings if text.startswith(shown)]
    return {"warning": "; ".join(texts)} if texts else {}


def note_sample(run: Run, sample: Incoming) -> None:
    """Warn about a sample without tokens, and about calls to models that may not be the policy."""
    capture = run.payload.get("capture")
    if sample.is_retokenized and (capture is None or read_flag("capture", capture)):
        warn(run, NO_TOKENS)
    policy, names = run.settings.policy_models, sample.asked_models
    if names and not any(name in (policy or ()) for name in names):
        asked = ", ".join(f"{name!r:.200}" for name in names[:20])
        detail = f". Set policy_models to the names of the policy (sample {sample.uid} requested {asked})"
        warn(run, SEVERAL_MODELS if policy is None else NO_POLICY, detail)
