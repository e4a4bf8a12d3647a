"""Harbor's environment without a container, for trusted tasks, and the agent that is a command.

Runs in the environment's child. Harbor loads both classes by their import paths.
"""

import asyncio
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from harbor.agents.base import BaseAgent
from harbor.agents.installed.base import NonZeroAgentExitCodeError
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.definition import COMPOSE_FILE_NAME, DOCKERFILE_NAME, require_agent_environment_definition
from harbor.models.task.verifier_mode import resolve_verifier_environment_definition

OWN_FOLDERS = frozenset({"logs", "tests", "solution", "tmp"})
"""Folders of ``/`` that every environment has for itself."""
MACHINE_FOLDERS = frozenset({"bin", "boot", "dev", "etc", "lib", "lib64", "proc", "run", "sbin", "sys", "usr", "var"})
"""Folders of ``/`` that are always the machine's."""
HOME = "/tmp"  # noqa: S108 -- the environment's own
AS_ROOT = os.geteuid() == 0
NAMESPACE = (
    *("unshare", "--mount", "--pid", "--fork", *(() if AS_ROOT else ("--user", "--map-root-user"))),
    *(sys.executable, "-I", "-S", str(Path(__file__).with_name("harbor_namespace.py"))),
)
ENTER = ("nsenter", "--mount", "--pid", *(() if AS_ROOT else ("--user", "--preserve-credentials")), "--target")
NO_RIGHTS = "it needs the right to make namespaces: run the server as root or allow unprivileged user namespaces"


class Layout:
    """What an environment's Dockerfile does. Raises ``ValueError`` for what needs a container, naming the line."""

    def __init__(self, folder: Path, config: Any) -> None:
        require_agent_environment_definition(folder, docker_image=config.docker_image)
        if (compose := folder / COMPOSE_FILE_NAME).exists():
            raise ValueError(f"{compose} needs containers")
        self._folder = folder
        self.workdir = PurePosixPath("/")
        self.copies: list[tuple[list[Path], PurePosixPath, bool]] = []
        """Sources and target of each COPY and WORKDIR, and whether the target is a folder for the sources."""
        for index, (number, step) in enumerate(_steps(folder / DOCKERFILE_NAME)):
            try:
                name, _, value = step.partition(" ")
                self._add(index, name.upper(), value.strip())
            except ValueError as error:
                where = f"{folder / DOCKERFILE_NAME}, line {number}: {step:.100}"
                raise ValueError(f"{where}: environment=process takes one FROM, WORKDIR and COPY: {error}") from None
        self._work_in(config.workdir or "")
        paths = (target for _, target, _ in self.copies)
        self.own_names = OWN_FOLDERS.union(path.parts[1] for path in paths if len(path.parts) > 1)

    def _add(self, index: int, name: str, value: str) -> None:
        if name == "WORKDIR":
            self._work_in(value)
        elif name == "COPY":
            *names, target = shlex.split(value)
            if any(name.startswith(("--", "[", "<")) for name in names):
                raise ValueError("COPY without options only")
            found = [
                sorted(self._folder.glob(name.lstrip("/"))) if name.strip("./") else [self._folder] for name in names
            ]
            sources = [path for paths in found for path in paths]
            if not all(found):
                raise ValueError(f"not all of its files are in {self._folder}")
            is_into = len(sources) > 1 or target.endswith(("/", "."))
            self.copies.append((sources, _own(self.workdir / target), is_into))
        elif name != "FROM" or index > 0:
            raise ValueError("it cannot run this line")

    def _work_in(self, folder: str) -> None:
        self.workdir = _own(self.workdir / folder)
        self.copies.append(([], self.workdir, True))

    def create(self, root: Path) -> None:
        """Create the folders and files below ``root``."""
        for name in OWN_FOLDERS:
            (root / name).mkdir(parents=True, exist_ok=True)
        for sources, target, is_into in self.copies:
            to = root / str(target).lstrip("/")
            if is_into:
                to.mkdir(parents=True, exist_ok=True)
            for source in sources:
                _copy(source, to)


def check_task(task: Any) -> None:
    """Raise ``ValueError`` for a task whose verifier or users ``ProcessEnvironment`` cannot have."""
    config = task.config
    for step in config.steps or [None]:
        if (definition := resolve_verifier_environment_definition(config, task.paths, step)) is not None:
            Layout(definition.directory, definition.config)
            if definition.bundled_tests and not (definition.directory / "test.sh").is_file():
                raise ValueError(f"{definition.directory} has no test.sh")
    for user in (config.agent.user, config.verifier.user):
        _check_root(user)


