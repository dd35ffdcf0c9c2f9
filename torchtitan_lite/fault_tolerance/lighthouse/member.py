"""Statement of a replica about itself, sealed with the secret of the run.

The lighthouse counts a replica, and the others train with it, only if the seal is right. Therefore
no process without the secret can join a quorum, claim a step, or name an address from which others
would heal, even through a lighthouse that checks nothing.
"""

import hmac
import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from torchtitan_lite.distributed.rpc.authentication import (
    AuthenticationError,
    message_authentication_code,
)

SERVICE = "torchtitan_lite.Lighthouse"
"""Service of the lighthouse, see `servicer`."""
PURPOSE = "lighthouse"
"""Its purpose, see `rpc.protocol.Identity`."""
_MAX_STEP = 1 << 62


@dataclass(frozen=True, kw_only=True)
class Member:
    """A replica in a quorum."""

    run_id: str
    """Run that it belongs to."""
    replica_id: str
    """Its id at the lighthouse, "NAME:FINGERPRINT:UUID"; the UUID is that of its process."""
    address: str
    """HOST:PORT of its coordinator."""
    store_address: str
    """HOST:PORT of its TCPStore."""
    step: int
    """Progress of its state; 0 if it has no valid one."""
    world_size: int
    """Number of its ranks."""
    state_urls: tuple[str, ...]
    """URL at which each rank serves its state."""
    token: int = 0
    """Last fencing token under which it took part, see `checkpoint.history`; 0 if there is none."""
    shrink_only: bool = False
    commit_failures: int = 0

    def seal(self, secret: str) -> str:
        """Return the statement with its seal, as JSON."""
        content = json.dumps(asdict(self), sort_keys=True)
        return json.dumps({"member": content, "seal": _seal(content, secret)})

    @staticmethod
    def unseal(text: str, secret: str) -> "Member":
        """Return the statement in `text`. Raises AuthenticationError if the seal is wrong."""
        try:
            envelope = json.loads(text)
            content, seal = envelope["member"], envelope["seal"]
            if not hmac.compare_digest(seal.encode(), _seal(content, secret).encode()):
                raise AuthenticationError("The statement of a replica has a wrong seal.")
            return _parse(json.loads(content))
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise AuthenticationError(f"The statement of a replica is invalid: {error!r}") from None


def _seal(content: str, secret: str) -> str:
    key = message_authentication_code(secret.encode(), b"torchtitan_lite member")
    return message_authentication_code(key, content.encode()).hex()


def _parse(content: dict[str, Any]) -> Member:
    kinds = {field.name: field.type for field in fields(Member)}
    if content.keys() != kinds.keys():
        raise ValueError("fields differ")
    values = {**content, "state_urls": tuple(content["state_urls"])}
    kinds_of = {"str": str, "int": int, "bool": bool, "tuple[str, ...]": tuple}
    for name, value in values.items():
        kind = (
            kinds[name] if isinstance(kinds[name], type) else kinds_of.get(str(kinds[name]), tuple)
        )
        if type(value) is not kind:
            raise TypeError(f"{name} is {value!r:.50}")
    urls = values["state_urls"]
    if not (
        0 <= values["step"] < _MAX_STEP
        and 0 <= values["token"] < _MAX_STEP
        and len(urls) == values["world_size"]
        and all(type(url) is str for url in urls)
    ):
        raise ValueError("a value is out of range")
    return Member(**values)
