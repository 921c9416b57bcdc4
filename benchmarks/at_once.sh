# Several training runs that share one GPU; sourced by the scripts beside it.

# share_gpu COUNT: let COUNT runs at a time have equal parts of the GPU's processors each, by the driver's multi-process
# service, so that none is faster while another one still compiles. Where that does not run, one at a time has all.
share_gpu() {
  AT_ONCE=$1
  if [ "$1" -eq 1 ]; then return; fi
  export CUDA_MPS_PIPE_DIRECTORY=${TMPDIR:-/tmp}/mps CUDA_MPS_LOG_DIRECTORY=${TMPDIR:-/tmp}/mps
  unset CUDA_MPS_ACTIVE_THREAD_PERCENTAGE # one that the daemon starts with would hold for processes without one, too
  mkdir -p "$CUDA_MPS_PIPE_DIRECTORY"
  if { echo get_server_list | nvidia-cuda-mps-control || nvidia-cuda-mps-control -d; } >/dev/null 2>&1 &&
    python -c 'import torch; torch.zeros(1).cuda()'; then
    export CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=$((100 / $1))
    echo "$1 at a time, each on $CUDA_MPS_ACTIVE_THREAD_PERCENTAGE % of the GPU's processors"
  else
    echo "the multi-process service does not run here: one at a time"
    unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
    AT_ONCE=1
  fi
}

# start OUT NAME PROGRAM... : run a program in the background once fewer than AT_ONCE are running
start() {
  local out=$1 name=$2
  shift 2
  while [ "$(jobs -rp | wc -l)" -ge "$AT_ONCE" ]; do wait -n || true; done
  run_one "$out" "$name" "$@" &
}

# Every run compiles for itself, so that none gets more steps than another for what an earlier one has compiled.
run_one() {
  local out=$1 name=$2 began=$SECONDS
  local -x TORCHINDUCTOR_CACHE_DIR=$out/compiled/$name TRITON_CACHE_DIR=$out/compiled/$name/triton
  shift 2
  mkdir -p "$out"
  "$@" >"$out/$name.log" 2>&1 || echo "$name failed: $(tail -n 1 "$out/$name.log")"
  echo "$name, $((SECONDS - began)) s: $(grep -a -o 'minutes=.*step$\|test: accuracy [0-9.]*%' "$out/$name.log" | tr '\n' ' ')"
}

train() {
  python -c "from vitlab.cli import main; main()" train "$@"
}
