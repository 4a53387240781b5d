#!/bin/sh
# One server and three workers on this machine's loopback: no root, no namespaces, no testbed.
#   sh docs/loopback.sh [PYTHON]        PYTHON: an interpreter that has this package (default .venv/bin/python)
# On a cluster: the same configuration file on every machine, the same variables with the server's address in
# MASTER_ADDR, and one `python -m dblp.train` a machine. See "Without a lab" in README.md.
set -eu
PYTHON=${1:-.venv/bin/python}
FOLDER=$(mktemp -d)
workers=
trap 'kill $workers 2>/dev/null || true; rm -rf "$FOLDER"' EXIT
trap 'exit 130' INT TERM

# What all ranks must agree on. The token is a shared secret: anybody who knows it may join the run.
# What is left out has the default of dblp/config.py (profile: recommended, MTU 1500, ...).
cat >"$FOLDER/config.json" <<JSON
{
  "version": 1,
  "token": "$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')",
  "seed": 7,
  "transport": {"name": "dblp", "kind": "bounded", "low": 0.008, "high": 0.408,
                "detector": {"kind": "every-n-rounds", "n": 10, "eta": 0.5}},
  "workload": {"kind": "train", "model": "digits-cnn", "data": "digits", "epochs": 2, "batch_size": 32},
  "deadlines": {"connect_s": 60, "round_s": 30}
}
JSON

export DBLP_CONFIG="$FOLDER/config.json" WORLD_SIZE=4 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 OMP_NUM_THREADS=1
for rank in 1 2 3; do
    RANK=$rank "$PYTHON" -m dblp.train &
    workers="$workers $!"
done
RANK=0 "$PYTHON" -m dblp.train # the server ends when every worker has said goodbye
for worker in $workers; do wait "$worker"; done
