"""Groups of a batch whose hooks leave them with different numbers of rows, in both forms of a reply."""

from collections.abc import Iterator

import pytest

from forebay.client import BufferClient
from forebay.client.tensors import collate
from tests.conftest import MakeServer
from tests.kit import IDLE, Json, NativeRun, ServerProcess, make_group, write_generator

HOOKS = f"""{IDLE.replace("idle", "uneven")}
def filter_item(item, task_type):
    return item["extra_info"]["fate"] != "dropped"

def pad_group_data(group, group_size):
    return group[0], [item for item in group[1] if item["extra_info"]["fate"] != "lost"]
"""


@pytest.fixture(scope="module")
def uneven_server(module_servers: MakeServer, tmp_path_factory: pytest.TempPathFactory) -> ServerProcess:
    path = write_generator(tmp_path_factory.mktemp("tasks"), HOOKS, "uneven_generator.py")
    return module_servers(generators=path.parent)


@pytest.fixture
def run(uneven_server: ServerProcess) -> NativeRun:
    return uneven_server.start_run("uneven", group_size=3, min_valid_item_size_ratio=0.1)


@pytest.fixture(params=[False, True], ids=["json", "tensors"])
def client(run: NativeRun, request: pytest.FixtureRequest) -> Iterator[BufferClient]:
    with BufferClient(run.server.url, as_tensors=request.param) as client:
        client.attach(run.run_id)
        yield client


def group(number: int, *fates: str, instance_id: str = "a", **changes: object) -> list[Json]:
    """A group that does not say its epoch, with what becomes of each sample."""
    samples = make_group(instance_id, [0.0, 1.0, 0.5], tokens=[1, 2], **changes)
    return [
        {**sample, "uid": f"{number}-{place}", "extra_info": {"fate": fate}}
        for place, (sample, fate) in enumerate(zip(samples, fates, strict=True))
    ]


def uids(client: BufferClient, num_groups: int) -> tuple[list[list[str]], list[int]]:
    """Those of a batch by group, and which group each row is of, as its tensors tell."""
    batch = client.read(num_groups, wait_s=20)
    assert batch is not None
    assert batch.num_groups == num_groups
    told: list[int] = collate(batch, 0)["group_index"].tolist()
    return [[row["uid"] for row in each.samples] for each in batch.groups], told


@pytest.mark.parametrize("as_arrays", [True, False])
def test_epochs_of_one_instance_are_told_apart(run: NativeRun, client: BufferClient, as_arrays: bool) -> None:
    samples = [*group(0, "kept", "kept", "kept"), *group(1, "kept", "dropped", "kept")]
    if as_arrays:
        run.send(samples)
    else:
        run.write(*samples)
    assert uids(client, 2) == ([["0-0", "0-1", "0-2"], ["1-0", "1-2"]], [0, 0, 0, 1, 1])


def test_a_group_of_which_a_hook_left_nothing_has_no_rows(run: NativeRun, client: BufferClient) -> None:
    run.write(*group(0, "kept", "kept", "lost"), *group(1, "lost", "lost", "lost"), *group(2, "kept", "lost", "lost"))
    assert uids(client, 3) == ([["0-0", "0-1"], ["2-0"]], [0, 0, 2])


def test_a_repeated_request_is_told_the_same(run: NativeRun) -> None:
    run.write(*group(0, "kept", "lost", "kept"), *group(1, "kept", "kept", "kept", instance_id="b"))
    first, again = (run.read(num_groups=2, request_id="r") for _ in range(2))
    assert first == again
    assert (first["num_groups"], first["group_sizes"], len(first["data"])) == (2, [2, 3], 5)
    assert first["group_ids"] == [group["group_id"] for group in run.groups()]


def test_a_group_names_what_the_server_knows_it_by(run: NativeRun, client: BufferClient) -> None:
    run.write(*group(0, "lost", "lost", "lost"), *group(1, "kept", "lost", "kept", instance_id="b"))
    batch = client.read(2, wait_s=20)
    assert batch is not None
    assert [run.group(each.group_id)["instance_id"] for each in batch.groups] == ["b"]


def test_nothing_has_no_groups(client: BufferClient) -> None:
    assert client.read(1, wait_s=0) is None
