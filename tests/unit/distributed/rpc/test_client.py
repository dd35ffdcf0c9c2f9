"""Sessions of a client that its server does not accept any more, or must not have."""

from types import SimpleNamespace
from typing import Any

import grpc

from torchtitan_lite.distributed.rpc.authentication import AuthenticationError
from torchtitan_lite.distributed.rpc.client import _Protocol


def _protocol() -> Any:
    protocol: Any = _Protocol("a:1", "service", "secret", "purpose")
    protocol.session = object()
    return protocol


def test_a_session_that_is_not_accepted_is_not_used_again() -> None:
    protocol = _protocol()
    error = SimpleNamespace(code=lambda: grpc.StatusCode.UNAUTHENTICATED)
    newer, protocol.session = protocol.session, object()
    assert protocol.can_retry(error, newer) and protocol.session is not None
    assert protocol.can_retry(error, protocol.session) and protocol.session is None
    assert not protocol.can_retry(error, None)


def test_a_session_with_a_wrong_proof_is_not_used_again() -> None:
    protocol = _protocol()
    protocol.rejected(AuthenticationError("a wrong proof"))
    assert protocol.session is None
