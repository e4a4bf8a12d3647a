"""Continue a chat that its engine aborted, for example for a weight update, until the choice is complete.

Input: the turn of a choice whose finish reason is ``abort``. ``continued_call.py`` requests part after part, and reads
the message. The caller does the I/O: run processes, in the event loop or in a thread, and the gateway. ``parts.py``
holds the parts so far and builds the next request: from token ids if the engine returns them, otherwise from text;
``vllm.py`` translates such a request for vLLM. ``message.py`` reads the message from all tokens, because a character, a
stop string or a tool call may lie across a cut. Output: one turn with the weight versions of its parts, and
(``reply.py``) a reply as if from a single call.
"""
