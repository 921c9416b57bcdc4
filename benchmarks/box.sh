#!/usr/bin/env bash
# The runs behind the model in the box, on one H200: benchmarks/box.sh OUT teacher|student|tuned
# TINY, PETS and FLOWERS name the data sets, WEIGHTS the file of ViT-Ti/16. Each run is one call, ten minutes at most.
set -euo pipefail
out=$1
train() { python -c "from vitlab.cli import main; main()" train "$@"; }

# Ti/16 fine-tuned on the same training images at 160 px, from which the small model learns: its pictures have 64, and
# above 160 the teacher would take longer than its student
teacher() {
  train tiny-imagenet weights="$WEIGHTS" head=new data="$TINY" image_size=160 drop_path=0.05 epochs=12 optimizer=adamw \
    lr=2e-4 warmup=150 decay=cosine weight_decay=0.05 mixup=0.2 cutmix=0 \
    randaugment=1,9 area=0.4,1 plain_end=0 --out "$out/teacher"
}

# at the size at which photos are fine-tuned, the first half at the pictures' own
student() {
  train tiny-imagenet data="$TINY" image_size=96 small_size=64 depth=7 width=256 mlp=1024 heads=4 drop_path=0 ema=0.999 \
    label_smoothing=0 randaugment=1,9 area=0.4,1 plain_end=0 teacher="$out/teacher" teacher_share=0.9 teacher_features=1 \
    minutes="${MINUTES:-9.2}" --out "$out/student"
}

# three seeds on each set of photos at 96 px, all at once
tuned() {
  for seed in 0 1 2; do
    train pets-96 data="$PETS" weights="$out/student" seed=$seed --out "$out/pets-$seed" &
    train flowers-96 data="$FLOWERS" weights="$out/student" seed=$seed --out "$out/flowers-$seed" &
  done
  wait
}

"$2"
