"""What ``register`` attaches and refuses, which methods a group has by it, and the modes that are registered."""

import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from forebay.core.errors import InvalidInput
from forebay.workers.groups import (
    NOT_CALLED,
    Call,
    ClassWithInitArgs,
    Dispatch,
    Execute,
    MapCall,
    ResourcePool,
    ResourcePoolManager,
    Worker,
    WorkerGroup,
    collect_all_to_all,
    create_colocated_worker_cls,
    dispatch_one_to_all,
    get_predefined_dispatch_fn,
    register,
    register_dispatch_mode,
    register_split,
    registration_of,
    update_dispatch_mode,
)
from forebay.workers.groups.register import REGISTERED, registered_methods


def lay_out(worker_group: Any, *args: Any, **kwargs: Any) -> Any:
    return args, kwargs


def collect(worker_group: Any, outputs: list[Any]) -> Any:
    return outputs


class Registered(Worker):
    @property
    def broken(self) -> int:
        raise AssertionError("a property was evaluated")

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def one(self, x: int) -> int:
        """What it does."""
        return x + 1

    @register(deadline_s=3, retries=2)
    async def two(self) -> None: ...

    def three(self) -> None: ...


class Derived(Registered):
    @register(Dispatch.ONE_TO_ALL)
    def four(self) -> int:
        return 4

    def two(self) -> None:  # type: ignore[override]
        """Registers nothing, and is no method of groups."""


def test_it_attaches_what_it_was_given_and_changes_nothing_else() -> None:
    def plain(self: Any, x: int) -> int:
        return x + 1

    attached = register(Dispatch.ONE_TO_ALL, Execute.RANK_ZERO, False, False, deadline_s=1.5, retries=1)(plain)
    assert attached is plain
    assert getattr(plain, REGISTERED) == {
        "dispatch_mode": Dispatch.ONE_TO_ALL,
        "execute_mode": Execute.RANK_ZERO,
        "blocking": False,
        "materialize_futures": False,
        "deadline_s": 1.5,
        "retries": 1,
    }
    assert Registered().one(4) == 5
    assert Registered.one.__doc__ == "What it does."


def test_its_defaults() -> None:
    assert registration_of(Registered, "two") == {
        "dispatch_mode": Dispatch.ALL_TO_ALL,
        "execute_mode": Execute.ALL,
        "blocking": True,
        "materialize_futures": True,
        "deadline_s": 3,
        "retries": 2,
    }
    parameters = inspect.signature(register).parameters
    assert [(name, each.default) for name, each in parameters.items()] == [
        ("dispatch_mode", Dispatch.ALL_TO_ALL),
        ("execute_mode", Execute.ALL),
        ("blocking", True),
        ("materialize_futures", True),
        ("deadline_s", None),
        ("retries", 0),
    ]


ANY = ["*args", "**kwargs"]


@pytest.mark.parametrize(
    ("public", "parameters"),
    [
        (WorkerGroup, ["resource_pool", "cls_with_init", "backend='processes'", "env=None", "wait_started=True"]),
        (WorkerGroup.execute_all, ["self", "method_name", *ANY]),
        (WorkerGroup.execute_all_async, ["self", "method_name", *ANY]),
        (WorkerGroup.execute_all_sync, ["self", "method_name", *ANY]),
        (WorkerGroup.execute_rank_zero, ["self", "method_name", *ANY]),
        (WorkerGroup.execute_rank_zero_async, ["self", "method_name", *ANY]),
        (WorkerGroup.execute_rank_zero_sync, ["self", "method_name", *ANY]),
        (WorkerGroup.execute_func_rank_zero, ["self", "func", *ANY]),
        (WorkerGroup.execute_rank, ["self", "rank", "method_name", *ANY]),
        (WorkerGroup.spawn, ["self", "roles=None"]),
        (WorkerGroup.replace, ["self", "rank"]),
        (WorkerGroup.started, ["self", "rank"]),
        (WorkerGroup.on_lost, ["self", "notify"]),
        (WorkerGroup.close, ["self", "drain_s=30.0"]),
        (Call.get, ["self", "timeout_s=None"]),
        (MapCall.get, ["self", "timeout_s=None"]),
        (ResourcePool, ["process_on_nodes", "cpus=1.0", "resources=None", "name=''"]),
        (ResourcePool.split, ["self", "sizes"]),
        (ResourcePool.merged, ["self", "other"]),
        (ResourcePoolManager, ["resource_pool_spec", "mapping", "backend=None"]),
        (ResourcePoolManager.get_resource_pool, ["self", "role"]),
        (ClassWithInitArgs, ["cls", *ANY]),
        (create_colocated_worker_cls, ["class_dict"]),
        (register_dispatch_mode, ["dispatch_mode_name", "dispatch_fn", "collect_fn"]),
        (update_dispatch_mode, ["dispatch_mode", "dispatch_fn", "collect_fn"]),
        (get_predefined_dispatch_fn, ["dispatch_mode"]),
        (Dispatch.remove, ["name"]),
        (registration_of, ["cls", "name"]),
        (register_split, ["kind", "split", "join", "length=<built-in function len>"]),
    ],
)
def test_arguments_keep_their_names_and_defaults(public: Any, parameters: list[str]) -> None:
    found = [each.replace(annotation=each.empty) for each in inspect.signature(public).parameters.values()]
    assert list(map(str, found)) == parameters


