"""The uids that memory holds, by the group that their samples name, and which of these groups go first. Pure."""

from collections.abc import Iterable, Iterator


class KnownUids:
    """Uids by the id of the group that each sample names, whether it is in that group, too late for it or surplus.

    Of a group that is known, all uids are there. Known groups that are done may be forgotten, the oldest first.
    """

    def __init__(self) -> None:
        self._group_of: dict[str, str] = {}
        self._of_group: dict[str, list[str]] = {}
        self._done: dict[str, int] = {}
        """Ids of groups that nobody needs in memory, as far as was known when they were put here, and their sizes."""
        self.num_done = 0
        """The samples of groups that are done, and one for each group."""

    def __contains__(self, uid: str) -> bool:
        return uid in self._group_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._group_of)

    def group_of(self, uid: str) -> str:
        """The id of the group that the sample with this uid names. Raises ``KeyError`` for one that is not here."""
        return self._group_of[uid]

    def add(self, uid: str, group_id: str) -> None:
        """A sample names the group."""
        self._group_of[uid] = group_id
        known = self._of_group.get(group_id)
        if known is None:
            known = self._of_group[group_id] = []
        known.append(uid)

    def learn(self, group_id: str, uids: Iterable[str]) -> None:
        """These are all uids of a group, unless it is known already."""
        if group_id not in self._of_group:
            self._of_group[group_id] = []
            for uid in uids:
                self.add(uid, group_id)

    def knows(self, group_id: str) -> bool:
        """Whether every uid of the group is here."""
        return group_id in self._of_group

    def num_of(self, group_id: str) -> int:
        """How many uids of the group are here."""
        return len(self._of_group.get(group_id, ()))

    def mark_done(self, group_id: str) -> None:
        """Nobody needs the group in memory any more, for now."""
        # Again if it was put here earlier, with fewer samples perhaps: before it was written to.
        self.num_done -= self._done.pop(group_id, 0)
        self._done[group_id] = size = self.num_of(group_id) + 1
        self.num_done += size

    def take_oldest(self, limit: int) -> list[str]:
        """The groups to forget if no more than ``limit`` are to stay; they are not among those done any more."""
        taken: list[str] = []
        while self._done and self.num_done > limit:
            group_id = next(iter(self._done))
            self.num_done -= self._done.pop(group_id)
            taken.append(group_id)
        return taken

    def forget(self, group_id: str) -> None:
        """Let go of a group's uids."""
        for uid in self._of_group.pop(group_id, ()):
            # A later sample of another group may have the same.
            if self._group_of.get(uid) == group_id:
                del self._group_of[uid]
