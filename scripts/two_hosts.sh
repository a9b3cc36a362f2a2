#!/bin/bash
# Two machines on one: two network namespaces with a link of limited rate between them. See
# scripts/bench/measure/two_hosts.py.
#
#     scripts/two_hosts.sh                      five minutes on 2 cores; writes docs/results/two_hosts.json
#     scripts/two_hosts.sh --rate 1gbit --delay 2ms
#
# Needs root or unprivileged user namespaces, and iproute2. The namespaces, the link, the mounts and the files live as long
# as the processes in them, so nothing is left behind, also after kill -9 of this script.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-$here/../.venv/bin/python}
[ -x "$python" ] || python=python3
for tool in unshare nsenter ip tc mount; do
  command -v "$tool" > /dev/null || { echo "two_hosts.sh: $tool is not installed (util-linux, iproute2)" >&2; exit 2; }
done
unshare -rnm true 2> /dev/null || { echo "two_hosts.sh: namespaces are not allowed here" >&2; exit 3; }
export HF_FSDP_TWO_HOSTS=1
export PYTHONPATH="${here%/scripts}${PYTHONPATH:+:$PYTHONPATH}"
exec unshare -rnm --propagation private "$python" -m scripts.bench two_hosts "$@"
