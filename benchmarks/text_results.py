"""Write the tables and figures of ``docs/text_results.md`` from the files under ``results/``.

    python -m benchmarks.text_results

A table is between ``<!-- table:NAME -->`` and ``<!-- end -->``; the text around it is written by hand and kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from statistics import mean

from benchmarks.markdown import figure, fill, table
from benchmarks.tables import ROOT
from benchmarks.text_figures import draw_all, image, sweeps
from benchmarks.text_runs import (
    BERT,
    DECODER,
    FROM_RUN,
    RESULTS,
    TATOEBA,
    TINY,
    block,
    by_series,
    lowest,
    machines,
    memory,
    missing,
    read_rows,
    rows_of,
    speed,
    strength,
)
from factorized.experiments.recipes.find import paper_cells
from factorized.experiments.reproduce.changes import folder_of

PAGE = ROOT / "docs" / "text_results.md"
SPEEDS = ROOT / "benchmarks" / "results" / "language-h200.json"
PAPER = (4, "BERT base")  # table and part of it that BERT-small stands beside
PAPER_ROWS = {
    "": "LAMB, 1.0",
    "-lamb-fd": "LAMB (SI & FD), 1.0",
    "-flambe": "FLAMBé (SI & FD), 1.0",
    "-0.5": "LAMB, 0.5",
    "-0.5-flambe": "FLAMBé (SI & FD), 0.5",
}
HELD_OUT = {
    "Wikipedia": "perplexity",
    "wikitext-2 validation": "perplexity_wikitext2-valid",
    "wikitext-2 test": "perplexity_wikitext2-test",
}
WAYS = ("", "-si", "-fd", "-si-fd")
LOW_RANK = [f"-lowrank-{ratio}{way}" for ratio in ("0.5", "0.25") for way in WAYS]
# recipes that a table is to show, and at how many strengths of their decay
EXPECTED: dict[str, dict[str, int]] = {
    "translation": {
        TATOEBA: 1,
        f"{TATOEBA}-fd-ov": 2,
        **{f"{TATOEBA}{way}": 1 for way in ("-0.5", "-0.5-si", "-0.25", "-0.25-si")},
    },
    "masked": {f"{BERT}{way}": 3 for way in PAPER_ROWS},
    "language": {f"{DECODER}{way}": 1 for way in ("", "-narrow-0.5", "-narrow-0.25", *LOW_RANK)},
    "sweep": {f"{TINY}-lowrank-0.5-si-fd": 3, f"{TINY}-lowrank-0.25-si-fd": 3},
}


def translation(results: Path = RESULTS) -> str:
    """Return the table of the translators."""
    rows = rows_of("translation", TATOEBA, results)
    columns = ["recipe", "strength", "parameters", "BLEU, tatoeba test", "BLEU, IWSLT-14 test", "validation loss"]
    columns += ["n", "updates", "seconds", "peak memory (GiB)"]
    body = [
        [
            row.name,
            strength(row),
            f"{row.parameters:,}",
            figure(row.scores("bleu")),
            figure(row.scores("bleu_iwslt14-test")),
            figure(row.scores("loss"), 3),
            str(len(row.runs)),
            f"{row.updates:,}",
            figure(row.measured("seconds"), 0),
            memory(row),
        ]
        for row in rows
    ]
    signatures = sorted({run["scores"]["bleu_signature"] for row in rows for run in row.runs})
    note = f"{machines(rows)}; BLEU by sacrebleu, {', '.join(f'`{signature}`' for signature in signatures)}."
    lacking = missing(EXPECTED["translation"], rows)
    return block(
        table(columns, body),
        rows,
        note if rows else "",
        lacking,
        image("translation", "BLEU by decay and by compression", results),
    )


def bert_loss(results: Path = RESULTS) -> str:
    """Return the table of the validation loss by optimizer and strength of the decay."""
    rows = rows_of("masked", BERT, results)
    strengths = sorted({row.strength for row in rows if row.strength is not None})
    columns = ["recipe", "parameters", *(f"strength {value:g}" for value in strengths), "n", "updates"]
    columns += ["tokens per second", "peak memory (GiB)"]
    body = []
    for some in by_series(rows).values():
        best = lowest(some, "loss")
        found = {row.strength: _marked(figure(row.scores("loss"), 3), row is best and len(some) > 1) for row in some}
        cells = [found.get(value, "") for value in strengths]
        seeds = ", ".join(str(len(row.runs)) for row in some)
        first = some[0]
        body.append(
            [first.name, f"{first.parameters:,}", *cells, seeds, f"{first.updates:,}", speed(some), memory(best)]
        )
    note = f"n is that of each strength. {machines(rows)}." if rows else ""
    return block(table(columns, body), rows, note, missing(EXPECTED["masked"], rows))


def bert_squad(results: Path = RESULTS) -> str:
    """Return the table of SQuAD after pre-training at the best strength, beside the paper's figures for BERT base."""
    rows, tuned = rows_of("masked", BERT, results), read_rows("questions", results)
    paper = {(cell.row, cell.column): cell.figure for cell in paper_cells() if (cell.table, cell.grid) == PAPER}
    columns = [
        "recipe",
        "strength",
        "loss, Wikipedia",
        "loss, wikitext-2",
        "F1",
        "EM",
        "n",
        "the paper's F1",
        "the paper's EM",
    ]
    body, lacking = [], [name for name in EXPECTED["masked"] if not any(row.recipe == name for row in rows)]
    scored: dict[tuple[str, ...], dict[str, tuple[float, float]]] = {}  # by settings of the fine-tuning
    for row in rows:
        best = row is lowest(by_series(rows)[row.series], "loss")
        fine = [one for one in tuned if f"{FROM_RUN}={folder_of(row.recipe, list(row.changes))}" in one.changes]
        label = PAPER_ROWS.get(row.recipe.removeprefix(BERT), "")
        published = [paper.get((label, name)) for name in ("F1", "EM")]
        for one in fine:
            name = " ".join([row.name, *(f"`{change}`" for change in one.others)])
            figures = [figure(row.scores(score), 3) for score in ("loss", "loss_wikitext2-valid")]
            figures += [figure(one.scores(score)) for score in ("f1", "exact_match")]
            theirs = ["–" if value is None else f"{value:.2f}" for value in published]
            body.append([name, _marked(strength(row), best), *figures, str(len(one.runs)), *theirs])
            if best and published[0] is not None:
                scored.setdefault(one.others, {})[label] = (mean(one.scores("f1")), published[0])
        if best and not any(one.others == () for one in fine):
            lacking.append(f"{row.recipe} at {strength(row)}")
    told = f"Missing: {', '.join(f'`{name}`' for name in lacking)}." if lacking else "Nothing is missing."
    bold = "The strength with the lowest loss on held-out Wikipedia is bold." if body else ""
    return block(table(columns, body), body, bold, machines(tuned) and f"{machines(tuned)}.", _orders(scored), told)


