"""Token-exact capture: record requests and sampled tokens turn by turn, and build samples from them.

1. ``request_fields.py`` adds the fields that make SGLang return token ids, logprobs and weight versions, and removes
   from the reply what the client did not request. ``reply_shape.py`` validates replies first.
2. ``read_reply.py`` and ``read_stream.py`` convert whole replies and streams into turns (``turn.py``);
   ``fill_gaps.py`` asks the engine for what a stream omits.
   ``engine_times.py`` reads the engine's timings; ``call_spans.py`` records calls with these timings in a trace.
3. ``sampling_params.py`` records how a call's tokens are sampled; ``notices.py`` warns once about logprobs that are
   missing or not the policy's. ``token_cap.py`` limits the total tokens that the calls of one rollout sample.
   ``policy_calls.py`` separates calls of the policy from those of other models.
4. ``trajectory.py`` collects the turns of a rollout in a tree of tokens (``token_tree.py``): a prompt extends the
   tokens of an earlier turn, is realigned with them, or forks.
5. ``sample_fields.py`` makes a sample of each branch: tokens, loss mask, logprobs, spans of weight versions and of
   sampling parameters.

6. Rows beside the tokens, such as routed experts: ``token_tree.py`` guesses which of them are known,
   ``read_rows.py`` reads them from a reply, ``fill_rows.py`` fetches those that a wrong guess left out, and
   ``side_rows.py`` keeps them until it makes the parts of the rollout's samples.

``checking.py`` feeds a sample back through an engine to check that its tokens have its recorded logprobs.
``teacher.py`` does the same at another model, whose logprobs become arrays of the sample.
"""
