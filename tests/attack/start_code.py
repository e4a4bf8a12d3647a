"""Code that runs at the start of every Python process of a server: for what no setting and no request brings about."""

import os
from pathlib import Path


def python_path_with(folder: Path, code: str) -> dict[str, str]:
    """The variables with which ``code`` runs first."""
    (folder / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}
