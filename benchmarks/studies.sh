#!/usr/bin/env bash
# The studies at laboratory size on one GPU: benchmarks/studies.sh OUT STUDY[=PROCESSES]... (see docs/studies.md)
# TINY, PETS and FLOWERS name the data. They run side by side, each by one process or more, since a process decodes the
# images once; `speed` and `axial` measure times, and are run one after the other when these are done. STEPS (2000) is
# the length of a pre-training, LIMIT (no limit) after how many seconds to stop; the same command goes on. Tables,
# figures and results, without the models, are then in OUT/studies.tgz.
set -uo pipefail
here=$(dirname "$0")
# shellcheck source=benchmarks/at_once.sh
source "$here/at_once.sh"
out=$1
shift
mkdir -p "$out"

# study NAME [OPTION...]: until it is done or the time is over
study() {
  local name=$1 began=$SECONDS left=$((${LIMIT:-1000000} - SECONDS)) steps=(steps="${STEPS:-2000}")
  shift
  if [ "$name" = speed ]; then steps=(); fi
  if [ "$left" -lt 30 ]; then return; fi
  # shellcheck disable=SC2086  # settings are words
  timeout --signal=TERM "$left" python -c "from vitlab.cli import main; main()" study "$name" data="$TINY" \
    targets="$PETS,$FLOWERS" "${steps[@]}" ${SETTINGS:-} "$@" --out "$out/$name" >>"$out/$name.log" 2>&1
  echo "$name: exit code $?, $((SECONDS - began)) s, $(find "$out/$name/jobs" -name result.json | wc -l) jobs are done"
}

share_gpu 2 >/dev/null # or more: the parts are not equal
unset CUDA_MPS_ACTIVE_THREAD_PERCENTAGE # runs of a fixed length may take what others leave
for one in "$@"; do
  name=${one%%=*}
  if [ "$name" = speed ] || [ "$name" = axial ]; then continue; fi
  jobs=1
  if [ "$name" != "$one" ]; then jobs=${one#*=}; fi
  study "$name" --jobs "$jobs" &
done
wait
for one in "$@"; do
  if [ "$one" = speed ] || [ "$one" = axial ]; then study "$one"; fi
done
tar -C "$out" -czf "$out.tgz" --exclude=run --exclude=features --exclude=studies.tgz . && mv "$out.tgz" "$out/studies.tgz"
