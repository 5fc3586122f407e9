#!/usr/bin/env bash
# Make many videos on a v6e-16 with xpk, on a cluster of `xpk cluster create`: deploy/xpk.sh CLUSTER IMAGE [OPTIONS OF XPK]
# GKE gives each host its index. Attach a storage as /data first: `xpk storage attach --auto-mount=true --mount-point=/data`.
set -euo pipefail
xpk workload create --cluster "$1" --docker-image "$2" --workload wanjax --tpu-type v6e-16 --num-slices 1 \
    --max-restarts 10 --env HF_HOME=/data/huggingface --env XDG_CACHE_HOME=/data/cache \
    --command "wanjax batch /data/prompts.txt --out /data/videos --model wan2.1-t2v-14b --processes auto" \
    "${@:3}"
