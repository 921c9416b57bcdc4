#!/usr/bin/env bash
# The studies at laboratory size on one GPU: benchmarks/studies.sh OUT STUDY... (see docs/studies.md)
# TINY, PETS and FLOWERS name the data. STEPS (2000) is the length of a pre-training, JOBS (8) how many runs share the
# GPU, LIMIT (no limit) after how many seconds to stop; the same command goes on. Tables, figures and results, without
# the models, are then in OUT/studies.tgz.
set -uo pipefail
here=$(dirname "$0")
# shellcheck source=benchmarks/at_once.sh
source "$here/at_once.sh"
out=$1
shift
jobs=${JOBS:-8}
share_gpu "$jobs"
unset CUDA_MPS_ACTIVE_THREAD_PERCENTAGE # runs of a fixed length may take what others leave
mkdir -p "$out"
for name in "$@"; do
  left=$((${LIMIT:-1000000} - SECONDS))
  if [ "$left" -lt 30 ]; then break; fi
  share=(--jobs "$jobs")
  if [ "$name" = speed ] || [ "$name" = axial ]; then share=(); fi # these measure times
  steps=(steps="${STEPS:-2000}")
  if [ "$name" = speed ]; then steps=(); fi
  began=$SECONDS
  # shellcheck disable=SC2086  # settings are words
  timeout --signal=TERM "$left" python -c "from vitlab.cli import main; main()" study "$name" data="$TINY" \
    targets="$PETS,$FLOWERS" "${steps[@]}" ${SETTINGS:-} "${share[@]}" --out "$out/$name" >>"$out/$name.log" 2>&1
  echo "$name: exit code $?, $((SECONDS - began)) s, $(find "$out/$name/jobs" -name result.json | wc -l) jobs are done"
  tar -C "$out" -czf "$out/studies.tgz" --exclude=run --exclude=features --exclude=studies.tgz .
done
