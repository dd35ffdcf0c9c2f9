"""What a replica needs to join the others: one clear error for each missing item."""

import socket
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from tests.harness.threads import run_on_threads
from torchtitan_lite.config.tables.fault_tolerance import FaultToleranceConfig
from torchtitan_lite.core.errors import ReplicaError
from torchtitan_lite.distributed import network
from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.distributed.mesh import Mesh, ParallelDims
from torchtitan_lite.fault_tolerance.replica import joining
from torchtitan_lite.fault_tolerance.replica.joining import (
    LIGHTHOUSE,
    TOKEN,
    address_for,
    environment,
)


def test_the_environment_names_the_lighthouse_and_the_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(LIGHTHOUSE, "http://10.0.0.1:29510")
    monkeypatch.setenv(TOKEN, "0123456789abcdef")
    assert environment() == ("http://10.0.0.1:29510", "0123456789abcdef")


def test_a_missing_lighthouse_address_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LIGHTHOUSE, raising=False)
    with pytest.raises(
        ReplicaError, match=r"TORCHFT_LIGHTHOUSE is not set.*torchtitan-lite launch"
    ):
        environment()


@pytest.mark.parametrize("token", ["", "short"])
def test_a_guessable_secret_is_an_error(monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    monkeypatch.setenv(LIGHTHOUSE, "http://10.0.0.1:29510")
    monkeypatch.setenv(TOKEN, token)
    with pytest.raises(ReplicaError, match=rf"has {len(token)} characters.*openssl rand") as caught:
        environment()
    assert not token or token not in str(caught.value)


def test_an_interface_or_the_route_gives_the_address() -> None:
    assert address_for("lo", "http://10.0.0.1:29510") == "127.0.0.1"
    assert address_for("127.0.0.1", "http://10.0.0.1:29510") == "127.0.0.1"
    assert address_for("", "http://127.0.0.1:29510") == "127.0.0.1"
    assert address_for("", "localhost:29510") in ("127.0.0.1", "::1")


@pytest.mark.parametrize(
    ("interface", "lighthouse", "message"),
    [
        ("eth77", "http://127.0.0.1:1", r"'eth77' is neither an address nor an interface .*lo"),
        ("", "http://nowhere.invalid:29510", "cannot be reached"),
    ],
)
def test_an_invalid_address_is_an_error(interface: str, lighthouse: str, message: str) -> None:
    with pytest.raises(ReplicaError, match=message):
        address_for(interface, lighthouse)


def test_a_name_that_means_loopback_here_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian names this machine 127.0.1.1 in /etc/hosts, which others cannot reach."""
    try:
        expected = network.address_toward("192.0.2.1", 80)
    except OSError:
        pytest.skip("this machine has no default route")
    real = socket.getaddrinfo

    def names_loopback(host: str, *arguments: Any, **options: Any) -> Any:
        return real("127.0.1.1" if host == "node0" else host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", names_loopback)
    assert address_for("", "http://node0:29510") == expected
    assert address_for("", "http://localhost:29510").startswith("127.")
    assert address_for("", "http://127.0.1.1:29510").startswith("127.")


def test_a_rank_that_is_not_the_leader_leaves_without_a_claim(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    closed: list[str] = []

    class Part:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def close(self) -> None:
            closed.append("replicas")

    monkeypatch.setenv(LIGHTHOUSE, "http://127.0.0.1:29510")
    monkeypatch.setenv(TOKEN, "0123456789abcdef")
    monkeypatch.setattr(joining, "broadcast_bytes", lambda text: b"127.0.0.1 29511")
    monkeypatch.setattr(joining, "Fence", lambda *_: pytest.fail("only the leader has one"))
    for name in ("HealingTransport", "QuorumManager", "FaultTolerantReplicas"):
        monkeypatch.setattr(joining, name, Part)
    mesh: Any = SimpleNamespace(is_leader=False, rank=1, world_size=2)
    state: Any = SimpleNamespace(cursor=0)
    with joining.join(FaultToleranceConfig(), state, mesh, **_unused()):
        assert not closed
    assert closed == ["replicas"] and "unauthenticated" not in caplog.text


def _unused() -> Any:
    """Arguments that only the leader, or nothing, reads."""
    names = "run_id fencing_tokens config_fingerprint newest_stored_step wait_until_modifiable"
    names += " stop_requested initial_stored_step phases"
    return dict.fromkeys(names.split())


def test_an_address_that_the_others_cannot_reach_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before this replica waits for anything."""
    monkeypatch.setenv(LIGHTHOUSE, "http://192.0.2.1:29510")
    monkeypatch.setenv(TOKEN, "0123456789abcdef")
    monkeypatch.setattr(joining, "address_for_others", lambda host, port: "192.0.2.7")
    monkeypatch.setattr(joining, "broadcast_bytes", lambda text: pytest.fail("it joins"))
    mesh: Any = SimpleNamespace(is_leader=False)
    state: Any = None
    config = FaultToleranceConfig(heal_interface="lo")
    with (
        pytest.raises(ReplicaError, match="'lo' is a loopback interface"),
        joining.join(config, state, mesh, **_unused()),
    ):
        pass


def test_all_ranks_meet_at_the_store_of_the_leader(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Met(Exception):
        pass

    def manager(*given: Any, store: tuple[str, int], **options: Any) -> Any:
        raise Met(*store)

    monkeypatch.setattr(joining, "environment", lambda: ("lighthouse:1", "token"))
    # Each rank has an address of its own.
    monkeypatch.setattr(joining, "address_for", lambda *given: f"10.0.0.{dist.get_rank()}")
    monkeypatch.setattr(joining, "_check_not_loopback", lambda *given: None)
    monkeypatch.setattr(joining, "listening_store", lambda address: SimpleNamespace(port=77))
    monkeypatch.setattr(joining, "Fence", lambda *given: None)
    monkeypatch.setattr(joining, "HealingTransport", lambda *given: None)
    monkeypatch.setattr(joining, "QuorumManager", manager)

    def meet() -> tuple[Any, ...]:
        unused: Any = None
        state: Any = SimpleNamespace(cursor=0, step=0)
        with (
            pytest.raises(Met) as met,
            joining.join(
                FaultToleranceConfig(lighthouse="torchft"),
                state,
                Mesh(detect_device("cpu"), ParallelDims(dp_shard=2)),
                run_id="run",
                fencing_tokens=unused,
                config_fingerprint="",
                newest_stored_step=unused,
                wait_until_modifiable=unused,
                stop_requested=unused,
                initial_stored_step=0,
                phases=unused,
            ),
        ):
            pass
        return met.value.args

    with caplog.at_level("WARNING", "torchtitan_lite"):
        assert run_on_threads(2, meet) == [("10.0.0.0", 77)] * 2
    assert caplog.text.count("torchft's lighthouse accepts unauthenticated clients") == 1
