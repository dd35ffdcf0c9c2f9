"""Prometheus: the newest values of a rank, scraped over HTTP.

The server listens on one interface, without a password and without encryption, and keeps few
connections for a short time. Its threads read values that are already on the host, so training
never waits for them.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from torchtitan_lite.config.tables.metrics import MetricsConfig
from torchtitan_lite.core.errors import UserError
from torchtitan_lite.core.optional_dependencies import require
from torchtitan_lite.distributed.rpc.http_server import BoundedHandler, BoundedHTTPServer
from torchtitan_lite.training.metrics.record import Event, StepRecord

if TYPE_CHECKING:
    from prometheus_client import Gauge

_PREFIX = "torchtitan_lite"
_HIGHEST_PORT = 65535
_GAUGES: dict[str, tuple[str, Callable[[StepRecord], float | None]]] = {
    "step": ("Newest step.", lambda record: record.step),
    "loss": ("Training loss of the newest step, in nats per token.", lambda record: record.loss),
    "grad_norm": ("Gradient norm before clipping.", lambda record: record.grad_norm),
    "learning_rate": ("Learning rate.", lambda record: record.lr),
    "tokens_per_second": ("Throughput of all replicas.", lambda record: record.tokens_per_second),
    "mfu_ratio": ("Model FLOPs utilization, 0 to 1.", lambda record: record.mfu),
    "memory_bytes": ("Peak memory of this rank.", lambda record: record.memory_gib * 2**30),
    "step_duration_seconds": ("Duration of the newest step.", lambda record: record.step_time_s),
    "data_wait_seconds": ("Wait for microbatches in it.", lambda record: record.data_time_s),
    "checkpoint_stall_seconds": (
        "Stall for a save in it.",
        lambda record: record.checkpoint_stall_s,
    ),
    "replicas": ("Replicas that took part in the newest step.", lambda record: record.num_replicas),
    "goodput_ratio": (
        "Goodput since the first start of the run, 0 to 1.",
        lambda record: record.goodput,
    ),
    "idle_experts": (
        "Experts without any token, over all routers.",
        lambda record: record.idle_experts,
    ),
    "last_step_timestamp_seconds": ("Unix time of the newest step.", lambda record: record.time),
}
"""HELP text and value of a record, by name. With None the gauge has no sample."""


class Prometheus:
    """Serves /metrics on `config.prometheus_host` and a port of this rank alone.

    Without `save_for_all_ranks` the leader of replica k listens on `prometheus_port` + k; with it,
    rank r listens on `prometheus_port` + k * `world_size` + r. Counters begin at 0 in each process.
    Raises UserError if the package is missing or the port cannot be opened.
    """

    def __init__(
        self, config: MetricsConfig, *, rank: int, world_size: int, replica: int | None
    ) -> None:
        require("prometheus_client", f"metrics.prometheus_port = {config.prometheus_port}")
        from prometheus_client import CollectorRegistry, Counter, MetricsHandler

        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        self._steps, self._skipped, self._tokens = (
            Counter(f"{_PREFIX}_{name}", text, registry=self._registry)
            for name, text in (
                ("steps", "Committed steps of this process."),
                ("skipped_steps", "Steps that were skipped for their loss or gradient."),
                ("tokens", "Tokens of the committed steps, summed over replicas."),
            )
        )
        self._events: Counter = Counter(
            f"{_PREFIX}_events", "Events, by name.", ["event"], registry=self._registry
        )
        info = self._gauge("info", "Which rank of which replica this is.", ("replica", "rank"))
        info.labels("" if replica is None else str(replica), str(rank)).set(1)
        port = port_of(config, rank=rank, world_size=world_size, replica=replica)
        handler = type("Handler", (BoundedHandler, MetricsHandler), {"registry": self._registry})
        try:
            self._server = BoundedHTTPServer((config.prometheus_host, port), handler)
        except OSError as error:
            raise UserError(
                f"metrics.prometheus_port: {config.prometheus_host}:{port} cannot be opened "
                f"({error.strerror or error}){_explained(config, port)}. Set another "
                "prometheus_port or prometheus_host, or prometheus_port = 0 to switch it off."
            ) from error

        self._thread = self._server.serve_in_thread("prometheus")

    def step(self, record: StepRecord) -> None:
        for name, (text, value_of) in _GAUGES.items():
            value = value_of(record)
            if value is not None:
                self._gauge(name, text).set(value)
        if record.router_load:
            text = "Tokens of the busiest expert, as a multiple of a fair share."
            gauge = self._gauge("router_load", text, ("router",))
            for router, load in record.router_load.items():
                gauge.labels(router).set(load)
        if record.skipped:
            self._skipped.inc()
        else:
            self._steps.inc()
            self._tokens.inc(round(record.tokens_per_second * record.step_time_s))

    def event(self, event: Event) -> None:
        self._events.labels(event.name).inc()
        loss = event.values.get("loss")
        if event.name == "validation" and isinstance(loss, int | float):
            self._gauge("validation_loss", "Newest validation loss, in nats per token.").set(loss)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _gauge(self, name: str, text: str, labels: tuple[str, ...] = ()) -> "Gauge":
        """Return a gauge, created at its first value, so that unknown values are not reported as
        0."""
        if name not in self._gauges:
            from prometheus_client import Gauge

            self._gauges[name] = Gauge(f"{_PREFIX}_{name}", text, labels, registry=self._registry)
        return self._gauges[name]


def port_of(config: MetricsConfig, *, rank: int, world_size: int, replica: int | None) -> int:
    """Return the port of one rank. Raises UserError if there is no such port."""
    number = replica or 0
    offset = number * world_size + rank if config.save_for_all_ranks else number
    port = config.prometheus_port + offset
    if port > _HIGHEST_PORT:
        raise UserError(
            f"metrics.prometheus_port = {config.prometheus_port} + {offset} (for replica "
            f"{number}, rank {rank}) = {port} is above {_HIGHEST_PORT}. Lower prometheus_port."
        )
    return port


def _explained(config: MetricsConfig, port: int) -> str:
    offset = port - config.prometheus_port
    if not offset:
        return ""
    return f", which is prometheus_port = {config.prometheus_port} + {offset} for this rank"
