"""Going on with a chat that its engine has aborted, for a weight update say, until it has come to its end.

In comes the turn of a choice whose finish reason is ``abort``. ``continued_call.py`` says what is to be done, step by
step: ask for the next part, pause, read the message. Whoever does the I/O takes the steps: run processes, in the event
loop or in a thread, and the gateway. ``parts.py`` knows what came so far, and the body of the next call: from token ids
where the engine gives them, else from text. Out of all tokens ``message.py`` reads the message, since a character, a
stop string or a tool call may lie across a cut. Out goes one turn with the weight versions of its parts, and by
``reply.py`` a reply as if one call had brought it.
"""
