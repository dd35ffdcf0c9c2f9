"""The weight transfer engine for vLLM, without vLLM: its modules are replaced by the few names that
the engine uses. tests/peers/test_vllm.py runs it with vLLM."""

import importlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest
import torch

from torchtitan_lite.core.errors import PublishError
from torchtitan_lite.serving import vllm_plugin
from torchtitan_lite.serving.publish import Update

A = TypeVar("A")
B = TypeVar("B")


class WeightTransferEngine(Generic[A, B]):
    """As in vLLM 0.32: a worker calls `update_weights` with a dict."""

    init_info_cls: type
    update_info_cls: type

    def __init__(self, model: Any) -> None:
        self.model, self.model_config = model, None

    def parse_update_info(self, given: dict[str, Any]) -> Any:
        return self.update_info_cls(**given)


class Factory:
    """Registry of backends."""

    _registry: dict[str, Any] = {}

    @classmethod
    def register_engine(cls, name: str, module: str, class_name: str) -> None:
        if name in cls._registry:
            raise ValueError(f"{name} is registered already")
        cls._registry[name] = (module, class_name)


@dataclass
class Model:
    """Records what is loaded, between the calls that prepare and finish a reload."""

    events: list[Any]
    error: Exception | None = None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.events.append({name: float(tensor) for name, tensor in weights})
        if self.error is not None:
            raise self.error


class Subscription:
    """Receives one version after the other."""

    def __init__(self, subscriber: Any, targets: dict[str, torch.Tensor]) -> None:
        self.subscriber, self._targets = subscriber, targets
        self.version: int | None = None
        self.published: list[int] = []

    def update(self, *, timeout_s: float, agree: Any) -> Update | None:
        assert timeout_s == 2.0 and agree(5) == 5
        if not self.published:
            return None
        self.version = self.published.pop(0)
        self._targets["w"].fill_(self.version)
        return Update(
            version=self.version,
            num_bytes=4,
            num_bytes_unchanged=0,
            num_bytes_received=4,
            seconds=0.1,
        )


class Subscriber:
    """A connection to a run."""

    opened: list["Subscriber"] = []

    def __init__(self, source: str, *, secret: str, timeout_s: float) -> None:
        self.source, self.secret, self.is_open = source, secret, True
        self.opened.append(self)

    def subscribe(self, targets: Any) -> Subscription:
        if self.source == "another model":
            raise PublishError("another model")
        return Subscription(self, targets)

    def close(self) -> None:
        self.is_open = False


@pytest.fixture
def events() -> list[Any]:
    return []


@pytest.fixture
def engine(events: list[Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    modules = {
        "vllm": {},
        "vllm.distributed": {},
        "vllm.distributed.parallel_state": {
            "get_world_group": lambda: SimpleNamespace(world_size=1)
        },
        "vllm.distributed.weight_transfer": {
            "WeightTransferEngine": WeightTransferEngine,
            "WeightTransferEngineFactory": Factory,
        },
        "vllm.distributed.weight_transfer.base": {
            "WeightTransferInitInfo": object,
            "WeightTransferUpdateInfo": object,
        },
        "vllm.model_executor": {},
        "vllm.model_executor.model_loader": {},
        "vllm.model_executor.model_loader.reload": {
            "initialize_layerwise_reload": lambda model: events.append("begin"),
            "finalize_layerwise_reload": lambda model, config: events.append("end"),
        },
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(Factory, "_registry", {})
    monkeypatch.setattr(Subscriber, "opened", [])
    name = "torchtitan_lite.serving.publish.vllm_engine"
    monkeypatch.delitem(sys.modules, name, raising=False)
    found = importlib.import_module(name)
    monkeypatch.setattr(found, "Subscriber", Subscriber)
    monkeypatch.setattr(found, "empty_state_dict", lambda subscriber: {"w": torch.zeros(())})
    monkeypatch.setattr(found, "hugging_face_targets", lambda subscriber, weights: weights)
    yield found
    sys.modules.pop(name, None)


def connected(engine: Any, events: list[Any]) -> tuple[Any, Subscription, Model]:
    model = Model(events)
    worker = engine.PublishedWeightsEngine(model)
    worker.init_transfer_engine(engine.InitInfo("a run"))
    return worker, worker._subscription, model


UPDATE = {"timeout_s": 2.0}


def test_the_plugin_registers_the_engine_once_and_lazily(engine: Any) -> None:
    for _ in range(2):
        vllm_plugin.register()
    ((name, (module, class_name)),) = Factory._registry.items()
    assert name == "torchtitan_lite"
    assert getattr(importlib.import_module(module), class_name) is engine.PublishedWeightsEngine


def test_newer_versions_are_loaded_and_others_are_not(engine: Any, events: list[Any]) -> None:
    worker, subscription, _ = connected(engine, events)
    worker.update_weights(UPDATE)
    assert events == [] and worker.version is None
    subscription.published = [7]
    worker.update_weights(UPDATE)
    assert events == ["begin", {"w": 7.0}, "end"] and worker.version == 7
    worker.update_weights(UPDATE)
    assert len(events) == 3
    subscription.published = [9]
    worker.update_weights(UPDATE)
    assert events[3:] == ["begin", {"w": 9.0}, "end"] and worker.version == 9


def test_after_an_error_of_the_loader_everything_is_loaded_again(
    engine: Any, events: list[Any]
) -> None:
    worker, subscription, model = connected(engine, events)
    subscription.published, model.error = [7], ValueError("no such weight")
    with pytest.raises(ValueError, match="no such weight"):
        worker.update_weights(UPDATE)
    assert events == ["begin", {"w": 7.0}, "end"] and worker.version is None
    model.error = None
    worker.update_weights(UPDATE)
    assert events[3:] == ["begin", {"w": 7.0}, "end"] and worker.version == 7


def test_an_update_needs_a_connection(engine: Any, events: list[Any]) -> None:
    worker = engine.PublishedWeightsEngine(Model(events))
    with pytest.raises(PublishError, match="Call init_weight_transfer_engine"):
        worker.update_weights(UPDATE)


def test_connections_are_closed(
    engine: Any, events: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHTITAN_LITE_TOKEN", "a secret")
    worker, subscription, _ = connected(engine, events)
    subscription.published = [7]
    worker.update_weights(UPDATE)
    # Another run replaces the first one, and begins without a version.
    worker.init_transfer_engine(engine.InitInfo("another run"))
    assert [one.is_open for one in Subscriber.opened] == [False, True]
    assert worker.version is None and Subscriber.opened[1].secret == "a secret"
    with pytest.raises(PublishError, match="another model"):
        worker.init_transfer_engine(engine.InitInfo("another model"))
    worker.shutdown()
    worker.shutdown()
    assert not any(one.is_open for one in Subscriber.opened)
