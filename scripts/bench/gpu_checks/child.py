"""``python -m scripts.bench.gpu_checks.child CONFIG``: a process of a rank that installs the package, as workers do.

Workers that are spawned import the script again, with its call of ``install()``, and inherit the variables of the rank.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import hf_fsdp_plugin as hfp

if __name__ == "__main__":
    hfp.install(sys.argv[1])
    accelerator = torch.accelerator.current_accelerator()
    module = torch.get_device_module(accelerator) if accelerator is not None else None
    has_context = bool(getattr(module, "is_initialized", lambda: False)())
    if dist.is_initialized() or has_context:
        raise SystemExit(f"child: process group {dist.is_initialized()}, device context {has_context}")
