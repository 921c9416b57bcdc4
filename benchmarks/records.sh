#!/usr/bin/env bash
# The two records, each run at most ten minutes from its start to its accuracy: benchmarks/records.sh OUT NAME...
# CIFAR names CIFAR-10 and TINY Tiny-ImageNet. AT_ONCE runs share the GPU (2), so none has more than its share of it.
# cifar-adamw is cifar-0 with AdamW in place of Muon, and nothing else.
set -euo pipefail
here=$(dirname "$0")
AT_ONCE=${AT_ONCE:-2}
# shellcheck source=benchmarks/at_once.sh
source "$here/at_once.sh"
out=$1
shift
if [ "$AT_ONCE" -gt 1 ]; then share_gpu; fi
time=minutes=${MINUTES:-9.2}
for name in "$@"; do
  case $name in
    cifar-adamw) row=(cifar10-fast data="$CIFAR" "$time" optimizer=adamw lr=1e-3) ;;
    cifar-*) row=(cifar10-fast data="$CIFAR" "$time" seed="${name#cifar-}") ;;
    tiny-*) row=(tiny-imagenet data="$TINY" "$time" batch=512 optimizer=muon lr=0.004 warmup=200 decay=linear ema=0.999 seed="${name#tiny-}") ;;
    *) echo "there is no run $name" && exit 2 ;;
  esac
  start "$out" "$name" train "${row[@]}" ${SETTINGS:-} --out "$out/$name"
done
wait
