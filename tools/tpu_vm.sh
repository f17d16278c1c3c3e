#!/usr/bin/env bash
# Runs a config on all workers of a Cloud TPU VM slice; see docs/launch.md.
#
#   tools/tpu_vm.sh NAME ZONE install
#   tools/tpu_vm.sh NAME ZONE run --config=FILE --workdir=gs://BUCKET/DIR [--config.FIELD=VALUE ...]
#   tools/tpu_vm.sh NAME ZONE log | stop
set -euo pipefail

if [ $# -lt 3 ]; then
  sed -n '2,6s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
name=$1 zone=$2 action=$3
shift 3

on() { # WORKER COMMAND
  gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker="$1" --command="$2"
}

case $action in
  install)
    archive=$(mktemp -d)/opd_jax.tar.gz
    git -C "$(dirname "$0")/.." archive --format=tar.gz --output="$archive" HEAD
    gcloud compute tpus tpu-vm scp "$archive" "$name:opd_jax.tar.gz" --zone="$zone" --worker=all
    rm -r "$(dirname "$archive")"
    on all "mkdir -p opd_jax && tar -xzf opd_jax.tar.gz -C opd_jax && cd opd_jax && \
      python3 -m venv ../opd_venv && ../opd_venv/bin/pip install --quiet -e '.[tpu]'"
    ;;
  run)
    arguments=$(printf ' %q' "$@" --config.runtime.multihost=True --config.runtime.platform=tpu)
    # The process goes on without the connection; its number is kept for `stop`.
    on all "cd opd_jax && { nohup ../opd_venv/bin/python -m opd_jax.main$arguments \
      >../opd_jax.log 2>&1 </dev/null & echo \$! >../opd_jax.pid; }"
    ;;
  log)
    on 0 "tail -n 50 -f opd_jax.log"
    ;;
  stop)
    on 0 "kill -TERM \$(cat opd_jax.pid)" # One is enough: all processes agree to stop.
    ;;
  *)
    echo "unknown action '$action': one of install, run, log, stop" >&2
    exit 2
    ;;
esac
