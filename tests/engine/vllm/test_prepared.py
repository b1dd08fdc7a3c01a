"""Weights that are prepared beside those in use, of modules that vLLM's layerwise reload knows."""

import gc
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from tests.waiting import until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


def make_model() -> Any:
    """Returns two layers that load as vLLM's models do."""
    import torch

    class Layer(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(4, 3), requires_grad=False)
            self.register_buffer("table", torch.arange(5.0), persistent=False)

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Layer(), Layer()

        def load_weights(self, tensors: Iterable[tuple[str, Any]]) -> None:
            from vllm.model_executor.model_loader.weight_utils import default_weight_loader

            named = {**dict(self.named_parameters()), **dict(self.named_buffers())}
            for name, tensor in tensors:
                loader = getattr(named[name], "weight_loader", default_weight_loader)
                loader(named[name], tensor)

    return Model()


async def prepared(model: Any, tensors: dict[str, Any]) -> Any:
    from rollmesh.engine.vllm import PreparedWeights

    found = PreparedWeights(model, iter(tensors.items()), lambda _: None)
    await ended(found)
    return found


async def ended(weights: Any) -> None:
    await until(lambda: not weights.running)


async def test_an_exchange_changes_the_model_and_leaves_nothing_behind() -> None:
    import torch
    from vllm.model_executor.model_loader.reload import layerwise

    model = make_model()
    layerwise.record_metadata_for_reloading(model)
    known = len(layerwise.LAYERWISE_INFO)
    parameters = dict(model.named_parameters())
    for value in (1.0, 2.0, 3.0):
        new = {name: torch.full((4, 3), value) for name in parameters}
        weights = await prepared(model, new)
        assert weights.ready
        assert not any((one == value).any() for one in parameters.values())
        weights.exchange(torch.float32)
        assert all((one == value).all() for one in parameters.values())
        assert dict(model.named_parameters()) == parameters  # the same objects
        assert model.state_dict().keys() == parameters.keys()
        assert all((one == torch.arange(5.0)).all() for one in model.buffers())
        del weights
        gc.collect()
        assert len(layerwise.LAYERWISE_INFO) == known
    alive = [one for one in gc.get_objects() if isinstance(one, type(model))]
    assert alive == [model]


async def test_weights_that_cannot_be_prepared_leave_the_model_as_it_is() -> None:
    import torch
    from vllm.model_executor.model_loader.reload import layerwise

    model = make_model()
    layerwise.record_metadata_for_reloading(model)
    known = len(layerwise.LAYERWISE_INFO)
    both = {"first.weight": torch.ones(4, 3), "second.weight": torch.ones(4, 3)}
    for tensors in (
        {"third.weight": torch.ones(4, 3)},
        {"first.weight": torch.ones(5, 3)},
        {"first.weight": torch.ones(4, 3)},
        {**both, "first.table": torch.ones(5)},
    ):
        weights = await prepared(model, tensors)
        assert not weights.ready
        assert all((one == 0).all() for one in model.parameters())
        assert len(layerwise.LAYERWISE_INFO) == known


@pytest.mark.parametrize("is_early", [True, False], ids=["early", "late"])
async def test_dropped_weights_leave_nothing_behind(*, is_early: bool) -> None:
    """They were prepared for an update that was given up, or are still being prepared."""
    import torch
    from vllm.model_executor.model_loader.reload import layerwise

    from rollmesh.engine.vllm import PreparedWeights

    model = make_model()
    layerwise.record_metadata_for_reloading(model)
    gc.collect()  # of the tests before
    known = len(layerwise.LAYERWISE_INFO)
    opened = threading.Event()

    def slow() -> Iterator[tuple[str, Any]]:
        assert opened.wait(60)
        yield from {"first.weight": torch.ones(4, 3), "second.weight": torch.ones(4, 3)}.items()

    weights = PreparedWeights(model, slow(), lambda _: None)
    if is_early:
        weights.drop()
    opened.set()
    await ended(weights)
    weights.drop()
    assert all((one == 0).all() for one in model.parameters())
    del weights
    gc.collect()
    assert len(layerwise.LAYERWISE_INFO) == known
    assert [one for one in gc.get_objects() if isinstance(one, type(model))] == [model]
