"""A run whose process does nothing but tell the address that it was given, so that a test can stand in for it."""

from tests.kit import ServerProcess, poll_until, write_generator

LENT = """
import threading
from forebay.generators import base
TASK_TYPE = "lent"
def run_rollout(data):
    print(f"lent: {data['remote_buffer_url']} whole", flush=True)
    threading.Event().wait()
"""


def lend_runs(server: ServerProcess) -> None:
    """Let runs of the task type ``lent`` be started there."""
    write_generator(server.generators, LENT, "lent_generator.py")


def lent_url(server: ServerProcess, run_id: str) -> str:
    """The private address of a run; waits until its process has told it."""
    return poll_until(lambda: _told(server, run_id))


def _told(server: ServerProcess, run_id: str) -> str:
    lines: list[str] = server.client.get(f"/v1/runs/{run_id}/log").json()["lines"]
    return next((line.split()[1] for line in lines if line.startswith("lent:") and line.endswith("whole")), "")
