"""A policy of somebody else's that caps some rollouts, and lets what is broken run again, uncapped and elsewhere."""

import os
import sys
from pathlib import Path

SOURCE = '''
from dataclasses import replace

from forebay.workers.scheduling.pull import Pull


class Capping(Pull):
    """Of ``options``: ``caps`` has tokens by the numbers of rollouts, ``again_at`` an engine for what is broken.

    ``again_once`` names a file without which nothing broken is chosen again, ``told_in`` one that is written once
    something is; ``first_at`` is where all begin.
    """

    def __init__(self, inputs):
        super().__init__(inputs)
        self._options = inputs.settings.options
        self._broken = set()

    def next(self, loads):
        import os
        chosen = super().next(loads)
        if chosen is None:
            return None
        if chosen.rollout in self._broken:
            if not os.path.exists(self._options.get("again_once", "/")):
                super().lost(chosen.rollout)
                return None
            return replace(chosen, engine=self._options.get("again_at", chosen.engine))
        cap = self._options.get("caps", {}).get(str(chosen.rollout.number))
        return replace(chosen, cap_tokens=cap, engine=self._options.get("first_at", chosen.engine))

    def broken(self, rollout, tokens, seconds):
        self._broken.add(rollout)
        if "told_in" in self._options:
            open(self._options["told_in"], "w").close()
        super().broken(rollout, tokens, seconds)
'''


def install_capping(site: Path) -> dict[str, str]:
    """Install it below ``site``, for this process too; what a server needs in its environment for it."""
    info = site / "capping-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: capping\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[forebay.policies]\ncapping = capping:Capping\n")
    (site / "capping.py").write_text(SOURCE)
    sys.path.insert(0, str(site))
    earlier = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{site}:{earlier}" if earlier else str(site)}