def test_methods_are_found_in_the_class_without_evaluating_properties() -> None:
    assert list(registered_methods(Registered)) == ["one", "two"]
    assert list(registered_methods(Derived)) == ["four", "one"]
    assert registration_of(Registered, "broken") is None
    assert registration_of(Registered, "nothing") is None


@pytest.mark.parametrize(
    ("options", "field", "said"),
    [
        ({"dispatch_mode": "ALL_TO_ALL"}, "dispatch_mode", "'ALL_TO_ALL' is not a dispatch mode"),
        ({"dispatch_mode": {"dispatch_fn": lay_out}}, "dispatch_mode", "is not a dispatch mode"),
        ({"dispatch_mode": {"dispatch_fn": lay_out, "collect_fn": 3}}, "dispatch_mode", "is not a dispatch mode"),
        ({"execute_mode": "ALL"}, "execute_mode", "'ALL' is not an execute mode"),
        ({"dispatch_mode": Dispatch.MAP, "execute_mode": Execute.ANY}, "execute_mode", "MAP runs on all workers"),
        (
            {"dispatch_mode": {"dispatch_fn": lay_out, "collect_fn": collect}, "execute_mode": Execute.ANY},
            "execute_mode",
            "cannot be used",
        ),
        ({"deadline_s": 0}, "deadline_s", "above 0"),
        ({"deadline_s": "5"}, "deadline_s", "above 0"),
        ({"retries": -1}, "retries", "a count"),
        ({"retries": True}, "retries", "a count"),
    ],
)
def test_what_is_wrong_is_refused_at_the_decoration(options: dict[str, Any], field: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said) as e:
        register(**options)
    assert e.value.field == field
    assert e.value.hint


def test_only_functions_can_be_registered() -> None:
    with pytest.raises(InvalidInput, match="is not a function"):
        register()(property(lambda _: 1))  # type: ignore[type-var]


@pytest.mark.parametrize("name", ["close", "spawn", "world_size", "execute_all", "replace", "vitals"])
def test_a_method_that_would_hide_the_groups_own_is_refused_by_name(name: str) -> None:
    def method(self: Any) -> None: ...

    hiding = type("Hiding", (Worker,), {name: register(Dispatch.ONE_TO_ALL)(method)})
    with pytest.raises(InvalidInput, match=f"'{name}' cannot be a method") as e:
        WorkerGroup([1], ClassWithInitArgs(hiding), backend="inline")
    assert e.value.field == name
    group = WorkerGroup([1], create_colocated_worker_cls({"a": ClassWithInitArgs(hiding)}), backend="inline")
    with pytest.raises(InvalidInput, match=f"'{name}' cannot be a method"):
        group.spawn()
    group.close()


def test_a_bound_method_is_called_and_documented_as_its_own() -> None:
    with WorkerGroup([1], ClassWithInitArgs(Registered), backend="inline") as group:
        assert group.one.__name__ == "one"
        assert group.one.__doc__ == "What it does."
        assert repr(group) == "<WorkerGroup of 1 x Registered on inline>"


@pytest.mark.parametrize(
    ("value", "said"),
    [(Registered, "ClassWithInitArgs"), (ClassWithInitArgs(int), "derive the class from Worker")],  # type: ignore[type-var]
)
def test_what_is_no_class_of_a_worker_is_refused(value: Any, said: str) -> None:
    with pytest.raises(InvalidInput) as e:
        WorkerGroup([1], value, backend="inline")
    assert e.value.field == "cls_with_init"
    assert said in e.value.hint
    with pytest.raises(InvalidInput) as e:
        create_colocated_worker_cls({"actor": value})
    assert e.value.field == "class_dict.actor"


