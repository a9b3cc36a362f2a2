"""The end of a launcher whose threads still ask the store of several machines."""

import os
import subprocess
import sys

SCRIPT = """
import sys, threading, time
import torch.distributed as dist
from hf_fsdp_plugin.cli.main import main
from hf_fsdp_plugin.launcher.store_threads import PREFIX

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

def ask():
    while True:
        store.set("a", "b")

for name in (PREFIX, PREFIX, "RendezvousKeepAliveTimer_0", "RendezvousKeepAliveTimer_1"):
    threading.Thread(target=ask, name=name, daemon=True).start()
time.sleep(0.2)
sys.exit(main(sys.argv[1:]))
"""


def test_exit_code_is_kept_beside_threads_of_a_store() -> None:
    """Without ``exit_beside_store_threads``, the interpreter aborts with exit code 134."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for words, code in ((["explain", "FSDP-E707"], 0), (["explain", "FSDP-E7"], 2)):
        command = [sys.executable, "-c", SCRIPT, *words]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, "terminate called" in done.stderr) == (code, False), done.stderr
        assert done.stdout or code
