"""``benchmarks.decode`` in small, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import decode

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


def test_a_cache_that_is_too_short_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--length 32 is less than the 81 tokens of all rounds"):
        decode.main([*SMALL, "--rounds", "5", "--repeats", "10", "--out", str(tmp_path / "decode.json")])
