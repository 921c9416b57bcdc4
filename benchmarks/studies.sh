#!/usr/bin/env bash
# The studies at laboratory size on one GPU: benchmarks/studies.sh OUT STUDY[:PROCESSES[:key=value...]]... (docs/studies.md)
# TINY, PETS and FLOWERS name the data. They run side by side, each by one process or more with settings of its own:
# positions:2:optimizer=muon:lr=0.003. `speed` and `axial` measure times, and are run one after the other when these are
# done. STEPS (2000) is the length of a pre-training, LIMIT (no limit) after how many seconds to stop; the same command
# goes on. Tables, figures and results, without the models, are then in OUT/studies.tgz; FROM names such a file to go on
# from on another machine.
set -uo pipefail
here=$(dirname "$0")
# shellcheck source=benchmarks/at_once.sh
source "$here/at_once.sh"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # small products on a busy machine
out=$1
shift
mkdir -p "$out"
if [ -n "${FROM:-}" ]; then tar -C "$out" -xzf "$FROM" --skip-old-files; fi

# study NAME [OPTION...]: until it is done or the time is over
study() {
  local name=$1 began=$SECONDS left=$((${LIMIT:-1000000} - SECONDS)) steps=(steps="${STEPS:-2000}")
  shift
  if [[ "$name" = speed || " $*" == *" steps="* ]]; then steps=(); fi
  if [ "$left" -lt 30 ]; then return; fi
  timeout --signal=TERM "$left" python -c "from vitlab.cli import main; main()" study "$name" data="$TINY" \
    targets="$PETS,$FLOWERS" "${steps[@]}" "$@" --out "$out/$name" >>"$out/$name.log" 2>&1
  echo "$name: exit code $?, $((SECONDS - began)) s, $(find "$out/$name/jobs" -name result.json | wc -l) jobs are done"
}

pack() {
  tar -C "$out" -czf "$out.tgz" --exclude=run --exclude=features --exclude=.lock --exclude=studies.tgz . &&
    mv "$out.tgz" "$out/studies.tgz"
}

share_gpu 2 >/dev/null # or more: the parts are not equal
unset CUDA_MPS_ACTIVE_THREAD_PERCENTAGE # runs of a fixed length may take what others leave
alone=()
for one in "$@"; do
  IFS=: read -ra words <<<"$one"
  if [[ "${words[0]}" = speed || "${words[0]}" = axial ]]; then
    alone+=("$one")
  else
    study "${words[0]}" "${words[@]:2}" --jobs "${words[1]:-1}" &
  fi
done
while [ "$(jobs -rp | wc -l)" -gt 0 ]; do # what there is can be fetched meanwhile
  sleep 5
  if ((SECONDS % 60 < 5)); then pack; fi
done
for one in "${alone[@]}"; do
  IFS=: read -ra words <<<"$one"
  study "${words[0]}" "${words[@]:2}" --jobs "${words[1]:-1}"
done
pack
