#!/usr/bin/env bash
# The two records, each run at most ten minutes from its start to its accuracy: benchmarks/records.sh OUT NAME...
# CIFAR names CIFAR-10 and TINY Tiny-ImageNet. AT_ONCE runs (2) share the GPU in equal parts, so each has less than all
# of it for its time.
# cifar-adamw is cifar-0 with AdamW in place of Muon, and nothing else.
set -euo pipefail
here=$(dirname "$0")
# shellcheck source=benchmarks/at_once.sh
source "$here/at_once.sh"
out=$1
shift
share_gpu "${AT_ONCE:-2}"
time=minutes=${MINUTES:-8.5}
for name in "$@"; do
  case $name in
    cifar-adamw) row=(cifar10-fast data="$CIFAR" "$time" optimizer=adamw lr=6e-4) ;;
    cifar-*) row=(cifar10-fast data="$CIFAR" "$time" seed="${name#cifar-}") ;;
    tiny-*) row=(tiny-imagenet data="$TINY" "$time" seed="${name#tiny-}") ;;
    *) echo "there is no run $name" && exit 2 ;;
  esac
  start "$out" "$name" train "${row[@]}" ${SETTINGS:-} --out "$out/$name"
done
wait
