#!/usr/bin/env bash
# Everything docs/performance.md says of one GPU: benchmarks/speeds.sh OUT checks, then benchmarks/speeds.sh OUT times
# IMAGES names a data set of images of one size and TI16 the weights of a Ti/16. The checks (GPU tests, losses of 300
# steps, agreement of 8 bits) run side by side and leave compiled code behind; the times are taken one after the other.
set -uo pipefail
here=$(dirname "$0")
out=$1
mkdir -p "$out"
train=(python "$here/training_speed.py")
infer=(python "$here/inference_speed.py")

checks() {
  local model
  python -m pytest -m gpu -p no:cacheprovider -o addopts= -q tests/kernels tests/inference tests/data/test_regions.py \
    tests/training/test_working_copy.py tests/training/test_cuda_graph.py >"$out/tests.log" 2>&1 &
  for model in B/16 L/16; do
    "${train[@]}" --only seeds --data "$IMAGES" --models "$model" --out "$out/losses.jsonl" >"$out/seeds-${model%/*}.log" 2>&1 &
    "${train[@]}" --only paths --data "$IMAGES" --models "$model" --out "$out/losses.jsonl" >"$out/paths-${model%/*}.log" 2>&1 &
  done
  {
    sleep 30 # what the others compile first
    "${infer[@]}" --rounds 1 --seconds 0.1 >"$out/first.log" 2>&1
    "${infer[@]}" --only --model "$TI16" --images "$IMAGES" >"$out/agreement-ti16.json" 2>>"$out/first.log"
    "${infer[@]}" --only --model box --images "$IMAGES" >"$out/agreement-box.json" 2>>"$out/first.log"
  } &
  wait
  tail -n 1 "$out/tests.log"
  grep losses "$out/losses.jsonl"
  grep -h -E '"(agreement|images|layers|of|work|again)"' "$out"/agreement-*.json
}

times() {
  local model
  for model in B/16 L/16; do
    "${train[@]}" --only train fp8 graph timm --models "$model" --out "$out/training.jsonl" >"$out/training-${model%/*}.log" 2>&1
  done
  "${infer[@]}" --rounds 6 --seconds 0.4 >"$out/inference.json" 2>"$out/inference.log"
  for model in "$TI16" box; do # with the layers and images in 8 bits that calibration chooses
    "${infer[@]}" --rounds 6 --seconds 0.4 --only --model "$model" --images "$IMAGES" 2>>"$out/inference.log" >>"$out/chosen.json"
  done
  python "$here/loader.py" --workers "$(nproc)" --rounds 3 --seconds 2 --count 2048 --sides >"$out/loader.txt" 2>&1
  grep -v profile "$out/training.jsonl" | cut -c 1-400
  cat "$out/inference.log" "$out/loader.txt" # each part of the first as one line
}

"$2"
