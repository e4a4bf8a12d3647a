"""What was generated once is used again.

``source`` says how a recording is read, wherever it lies (a run of the journal: ``buffer/journal_source.py``),
``options`` what a start may ask of a replay, ``conditions`` what of it must agree with what was recorded,
``step_filter`` which groups a step means, ``errors`` what can be wrong. ``replayed_bodies`` has the field by
which a replayed sample says which one it is, and what need not be paid for again.

``recording`` is an exported file, a log of ``core/records``; ``recording_file`` is one as a source,
``recording_export`` makes one, with zstandard ``frames``, and ``recording_secrets`` says what no file has.
``recorded_sample`` checks what a file says, and ``recording_differences`` compares two. ``recorded_calls`` has the
calls of an engine in a file, and ``call_request`` says which requests are equal, whose they are, and what is a fact
about the engine.

``skip`` is for the functions of any trainer: on chosen steps, what a function returned in an earlier run is loaded
instead of calling it. ``substitutes`` has the rule of ``repeat``, for whatever is numbered: another step, or epoch, in
place of one that is missing. ``group_frames`` is what a run process is told of a recorded group. ``differences`` tells
in words where two JSON values first differ.

``outcomes`` has the verdicts on groups, as a recording tells them and as a rehearsal finds them, ``comparison`` adds up
what changes, ``comparison_plots`` draws it.

``engine`` is for calls: an engine's answers, recorded once, and given again without it.

Import from the folders, as ``from forebay.replay.skip import SkipManager``; ``Recording``, ``RecordedEngine`` and
``EngineRecorder`` are here, and looked up only when they are asked for: the buffer, which reads recordings, knows no
web framework.
"""

from typing import TYPE_CHECKING

from forebay.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from forebay.replay.engine.engine_recorder import EngineRecorder
    from forebay.replay.engine.recorded_engine import RecordedEngine
    from forebay.replay.recording import Recording

__all__ = ["EngineRecorder", "RecordedEngine", "Recording"]

__getattr__ = lazy_names(
    __name__,
    {
        "EngineRecorder": "forebay.replay.engine.engine_recorder",
        "RecordedEngine": "forebay.replay.engine.recorded_engine",
        "Recording": "forebay.replay.recording",
    },
)
