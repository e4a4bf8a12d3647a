"""Token-exact capture: what an engine was asked and what it sampled, turn by turn, and the samples made of it.

1. ``request_fields.py`` adds to a chat what makes SGLang give token ids, logprobs and weight versions, and takes out of
   the reply what its client has not asked for. ``reply_shape.py`` holds a reply against the types of a chat first.
2. ``read_reply.py`` and ``read_stream.py`` make turns (``turn.py``) of whole replies and of streams; ``fill_gaps.py``
   asks the engine for what a stream leaves out.
   ``engine_times.py`` reads what the engine tells of its time, ``call_spans.py`` records calls with it in a trace.
3. ``sampling_params.py`` says how a call's tokens are drawn; ``notices.py`` logs, once, that logprobs are not the
   policy's, or are missing. ``token_cap.py`` bounds what the calls of one rollout sample together. ``policy_calls.py``
   separates calls of the policy from those of other models.
4. ``trajectory.py`` collects the turns of a rollout in a tree of tokens (``token_tree.py``): a prompt goes on from the
   tokens of an earlier turn, is realigned with them, or forks.
5. ``sample_fields.py`` makes a sample of each branch: tokens, loss mask, logprobs, spans of weight versions and of
   sampling parameters.

``checking.py`` feeds a sample back through an engine, to see that its tokens have its logprobs.
"""
