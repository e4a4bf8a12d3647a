"""The uids in memory, by the group that their samples name, and which of these groups are evicted first. Pure."""

from collections.abc import Iterable, Iterator


class KnownUids:
    """Uids by the group id that each sample names, whether the sample is a member, late or surplus.

    All uids of a known group are here. Known groups that are done may be evicted, oldest first.
    """

    def __init__(self) -> None:
        self._group_of: dict[str, str] = {}
        self._of_group: dict[str, list[str]] = {}
        self._done: dict[str, int] = {}
        """Sizes of groups that may be evicted, by id, as of when they were added here."""
        self.num_done = 0
        """Number of samples of groups that are done, plus one for each group."""

    def __contains__(self, uid: str) -> bool:
        return uid in self._group_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._group_of)

    def group_of(self, uid: str) -> str:
        """The id of the group that the sample with this uid names. Raises ``KeyError`` for an unknown uid."""
        return self._group_of[uid]

    def add(self, uid: str, group_id: str) -> None:
        """Record a sample that names the group."""
        self._group_of[uid] = group_id
        known = self._of_group.get(group_id)
        if known is None:
            known = self._of_group[group_id] = []
        known.append(uid)

    def learn(self, group_id: str, uids: Iterable[str]) -> None:
        """Record the complete list of a group's uids, unless the group is known already."""
        if group_id not in self._of_group:
            self._of_group[group_id] = []
            for uid in uids:
                self.add(uid, group_id)

    def knows(self, group_id: str) -> bool:
        """Whether all uids of the group are here."""
        return group_id in self._of_group

    def num_of(self, group_id: str) -> int:
        """Number of the group's uids here."""
        return len(self._of_group.get(group_id, ()))

    def mark_done(self, group_id: str) -> None:
        """Mark a group as one that may be evicted."""
        # It may have been marked before, when it had fewer samples.
        self.num_done -= self._done.pop(group_id, 0)
        self._done[group_id] = size = self.num_of(group_id) + 1
        self.num_done += size

    def take_oldest(self, limit: int) -> list[str]:
        """Take the groups to evict so that at most ``limit`` remain; they are no longer marked as done."""
        taken: list[str] = []
        while self._done and self.num_done > limit:
            group_id = next(iter(self._done))
            self.num_done -= self._done.pop(group_id)
            taken.append(group_id)
        return taken

    def forget(self, group_id: str) -> None:
        """Drop a group's uids."""
        for uid in self._of_group.pop(group_id, ()):
            # A later sample of another group may have the same uid.
            if self._group_of.get(uid) == group_id:
                del self._group_of[uid]
