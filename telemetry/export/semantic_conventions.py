"""Attribute names sent to a collector: those of one version of OpenTelemetry's conventions, and Forebay's own.

The GenAI names are from the semantic conventions 1.41.0, the last release before they moved to a repository of their
own. They are written out here, so that another version of a package changes nothing.
"""

from typing import Final

SEMCONV_VERSION: Final = "1.41.0"
SCHEMA_URL: Final = f"https://opentelemetry.io/schemas/{SEMCONV_VERSION}"

OPERATION: Final = "gen_ai.operation.name"
PROVIDER: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
TOOL_NAME: Final = "gen_ai.tool.name"
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"
ERROR_TYPE: Final = "error.type"
SERVICE_NAME: Final = "service.name"
PROCESS_ID: Final = "process.pid"

CHAT: Final = "chat"
"""The operation of an engine call."""
EXECUTE_TOOL: Final = "execute_tool"
DEFAULT_PROVIDER: Final = "openai"
"""The protocol that an engine speaks unless recorded otherwise."""

RUN_ID: Final = "rl.run_id"
PROCESS: Final = "rl.process"
GROUP_ID: Final = "rl.group_id"
UID: Final = "rl.uid"
INSTANCE_ID: Final = "rl.instance_id"
EPOCH: Final = "rl.epoch"
SLOT: Final = "rl.slot"
ATTEMPT: Final = "rl.attempt"
TURN: Final = "rl.turn"
PHASE: Final = "rl.phase"
STEP: Final = "rl.step"
REWARD: Final = "rl.reward"
ENDING: Final = "rl.ending"
OUTCOME: Final = "rl.outcome"
WEIGHT_VERSIONS: Final = "rl.weight_versions"
IS_OPEN: Final = "rl.is_open"
"""Marks a span that had not ended when its log ended."""
OWN: Final = "rl."
"""Prefix of all other names of Forebay."""
