"""Replays what an earlier run generated, or what an engine answered.

``source`` defines how a recording is read, wherever it is stored (a run of the journal: ``buffer/journal_source.py``).
``options`` parses what a start asks of a replay, ``conditions`` checks what must agree with the recording,
``step_filter`` maps steps to groups, and ``errors`` has the exceptions. ``replayed_bodies`` reads and writes the field
that names the recorded sample, and counts the tokens that a replay need not generate again.

``recording`` is an exported file, a log of ``core/records``. ``recording_file`` reads one as a source,
``recording_export`` writes one with zstandard ``frames``, and ``recording_secrets`` removes secrets from it.
``recorded_sample`` checks the rows of a file, and ``recording_differences`` compares two files. ``recorded_calls``
stores the calls of an engine. ``call_request`` decides which requests are equal, which rollout each belongs to, and
which requests ask for facts about the engine.

``exporters`` writes the rollouts of a recording for other tools: ATIF, Parquet, JSON Lines.

``skip`` is for the functions of any trainer: on chosen steps, the result of an earlier run is loaded instead of calling
the function. ``substitutes`` has the rule of ``repeat``: which step, or epoch, replaces a missing one. ``group_frames``
is what a run process receives about a recorded group. ``differences`` describes where two JSON values first differ.

``outcomes`` has the verdicts on groups, as recorded and as a rehearsal finds them. ``comparison`` adds up the changes,
and ``comparison_plots`` draws them.

``engine`` is for calls: an engine's answers are recorded once and replayed without the engine.

Import from the folders, as in ``from forebay.replay.skip import SkipManager``. ``Recording``, ``RecordedEngine`` and
``EngineRecorder`` are exported here but imported lazily: the buffer, which reads recordings, must not load a web
framework.
"""

from typing import TYPE_CHECKING

from forebay.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from forebay.replay.engine.engine_recorder import EngineRecorder
    from forebay.replay.engine.recorded_engine import RecordedEngine
    from forebay.replay.recording import Recording

__all__ = ["EngineRecorder", "RecordedEngine", "Recording"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "EngineRecorder": "forebay.replay.engine.engine_recorder",
        "RecordedEngine": "forebay.replay.engine.recorded_engine",
        "Recording": "forebay.replay.recording",
    },
)
