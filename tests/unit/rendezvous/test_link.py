"""An agent that is blocked does not report."""

import time

import pytest

from tests import launch
from torchtitan_lite.errors import RpcError
from torchtitan_lite.rendezvous import link as link_module
from torchtitan_lite.rendezvous.link import RendezvousLink
from torchtitan_lite.rendezvous.messages import PURPOSE, SERVICE
from torchtitan_lite.rendezvous.server import rendezvous_server
from torchtitan_lite.rpc.client import RpcClient

_SECRET = "a secret of the tests"


def _link(endpoint: str) -> RendezvousLink:
    return RendezvousLink(
        endpoint,
        _SECRET,
        address="127.0.0.1",
        name="a",
        run_id="run",
        num_machines=1,
        num_ranks=1,
        fingerprint="1-abc",
    )


def test_reports_end_while_the_main_loop_is_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "BLOCKED_S", 0.3)
    monkeypatch.setattr(link_module, "REPORT_S", 0.05)
    with rendezvous_server("127.0.0.1:0", _SECRET) as server:
        link = _link(server.address)
        link.start()
        launch.wait_until(lambda: (link.beat(), link.answer)[1], 10)
        time.sleep(0.6)
        lease_s = link.lease_until_s
        time.sleep(0.3)
        assert link.lease_until_s == lease_s
        link.beat()
        launch.wait_until(lambda: link.lease_until_s > lease_s, 5)
        link.leave()


def test_a_changed_report_is_sent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "REPORT_S", 60.0)
    with rendezvous_server("127.0.0.1:0", _SECRET) as server:
        link = _link(server.address)
        link.start()
        launch.wait_until(lambda: link.answer, 10)
        lease_s = link.lease_until_s
        link.update(is_stopping=True)
        assert launch.wait_until(lambda: link.lease_until_s > lease_s, 5) < 2
        link.leave()


def test_a_malformed_report_is_answered_with_the_reason() -> None:
    with (
        rendezvous_server("127.0.0.1:0", _SECRET) as server,
        RpcClient(server.address, SERVICE, _SECRET, PURPOSE) as client,
        pytest.raises(RpcError, match="The report is malformed") as caught,
    ):
        client.call("Report", {"machine": "a"}, 5)
    assert caught.value.is_final
