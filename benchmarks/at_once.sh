# Several training runs that share one GPU; sourced by the scripts beside it. AT_ONCE (4) says how many.
# Where the driver's multi-process service starts, their kernels run side by side; else they take turns.

share_gpu() {
  export CUDA_MPS_PIPE_DIRECTORY=${TMPDIR:-/tmp}/mps CUDA_MPS_LOG_DIRECTORY=${TMPDIR:-/tmp}/mps
  mkdir -p "$CUDA_MPS_PIPE_DIRECTORY"
  if ! echo get_server_list | nvidia-cuda-mps-control 2>/dev/null && ! nvidia-cuda-mps-control -d; then
    echo "the multi-process service does not start here: runs take turns"
    unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
  fi
}

# start OUT NAME PROGRAM... : run a program in the background once fewer than AT_ONCE are running
start() {
  local out=$1 name=$2
  shift 2
  while [ "$(jobs -rp | wc -l)" -ge "${AT_ONCE:-4}" ]; do wait -n || true; done
  run_one "$out" "$name" "$@" &
}

run_one() {
  local out=$1 name=$2 began=$SECONDS
  shift 2
  mkdir -p "$out"
  "$@" >"$out/$name.log" 2>&1 || echo "$name failed: $(tail -n 1 "$out/$name.log")"
  echo "$name, $((SECONDS - began)) s: $(grep -a -o 'minutes=.*steps\|test: accuracy [0-9.]*%' "$out/$name.log" | tr '\n' ' ')"
}

train() {
  python -c "from vitlab.cli import main; main()" train "$@"
}
