"""decode2.py MODEL BATCH GROUP: dense beside chains with several settings; times and kernels."""
import json, os, statistics, sys, time, torch
from dataclasses import asdict
from quiet import EV, ready, turn
from benchmarks import decode as D
import factorized as fz
from factorized.integrations.decoding import fuse_decoder
from factorized.nn import few_rows
from factorized.nn.few_rows import Launch as L
from factorized.nn.running import count_parameters
from factorized.nn.timing import capture, cuda_milliseconds
from transformers import AutoModelForCausalLM
T0 = time.time()
model, batch, group = sys.argv[1], int(sys.argv[2]), sys.argv[3]
if group == "nocudnn": torch.backends.cuda.enable_cudnn_sdp(False)
RANK = {"llama-445m": 592, "llama-wide": 1184, "tiny": 16}[model]
cpu = model == "tiny"; device = torch.device("cpu" if cpu else "cuda"); dtype = torch.float32 if cpu else torch.bfloat16
ONE = [L(), L(per=4, warps=4), L(ahead=False), L(mode="overlap", per=8, warps=4), L(prefetch=False), L(per=1, warps=16)]
FEW = [L(per=2, ahead=False), L(per=1, ahead=False, elements=64, stages=4), L(per=1), L(mode="overlap", per=2, ahead=False), L(per=3, warps=4, elements=64, ahead=False), L(mode="overlap", per=4, warps=4, elements=64, ahead=False)]
ALL = ONE if batch == 1 else FEW
DENSE = ("dense", None, None, [None])
WAYS = {
    "A": [DENSE, ("low rank joined", RANK, "joined", ALL[:3])],
    "B": [DENSE, ("low rank joined", RANK, "joined", ALL[3:])],
    "C": [DENSE, ("low rank split", RANK, "split", [ALL[0], ALL[3]]), ("dense joined", None, "joined", [ALL[0], ALL[3]]), ("low rank", RANK, None, [None])],
    "nocudnn": [DENSE, ("low rank joined", RANK, "joined", ALL[:1])],
}[group]
def build(rank, fused):
    torch.manual_seed(0)
    with device: m = AutoModelForCausalLM.from_config(D.MODELS[model]())
    m.eval().requires_grad_(False); full = count_parameters(m)
    if rank: m = fz.lower(fz.factorize(m, fz.LowRank(), rank=rank, init="default"))
    m = m.to(dtype); share = count_parameters(m) / full
    if fused: fuse_decoder(m, joined=fused == "joined")
    return m, share
def allowed(mode):
    f = EV / f"smoke.{mode}"
    for _ in range(600):
        if f.exists(): return json.loads(f.read_text())["ok"]
        if (EV / "quiet").exists(): return False
        time.sleep(0.1)
    return False
rows, steps = [], {}
def save(): (EV / f"back/decode-{model}-{batch}-{group}.json").write_text(json.dumps(rows, indent=0))
reference = None
for way, rank, fused, settings in WAYS:
    decoder = None
    for setting in settings:
        if (EV / "quiet").exists(): break
        if setting and not cpu and not allowed("one" if setting.mode == "one" else "overlap"): continue
        began = time.time()
        try:
            if setting: few_rows.LAUNCH = setting
            if decoder is None:
                torch._dynamo.reset(); m, share = build(rank, fused)
                decoder = D.Decoder(m, batch, 512, None if cpu else {}); step = decoder.step
            else:
                step = capture(decoder._step) if not cpu else decoder._step
            step()
            if not cpu: torch.cuda.synchronize()
            steps[way, str(setting)] = (decoder, step, share, setting)
            print(model, batch, way, setting, "compiled", round(time.time() - began, 1), "at", round(time.time() - T0, 1), flush=True)
        except Exception as e:
            rows.append({"failed": repr(e)[:800], "way": way, "batch": batch, "setting": str(setting)}); print(rows[-1], flush=True); save()
if not cpu: ready(f"decode2-{model}-{batch}-{group}")
def rewind(d):
    for layer in d.cache.layers: layer.cumulative_length.fill_(D.PROMPT)
with turn():
    times = {k: [] for k in steps}
    for r in range(8):
        for k, (d, step, _, _) in steps.items():
            rewind(d)
            if cpu: step(); ms = 1.0
            else: ms = cuda_milliseconds(step, 20)
            if r: times[k].append(ms)
    base = statistics.median(times["dense", "None"]) if ("dense", "None") in times else None
    for k, (d, step, share, setting) in steps.items():
        ms = statistics.median(times[k])
        row = {"model": model, "batch": batch, "group": group, "way": k[0], "setting": asdict(setting) if setting else None, "share": round(share, 4), "ms": round(ms, 4), "spread": [round(min(times[k]), 4), round(max(times[k]), 4)], "over": round(ms / base, 3) if base else None}
        rows.append(row); print(row, flush=True)
    save()
if cpu or group not in ("A", "C"): sys.exit()
from torch.profiler import ProfilerActivity, profile
with turn():
    for row, (k, (d, step, _, setting)) in zip([r for r in rows if "ms" in r], list(steps.items())):
        if k[0] == "dense" and group == "C" or setting and k[0] == "low rank joined" and setting != ALL[0]: continue
        rewind(d)
        with profile(activities=[ProfilerActivity.CUDA]) as prof:
            for _ in range(5): step()
            torch.cuda.synchronize()
        top = [(e.key[:90], e.count // 5, round(e.self_device_time_total / 5, 1)) for e in prof.key_averages() if e.self_device_time_total > 0]
        row |= {"kernels": sum(t[1] for t in top), "busy_us": round(sum(t[2] for t in top), 1), "top": sorted(top, key=lambda t: -t[2])[:14]}
    save()
