"""What was generated once is used again.

``model`` says what a recording tells of a run, ``source`` how it is read, wherever it lies (a run of the journal:
``buffer/journal_source.py``), ``options`` what a start may ask of a replay, ``conditions`` what of it must agree with
what was recorded, ``recording_schema`` the file, ``errors`` what can be wrong with it. ``provenance`` has the field
by which a replayed sample says which one it is, ``sampled_tokens`` what need not be paid for again.

``skip`` is for the functions of any trainer: on chosen steps, what a function returned in an earlier run is loaded
instead of calling it. ``substitutes`` has the rule of ``repeat``, for whatever is numbered: another step, or epoch, in
place of one that is missing. ``differences`` tells in words where two JSON values first differ.

Import from the folders: ``from forebay.replay.skip import SkipManager``.
"""
