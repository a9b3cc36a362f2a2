"""Measure memory and host waits of training with the optimizer's state in host memory, on the simulated accelerator.

It is compared with state on the device, and with FSDP's own offload of everything. The device counts bytes and waits,
and has no speed of its own. Losses should be equal.

    python -m scripts.bench offloaded_steps        (five minutes on 2 cores; writes docs/results/offloaded_steps.json)
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from scripts.bench.common import child_environment, make_llama, make_parser, run_two_ranks
from scripts.bench.tables.update_results import write_result

SIZES = {
    "vocab_size": 16000, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 8,
}  # fmt: skip
SETTINGS: dict[str, dict[str, bool]] = {
    "on the device": {}, "fsdp_offload_optimizer": {"fsdp_offload_optimizer": True},
    "fsdp_offload_params": {"fsdp_offload_params": True},
}  # fmt: skip
STEPS = 3


def main() -> int:
    parser = make_parser(__doc__, "offloaded_steps")
    parser.add_argument("--small", action="store_true", help="a model with a single window")
    parser.add_argument("--measure", type=Path)
    args = parser.parse_args()
    if args.measure:
        measure(args.measure, small=args.small)
        return 0
    from tests.accelerator.accelerator_build import BACKEND, available

    if reason := available():
        print(f"The simulated accelerator cannot be built: {reason}.", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="offloaded_steps_") as folder:
        found = Path(folder) / "found.json"
        options = ["--measure", str(found), *(["--small"] if args.small else [])]
        if run_two_ranks(__file__, options, child_environment(os.environ, BACKEND)) != 0:
            return 1
        write_result("offloaded_steps", args.out.resolve(), {"ranks": 2, **json.loads(found.read_text())})
    return 0


def measure(out: Path, *, small: bool) -> None:
    """Write the figures of the first rank."""
    import torch.distributed as dist
    from accelerate.state import AcceleratorState, GradientState

    sizes = {**SIZES, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 256} if small else SIZES
    places: dict[str, Any] = {}
    for name, settings in SETTINGS.items():
        places[name] = train(sizes, settings)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        gc.collect()
    losses = [place.pop("losses") for place in places.values()]
    differences = [abs(a / b - 1) for own in losses for a, b in zip(own, losses[0], strict=True)]
    if dist.get_rank() == 0:
        out.write_text(json.dumps({"places": places, "loss_difference": max(differences)}))
    dist.barrier()
    dist.destroy_process_group()


def train(sizes: dict[str, int], settings: dict[str, bool]) -> dict[str, Any]:
    """Train some steps. Returns losses, bytes between steps and the most that an update adds, and waits of the last."""
    import torch
    import torch_npu

    import hf_fsdp_plugin as hfp
    from hf_fsdp_plugin.torch_private.modules import local_tensor

    fsdp = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", **settings}
    config = {"distributed_type": "FSDP", "num_processes": 2, "mixed_precision": "bf16", "fsdp_config": fsdp}
    accelerator = hfp.accelerator(hfp.load_spec(config, environ={}))
    memory = torch.get_device_module(accelerator.device.type)
    before = memory.memory_allocated()
    torch.manual_seed(0)
    model = make_llama(**sizes, attn_implementation="eager").train()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True))
    ids = torch.arange(32, device=accelerator.device)[None] * 7 % sizes["vocab_size"]
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=ids, labels=ids).loss
        losses.append(float(loss.item()))
        accelerator.backward(loss)
        del loss
        at_update = memory.memory_allocated()
        memory.reset_peak_memory_stats()
        with torch_npu.HostWaits() as waits:
            optimizer.step()
        update = memory.max_memory_allocated() - at_update
        optimizer.zero_grad()
    states = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    return {
        "losses": losses,
        "state_bytes": sum(local_tensor(value).nbytes for value in states),
        "between_steps_bytes": memory.memory_allocated() - before,
        "update_bytes": update,
        "update_waits": len(waits.events),
    }


if __name__ == "__main__":
    raise SystemExit(main())
