"""What can be wrong with a recording, or with a request for one."""

from collections.abc import Mapping, Sequence
from typing import Any

from forebay.core.errors import Conflict, InvalidInput, NotFound, StorageFailed


class NotRecorded(NotFound):
    """The recording does not contain what a replay asked for."""

    code = "not_recorded"


class FolderNotRecorded(InvalidInput):
    """Rewards should be computed again by a verifier that reads the agent's folder."""

    def __init__(self) -> None:
        super().__init__(
            "the verifier reads the agent's folder, which is not part of a recording",
            hint="replay with the recorded rewards, or use a reward function that needs only the sample's item",
            field="replay.rewards",
        )


class ReplayDiffers(Conflict):
    """A replay's start does not match its recording. ``differences`` lists field, recorded, now."""

    code = "replay_differs"

    def __init__(self, differences: Sequence[Mapping[str, Any]]) -> None:
        words = "; ".join(f"{each['field']} was {each['recorded']!r}, now {each['now']!r}" for each in differences)
        names = ",".join(str(each["field"]) for each in differences)
        super().__init__(
            f"the start does not match the recording: {words}"[:4_000],
            hint=f"start with the recorded values, or ignore them: forebay start --replay SOURCE --ignore {names}",
            field="replay",
        )
        self.differences = list(differences)


class RecordingDamaged(StorageFailed):
    """A recording cannot be read: not a recording, a later version, or damaged (``place`` and ``detail``)."""

    code = "recording_damaged"

    def __init__(self, reason: str, *, hint: str = "", place: str = "", detail: str = "") -> None:
        what = "the recording cannot be read"
        super().__init__(reason, what=what, hint=hint or "forebay recording verify FILE lists all damage")
        self.place, self.detail = place, detail
