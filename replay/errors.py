"""What can be wrong with a recording, or with what is asked of one."""

from collections.abc import Mapping, Sequence
from typing import Any

from forebay.core.errors import Conflict, InvalidInput, NotFound, StorageFailed


class NotRecorded(NotFound):
    """A replay was asked for what its recording does not have."""

    code = "not_recorded"


class FolderNotRecorded(InvalidInput):
    """Rewards are to be asked for again of a judge that looks into the folder of the agent."""

    def __init__(self) -> None:
        super().__init__(
            "the verifier looks into the folder of the agent, and no recording has that",
            hint="replay with the recorded rewards, or judge by what a reward function finds in its item",
            field="replay.rewards",
        )


class ReplayDiffers(Conflict):
    """What a replay was asked for is not what was recorded. ``differences`` has each: field, recorded, now."""

    code = "replay_differs"

    def __init__(self, differences: Sequence[Mapping[str, Any]]) -> None:
        words = "; ".join(f"{each['field']} was {each['recorded']!r}, now {each['now']!r}" for each in differences)
        names = ",".join(str(each["field"]) for each in differences)
        super().__init__(
            f"the recording is of something else: {words}"[:4_000],
            hint=f"start it with what was recorded, or let it be: forebay start --replay SOURCE --ignore {names}",
            field="replay",
        )
        self.differences = list(differences)


class RecordingDamaged(StorageFailed):
    """A recording is none of ours, of a later version, or damaged; ``place`` and ``detail`` say what of it."""

    code = "recording_damaged"

    def __init__(self, reason: str, *, hint: str = "", place: str = "", detail: str = "") -> None:
        what = "the recording cannot be read"
        super().__init__(reason, what=what, hint=hint or "forebay recording verify FILE lists all that is damaged")
        self.place, self.detail = place, detail
