"""``benchmarks.decode`` in small, on the CPU."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import decode, speed
from factorized.nn import few_rows, one_row, one_token

CPU = torch.device("cpu")
SMALL = ["tiny", "--device", "cpu", "--no-compile", "--rounds", "1", "--repeats", "1", "--length", "32"]


@pytest.mark.parametrize("ratio", [None, 0.5])
def test_a_decoder_gives_the_tokens_that_transformers_generates(
    ratio: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = decode.build("tiny", ratio, CPU, torch.float32)
    prompts = []
    real = torch.randint
    monkeypatch.setattr(torch, "randint", lambda *given, **how: prompts.append(real(*given, **how)) or prompts[-1])
    decoder = decode.Decoder(model, batch=2, length=32, options=None)
    tokens = [decoder.tokens.clone()]
    for _ in range(3):
        decoder.step()
        tokens.append(decoder.tokens.clone())
    expected = model.generate(prompts[0], max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0)
    assert torch.equal(torch.cat(tokens, dim=1), expected[:, decode.PROMPT :])


def test_fused_layers_compute_what_they_did() -> None:
    tokens = torch.randint(0, 100, (2, 5))
    plain, fused = (decode.build("tiny", 0.5, CPU, torch.float32, fused=fused) for fused in (False, True))
    torch.testing.assert_close(fused(tokens).logits, plain(tokens).logits)


def test_every_model_has_a_dense_row_and_one_for_each_ratio(tmp_path: Path) -> None:
    out = tmp_path / "decode.json"
    decode.main([*SMALL, "--ratio", "0.5", "--ratio", "0.25", "--batch", "2", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [(row["model"], row["batch"], row["ratio"]) for row in rows] == [("tiny", 2, r) for r in (None, 0.5, 0.25)]
    dense, half, quarter = (row["parameters"] for row in rows)
    assert dense / 2 >= half > 0.45 * dense
    assert dense / 4 >= quarter
    assert rows[0]["over_dense"] == 1
    assert all(row["milliseconds"] > 0 and row["bytes"] == 4 * row["parameters"] for row in rows)


def test_fused_layers_are_timed_beside_the_lowered_ones_and_with_other_constants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    real = decode.Decoder.__init__

    def record(*given: Any) -> None:
        seen.append((one_row.BLOCK, one_row.PROGRAMS, few_rows.PROGRAMS, one_token.SEQUENCES))
        real(*given)

    monkeypatch.setattr(decode.Decoder, "__init__", record)
    out = tmp_path / "decode.json"
    others = ["--kernel", "BLOCK=512,PROGRAMS=4", "--rows", "PROGRAMS=1", "--attention", "SEQUENCES=0"]
    decode.main([*SMALL, "--batch", "1", "--fuse", *others, "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    fused = ["fused", "fused, BLOCK=512, PROGRAMS=4", "fused, rows PROGRAMS=1", "fused, attention SEQUENCES=0"]
    assert [row["way"] for row in rows] == ["dense", "low rank", *fused]
    usual = (one_row.BLOCK, one_row.PROGRAMS, few_rows.PROGRAMS, one_token.SEQUENCES)
    others = [(512, 4, *usual[2:]), (*usual[:2], 1, usual[3]), (*usual[:3], 0)]
    assert seen == [usual, usual, usual, *others]


def test_jobs_are_compiled_in_processes_of_their_own_before_any_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, started = tmp_path / "decode.json", []
    words = [*SMALL, "--batch", "1", "--batch", "2", "--out", str(out)]

    class Process:
        def __init__(self, command: list[str]) -> None:
            decode.main(command[3:])

        def wait(self) -> None:
            assert not out.exists()

    real = decode.start
    monkeypatch.setattr(decode, "start", lambda *job: started.append((str(job[1]), job[2])) or real(*job))
    monkeypatch.setattr(decode, "subprocess", SimpleNamespace(Popen=Process))
    decode.main([*words, "--parallel"])
    assert started == [("dense", 1), ("low rank", 1), ("dense", 2), ("low rank", 2)] * 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kernel", "BLOCK=512"], "give --fuse too"),
        (["--rows", "PROGRAMS=1"], "give --fuse too"),
        (["--attention", "SEQUENCES=0"], "give --fuse too"),
        (["--fuse", "--kernel", "CAPABILITY=8"], "must be like PROGRAMS=4,WARPS=8, of PROGRAMS, .* got CAPABILITY=8"),
        (["--fuse", "--kernel", "BLOCK"], "got BLOCK"),
    ],
)
def test_wrong_constants_are_refused(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        decode.main([*SMALL, *words, "--out", str(tmp_path / "decode.json")])
    assert re.search(message, f"{error.value} {capsys.readouterr().err}")


def test_a_cache_that_is_too_short_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--length 32 is less than the 81 tokens of all rounds"):
        decode.main([*SMALL, "--rounds", "5", "--repeats", "10", "--out", str(tmp_path / "decode.json")])


def test_the_table_of_decoding_names_the_sizes_of_the_models() -> None:
    configs = {name: decode.MODELS[name]() for name in speed.DECODERS}
    sizes = {name: f"{c.num_hidden_layers} layers, {c.hidden_size} wide" for name, c in configs.items()}
    assert sizes == speed.DECODERS
