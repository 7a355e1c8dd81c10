# go.sh: run in the root of the tree of branch `decode`, with R = the folder of these files and OUT set. At most 120 s.
export EV=/tmp/ev.decode PYTHONPATH=.:$R HF_HUB_OFFLINE=1 TORCHINDUCTOR_COMPILE_THREADS=2 OMP_NUM_THREADS=1 TORCHINDUCTOR_CACHE_DIR=/tmp/dc/i TRITON_CACHE_DIR=/tmp/dc/t PYTHONUNBUFFERED=1
rm -rf $EV; mkdir -p $EV/back $EV/log; W=${W:-84}; E=${E:-116}
for m in one overlap; do (timeout -k 1 60 python3 $R/smoke.py $m > $EV/log/smoke-$m 2>&1; [ -f $EV/smoke.$m ] || echo '{"ok": false}' > $EV/smoke.$m) & done
n=0
for m in llama-445m llama-wide; do for b in 1 8; do for g in A B C; do timeout -k 1 $E python3 $R/decode2.py $m $b $g > $EV/log/$m-$b-$g 2>&1 & n=$((n+1)); done; done; done
timeout -k 1 $E python3 $R/decode2.py llama-445m 1 nocudnn > $EV/log/nocudnn 2>&1 & n=$((n+1))
for ((s = 0; s < W * 2; s++)); do [ $(ls $EV | grep -c '^ready') -ge $n ] && break; sleep 0.5; done
echo "waited $((s/2)) s; ready: $(ls $EV | grep -c '^ready') of $n"; touch $EV/quiet; wait
python3 - <<'P'
import json, os, pathlib
ev = pathlib.Path(os.environ["EV"]); out = pathlib.Path(os.environ["OUT"])
(out / "decode.json").write_text(json.dumps({p.name: json.loads(p.read_text()) for p in sorted((ev / "back").iterdir())}, indent=0))
(out / "decode-smoke.json").write_text(json.dumps({p.name: p.read_text() for p in sorted(ev.glob("smoke.*"))}, indent=0))
(out / "decode-logs.txt").write_text("\n".join(f"== {p.name}\n{p.read_text()[-2500:]}" for p in sorted((ev / "log").iterdir())))
P
grep -h "'way'" $EV/log/* | cut -c1-420
