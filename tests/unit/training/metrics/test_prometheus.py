import socket
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError

from torchtitan_lite.core.errors import UserError
from torchtitan_lite.distributed.rpc import http_server
from torchtitan_lite.training.metrics import Event, MetricsConfig, open_metrics
from torchtitan_lite.training.metrics.prometheus import Prometheus, port_of


@pytest.fixture
def port():
    """Return a free port that is followed by two more free ports."""
    while True:
        with socket.socket() as first:
            first.bind(("127.0.0.1", 0))
            result = first.getsockname()[1]
        try:
            for offset in (1, 2):
                with socket.socket() as other:
                    other.bind(("127.0.0.1", result + offset))
        except OSError:
            continue
        return result


def opened(folder, port, *, rank=0, world_size=1, replica=None, **settings):
    return open_metrics(
        MetricsConfig(prometheus_port=port, **settings),
        folder=folder,
        rank=rank,
        is_leader=rank == 0,
        total_steps=10,
        resume_step=0,
        run_config={},
        world_size=world_size,
        replica=replica,
    )


def scrape(port):
    """Return the values by name and by the label values, in the order of the labels' names."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        (sample.name, *(sample.labels[key] for key in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_newest_values_can_be_scraped(tmp_path, port, make_record):
    with opened(tmp_path, port) as metrics:
        before = scrape(port)
        metrics.step(make_record(1, loss=5.0, tokens_per_second=200.0, step_time_s=0.5))
        metrics.step(make_record(2, loss=4.5, tokens_per_second=200.0, step_time_s=0.5, time=7.0))
        metrics.step(make_record(3, loss=float("nan"), skipped=True, router_load={"a.b": 1.5}))
        metrics.event(Event(name="validation", step=3, values={"loss": 4.75}))
        metrics.event(Event(name="quorum", step=3, values={"replicas": 2}))
        metrics.event(Event(name="quorum", step=3, values={"replicas": 1}))
        actual = scrape(port)
    # No metric reports 0 before it is measured.
    assert ("torchtitan_lite_loss",) not in before
    assert before[("torchtitan_lite_steps_total",)] == 0
    assert before[("torchtitan_lite_info", "0", "")] == 1
    assert str(actual[("torchtitan_lite_loss",)]) == "nan"
    assert actual[("torchtitan_lite_steps_total",)] == 2
    assert actual[("torchtitan_lite_skipped_steps_total",)] == 1
    assert actual[("torchtitan_lite_tokens_total",)] == 200
    assert actual[("torchtitan_lite_learning_rate",)] == 8e-4
    assert actual[("torchtitan_lite_memory_bytes",)] == 0.61 * 2**30
    assert actual[("torchtitan_lite_router_load", "a.b")] == 1.5
    assert actual[("torchtitan_lite_validation_loss",)] == 4.75
    assert actual[("torchtitan_lite_events_total", "quorum")] == 2
    assert ("torchtitan_lite_mfu_ratio",) not in actual


def test_the_server_ends_with_the_metrics(tmp_path, port):
    opened(tmp_path, port).close()
    with pytest.raises(urllib.error.URLError):
        scrape(port)
    # The port is free again.
    opened(tmp_path, port).close()


def test_only_the_given_interface_is_open(tmp_path, port):
    with (
        opened(tmp_path, port, prometheus_host="127.0.0.2"),
        pytest.raises(urllib.error.URLError),
    ):
        scrape(port)


def test_each_rank_has_its_own_port(tmp_path, port, make_record):
    with (
        opened(tmp_path, port, world_size=2, save_for_all_ranks=True) as leader,
        opened(tmp_path, port, rank=1, world_size=2, save_for_all_ranks=True) as other,
    ):
        leader.step(make_record(1, memory_gib=1.0))
        other.step(make_record(1, memory_gib=2.0))
        name = ("torchtitan_lite_memory_bytes",)
        assert (scrape(port)[name], scrape(port + 1)[name]) == (2**30, 2**31)


def test_other_ranks_open_no_port_unless_enabled(tmp_path, port):
    with opened(tmp_path, port, rank=1, world_size=2), pytest.raises(urllib.error.URLError):
        scrape(port + 1)


@pytest.mark.parametrize("for_all", [False, True])
def test_no_two_ranks_share_a_port(for_all):
    config = MetricsConfig(prometheus_port=9000, save_for_all_ranks=for_all)
    ranks = range(3) if for_all else [0]
    ports = [
        port_of(config, rank=rank, world_size=3, replica=replica)
        for replica in range(4)
        for rank in ranks
    ]
    assert ports == list(range(9000, 9000 + len(ports)))


def test_a_port_in_use_is_one_clear_error_before_any_file(tmp_path, port):
    with opened(tmp_path / "first", port), pytest.raises(UserError) as raised:
        opened(tmp_path / "second", port)
    message = str(raised.value)
    assert "metrics.prometheus_port" in message and f"127.0.0.1:{port}" in message
    assert "\n" not in message
    assert not (tmp_path / "second").exists()


def test_a_port_in_use_names_the_offset_of_the_replica(tmp_path, port):
    with opened(tmp_path / "first", port + 1), pytest.raises(UserError, match=f"{port} \\+ 1 for"):
        opened(tmp_path / "second", port, replica=1)


def test_a_port_above_the_maximum_is_rejected():
    config = MetricsConfig(prometheus_port=65535)
    with pytest.raises(UserError, match="= 65536 is above 65535"):
        port_of(config, rank=0, world_size=1, replica=1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_package_is_one_clear_error_on_every_rank(tmp_path, monkeypatch, rank):
    monkeypatch.setattr("torchtitan_lite.core.optional_dependencies.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install prometheus_client.*\[prometheus\]"):
        opened(tmp_path, 9000, rank=rank)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("setting", [{"prometheus_port": 65536}, {"prometheus_host": ""}])
def test_invalid_addresses_are_rejected(setting):
    with pytest.raises(ValidationError):
        MetricsConfig(**setting)


def test_idle_connections_do_not_prevent_a_scrape(tmp_path, port):
    with opened(tmp_path, port) as metrics:
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
        assert ("torchtitan_lite_info", "0", "") in scrape(port)
        (prometheus,) = (one for one in metrics._every_step if isinstance(one, Prometheus))
        assert len(prometheus._server._strangers) <= http_server._LIMITS.per_address
        for one in idle:
            one.close()


def test_a_closed_server_has_no_thread(port):
    served = Prometheus(MetricsConfig(prometheus_port=port), rank=0, world_size=1, replica=None)
    join, joined = served._thread.join, []
    served._thread.join = lambda timeout=None: joined.append(join(timeout))
    served.close()
    assert joined and not served._thread.is_alive()
