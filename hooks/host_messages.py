"""Messages between server and hook host, sent over ``forebay.core.processes``.

Bodies, ids and the answers of users' hooks are sent as JSON bytes, which msgpack does not decode.
"""

import msgspec

from forebay.core.group import SLIME_REWARD_RANGE, Normaliser, RewardRange
from forebay.hooks.types import Contract, Processed


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
    """A request about one group. Without bodies, it is about index items. ``sizes`` are the fields of ``Sizes``."""

    instance_id: bytes
    rewards: list[float]
    rollout_ids: list[str]
    bodies: list[bytes] | None
    sizes: tuple[int, int, int]
    forks: list[int] = []


class Judge(AboutGroup, tag="judge"):
    """Requests a call of ``is_valid_group``."""


class Process(AboutGroup, tag="process"):
    """Requests the rows of a group."""


class MetaInfo(msgspec.Struct, tag="meta_info"):
    """Requests a call of ``get_group_data_meta_info`` with these groups, each as its instance id and bodies."""

    groups: list[tuple[bytes, list[bytes]]]


class Notify(msgspec.Struct, tag="notify"):
    """Notifies of an event; ``payload`` is a JSON object."""

    event: str
    payload: bytes


class Hello(msgspec.Struct, tag="hello"):
    """The host is ready: the implementers of each hook, and the contract if known."""

    implementations: dict[str, list[str]]
    contract: Contract | None


class Asking(msgspec.Struct, tag="asking"):
    """A hook is about to be called. Its name is reported if the host then dies or times out."""

    hook: str


class Judged(msgspec.Struct, tag="judged"):
    """The verdict, and the contract if known."""

    is_valid: bool
    is_finished: bool
    contract: Contract | None


class MadeRows(msgspec.Struct, tag="rows"):
    """The rows of a group, and the contract if known."""

    processed: Processed
    contract: Contract | None


class Described(msgspec.Struct, tag="described"):
    """The meta info as JSON."""

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
Reply = Judged | MadeRows | Described | Notified
FromHost = Hello | Asking | Reply | Failed
REPLIES: dict[type[Request], type[Reply]] = {Judge: Judged, Process: MadeRows, MetaInfo: Described, Notify: Notified}