class ProcessEnvironment(BaseEnvironment):  # type: ignore[misc] # Harbor is not installed where this is checked
    """Runs a task's commands in namespaces of their own, with Harbor's absolute paths in the trial's folder.

    Instead of the image of ``FROM``, it has the machine's programs. Commands run as root of the namespaces.
    """

    _first: Process | None = None
    """The namespaces' first process, which ends with its standard input."""
    _pid = ""

    @staticmethod
    def type() -> str:
        return "process"

    @classmethod
    def preflight(cls) -> None:
        """Make namespaces and leave them. Raises ``SystemExit``, as other environments do."""
        with tempfile.TemporaryDirectory() as root:
            (Path(root) / "tmp").mkdir()
            try:
                words = [*NAMESPACE, root, "tmp"]
                subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)  # noqa: S603 -- our program
            except OSError as error:
                raise SystemExit(f"it needs the program {error.filename}, of util-linux") from None
            except subprocess.CalledProcessError as error:
                raise SystemExit(f"{NO_RIGHTS} ({error.stderr.strip().rpartition(chr(10))[2]})") from None

    def _validate_definition(self) -> None:
        self._layout = Layout(self.environment_dir, self.task_env_config)

    async def start(self, force_build: bool) -> None:  # noqa: ARG002 -- nothing is built
        """Copy the task's files and make the namespaces. Raises ``RuntimeError`` where there are no rights."""
        root = self.trial_paths.trial_dir.resolve() / "process" / self.session_id
        await asyncio.to_thread(self._layout.create, root)
        words = (*NAMESPACE, str(root), *self._layout.own_names)
        self._first = await asyncio.create_subprocess_exec(*words, stdin=PIPE, stdout=PIPE)
        assert self._first.stdout is not None
        self._pid = (await self._first.stdout.readline()).decode().strip()
        if not self._pid:
            raise RuntimeError(NO_RIGHTS)
        await self.ensure_dirs(self._mount_targets(writable_only=True))
        await self._upload_environment_dir_after_start()

    async def stop(self, delete: bool) -> None:  # noqa: ARG002 -- its files are in the trial's folder
        """End all processes of the environment. Its files stay."""
        if self._first is not None and self._first.stdin is not None:
            self._first.stdin.close()
            await self._first.wait()

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a command with bash. Raises ``RuntimeError`` when its time is up, ``ValueError`` for another user."""
        _check_root(self._resolve_user(user))
        script = f"cd {shlex.quote(cwd or str(self._layout.workdir))} || exit\n{command}"
        # Files, because a program that the command leaves behind would keep pipes open.
        with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
            process = await asyncio.create_subprocess_exec(
                *(*ENTER, self._pid, "bash", "-c", script),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env={"PATH": os.environ["PATH"], "HOME": HOME, "LANG": "C.UTF-8", **(self._merge_env(env) or {})},
                start_new_session=True,
            )
            try:
                await asyncio.wait_for(process.wait(), timeout_sec)
            except TimeoutError:
                raise RuntimeError(f"Command timed out after {timeout_sec} seconds") from None
            finally:
                if process.returncode is None:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
            out, err = (file.seek(0) or file.read().decode(errors="replace") for file in (stdout, stderr))
        return ExecResult(stdout=out, stderr=err, return_code=process.returncode)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await asyncio.to_thread(_copy, Path(source_path), self._at(target_path))

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await asyncio.to_thread(_copy, self._at(source_path), Path(target_path))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self.upload_file(source_dir, target_dir)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await self.download_file(source_dir, target_dir)

    def _at(self, path: str) -> Path:
        return Path(f"/proc/{self._pid}/root{self._layout.workdir / path}")


def _steps(dockerfile: Path) -> Iterator[tuple[int, str]]:
    """Yield each instruction in one line, with the number of its first line."""
    first, step = 0, ""
    for number, line in enumerate(dockerfile.read_text().splitlines() if dockerfile.exists() else (), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            first = first if step else number
            step += line.rstrip().removesuffix("\\")
            if not line.rstrip().endswith("\\"):
                yield first, step.strip()
                step = ""


def _own(path: PurePosixPath) -> PurePosixPath:
    if len(path.parts) > 1 and path.parts[1] in MACHINE_FOLDERS:
        raise ValueError(f"it cannot write into /{path.parts[1]}, which is the machine's")
    return path


def _check_root(user: str | int | None) -> None:
    if user not in (None, "", 0, "0", "root"):
        raise ValueError(f"environment=process runs everything as root (got user {user!r})")


def _copy(source: Path, target: Path) -> None:
    """Copy the contents of a folder into a folder, or a file to a file or into a folder."""
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)


class CommandAgent(BaseAgent):  # type: ignore[misc] # Harbor is not installed where this is checked
    """Runs a shell line in the task's environment. ``FOREBAY_INSTRUCTION`` holds the task's instruction."""

    def __init__(self, *args: Any, command: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._command = command

    @staticmethod
    def name() -> str:
        return "command"

    def version(self) -> str | None:
        return None

    async def setup(self, environment: BaseEnvironment) -> None:
        """Install nothing: the environment has what the command needs."""

    async def run(self, instruction: str, environment: BaseEnvironment, context: Any) -> None:  # noqa: ARG002
        """Run the command to its end. Raises ``NonZeroAgentExitCodeError``."""
        ended = await environment.exec(self._command, env={"FOREBAY_INSTRUCTION": instruction})
        if ended.return_code != 0:
            said = ((ended.stderr or "").strip() or (ended.stdout or "").strip())[-1_000:]
            raise NonZeroAgentExitCodeError(f"{self._command!r} ended with status {ended.return_code}: {said}")
