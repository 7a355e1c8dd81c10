"""The stages of a compression: their order, what is held and kept, progress, messages and damage."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import factorized as fz
from factorized.experiments.compress.page import compress_page, write_page
from factorized.experiments.compress.subject import recovery_recipe
from factorized.experiments.compress.work import Settings, Work
from factorized.experiments.recipes.find import load_any_recipe
from factorized.experiments.training.state import check_same_devices
from factorized.files.checksum import sealed
from tests.experiments.compress.points import Points
from tests.planning.models_for_planning import Mlp

SETTINGS = Settings(ratio=0.5)
RECIPE = recovery_recipe(load_any_recipe("digits/resnet8"), None, SETTINGS.factorize)


def compressed(folder: Path, settings: Settings = SETTINGS, **options: Any) -> tuple[Points, Work]:
    subject = Points()
    work = Work(subject, settings, folder, say=options.pop("say", lambda line: None), **options)
    work.run(RECIPE, ["lowered", "composed"])
    return subject, work


def test_one_network_is_held_at_a_time(tmp_path: Path) -> None:
    subject = Points()
    subject.watching = True
    Work(subject, SETTINGS, tmp_path, say=lambda line: None).run(RECIPE, ["lowered", "composed"])
    assert len(subject.given) > 4
    assert subject.most_held == 1


def test_every_stage_is_reported_in_one_line_with_its_figures(tmp_path: Path) -> None:
    said: list[str] = []
    _, work = compressed(tmp_path, say=said.append)
    state = work.state
    assert said == [
        f"points: {state['before']['parameters']:,} parameters, loss {state['before']['scores']['loss']:.2f}",
        f"plan: 3 layers factorized, {work.plan.params_after:,} of {work.plan.params:,} parameters",
        f"compressed: {work.plan.params_after:,} parameters, loss {state['compressed']['scores']['loss']:.2f}",
        f"recovered: loss {state['recovered']['scores']['loss']:.2f}, after 1 s of digits/resnet8-recovery",
        f"lowered: {work.plan.params_after:,} parameters, loss {state['lowered']['scores']['loss']:.2f}; "
        f"{tmp_path / 'lowered'}",
        f"composed: {work.plan.params:,} parameters, loss {state['composed']['scores']['loss']:.2f}; "
        f"{tmp_path / 'composed'}",
    ]


def test_progress_tells_batches_and_layers(tmp_path: Path) -> None:
    told: dict[str, list[tuple[int, int | None]]] = {}
    compressed(tmp_path, progress=lambda what, done, total: told.setdefault(what, []).append((done, total)))
    batches = [(number, 5) for number in range(1, 6)]
    assert told == {
        "choosing ranks": batches,
        "reading spectra": batches,
        "calibrating": batches,
        "factorizing": [(1, 3), (2, 3), (3, 3)],
    }


def test_many_examples_are_no_reason_to_warn_of_batches_that_never_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("factorized.planning.calibration.MANY", 2)
    _, work = compressed(tmp_path)
    assert work.state["notes"] == []


def test_few_layers_in_a_pass_mean_more_passes_and_the_same_result(tmp_path: Path) -> None:
    told: list[str] = []
    _, few = compressed(
        tmp_path / "few",
        Settings(ratio=0.5, layers_per_pass=1),
        progress=lambda what, done, total: told.append(what),
    )
    _, all_at_once = compressed(tmp_path / "all")
    assert told.count("calibrating") == 3 * 5
    assert told.count("choosing ranks") == 3 * 5
    assert few.state["compressed"] == all_at_once.state["compressed"]


def test_a_compression_goes_on_with_other_layers_per_pass(tmp_path: Path) -> None:
    whole = Settings(ratio=0.5)
    Work(Points(), whole, tmp_path, say=lambda line: None).run(None)
    subject = Points()
    few = Settings(ratio=0.5, layers_per_pass=1)  # for less memory, after a first try ran out of it
    state = Work(subject, few, tmp_path, say=lambda line: None).run(RECIPE)
    assert state["recovered"]["scores"]
    assert "save compressed" not in subject.done


def test_the_budget_is_spent_as_asked(tmp_path: Path) -> None:
    model, found = Points(), {}
    for ranks in ("loss", "outputs", "uniform"):
        _, work = compressed(tmp_path / ranks, Settings(ratio=0.5, ranks=ranks, samples=200))
        found[ranks] = [entry.rank for entry in work.plan.layers]
        assert 0.45 < work.plan.params_after / work.plan.params <= 0.5
    by_outputs = fz.plan(model.dense(), ratio=0.5, allocate="spectrum", calibration=fz.Calibrated(model.batches(200)))
    assert found["outputs"] == [entry.rank for entry in by_outputs.layers]
    assert found["uniform"] == [entry.rank for entry in fz.plan(model.dense(), ratio=0.5).layers]
    assert found["loss"] != found["outputs"]
    kept = fz.load(tmp_path / "outputs/compressed", model._build())
    ours = fz.factorize(model.dense(), by_outputs, init=fz.Calibrated(model.batches(200)))
    torch.testing.assert_close(kept.state_dict(), ours.state_dict())


def test_settings_reach_the_plan_and_the_recipe(tmp_path: Path) -> None:
    settings = Settings(ratio=0.6, kind="channel", exclude=("wide",), multiple_of=2)
    _, work = compressed(tmp_path, settings)
    assert "wide" not in [entry.name for entry in work.plan.layers]
    assert all(entry.rank % 2 == 0 for entry in work.plan.layers)
    fields = settings.factorize
    assert (fields.scheme, fields.ratio, fields.kind, fields.exclude, fields.multiple_of, fields.allocate) == (
        *("low_rank", 0.6, "channel", ["wide"], 2),
        "spectrum",
    )
    assert Settings(ratio=0.6, ranks="uniform").factorize.allocate == "uniform"


def test_finished_stages_are_kept_and_missing_ones_are_done(tmp_path: Path) -> None:
    subject = Points()
    Work(subject, SETTINGS, tmp_path, say=lambda line: None).run(None)
    assert subject.done == ["dense", "evaluate", "save compressed", "evaluate", "dense", "load"]
    again = Points()
    state = Work(again, SETTINGS, tmp_path, say=lambda line: None).run(RECIPE, ["composed"])
    assert again.done[:3] == ["load", "train", "evaluate"]
    assert "save compressed" not in again.done
    assert set(state["differences"]) == {"alone", "compressed", "recovered"}
    last = Points()
    assert Work(last, SETTINGS, tmp_path, say=lambda line: None).run(RECIPE, ["composed"]) == state
    assert last.done == []
    assert set(state["seconds"]) == {"before", "plan", "compressed", "recovered", "composed", "differences"}
    assert all(seconds > 0 for seconds in state["seconds"].values())


@pytest.mark.parametrize("written", [0, 1])
def test_plain_forms_from_before_a_recovery_are_written_again_though_that_was_stopped(
    tmp_path: Path, written: int
) -> None:
    forms = ("lowered", "composed")
    Work(Points(), SETTINGS, tmp_path, say=lambda line: None).run(None, forms)
    stopped = Points()
    stopped.stop_before_saving = forms[written]
    with pytest.raises(KeyboardInterrupt):
        Work(stopped, SETTINGS, tmp_path, say=lambda line: None).run(RECIPE)
    last = Points()
    state = Work(last, SETTINGS, tmp_path, say=lambda line: None).run(RECIPE)
    assert [one for one in last.done if one.startswith("save")] == [f"save {form}" for form in forms[written:]]
    for form in forms:
        assert state[form]["scores"]["loss"] == pytest.approx(state["recovered"]["scores"]["loss"], rel=1e-4)


@pytest.mark.parametrize("part", ["", "*.safetensors", "*.json", "*.pt"])
@pytest.mark.parametrize("gone", ["compressed", "recovered", "lowered", "composed"])
def test_a_folder_that_was_deleted_or_lost_a_file_is_written_again(tmp_path: Path, gone: str, part: str) -> None:
    before = Work(Points(), SETTINGS, tmp_path, say=lambda line: None).run(RECIPE, ["lowered", "composed"])
    names = sorted(path.suffix for path in (tmp_path / gone).iterdir())
    if part:
        lost = list((tmp_path / gone).glob(part))
        for path in lost:
            path.unlink()
    else:
        shutil.rmtree(tmp_path / gone)
        lost = [tmp_path / gone]
    subject = Points()
    state = Work(subject, SETTINGS, tmp_path, say=lambda line: None).run(RECIPE, ["lowered", "composed"])
    assert sorted(path.suffix for path in (tmp_path / gone).iterdir()) == names
    assert subject.done.count("train") == (gone == "recovered" and bool(lost))
    saved = [f"save {gone}"] * (gone != "recovered" and bool(lost))
    assert [one for one in subject.done if one.startswith("save")] == saved
    assert {**state, "seconds": 0, "files": 0} == {**before, "seconds": 0, "files": 0}


def test_overwriting_leaves_nothing_of_the_compression_before(tmp_path: Path) -> None:
    compressed(tmp_path)
    subject = Points()
    work = Work(subject, Settings(ratio=0.7), tmp_path, overwrite=True, say=lambda line: None)
    assert not any((tmp_path / name).exists() for name in ("compressed", "recovered", "lowered", "composed"))
    work.run(None)
    assert work.state["compressed"]["parameters"] <= 0.7 * work.state["before"]["parameters"]
    assert "recovered" not in json.loads((tmp_path / "compress.json").read_text())


@pytest.mark.parametrize("change", ["weights", "samples"])
def test_another_network_or_setting_in_the_folder_is_named(tmp_path: Path, change: str) -> None:
    compressed(tmp_path)
    other = Points()
    other.identity = ["other weights", "some points"] if change == "weights" else other.identity
    settings = SETTINGS if change == "weights" else Settings(ratio=0.5, samples=100)
    differs = (
        "the weights, files or data of points were others then" if change == "weights" else "samples is 2048 there"
    )
    with pytest.raises(ValueError, match=f"holds another compression: {differs}"):
        Work(other, settings, tmp_path)


def test_a_recovery_that_began_on_another_device_is_refused_by_options_that_compress_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Points, "train", lambda *_: check_same_devices(["1 process on cuda"], "1 process on cpu", tmp_path)
    )
    with pytest.raises(ValueError, match="was trained by 1 process on cuda, and this is 1 process on cpu") as caught:
        compressed(tmp_path)
    assert "give --recover and --device as for that recovery, choose another --out" in str(caught.value)
    assert "--allow-other-devices" not in str(caught.value)


@pytest.mark.parametrize("name", ["compressed", "recovered", "lowered", "composed"])
def test_a_folder_of_that_name_that_is_of_no_compression_is_not_touched_unless_asked_for(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "thesis.txt").write_text("three years")
    with pytest.raises(ValueError, match=f"{name} exists, and is not part of a compression; choose another --out"):
        compressed(tmp_path)
    assert (tmp_path / name / "thesis.txt").exists()
    compressed(tmp_path, overwrite=True)
    assert not (tmp_path / name / "thesis.txt").exists()


def test_what_a_killed_process_left_of_its_files_is_removed(tmp_path: Path) -> None:
    compressed(tmp_path)
    names = ["compress.json", "compress.html", "composed/model.safetensors", "lowered/model.safetensors"]
    left = [f"{name}.0123456789ab.tmp" for name in names]
    for name in (*left, "own.tmp"):
        (tmp_path / name).write_text("{")
    compressed(tmp_path)
    assert [(tmp_path / name).exists() for name in (*left, "own.tmp")] == [False, False, False, False, True]


@pytest.mark.parametrize("wrong", [{"ratio": 0.02}, {"ratio": 0.5, "exclude": ("nothing",)}])
def test_settings_that_allow_no_plan_are_refused_before_anything_is_tested(tmp_path: Path, wrong: Any) -> None:
    subject = Points()
    with pytest.raises(ValueError, match=r"is out of reach|matches no layer"):
        Work(subject, Settings(**wrong), tmp_path, say=lambda line: None).run(None)
    assert subject.done == ["dense"]


def test_other_settings_are_taken_as_long_as_there_is_no_plan(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="matches no layer"):
        Work(Points(), Settings(ratio=0.02, exclude=("nothing",)), tmp_path, say=lambda line: None).run(None)
    with pytest.raises(ValueError, match="factorize more layers: --first-and-last would reach"):
        Work(Points(), Settings(ratio=0.02), tmp_path, say=lambda line: None).run(None)
    work = Work(Points(), Settings(ratio=0.5, keep_first_and_last=False), tmp_path, say=lambda line: None)
    work.run(None)
    assert work.plan.ratio <= 0.5
    assert not any("keep_first_and_last" in (entry.reason or "") for entry in work.plan.entries)
    assert Work(Points(), work.settings, tmp_path).state["asked"]["keep_first_and_last"] is False


def test_other_settings_are_taken_if_the_plan_was_stopped_and_what_was_tested_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(_: Work) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Work, "_plan", stop)
        with pytest.raises(KeyboardInterrupt):
            Work(Points(), SETTINGS, tmp_path, say=lambda line: None).run(None)
    subject = Points()
    state = Work(subject, Settings(ratio=0.7), tmp_path, say=lambda line: None).run(None)
    assert state["asked"]["ratio"] == 0.7
    assert subject.done.count("evaluate") == 1  # of the compressed network
    assert 0.6 < state["compressed"]["parameters"] / state["before"]["parameters"] <= 0.7


@pytest.mark.parametrize("damage", ["{", "[]", '{"checksum": "0"}', json.dumps(sealed({"asked": {}})), None])
def test_a_damaged_state_is_refused(tmp_path: Path, damage: str | None) -> None:
    compressed(tmp_path)
    path = tmp_path / "compress.json"
    path.write_text(damage if damage is not None else path.read_text().replace('"ratio": 0.5', '"ratio": 0.6'))
    with pytest.raises(ValueError, match=r"compress\.json is damaged, was changed, or .*; start over with --overwrite"):
        Work(Points(), SETTINGS, tmp_path)


def test_what_is_lost_is_measured_on_the_network_as_it_is_and_after_recovery(tmp_path: Path) -> None:
    subject, work = compressed(tmp_path)
    found = work.state["differences"]
    names = [entry.name for entry in work.plan.layers]
    x = points_of(subject)
    dense, ours = subject.dense(), fz.load(tmp_path / "compressed", subject._build()).eval()
    trained = fz.load(tmp_path / "recovered", subject._build()).eval()
    for network in (dense, ours, trained):
        network.outlet = torch.nn.Identity()  # the last layer of the plan is the one before it
    with torch.no_grad():
        y = dense(x)
        for stage, network in (("compressed", ours), ("recovered", trained)):
            expected = ((network(x) - y).square().sum() / y.square().sum()).item()
            assert found[stage][names[-1]] == pytest.approx(expected, rel=1e-4)
    assert found["alone"][names[-1]] < found["compressed"][names[-1]]


def points_of(subject: Points) -> torch.Tensor:
    x: torch.Tensor = subject.batches(2048)[2][0]  # the one in the middle
    return x


def test_warnings_become_notes_that_stay(tmp_path: Path) -> None:
    said: list[str] = []
    _, work = compressed(tmp_path, Settings(ratio=0.5, samples=10), say=said.append)
    (note,) = work.state["notes"]
    assert note.startswith("init=Calibrated: fewer samples than directions")
    assert f"note: {note}" in said
    assert note in compress_page(work.state)


def test_the_page_shows_scores_layers_losses_and_what_recovery_changed(tmp_path: Path) -> None:
    _, work = compressed(tmp_path)
    state = work.state
    before, after, now = (state[stage]["scores"]["loss"] for stage in ("before", "compressed", "recovered"))
    page = write_page(state, tmp_path).read_text()
    assert f"<dt>loss, dense</dt><dd>{before:.2f}</dd>" in page
    assert f"<dt>loss, compressed</dt><dd>{after:.2f}</dd>" in page
    assert f"<dt>loss, recovered</dt><dd>{now:.2f}</dd>" in page
    assert f"<dt>improved by recovery</dt><dd>{after - now:.2f}</dd>" in page  # lower is better
    for row in state["plan"]["layers"]:
        assert f"<code>{row['name']}</code>" in page
        assert f"{row['name']}: rank {row['rank']} of {row['full_rank']}" in page
        shares = [100 * state["differences"][stage][row["name"]] for stage in ("alone", "compressed", "recovered")]
        shown = "".join(f'<td class="number">{share:.1f} %</td>' for share in shares)
        assert shown in page.replace("\n", "")
    state["recovered"]["scores"]["loss"] = after + 0.25
    assert "<dt>worsened by recovery</dt><dd>0.25</dd>" in compress_page(state)
    state["compressed"]["scores"]["loss"] = before - 0.5  # nothing was lost, so that nothing could be won back
    state["recovered"]["scores"]["loss"] = before - 0.75
    page = compress_page(state)
    assert "<dt>improved by recovery</dt><dd>0.25</dd>" in page
    assert "won back" not in page
    assert "Loss while recovering" in page
    assert "digits/resnet8-recovery" in page
    for form in ("lowered", "composed"):
        assert f"<td>{form}</td>" in page


@pytest.mark.parametrize("difference", [0.0, 6e-15])
def test_a_layer_that_differs_by_rounding_alone_does_not_squeeze_the_chart(tmp_path: Path, difference: float) -> None:
    _, work = compressed(tmp_path)
    state = json.loads(json.dumps(work.state))
    differences = state["differences"]["compressed"]
    differences["wide"] = difference
    page = compress_page(state)
    assert "1e-06</text>" in page
    assert "1e-09</text>" not in page
    assert "1e-15</text>" not in page
    differences["wide"] = 0.1
    assert "1e-06</text>" not in compress_page(state)


def test_a_spectrum_is_drawn_kept_up_to_the_rank_and_cut_after_it(tmp_path: Path) -> None:
    _, work = compressed(tmp_path)
    state = json.loads(json.dumps(work.state))
    row = state["plan"]["layers"][0]
    row |= {"rank": 1, "full_rank": 4, "spectrum": [0.9, 0.09, 0.01, 0.0]}
    page = compress_page(state)
    # 150 wide, 34 high over six powers of ten: 0.1 of the largest is 5/6 of the height, and zero is none
    assert '<polygon class="kept" points="0.0,34 0.0,0.0 37.5,0.0 37.5,34"/>' in page
    assert '<polygon class="cut" points="37.5,34 37.5,5.7 75.0,5.7 75.0,11.1 112.5,11.1 112.5,34.0 150.0,34.0' in page
    row |= {"rank": 500, "full_rank": 1000}  # four of its thousand values are drawn, so that half of them are kept
    assert '<polygon class="kept" points="0.0,34 0.0,0.0 37.5,0.0 37.5,5.7 75.0,5.7 75.0,34"/>' in compress_page(state)
    row["spectrum"] = None
    assert "no batch reaches it" in compress_page(state)


def test_a_layer_of_zeros_is_on_the_page_and_nothing_is_relative_to_its_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(subject: Points) -> torch.nn.Module:
        torch.manual_seed(0)
        model = Mlp()
        for parameter in model.square.parameters():
            torch.nn.init.zeros_(parameter)
        return model

    monkeypatch.setattr(Points, "_build", build)
    _, work = compressed(tmp_path, Settings(ratio=0.4, ranks="outputs"))
    (row,) = (row for row in work.state["plan"]["layers"] if row["name"] == "square")
    assert set(row["spectrum"]) == {0.0}
    assert all("square" not in found for found in work.state["differences"].values())
    page = write_page(work.state, tmp_path).read_text()
    assert f"square: rank {row['rank']} of {row['full_rank']}" in page


def test_names_on_the_page_are_text_and_not_markup(tmp_path: Path) -> None:
    _, work = compressed(tmp_path)
    work.state["asked"]["model"] = "<b>points</b>"
    page = compress_page(work.state)
    assert "&lt;b&gt;points&lt;/b&gt;, compressed to" in page
    assert "<b>" not in page
