"""``docs/text_results.md`` is what its script makes of ``results/``."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks import text_results
from benchmarks.drawing import Panel, checksum, draw, drawn_from
from benchmarks.markdown import fill
from benchmarks.text_figures import FIGURES, FOLDER, panels_of
from benchmarks.text_runs import RESULTS
from factorized.experiments.recipes.find import load_any_recipe
from factorized.experiments.recipes.shorten import shorten
from factorized.experiments.reproduce.add import add_result
from factorized.experiments.reproduce.data import data_checksum
from factorized.experiments.reproduce.runs import read_run
from factorized.experiments.training.record import write_json

MACHINE = {"device": "NVIDIA H200", "torch": "2.11.0", "transformers": "5.0", "commit": "abc"}
SCORES: dict[str, dict[str, Any]] = {
    "translation": {"bleu": 30.0, "bleu_iwslt14-test": 9.0, "bleu_signature": "nrefs:1", "loss": 2.0},
    "masked": {"loss": 3.0, "loss_wikitext2-valid": 3.5},
    "language": {
        "loss": 4.0,
        "perplexity": 80.0,
        "perplexity_wikitext2-valid": 82.0,
        "perplexity_wikitext2-test": 81.0,
    },
    "questions": {"loss": 2.0, "f1": 60.0, "exact_match": 50.0},
}


def result(name: str, *changes: str, seed: int = 0, **others: Any) -> dict[str, Any]:
    """Return the result of a run, as training writes it."""
    recipe: Any = load_any_recipe(name, changes)
    checksum = "0" if recipe.data.train else data_checksum(recipe, None)
    scores = {**SCORES[recipe.task], **others.pop("scores", {})}
    return {
        "task": recipe.task,
        "recipe": recipe.of_seed(seed).to_dict(),
        "seed": seed,
        "from_run": None,
        "score": "loss",
        "scores": scores,
        "parameters": 1_000_000,
        "seconds": 60.0,
        "tokens": 5000,
        "tokens_per_second": 1000.0,
        "peak_memory": 2**30,
        "machine": MACHINE,
        "data": {"name": recipe.data.name, "checksum": checksum},
        "history": [{"update": 100, "loss": 5.0}, {"update": 100, "perplexity": 90.0}],
        "files": {"model.safetensors": "0"},
        **others,
    }


def taken(results: Path, name: str, *changes: str, note: str | None = None, **others: Any) -> Path:
    """Add a run to ``results`` and return its file."""
    path = results.parent / "result.json"
    write_json(path, result(name, *changes, **others))
    return add_result(path, results, None, [read_run(path)], changed=True, note=note)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return tmp_path / "results"


def test_the_page_is_what_the_script_makes_of_the_results() -> None:
    page = text_results.PAGE.read_text()
    assert fill(page, text_results.TABLES) == page
    assert re.findall("<!-- table:(.*?) -->", page) == list(text_results.TABLES)


def test_the_figures_are_drawn_from_the_results() -> None:
    shown = {name: panels_of(name, RESULTS) for name in FIGURES}
    expected = {name: checksum(panels) if panels else None for name, panels in shown.items()}
    assert {name: drawn_from(FOLDER / f"{name}.svg") for name in FIGURES} == expected


def test_a_run_is_added_under_its_recipe_and_its_changes(results: Path) -> None:
    plain = taken(results, "bert/small-flambe", seed=2)
    changes = ("decay.strength=3e-5", "schedule.updates=1500", "run.evaluate_every=500")
    changed = taken(results, "bert/small-flambe", *changes)
    assert plain == results / "bert/small-flambe/seed-2.json"
    assert changed == results / "bert/small-flambe+decay.strength=3e-05+schedule.updates=1500/seed-0.json"


def test_a_fine_tuned_run_says_what_it_went_on_from_and_no_path(results: Path) -> None:
    before = result("bert/small-flambe", "decay.strength=0.03", seed=1)
    path = taken(results, "squad/bert-small", "model.from_run=/tmp/some/where/seed-1", from_run=before)
    assert path.parent.name == "bert-small+model.from_run=bert~small-flambe~decay.strength=0.03~seed-1"
    found = read_run(path).result
    assert found["from_run"] == {"recipe": "bert/small-flambe", "changes": ["decay.strength=0.03"], "seed": 1}
    assert found["recipe"]["model"]["from_run"] == "bert/small-flambe+decay.strength=0.03/seed-1"
    assert "/tmp" not in path.read_text()


def test_a_run_that_went_on_from_a_changed_one_is_changed_whatever_the_folder_was_called(results: Path) -> None:
    planned = taken(results, "squad/bert-small", from_run=result("bert/small"))
    changed = taken(results, "squad/bert-small", from_run=result("bert/small", "decay.strength=0.03"))
    assert planned == results / "squad/bert-small/seed-0.json"
    assert changed.parent.name == "bert-small+model.from_run=bert~small~decay.strength=0.03~seed-0"


def test_a_shortened_run_may_go_on_from_a_shortened_one_and_a_whole_one_may_not(results: Path) -> None:
    def shortened(name: str) -> dict[str, Any]:
        recipe: Any = shorten(load_any_recipe(name), 200)
        return {**result(name), "recipe": recipe.of_seed(0).to_dict()}

    before = shortened("bert/small")
    short = taken(results, "squad/bert-small", **{**shortened("squad/bert-small"), "from_run": before})
    whole = taken(results, "squad/bert-small", from_run=before)
    assert short.parent.parent == results / "squad/bert-small"
    assert whole.parent.name == "bert-small+model.from_run=bert~small~shortened_from=5000~schedule.updates=200~seed-0"


def test_every_result_names_its_commit() -> None:
    machines = {path: json.loads(path.read_text())["machine"] for path in RESULTS.rglob("*.json")}
    assert len(machines) > 60
    assert [path for path, machine in machines.items() if not machine.get("commit")] == []


def test_rows_differ_by_settings_and_average_over_seeds(results: Path) -> None:
    for seed, bleu in ((0, 30.0), (1, 32.0)):
        taken(results, "translation/tatoeba", seed=seed, scores={"bleu": bleu})
    taken(results, "translation/tatoeba", "schedule.updates=500", note="four runs shared the GPU")
    taken(results, "translation/tatoeba-fd-ov", "decay.strength=3e-5")
    text = text_results.translation(results)
    updates = result("translation/tatoeba")["recipe"]["schedule"]["updates"]
    row = f"| 1,000,000 | 31.00 ± 1.41 | 9.00 ± 0.00 | 2.000 ± 0.000 | 2 | {updates:,} | 60 ± 0 | 1.00 |"
    assert f"| `translation/tatoeba` | – {row}" in text
    assert "| `translation/tatoeba` `schedule.updates=500` | – " in text
    assert "| 1 | 500 | – | 1.00 |" in text  # its seconds are not those of a run alone
    assert "| `translation/tatoeba-fd-ov` | 3e-05 |" in text
    assert "NVIDIA H200, torch 2.11.0, transformers 5.0; BLEU by sacrebleu, `nrefs:1`." in text
    assert "Missing: `translation/tatoeba-fd-ov` at 1 more strength, `translation/tatoeba-0.5`, " in text


def test_the_best_strength_of_each_optimizer_is_marked_and_fine_tuned(results: Path) -> None:
    for strength, loss in ((0.01, 3.0), (0.03, 2.5), (0.1, 2.8)):
        taken(results, "bert/small", f"decay.strength={strength}", scores={"loss": loss})
        taken(results, "bert/small-flambe", f"decay.strength={strength}", scores={"loss": loss - 0.1})
    losses = text_results.bert_loss(results)
    assert "| `bert/small-flambe` | 1,000,000 | 2.900 | **2.400** | 2.700 | 1, 1, 1 |" in losses
    for name, f1 in (("bert/small", 60.0), ("bert/small-flambe", 58.0)):
        before = result(name, "decay.strength=0.03")
        taken(results, "squad/bert-small", "model.from_run=out/x", from_run=before, scores={"f1": f1})
    squad = text_results.bert_squad(results)
    assert "| `bert/small-flambe` | **0.03** | 2.400 | 3.500 | 58.00 | 50.00 | 1 | 88.88 | 81.54 |" in squad
    assert "Fine-tuned as the recipe has it, by F1, the paper: FLAMBé (SI & FD), 1.0 > LAMB, 1.0. Here: " in squad
    assert "Here: LAMB, 1.0 > FLAMBé (SI & FD), 1.0. 0 of 1 pairs are in the paper's order." in squad
    assert "Missing: `bert/small-lamb-fd`, `bert/small-0.5`, `bert/small-0.5-flambe`." in squad


def test_decoders_are_in_one_table_and_strengths_in_another(results: Path) -> None:
    for strength, perplexity in ((0.01, 90.0), (0.1, 85.0)):
        scores = {"perplexity": perplexity}
        taken(results, "language/tiny-lowrank-0.5-si-fd", f"decay.strength={strength}", scores=scores)
    taken(results, "language/small-lowrank-0.5-si-fd")
    taken(results, "language/small-lowrank-0.5-si")
    taken(results, "language/small-narrow-0.5")
    taken(results, "language/small")
    rows = [line.split(" | ") for line in text_results.language(results).splitlines() if line.startswith("| `")]
    assert [row[0] for row in rows] == [
        f"| `language/small{way}`" for way in ("", "-narrow-0.5", "-lowrank-0.5-si", "-lowrank-0.5-si-fd")
    ]
    assert rows[0][1:] == [
        "0.1",
        "1,000,000",
        "4.000",
        "80.00",
        "82.00",
        "81.00",
        "1",
        "5,000 |",
    ]
    sweep = text_results.sweep(results)
    assert "| strength | `language/tiny-lowrank-0.5-si-fd` | `language/small-lowrank-0.5-si-fd` |" in sweep
    assert "| 0.01 | 90.00 |  |\n| 0.1 | **85.00** | 80.00 |" in sweep
    assert "Without Frobenius decay: `language/small-lowrank-0.5-si` 80.00 (weight decay 0.1)." in sweep


def test_without_results_everything_is_missing_and_nothing_is_shown(results: Path) -> None:
    for name, expected in (
        ("translation", "`translation/tatoeba`"),
        ("sweep", "`language/tiny-lowrank-0.5-si-fd` at 3"),
    ):
        text = partial(text_results.TABLES[name], results)()
        assert text.startswith(f"Missing: {expected}")
        assert "|" not in text
    assert all(not panels_of(name, results) for name in FIGURES)


def test_figures_show_decay_compression_and_curves(results: Path) -> None:
    taken(results, "translation/tatoeba", scores={"bleu": 33.0})
    taken(results, "translation/tatoeba-fd-ov", "decay.strength=1e-4", scores={"bleu": 34.0})
    taken(results, "translation/tatoeba-0.5-si", scores={"bleu": 31.0})
    taken(results, "translation/tatoeba-0.25-si", scores={"bleu": 29.0})
    decay, compression = panels_of("translation", results)
    assert (decay.lines, decay.levels) == ({"FD-OV": [(1e-4, 34.0)]}, {"no decay": 33.0})
    assert compression.lines == {"with SI": [(0.25, 29.0), (0.5, 31.0), (1.0, 33.0)]}
    for ratio, bleu in ((0.5, 25.0), (0.25, 19.0)):  # of another kind than the others
        taken(results, f"translation/tatoeba-{ratio}", "factorize.init=default", scores={"bleu": bleu})
    _, compression = panels_of("translation", results)
    assert list(compression.lines) == ["with SI", "factors drawn by torch"]
    assert compression.lines["factors drawn by torch"] == [(0.25, 19.0), (0.5, 25.0), (1.0, 33.0)]
    assert "at 1 more strength, `translation/tatoeba-0.5`, `translation/tatoeba-0.25`." in text_results.translation(
        results
    )
    taken(results, "language/small-narrow-0.5")
    (curves,) = panels_of("language", results)
    assert curves.lines == {"language/small-narrow-0.5": [(100, 90.0)]}


def test_a_figure_is_small_and_drawn_again_only_for_other_data(tmp_path: Path) -> None:
    path = tmp_path / "figures" / "x.svg"
    panel = Panel("strength", "BLEU", {"FD-OV": [(1e-5, 30.0), (1e-4, 31.0)]}, {"no decay": 29.0}, "x")
    draw([panel], path)
    assert drawn_from(path) == checksum([panel])
    assert path.stat().st_size < 60_000
    before = path.read_text()
    draw([panel], path)
    assert path.read_text() == before
    other = Panel("strength", "BLEU", {"WD": [(1e-5, 28.0)]})
    draw([other], path)
    assert drawn_from(path) == checksum([other])


def test_speeds_are_shown_beside_that_of_the_dense_network(tmp_path: Path) -> None:
    machine = {"device": "NVIDIA H200", "torch": "2.11.0", "transformers": "5.17.0", "commit": "0123456789"}
    rows = [
        {"recipe": "language/small", "parameters": 1000, "tokens_per_second": 2000.0, "peak_memory": 2**30},
        {"recipe": "language/small-narrow-0.5", "parameters": 500, "tokens_per_second": 3000.0, "peak_memory": 2**29},
    ]
    (tmp_path / "speeds.json").write_text(json.dumps({"machine": machine, "updates": 7, "rows": rows}))
    told = text_results.language_speed(tmp_path / "speeds.json")
    assert "| `language/small-narrow-0.5` | 500 | 3,000 | 1.50 | 0.50 |" in told
    assert "commit 0123456, 7 updates each, n = 1." in told
