#!/usr/bin/env bash
# What helps a small ViT in a fixed time on one GPU: benchmarks/what_pays.sh OUT [NAME...]
# TINY names Tiny-ImageNet. AT_ONCE runs (6) share the GPU in equal parts, and each has the same minutes (MINUTES, 9): a
# change that makes a step cheaper gets more of them. The seeds of the first row say how much of a difference is chance.
set -euo pipefail
here=$(dirname "$0")
# shellcheck source=benchmarks/at_once.sh
source "$here/at_once.sh"
out=$1
shift

variants() {
  cat <<'END'
seed-0
seed-1 seed=1
seed-2 seed=2
adamw optimizer=adamw lr=1e-3
pool-token pool=token
pool-attention pool=attention
conv-stem
batch-1024 batch=1024 lr=0.0056 warmup=100
batch-256 batch=256 lr=0.0028 warmup=400
plain-end plain_end=0.1
weak mixup=0.2 cutmix=0
no-randaugment randaugment=0,0
small-first small_size=48
small-longer small_size=48 small_start=0.75
patch-dropout patch_dropout=0.25
ema-0.995 ema=0.995
ema-0.999 ema=0.999
qk-norm qk_norm=true
rotary rotary=cells positions=none
wsd decay=wsd
cosine decay=cosine
drop-path-0 drop_path=0
drop-path-0.2 drop_path=0.2
randaugment-2 randaugment=2,9
wider width=320 heads=5 mlp=1280 depth=6
patch-4 model=S/4
patch-4-dropout model=S/4 patch_dropout=0.5
patch-4-small model=S/4 small_size=32 small_start=0.75
s8 width=384 heads=6 mlp=1536 depth=12
s8-patch-dropout width=384 heads=6 mlp=1536 depth=12 patch_dropout=0.5
END
}

share_gpu "${AT_ONCE:-6}"
while read -r name settings; do
  if [ $# -gt 0 ] && [[ " $* " != *" $name "* ]]; then continue; fi
  program=train
  if [ "$name" = conv-stem ]; then program="python $here/conv_stem.py"; fi
  # shellcheck disable=SC2086  # settings and programs are words
  start "$out" "$name" $program tiny-imagenet data="$TINY" depth=9 width=256 mlp=1024 heads=4 drop_path=0.1 \
    randaugment=1,9 area=0.4,1 plain_end=0 minutes="${MINUTES:-9}" $settings --out "$out/$name"
done < <(variants)
wait
