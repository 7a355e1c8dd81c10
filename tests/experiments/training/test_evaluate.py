from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from factorized.experiments.data.augment import normalize
from factorized.experiments.training import evaluate
from factorized.experiments.training.evaluate import Evaluator
from factorized.experiments.training.network import build_network
from tests.experiments.training.small import digits, recipe
from tests.models.unchanged import unchanged


@pytest.mark.parametrize("count", [1, 31, 32, 33, 64, 100])
def test_the_accuracy_is_that_of_a_plain_loop_whatever_the_number_of_images(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "BATCH", 32)
    images = digits(test=count)
    network = build_network(recipe(), images, seed=0)
    evaluator = Evaluator(network, images, torch.float32)
    network.eval()
    losses, correct = [], 0
    with torch.no_grad():
        for x, y in zip(images.x_test, images.y_test, strict=True):
            logits = network(normalize(x[None], images.mean, images.std))
            losses.append(F.cross_entropy(logits, y[None]).item())
            correct += int(logits.argmax() == y)
    for _ in range(2):  # the second time counts from zero again
        loss, accuracy = evaluator()
        assert accuracy == 100 * correct / count
        assert loss == pytest.approx(sum(losses) / count, rel=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_evaluating_leaves_the_network_as_it_was(training: bool) -> None:
    network = build_network(recipe(), digits(), seed=0).train(training)
    network.get_submodule("bn1").train(not training)  # frozen statistics, say
    evaluator = Evaluator(network, digits(), torch.float32)
    with unchanged(network):
        evaluator()


def test_the_network_is_put_back_even_if_evaluation_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    network = build_network(recipe(), digits(), seed=0).train()
    evaluator = Evaluator(network, digits(), torch.float32)
    network.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        evaluator()
    assert network.training
