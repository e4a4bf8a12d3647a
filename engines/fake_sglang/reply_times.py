"""What a reply tells of the time that its call took, in the fields of SGLang's ``meta_info``.

Latencies are in seconds, moments in seconds since the Unix epoch, all measured by the engine itself. What has not come
to pass is left out.
"""

import time

from forebay.engines.fake_sglang.calls import Choice, JSONObject


def reply_times(choice: Choice, *, with_stages: bool) -> JSONObject:
    """``e2e_latency`` of a choice that has ended; ``with_stages`` what SGLang adds under ``--enable-metrics``."""
    arrived_s, ended_s = choice.call.arrived_s, choice.milestones.ended_s
    fields: JSONObject = {} if ended_s is None else {"e2e_latency": ended_s - arrived_s}
    return fields | (_stages(choice) if with_stages else {})


def _stages(choice: Choice) -> JSONObject:
    reached, arrived_s = choice.milestones, choice.call.arrived_s
    to_wall_s = time.time() - time.monotonic()
    fields: JSONObject = {}
    if reached.begun_s is not None:
        fields |= {"queue_time": reached.begun_s - arrived_s, "forward_entry_time": to_wall_s + reached.begun_s}
    if reached.prefilled_s is not None:
        fields["prefill_finished_time"] = to_wall_s + reached.prefilled_s
    if reached.ended_s is None:
        return fields
    # As in SGLang, these come with the end only.
    fields["request_received_ts"] = to_wall_s + arrived_s
    fields["request_finished_ts"] = to_wall_s + reached.ended_s
    if reached.prefilled_s is not None:
        fields["first_token_latency"] = reached.prefilled_s - arrived_s
        fields |= _throughput(len(choice.tokens) - 1, reached.ended_s - reached.prefilled_s)
    return fields


def _throughput(num_decoded: int, decode_s: float) -> JSONObject:
    """Tokens per second after the first one."""
    return {"decode_throughput": num_decoded / decode_s} if num_decoded > 0 and decode_s > 0 else {}
