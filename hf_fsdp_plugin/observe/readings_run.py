"""One function a setting, for what is not sharding: checkpoints, activations, loading, the launch."""

from __future__ import annotations

from pathlib import Path

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper, CheckpointWrapper

from hf_fsdp_plugin.devices import accelerator_type
from hf_fsdp_plugin.observe.internals import is_compiled
from hf_fsdp_plugin.observe.scene import Reading, Scene, uniform, unobservable
from hf_fsdp_plugin.observe.units import checkpoints_natively


def read_state_dict(scene: Scene) -> Reading:
    if scene.state_dict is None:
        return unobservable("nothing was saved, and no Accelerator was given")
    return Reading(value=scene.state_dict)


def read_asynchronous(scene: Scene) -> Reading:
    if scene.saved_asynchronously is None:
        return unobservable("nothing was saved")
    return Reading(value=scene.saved_asynchronously, reason="as the last checkpoint was written")


def read_checkpointing(scene: Scene) -> Reading:
    wrappers = [module for module in scene.model.modules() if isinstance(module, CheckpointWrapper)]
    native = [module for module in scene.model.modules() if checkpoints_natively(module)]
    if not wrappers and not native:
        return Reading(value="none")
    if wrappers and native:
        return Reading(value="twice", reason="both torch's and Transformers' checkpointing recompute the same layers")
    if native:
        return Reading(value="full", reason="by Transformers' gradient checkpointing")
    selective = ["context_fn" in getattr(module.checkpoint_fn, "keywords", {}) for module in wrappers]
    kind = uniform("selective" if one else "full" for one in selective)
    bare = [unit.name for unit in scene.layers if not unit.checkpointed]
    if bare and len(wrappers) < len(scene.layers):
        return Reading(value=f"{kind} in {len(wrappers)} of {len(scene.layers)} units", matches=False)
    return Reading(value=kind, reason=f"{len(wrappers)} modules")


def read_activation_offload(scene: Scene) -> Reading:
    offloads = [
        m for m in scene.model.modules() if isinstance(m, ActivationWrapper) and not isinstance(m, CheckpointWrapper)
    ]
    return Reading(value=bool(offloads))


def read_ram_efficient(scene: Scene) -> Reading:
    """Loading that spares ranks the weights leaves them something to fill."""
    reading = read_loading(scene, wanted=scene.plan.ram_efficient)
    seen = scene.weights
    if reading.matches and seen is not None and seen.num_broadcast and not seen.num_filled and scene.world_size > 1:
        return unobservable("every rank held all weights before rank 0's came: it built or read them itself")
    return reading


def read_loading(scene: Scene, *, wanted: bool) -> Reading:
    """Both ways of loading end alike: every rank holds rank 0's weights, and nothing is left without memory."""
    if not wanted:
        return unobservable("each rank loads for itself, which leaves no trace")
    seen = scene.weights
    if seen is None:
        return unobservable("the ranks' weights were not compared")
    if seen.num_on_meta:
        return Reading(
            value=False, reason=f"{seen.num_on_meta} tensors have no memory: nobody loaded them", matches=False
        )
    if seen.differing:
        return Reading(value=False, reason=f"ranks differ in {', '.join(seen.differing[:3])}", matches=False)
    if seen.num_broadcast:
        loaded = f", {seen.num_filled} of them not loaded elsewhere" if seen.num_filled else ""
        reason = f"{seen.num_broadcast} tensors came from rank 0, bit for bit the same on all ranks{loaded}"
        return Reading(value=True, reason=reason, matches=True)
    if seen.replicated:
        return Reading(value=True, reason="replicas and buffers are equal on all ranks", matches=True)
    return unobservable("buffers are equal on all ranks and nothing is unloaded; each weight lives on one rank only")


def read_num_processes(scene: Scene) -> Reading:
    return Reading(value=scene.world_size)


def read_num_machines(scene: Scene) -> Reading:
    if scene.hosts == scene.plan.spec.launch.num_machines:
        return Reading(value=scene.hosts)
    return unobservable(f"the ranks report {scene.hosts} host names, which containers may share or split")


def read_mixed_precision(scene: Scene) -> Reading:
    spec = scene.plan.spec
    asked = str(spec.launch.mixed_precision).lower()
    if (asked in ("bf16", "fp16") or spec.precision.param in ("bf16", "fp16")) and spec.precision.param != asked:
        return unobservable(f"precision.param says {spec.precision.param} and decides")
    if not any(unit.live.casts for unit in scene.owners):
        return Reading(value="no")
    value = uniform(unit.param_dtype for unit in scene.owners)
    return Reading(value="no" if value == "fp32" else value)


def read_use_cpu(scene: Scene) -> Reading:
    if scene.device_type == "cpu" and not scene.plan.spec.launch.use_cpu:
        return Reading(
            value=True, reason="there is no accelerator on this machine", matches=accelerator_type() == "cpu"
        )
    return Reading(value=scene.device_type == "cpu")


def read_distributed_type(scene: Scene) -> Reading:
    return Reading(value="FSDP")


def read_dynamo(scene: Scene) -> Reading:
    asked = {str(key).removeprefix("dynamo_"): value for key, value in scene.plan.spec.launch.dynamo_config.items()}
    wanted = str(asked.get("backend", "NO")).upper() != "NO"
    compiled = is_compiled(scene.model)
    return Reading(value="compiled" if compiled else "not compiled", matches=compiled == wanted)


def state_dict_kind(folder: Path) -> str | None:
    """What kind of model state a checkpoint folder holds: ``sharded``, ``local``, ``full``, or ``None``."""
    if any(path.parent.name.startswith("pytorch_model_fsdp") for path in folder.glob("*/.metadata")):
        return "sharded"
    local = ("pytorch_model_fsdp_local/*_rank*.safetensors", "pytorch_model_fsdp*_rank*.bin")
    if any(path for pattern in local for path in folder.glob(pattern)):
        return "local"
    full = ("pytorch_model_fsdp*.bin", "model*.safetensors", "pytorch_model*.bin")
    return "full" if any(path for pattern in full for path in folder.glob(pattern)) else None
