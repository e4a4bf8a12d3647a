"""The events of the published layout: which of them stand inside which, and what their time is called in a report."""

_REQUEST = 0
_LOOP = 1
_TURN = 2
_STATE = 3
_PART = 4
_OWN = 5

DEPTHS = {
    "async_rollout_request_complete": _REQUEST,
    "main_loop": _LOOP,
    "turn_end": _TURN,
    "pending_state_handling": _STATE,
    "tool_calling_state": _STATE,
    "interacting_state": _STATE,
    "turn_pre_process": _STATE,
    "turn_engine_call": _STATE,
    "turn_post_process": _STATE,
    "reward_calculation": _STATE,
    "finalization": _STATE,
    "tool_creation_pending_state": _PART,
    "interaction_start_pending_state": _PART,
    "tool_execution": _PART,
    "tool_response_processing": _PART,
    "engine_generate_setup": _PART,
    "engine_async_generate_actual": _PART,
    "turn_tool_parsing": _PART,
    "interaction_response": _PART,
}
"""How deep an event of a request stands: at each moment the deepest counts. One nobody knows is the deepest."""

PHASES_OF_EVENTS = {
    "turn_engine_call": "engine",
    "engine_async_generate_actual": "engine",
    "tool_execution": "tool",
    "reward_calculation": "reward",
    "reward_duration": "reward",
    "barrier": "barrier_wait",
}
"""What is called otherwise in a report; the rest keeps its name, without ``_duration``."""

MOMENTS = {"request_start", "turn_start"}
"""Nothing lasts: these are read for when they were."""

STEP_TOTAL = "total_step_duration"
LENGTH_STATS = "step_response_length_stats"
MONITORING = "async_rollout_with_monitoring_duration"
COMPLETE = "async_rollout_request_complete"
ABORTS = ("aborted_request", "aborted_request_with_exception", "aborted_request_with_cancelled_error")
PADDING = "_padding"
"""At the end of an abort's name: the place of an aborted request was filled; it is no second abort."""

WORKER_DEPTHS = {"async_generate_duration": _REQUEST, "engine_async_generate": _LOOP}
"""Of what a worker does: whatever else it does meanwhile is counted as that."""


def depth_of(event: str) -> int:
    """How deep an event of a request stands."""
    return DEPTHS.get(event, _OWN)


def is_leaf(event: str) -> bool:
    """Whether it is a part of a turn or a state, not what holds them."""
    return depth_of(event) >= _STATE


def phase_of(event: str) -> str:
    """What the time of ``event`` is called in a report."""
    return PHASES_OF_EVENTS.get(event) or event.removesuffix("_duration")


def is_abort(event: str) -> bool:
    """In every spelling, the filled places included."""
    return event.removesuffix(PADDING) in ABORTS
