"""smoke.py MODE: whether chains compute on this GPU what plain torch does, in a graph too."""
import json, sys, time, torch
from quiet import EV
from factorized.nn import few_rows
from factorized.nn.few_rows import Chain, Launch
from factorized.nn.timing import capture, cuda_milliseconds
mode = sys.argv[1]; rows_out = []; torch.manual_seed(0)
def draw(o, i): return torch.randn(o, i, device="cuda", dtype=torch.bfloat16) / i**0.5
A, B, C, D, n = draw(1184, 2048), draw(11264, 592), draw(592, 5632), draw(2048, 592), torch.rand(2048, device="cuda", dtype=torch.bfloat16) + 0.5
ok = True
for batch in (1, 8):
    x = torch.randn(batch, 2048, device="cuda", dtype=torch.bfloat16)
    def run():
        c = Chain(1e-5); t = c.add(x, A, norm=n); t = c.add(t, B, gated=True); t = c.add(t, C); return c.run(c.add(t, D, residual=x))[0]
    few_rows.MOST_ROWS = 0; want = run().double(); few_rows.MOST_ROWS = 8
    few_rows.LAUNCH = Launch(mode=mode, per=2 if batch == 1 else 1, ahead=batch == 1)
    try:
        began = time.time(); got = run(); torch.cuda.synchronize(); took = time.time() - began
        error = ((got.double() - want).norm() / want.norm()).item()
        kept = []
        def step(): kept[:] = [run()]
        g = capture(step); worst = 0.0
        for _ in range(200):
            g()
        torch.cuda.synchronize(); worst = ((kept[0].double() - want).norm() / want.norm()).item()
        us = cuda_milliseconds(g, 50) * 1e3
        rows_out.append({"mode": mode, "batch": batch, "error": error, "error_in_graph": worst, "us_feed_forward_in_cache": us, "compile_s": took})
        ok &= error < 0.02 and worst < 0.02
    except Exception as e:
        rows_out.append({"mode": mode, "batch": batch, "failed": repr(e)[:600]}); ok = False
    print(rows_out[-1], flush=True)
(EV / f"smoke.{mode}").write_text(json.dumps({"ok": ok, "rows": rows_out}))
