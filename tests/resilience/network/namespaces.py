"""A network of namespaces on one machine, whose links can be broken.

Each host is a network namespace with one interface, `eth0`; a bridge in a namespace of its own
connects them. Nothing of it is visible to the machine's own network. Needs root, `ip` and `nft`;
a limited rate needs `tc`, latency the netem module of the kernel.

All namespaces are called tlite-PID-NUMBER-NAME and are removed at the end; those of a process that
was killed are removed by the next one.
"""

import itertools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import psutil

_PREFIX = "tlite"
_SWITCH = "switch"
_SUBNET, _SUBNET_V6 = "10.213.77.", "fd00:213:77::"
_numbers = itertools.count()
_ETC = Path("/etc/netns")
"""`ip netns exec NAME` binds the files in /etc/netns/NAME over those in /etc."""


class Unavailable(Exception):
    """The reason why this machine cannot have such a network."""


def unavailable_reason(tools: Sequence[str] = ("ip", "nft", "unshare")) -> str | None:
    """Return why this process cannot make such networks; None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} is not installed"
    _remove_leftovers()
    name = f"{_PREFIX}-{os.getpid()}-probe"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "add", "bridge", "type", "bridge")
        _nft(name, "add table inet faults\n")
    except Unavailable as error:
        return f"network namespaces cannot be made: {error}"
    finally:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
    return None


class Network:
    """Hosts, by names of at most 12 characters, and the faults of their links. A context
    manager."""

    def __init__(self, hosts: Sequence[str], *, is_v6: bool = False) -> None:
        """`is_v6`: hosts have addresses of IPv6 only, also of themselves."""
        self._prefix = f"{_PREFIX}-{os.getpid()}-{next(_numbers)}"
        self._is_v6, subnet = is_v6, _SUBNET_V6 if is_v6 else _SUBNET
        self._addresses = {name: f"{subnet}{place}" for place, name in enumerate(hosts, 10)}
        self._dropped: dict[str, list[str]] = {name: [] for name in hosts}
        """Rules of nft for what a host receives."""

    def __enter__(self) -> "Network":
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _build(self) -> None:
        switch = self._namespace(_SWITCH)
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge",
             "stp_state", "0", "forward_delay", "0")  # fmt: skip
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for name, address in self._addresses.items():
            own = self._namespace(name)
            _run("ip", "netns", "add", own)
            _run("ip", "-n", switch, "link", "add", f"to-{name}", "type", "veth",
                 "peer", "name", "eth0", "netns", own)  # fmt: skip
            _run("ip", "-n", switch, "link", "set", f"to-{name}", "master", "bridge", "up")
            for device in ("lo", "eth0"):
                _run("ip", "-n", own, "link", "set", device, "up")
            if self._is_v6:
                # Usable at once, without a search for duplicates.
                _run("ip", "-n", own, "address", "add", f"{address}/64", "dev", "eth0", "nodad")
                _run("ip", "-4", "-n", own, "address", "flush", "dev", "lo")
            else:
                _run("ip", "-n", own, "address", "add", f"{address}/24", "dev", "eth0")
            chain = "{ type filter hook input priority 0; }"
            _nft(own, f"add table inet faults\nadd chain inet faults received {chain}\n")
            self.set_hosts(name, f"{self.loopback} localhost\n{address} {name}\n")

    def close(self) -> None:
        """Remove all namespaces. Their processes must have ended."""
        for name in (*self._addresses, _SWITCH):
            _remove(self._namespace(name))

    def address(self, name: str) -> str:
        return self._addresses[name]

    def endpoint(self, name: str, port: int) -> str:
        """Return HOST:PORT of a host."""
        address = self.address(name)
        return f"[{address}]:{port}" if self._is_v6 else f"{address}:{port}"

    @property
    def loopback(self) -> str:
        """The address of a host for itself alone."""
        return "::1" if self._is_v6 else "127.0.0.1"

    def command(self, name: str, hostname: str | None = None) -> list[str]:
        """Return the start of a command line that runs the rest on a host. The process that it
        starts becomes the command."""
        script = 'hostname "$0" && exec "$@"'
        return ["ip", "netns", "exec", self._namespace(name),
                "unshare", "--uts", "sh", "-c", script, hostname or name]  # fmt: skip

    def processes(self, name: str) -> list[int]:
        """Return the processes of a host, whoever started them."""
        return [int(pid) for pid in _run("ip", "netns", "pids", self._namespace(name)).split()]

    def set_hosts(self, name: str, text: str) -> None:
        """Set /etc/hosts of a host, for processes that are started later."""
        folder = _ETC / self._namespace(name)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts").write_text(text)

    def unplug(self, name: str) -> None:
        """Break the link of a host to all others, without notice to its processes."""
        _run("ip", "-n", self._namespace(_SWITCH), "link", "set", f"to-{name}", "down")

    def plug(self, name: str) -> None:
        """Mend the link of a host to all others."""
        _run("ip", "-n", self._namespace(_SWITCH), "link", "set", f"to-{name}", "up")

    def block(self, source: str, target: str) -> None:
        """Drop all that a host sends to another one; the other direction works."""
        self._filter(target, f"ip saddr {self.address(source)} drop")

    def cut(self, one: str, other: str) -> None:
        """Drop all between two hosts."""
        self.block(one, other)
        self.block(other, one)

    def reset(self, name: str, other: str) -> None:
        """End all connections between two hosts, also new ones, as a firewall before the first one
        does: the other one receives resets, and the first one nothing."""
        source = f"ip saddr {self.address(other)} ip protocol tcp"
        self._filter(name, f"{source} reject with tcp reset")

    def lose(self, name: str, percent: int) -> None:
        """Drop a part of the packets that a host receives, at random."""
        self._filter(name, f'iifname "eth0" numgen random mod 100 < {percent} drop')

    def mend(self) -> None:
        """Remove all filters."""
        for name, rules in self._dropped.items():
            if rules:
                rules.clear()
                self._apply(name)

    def limit(self, name: str, kbit_per_s: int) -> None:
        """Limit the rate at which a host sends and receives. Raises Unavailable."""
        shape = ["tbf", "rate", f"{kbit_per_s}kbit", "burst", "16kb", "latency", "400ms"]
        for namespace, device in (
            (self._namespace(name), "eth0"),
            (self._namespace(_SWITCH), f"to-{name}"),
        ):
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *shape)

    def unlimit(self, name: str) -> None:
        """Remove the limit of a host's rate."""
        for namespace, device in ((name, "eth0"), (_SWITCH, f"to-{name}")):
            _run("tc", "-n", self._namespace(namespace), "qdisc", "delete", "dev", device, "root")

    def delay(self, name: str, ms: int) -> None:
        """Delay all that a host sends. Raises Unavailable."""
        own = self._namespace(name)
        _run("tc", "-n", own, "qdisc", "replace", "dev", "eth0", "root", "netem",
             "delay", f"{ms}ms")  # fmt: skip

    def sent_bytes(self, name: str) -> int:
        """Return how many bytes a host has sent."""
        shown = _run("ip", "-n", self._namespace(name), "-s", "-j", "link", "show", "dev", "eth0")
        return json.loads(shown)[0]["stats64"]["tx"]["bytes"]

    def _namespace(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def _filter(self, name: str, rule: str) -> None:
        self._dropped[name].append(rule)
        self._apply(name)

    def _apply(self, name: str) -> None:
        rules = "".join(f"add rule inet faults received {one}\n" for one in self._dropped[name])
        _nft(self._namespace(name), f"flush chain inet faults received\n{rules}")


def _remove(namespace: str) -> None:
    subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)
    shutil.rmtree(_ETC / namespace, ignore_errors=True)
    with suppress(OSError):
        _ETC.rmdir()


def _remove_leftovers() -> None:
    """Remove the namespaces of processes that no longer exist."""
    for line in _run("ip", "netns", "list").splitlines():
        found = re.match(rf"{_PREFIX}-(\d+)-[\w-]+", line)
        if found and not psutil.pid_exists(int(found[1])):
            _remove(found[0])


def _nft(namespace: str, commands: str) -> None:
    _run("ip", "netns", "exec", namespace, "nft", "-f", "-", given=commands)


def _run(*command: str, given: str = "") -> str:
    """Return the output of a command. Raises Unavailable if it fails."""
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"`{' '.join(command)}`: {done.stderr.strip()}")
    return done.stdout
