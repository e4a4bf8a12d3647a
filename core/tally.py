"""Counts that the processes of a run tell, one process after the other."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    """Each process tells its own totals, again and again; those of the processes before it are added."""

    process_id: str = ""
    current: dict[str, int] = field(default_factory=dict)
    """What the process of this id told last."""
    earlier: dict[str, int] = field(default_factory=dict)
    """The sum over all processes before it."""

    def tell(self, process_id: str, counts: Mapping[str, int]) -> bool:
        """Take what a process counts by now; whether that changes anything. A report may come twice."""
        if process_id != self.process_id:
            self.earlier, self.current, self.process_id = dict(self.totals), {}, process_id
        is_news = self.current != counts
        self.current = dict(counts)
        return is_news

    @property
    def totals(self) -> Counter[str]:
        """All processes together."""
        return Counter(self.earlier) + Counter(self.current)