def _orders(scored: dict[tuple[str, ...], dict[str, tuple[float, float]]]) -> str:
    """Return whether F1, ours and the paper's by row, has the paper's order; for each way of fine-tuning."""
    told = []
    for changes, rows in scored.items():
        pairs = list(combinations(rows.values(), 2))
        if not pairs:
            continue
        theirs = " > ".join(sorted(rows, key=lambda name: -rows[name][1]))
        ours = " > ".join(sorted(rows, key=lambda name: -rows[name][0]))
        same = sum((a[0] - b[0]) * (a[1] - b[1]) > 0 for a, b in pairs)
        way = ", ".join(f"`{change}`" for change in changes) or "as the recipe has it"
        told.append(
            f"Fine-tuned {way}, by F1, the paper: {theirs}. Here: {ours}. {same} of {len(pairs)} pairs are in the "
            "paper's order."
        )
    return "\n\n".join(told)


def language(results: Path = RESULTS) -> str:
    """Return the table of the decoders."""
    order = {name: number for number, name in enumerate(EXPECTED["language"])}
    rows = sorted(rows_of("language", DECODER, results), key=lambda row: order.get(row.recipe, len(order)))
    columns = ["recipe", "strength", "parameters", "loss", *(f"perplexity, {text}" for text in HELD_OUT)]
    columns += ["n", "tokens read"]
    body = [
        [
            row.name,
            strength(row),
            f"{row.parameters:,}",
            figure(row.scores("loss"), 3),
            *(figure(row.scores(score)) for score in HELD_OUT.values()),
            str(len(row.runs)),
            f"{row.runs[0]['tokens']:,}",
        ]
        for row in rows
    ]
    note = f"{machines(rows)}." if rows else ""
    lacking = missing(EXPECTED["language"], rows)
    return block(table(columns, body), rows, note, lacking, image("language", "Learning curves", results))


def language_speed(measured: Path = SPEEDS) -> str:
    """Return the table of the decoders' speed and memory, measured one at a time by ``benchmarks.language_speed``."""
    found = json.loads(measured.read_text())
    dense = found["rows"][0]["tokens_per_second"]
    body = [
        [
            f"`{row['recipe']}`",
            f"{row['parameters']:,}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['tokens_per_second'] / dense:.2f}",
            f"{row['peak_memory'] / 2**30:.2f}",
        ]
        for row in found["rows"]
    ]
    machine = found["machine"]
    columns = ["recipe", "parameters", "tokens per second", "of dense", "peak memory (GiB)"]
    versions = f"torch {machine['torch']}, transformers {machine['transformers']}"
    note = f"{machine['device']}, {versions}, commit {machine['commit'][:7]}, {found['updates']} updates each, n = 1."
    return table(columns, body, note)


def sweep(results: Path = RESULTS) -> str:
    """Return the table of perplexity by the strength of Frobenius decay, at both sizes."""
    series = sweeps(results)
    rows = [row for some in series.values() for row in some]
    best = {key: lowest(some, "perplexity") for key, some in series.items() if len(some) > 1}
    columns = ["strength", *(some[0].name for some in series.values())]
    body = []
    for value in sorted({row.strength for row in rows if row.strength is not None}):
        at = {
            row.series: _marked(figure(row.scores("perplexity")), row is best.get(row.series))
            for row in rows
            if row.strength == value
        }
        body.append([f"{value:g}", *(at.get(key, "") for key in series)])
    plain = [row for row in read_rows("language", results) if row.recipe.endswith("-si")]
    beside = [f"{row.name} {figure(row.scores('perplexity'))} (weight decay {strength(row)})" for row in plain]
    note = f"Perplexity per word of held-out text, the lowest one bold. {machines(rows)}." if rows else ""
    without = f"Without Frobenius decay: {', '.join(beside)}." if beside else ""
    lacking = missing(EXPECTED["sweep"], rows)
    return block(
        table(columns, body), rows, note, without, lacking, image("strength", "Perplexity by strength", results)
    )


def _marked(cell: str, best: bool) -> str:
    return f"**{cell}**" if best else cell


TABLES: dict[str, Callable[[], str]] = {
    "translation": translation,
    "bert-loss": bert_loss,
    "bert-squad": bert_squad,
    "language": language,
    "language-speed": language_speed,
    "sweep": sweep,
}


if __name__ == "__main__":
    draw_all()
    PAGE.write_text(fill(PAGE.read_text(), TABLES))
