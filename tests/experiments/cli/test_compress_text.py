"""``factorized compress`` of transformers of text: runs of ours, and Hugging Face folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from factorized.experiments.cli.compress import EXAMPLES
from factorized.experiments.text.tokenizer import load_tokenizer
from tests.experiments.cli.conftest import Cli
from tests.experiments.cli.test_compress_verb import state_of
from tests.experiments.text.small import BY_TASK, NAMES, SMALL, files


def _text_run(cli: Cli, task: str) -> str:
    changes = [f"--set={change}" for change in (*SMALL, *BY_TASK[task], *files(Path("texts"), task))]
    assert cli("train", NAMES[task], "--data", "texts", "--device", "cpu", *changes).code == 0
    return f"out/{NAMES[task]}/seed-0"


@pytest.mark.parametrize("task", ["language", "masked", pytest.param("translation", marks=pytest.mark.nightly)])
def test_a_run_on_text_is_compressed_recovered_and_composed(
    cli: Cli, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = _text_run(cli, task)
    given = ("--ratio", "0.9", "--data", "texts", "--device", "cpu")
    said = cli("compress", run, *given, "--to", "composed")
    assert said.code == 0, said.err
    state = state_of(Path(run) / "compressed-0.9")
    score = state["score"]
    assert state["compressed"]["parameters"] <= 0.9 * state["before"]["parameters"]
    assert state["composed"]["scores"][score] == pytest.approx(state["recovered"]["scores"][score], rel=1e-2, abs=0.1)
    decay = "none" if task == "translation" else "frobenius"  # as its own recipe has it
    assert state["recovered"]["recipe"]["decay"]["kind"] == decay
    tokens = load_tokenizer(Path(run) / "model").get_vocab()
    for form in ("compressed", "composed"):
        assert load_tokenizer(Path(run) / "compressed-0.9" / form).get_vocab() == tokens
    assert cli("evaluate", f"{run}/compressed-0.9/recovered/seed-0", "--data", "texts", "--device", "cpu").code == 0
    assert "cannot be written as lowered" in cli("compress", run, *given, "--to", "lowered").error
    assert not [line for line in EXAMPLES.splitlines() if "language/" in line and "lowered" in line]
    assert "is for images" in cli("compress", run, *given, "--recover", "digits/resnet8").error


def test_a_hugging_face_folder_is_compressed_by_text_files_and_recovered_by_a_recipe(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path(_text_run(cli, "language")) / "model"
    given = ("--ratio", "0.9", "--data", "texts", "--device", "cpu", "--out", "small")
    said = cli("compress", folder, *given)
    assert said.code == 0, said.err
    assert "recovered" not in state_of(Path("small"))
    said = cli("compress", folder, "--ratio", "0.9", "--data", "nowhere")
    assert "there is no folder nowhere; give the folder of .txt files" in said.error
    assert "is a language model; name its text by --data" in cli("compress", folder, "--ratio", "0.9").error
    Path("own.toml").write_text(
        'extends = "language/tiny"\n[schedule]\nupdates = 2\n'
        "[run]\nbatch = 4\nevaluate_every = 2\ncheckpoint_every = 2\n"
    )
    said = cli("compress", folder, *given, "--recover", "own.toml")
    assert said.code == 0, said.err
    assert state_of(Path("small"))["recovered"]["recipe"]["model"]["name"].startswith("hf:")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    damaged = cli("compress", folder, *given[:-1], "other").error
    assert "model cannot be read: " in damaged
    assert "save it again with model.save_pretrained(folder)" in damaged
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForTokenClassification"]}))
    assert "architectures must name a model for causal or masked" in cli("compress", folder, *given).error
    (folder / "config.json").write_text("{")
    assert "config.json is damaged" in cli("compress", folder, *given).error
