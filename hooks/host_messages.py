"""What server and hook host say to each other, over ``forebay.core.processes``.

Bodies, ids and whatever users' hooks answer travel as JSON bytes inside, which msgpack does not look into.
"""

import msgspec

from forebay.core.group import SLIME_REWARD_RANGE, Normaliser, RewardRange
from forebay.hooks.types import Contract, Row


class Setup(msgspec.Struct, tag="setup"):
    """The first message to a host: what to load. A path of "" means no generator file."""

    task_type: str
    contract: Contract | None
    normaliser: Normaliser
    module_path: str
    python_path: list[str]
    loads_plugins: bool
    reward_range: RewardRange | None = SLIME_REWARD_RANGE


class AboutGroup(msgspec.Struct):
    """What is asked about one group. Without bodies, about index items. ``sizes`` are the fields of ``Sizes``."""

    instance_id: bytes
    rewards: list[float]
    rollout_ids: list[str]
    bodies: list[bytes] | None
    sizes: tuple[int, int, int]
    forks: list[int] = []


class Judge(AboutGroup, tag="judge"):
    """Ask ``is_valid_group``."""


class Process(AboutGroup, tag="process"):
    """Ask for the rows of a group."""


class MetaInfo(msgspec.Struct, tag="meta_info"):
    """Ask ``get_group_data_meta_info`` about these groups: instance ids and bodies."""

    groups: list[tuple[bytes, list[bytes]]]


class Notify(msgspec.Struct, tag="notify"):
    """Tell of an event; ``payload`` is a JSON object."""

    event: str
    payload: bytes


class Hello(msgspec.Struct, tag="hello"):
    """The host is ready: hook → who implements it, and the contract as far as it is known."""

    implementations: dict[str, list[str]]
    contract: Contract | None


class Asking(msgspec.Struct, tag="asking"):
    """A hook is about to be called: whom to name if nothing more is heard."""

    hook: str


class Judged(msgspec.Struct, tag="judged"):
    """The verdict, and the contract as far as it is known."""

    is_valid: bool
    is_finished: bool
    contract: Contract | None


class Rows(msgspec.Struct, tag="rows"):
    """The rows of a group, and the contract as far as it is known."""

    rows: list[Row]
    num_kept: int
    is_filtered: bool
    is_out_of_range: bool
    contract: Contract | None


class Described(msgspec.Struct, tag="described"):
    """The meta info, as JSON."""

    meta_info: bytes


class Notified(msgspec.Struct, tag="notified"):
    """Every implementation of a notification has returned."""


class Failed(msgspec.Struct, tag="failed"):
    """A hook failed, or the host could not be set up (then ``hook`` names the file or the plugin)."""

    hook: str
    message: str
    traceback: str


Request = Judge | Process | MetaInfo | Notify
ToHost = Setup | Request
Reply = Judged | Rows | Described | Notified
FromHost = Hello | Asking | Reply | Failed
REPLIES: dict[type[Request], type[Reply]] = {Judge: Judged, Process: Rows, MetaInfo: Described, Notify: Notified}
