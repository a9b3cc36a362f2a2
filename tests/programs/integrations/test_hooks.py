"""The part of tests/unit/integrations/test_hooks.py that starts processes or computes for seconds."""

from __future__ import annotations

import subprocess
import sys


def test_modules_imported_later_are_hooked_and_restored() -> None:
    program = (
        "import sys, hf_fsdp_plugin as hfp\n"
        "hfp.install()\n"
        "assert 'accelerate' not in sys.modules\n"
        "from accelerate import Accelerator\n"
        "assert hasattr(Accelerator.prepare, '__wrapped__')\n"
        "hfp.uninstall()\n"
        "assert not hasattr(Accelerator.prepare, '__wrapped__')\n"
        "assert not [f for f in sys.meta_path if type(f).__module__.startswith('hf_fsdp_plugin')]\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