@pytest.mark.parametrize("classes", [{}, {"": ClassWithInitArgs(Registered)}, {"a-b": ClassWithInitArgs(Registered)}])
def test_roles_have_names(classes: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as e:
        create_colocated_worker_cls(classes)
    assert e.value.field == "class_dict"


# -- modes


@pytest.fixture
def test_mode() -> Callable[[], Any]:
    return lambda: register_dispatch_mode("TEST_MODE", lay_out, collect)


def test_a_mode_is_registered_updated_and_removed(test_mode: Callable[[], Any]) -> None:
    mode = test_mode()
    try:
        assert "TEST_MODE" in Dispatch
        assert mode in list(Dispatch)
        assert Dispatch.TEST_MODE is mode
        assert repr(mode) == "Dispatch.TEST_MODE"
        assert get_predefined_dispatch_fn(mode) == {"dispatch_fn": lay_out, "collect_fn": collect}
        with pytest.raises(InvalidInput, match="already exists"):
            test_mode()
        update_dispatch_mode(mode, dispatch_one_to_all, collect_all_to_all)
        assert get_predefined_dispatch_fn(mode) == get_predefined_dispatch_fn(Dispatch.ONE_TO_ALL)
        assert pickle.loads(pickle.dumps(mode)) is mode
    finally:
        Dispatch.remove("TEST_MODE")
    assert "TEST_MODE" not in Dispatch
    with pytest.raises(AttributeError, match="unknown dispatch mode TEST_MODE; the modes are ONE_TO_ALL"):
        _ = Dispatch.TEST_MODE
    with pytest.raises(InvalidInput, match="is not a dispatch mode"):
        get_predefined_dispatch_fn(mode)


@pytest.mark.parametrize("name", ["ONE_TO_ALL", "NOTHING"])
def test_only_what_was_registered_can_be_removed(name: str) -> None:
    with pytest.raises(InvalidInput, match=f"'{name}' was not registered"):
        Dispatch.remove(name)
    assert Dispatch.ONE_TO_ALL in Dispatch


@pytest.mark.parametrize("name", ["with space", "remove", "ONE_TO_ALL"])
def test_a_mode_needs_a_name_of_its_own(name: str) -> None:
    with pytest.raises(InvalidInput) as e:
        register_dispatch_mode(name, lay_out, collect)
    assert e.value.field == "dispatch_mode_name"


def test_map_has_no_two_functions() -> None:
    with pytest.raises(InvalidInput, match="MAP has no dispatch and collect functions"):
        get_predefined_dispatch_fn(Dispatch.MAP)


def of_even_ranks(worker_group: Any, numbers: list[int]) -> Any:
    return ([number if rank % 2 == 0 else NOT_CALLED for rank, number in enumerate(numbers)],), {}


class OfEven(Worker):
    @register({"dispatch_fn": of_even_ranks, "collect_fn": collect})
    def ranks(self, number: int) -> tuple[int, int]:
        return self.rank, number

    @register({"dispatch_fn": lay_out, "collect_fn": collect})
    def laid_out_badly(self, number: int) -> int:
        return number


def test_a_dispatch_function_may_leave_ranks_out() -> None:
    with WorkerGroup([4], ClassWithInitArgs(OfEven), backend="inline") as group:
        assert group.ranks([5, 6, 7, 8]) == [(0, 5), (2, 7)]
        with pytest.raises(InvalidInput, match="laid_out_badly returned no list with 4 entries") as e:
            group.laid_out_badly([1, 2, 3])
        assert e.value.field == "dispatch_fn"
        with pytest.raises(InvalidInput, match=r"rank must be 0 to 3 \(got 4\)"):
            group.execute_rank(4, "ranks", 1)


@pytest.mark.parametrize(
    ("env", "field"), [({"A=B": "1"}, "env"), ({"": "1"}, "env"), ({"A": 1}, "env.A"), ({"A": "\0"}, "env.A")]
)
def test_what_cannot_be_a_variable_is_refused(env: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as e:
        WorkerGroup([1], ClassWithInitArgs(Registered), backend="inline", env=env)
    assert e.value.field == field
