"""``factorized evaluate``: measure the score of a finished run again."""

from __future__ import annotations

import typer

from factorized.experiments.cli.arguments import Data, Device, Run, TrustModel, examples
from factorized.experiments.cli.console import say
from factorized.experiments.cli.text import evaluate_run, is_text_run

EXAMPLES = examples(
    "factorized evaluate out/digits/resnet8/seed-0",
    "factorized evaluate out/cifar10/resnet32x2/seed-0 --data DIR",
    "factorized evaluate out/cifar10/resnet32x2/seed-0 --data other-images.npz",
)
ALLOWED = 0.5  # points between two devices or precisions, on the same images


def evaluate(run: Run, data: Data = None, device: Device = None, trust_model: TrustModel = False) -> None:
    """Measure the test accuracy of a finished run and compare it with the one that was recorded.

    On the images of the run, the exit code is 1 if the two differ by more than half a point.
    """
    from factorized.experiments.cli.device import pick_device
    from factorized.experiments.cli.images import load_data_of_run
    from factorized.experiments.training.evaluate import evaluate_as_trained
    from factorized.experiments.training.trained import load_trained

    where = pick_device(device)
    if is_text_run(run):
        evaluate_run(run, data, where)
        return
    recipe, result, network = load_trained(run, trust_model=trust_model)
    images = load_data_of_run(recipe, result, data)
    loss, accuracy = evaluate_as_trained(recipe, network.to(where), images)
    recorded = result["accuracy"]
    say(f"test accuracy {accuracy:.2f} %, loss {loss:.4f}, on {len(images.y_test):,} images of {images.name}")
    if images.checksum != result["data"]["checksum"]:
        say(f"recorded {recorded:.2f} % on other images ({result['data']['name']}): not comparable")
        return
    say(f"recorded {recorded:.2f} %: {accuracy - recorded:+.2f} points")
    if abs(accuracy - recorded) > ALLOWED:
        raise typer.Exit(1)
