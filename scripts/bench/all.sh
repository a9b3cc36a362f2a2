#!/usr/bin/env bash
# Runs benchmarks with the Python of .venv, otherwise python3 on PATH: bash scripts/bench/all.sh --help
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-.venv/bin/python}
command -v "$python" > /dev/null || python=python3
exec "$python" -m scripts.bench "$@"
