"""``python -m scripts.bench.gpu_checks.predict POINT DEVICE [CAPABILITY]``: print the predicted memory."""

from __future__ import annotations

import json
import sys

from scripts.bench.measure.memory_points import Point, make_model, make_settings, make_workload, parse_point


def predict(point: Point, device_type: str, capability: float | None = None) -> dict[str, int | None]:
    """Return the predicted bytes; ``None`` for no prediction.

    Allocated and reserved memory are without the workspaces of cuBLAS; the total has all that the driver counts.
    ``offload`` and ``staging`` are memory of the host: of offload, and of the copies of an asynchronous save.
    """
    from dataclasses import replace

    import torch

    import hf_fsdp_plugin as hfp
    from hf_fsdp_plugin.tools.plan.estimate.machines import machine_named
    from hf_fsdp_plugin.tools.plan.estimate.memory.peak import estimate_memory, framework_bytes

    with torch.device("meta"):
        model = make_model(point)
    settings = make_settings(point, use_cpu=device_type == "cpu")
    settings["fsdp_config"]["fsdp_async_save"] = True  # as in the config of the checks
    spec = hfp.load_spec(settings)
    plan = hfp.resolve(spec, model, world_size=point.ranks, device_type=device_type)
    # Of its other figures, only the speed of the links matters, which is unknown here: NVLink needs more memory.
    machine = replace(machine_named("h100-sxm"), capability=capability)
    workspaces = framework_bytes(device_type, machine)
    estimate = estimate_memory(plan, model, make_workload(point), machine)
    device = estimate.device
    return {
        "allocated": (estimate.peak.bytes if device is None else device.allocated) - workspaces,
        "reserved": None if device is None else device.reserved - workspaces,
        "total": None if device is None else device.total,
        "offload": estimate.offload_bytes,
        "staging": estimate.staging_bytes,
    }


if __name__ == "__main__":
    print(json.dumps(predict(parse_point(sys.argv[1]), sys.argv[2], *map(float, sys.argv[3:]))))
