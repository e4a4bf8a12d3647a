"""Files of recordings with more than rows in them: nothing of it is run, and no command or server waits for it."""

import sqlite3
import struct
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.attack.hostile_files import forebay_in_time
from tests.conftest import MakeServer
from tests.kit import ServerProcess, assert_error
from tests.replay.recordings.recording_kit import write_recording

ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n)"
CREATE = "CREATE TABLE groups (number INTEGER PRIMARY KEY, group_id TEXT, num_rows INTEGER"
PAGE_BYTES = 4096
ANSWER_S = 2.0


def columns_of_a_function(database: sqlite3.Connection) -> None:
    columns, values = "number INTEGER PRIMARY KEY, group_id, num_rows, checksum", "x, x, 1, x'00'"
    replace_groups(database, columns, values, "json TEXT AS (hex(zeroblob(450000000 + number))), checksum BLOB")


def checks_of_a_function(database: sqlite3.Connection) -> None:
    columns, values = "number INTEGER PRIMARY KEY, group_id, num_rows, json, checksum", "x, x, 1, '{}', x'00'"
    check = "CHECK (length(hex(zeroblob(900000000))) > 0)"
    replace_groups(database, columns, values, f"json TEXT, checksum BLOB, {check}")


def replace_groups(database: sqlite3.Connection, columns: str, values: str, rest: str) -> None:
    """Fill a table that is harmless, and only then say what it is: nothing of it is computed here."""
    database.execute("DROP TABLE groups")
    database.execute(f"CREATE TABLE groups ({columns})")
    numbers = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < 20)"
    database.execute(f"{numbers} INSERT INTO groups SELECT {values} FROM n")
    database.execute("PRAGMA writable_schema = ON")
    database.execute("UPDATE sqlite_master SET sql = ? WHERE name = 'groups'", (f"{CREATE}, {rest})",))


def view_without_a_name(database: sqlite3.Connection) -> None:
    """Its name is no text, and that of the table beside it is a view's, which never ends."""
    database.execute("DROP TABLE groups")
    selected = "x AS number, 'a' AS group_id, 1 AS num_rows, '{}' AS json, x'' AS checksum"
    database.execute(f"CREATE VIEW groups AS {ENDLESS} SELECT {selected} FROM n WHERE x < 0")
    database.execute("CREATE VIEW other AS SELECT 1")
    database.execute("PRAGMA writable_schema = ON")
    name = "CAST(x'ff6f74686572' AS TEXT)"
    text = f"CAST(x'{b'CREATE VIEW '.hex()}ff6f74686572{b' AS SELECT 1'.hex()}' AS TEXT)"
    database.execute(
        f"UPDATE sqlite_master SET rowid = 0, name = {name}, tbl_name = {name}, sql = {text} WHERE name = 'other'"
    )


def index_of_a_function(database: sqlite3.Connection) -> None:
    database.execute("CREATE INDEX own ON batches (length(json)) WHERE number < 1")


PLANTED = [columns_of_a_function, checks_of_a_function, view_without_a_name, index_of_a_function]


def lead_in_circles(path: Path, table: str) -> None:
    """Give the table more rows than there is time for: five levels of pages that name the one below 2,000 times."""
    with closing(sqlite3.connect(path)) as database:
        (root,) = database.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()
    content = bytearray(path.read_bytes())
    content = content[: int.from_bytes(content[28:32], "big") * PAGE_BYTES]  # without the last line
    place = (root - 1) * PAGE_BYTES
    content += content[place : place + PAGE_BYTES]
    for _ in range(4):
        content += inner_page(len(content) // PAGE_BYTES)
    content[place : place + PAGE_BYTES] = inner_page(len(content) // PAGE_BYTES)
    content[28:32] = (len(content) // PAGE_BYTES).to_bytes(4, "big")
    path.write_bytes(content)


def inner_page(child: int) -> bytes:
    num_cells, at = 2_000, PAGE_BYTES - 5
    head = struct.pack(">BHHHBI", 5, 0, num_cells, at, 0, child) + at.to_bytes(2, "big") * num_cells
    return head.ljust(at, b"\0") + child.to_bytes(4, "big") + b"\x7f"


@pytest.fixture(scope="module")
def target(module_servers: MakeServer) -> ServerProcess:
    return module_servers()


def check_harmless(server: ServerProcess, path: Path, said: str) -> None:
    for command in ("show", "verify"):
        ended = forebay_in_time("recording", command, path)
        assert (ended.returncode, said in ended.stdout + ended.stderr) == (1, True), (command, ended)
    began_s = time.monotonic()
    assert_error(server.client.post("/v1/runs", json={"replay": str(path)}), 507, "recording_damaged")
    assert server.client.get("/healthz").status_code == 200
    assert time.monotonic() - began_s < ANSWER_S


@pytest.mark.parametrize("plant", PLANTED)
def test_what_is_no_plain_table_of_ours_is_refused(
    target: ServerProcess, tmp_path: Path, plant: Callable[[sqlite3.Connection], None]
) -> None:
    path = tmp_path / "a.fbr"
    write_recording(path)
    with closing(sqlite3.connect(path)) as database, database:
        plant(database)
    check_harmless(target, path, "which no recording has")


@pytest.mark.parametrize("table", ["groups", "samples", "batches", "calls"])
def test_pages_that_lead_in_circles_are_left(target: ServerProcess, tmp_path: Path, table: str) -> None:
    path = tmp_path / "a.fbr"
    write_recording(path)
    lead_in_circles(path, table)
    verified = forebay_in_time("recording", "verify", path)
    assert verified.returncode == 1
    assert forebay_in_time("recording", "show", path).returncode in (0, 1)
    reply = target.client.post("/v1/runs", json={"replay": str(path)})
    assert reply.status_code in (201, 404, 507), reply.text
    assert target.client.get("/healthz").status_code == 200
