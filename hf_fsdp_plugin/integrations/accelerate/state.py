"""Replacements of the constructors of ``PartialState`` and ``AcceleratorState``.

They enable FSDP on CPU ranks, and process groups for both CPU and accelerator tensors.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType, check_cuda_p2p_ib_support

from hf_fsdp_plugin.backends.ranks.cluster import gloo_interface, gloo_variables, raise_file_limit
from hf_fsdp_plugin.devices import DEVICES, accelerator_type, select_device
from hf_fsdp_plugin.integrations.accelerate import private
from hf_fsdp_plugin.integrations.accelerate.plugin import PlannedFsdpPlugin
from hf_fsdp_plugin.integrations.patching import set_variables
from hf_fsdp_plugin.integrations.session import session
from hf_fsdp_plugin.messages import print_once, print_warnings
from hf_fsdp_plugin.problems import Origin, Problem, SpecError
from hf_fsdp_plugin.rank_variables import launched_world_size
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.torch_private.process_groups import set_timeout, timeout_of


def init_partial_state(original: Callable[..., None], state: Any, *args: Any, **kwargs: Any) -> None:
    """On ranks with an accelerator, first start a process group for its tensors and for CPU tensors.

    Offloaded gradients, for example, are CPU tensors. If ``cpu`` or a backend is given, Accelerate starts its own
    process group instead. The time-out is that of the ``TrainingArguments``, on CPU ranks too.
    """
    is_given = kwargs.get("backend") is not None or (args and args[0]) or kwargs.get("cpu")
    was_started = dist.is_initialized()
    if not state.initialized and not was_started:
        _prepare_network()
        local_rank = int(os.environ.get("LOCAL_RANK", -1))
        if not is_given and local_rank >= 0 and (device := select_device(local_rank)).type != "cpu":
            _disable_unsupported_transports(device.type)
            timeout = {name: value for name, value in kwargs.items() if name == "timeout"}
            dist.init_process_group(device.process_group_backend, **timeout)
    if session.group_timeout is not None:
        kwargs.setdefault("timeout", session.group_timeout)
    if was_started and not state.initialized:
        _check_backend(kwargs.get("backend"), source="TrainingArguments")
    if "timeout" in kwargs and _is_early_group():
        set_timeout(kwargs["timeout"])
    original(*args, **kwargs)
    if not was_started and dist.is_initialized() and "timeout" not in kwargs:
        session.early_group = dist.group.WORLD
    _remove_index_of_cpu(state)
    own = getattr(state, "device", None)
    if own is not None and own.index is not None and own.index != state.local_process_index:
        # Accelerate passes the local rank to barriers, which is no device if each rank sees only its own. All objects
        # of `PartialState` share their attributes.
        state.wait_for_everyone = functools.partial(dist.barrier, device_ids=[own.index])


def _prepare_network() -> None:
    """Prepare this process for the connections of gloo, which every process group has."""
    world_size = launched_world_size()
    if world_size == 1:
        return
    set_variables(**gloo_variables(os.environ))
    interface, problem = gloo_interface(os.environ)
    if interface:
        set_variables(GLOO_SOCKET_IFNAME=interface)
    print_warnings(filter(None, (problem, raise_file_limit(world_size))))


def _disable_unsupported_transports(device_type: str) -> None:
    """Set NCCL's variables for GPUs without peer-to-peer transfers, as `accelerate launch` does.

    With other launchers, Accelerate raises and asks for these variables.
    """
    # The check starts nvidia-smi, which takes seconds while many ranks start, so it is made for these GPUs only.
    devices = range(torch.cuda.device_count() if device_type == "cuda" else 0)
    if any("RTX 40" in torch.cuda.get_device_name(each) for each in devices) and not check_cuda_p2p_ib_support():
        names = [name for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE") if name not in os.environ]
        set_variables(**dict.fromkeys(names, "1"))
        if names:
            print_once(f"{' and '.join(names)} set to 1: these GPUs do not support the transport with this driver.")


def _is_early_group() -> bool:
    return session.early_group is not None and session.early_group is dist.group.WORLD


def adjust_process_group(given: Mapping[str, Any], *, source: str) -> None:
    """Apply the arguments for a process group to the one that is started already. Does nothing if none is.

    Raises:
        SpecError: the group has another backend.
    """
    if not dist.is_initialized():
        return
    _check_backend(given.get("backend"), source=source)
    timeout = given.get("timeout")
    if timeout is not None and _is_early_group():
        set_timeout(timeout)
    elif timeout not in (None, timeout_of()):
        message = f"timeout={timeout} has no effect: the process group is started already, with {timeout_of()}."
        fix = "Pass it where the group is started: init_process_group, PartialState or TrainingArguments(ddp_timeout)."
        print_once(Problem(code="FSDP-W614", message=message, fix=fix, origin=Origin(source=source)))


def _check_backend(backend: str | None, *, source: str) -> None:
    """Raise ``SpecError`` if the process group has another backend for the tensors of a model."""
    if backend is None:
        return
    device = accelerator_type()
    asked, found = (
        dict(pair.split(":") for pair in text.split(",")).get(device) if ":" in text else text
        for text in (backend, str(dist.get_backend_config()))
    )
    if asked != found:
        message = f"backend={backend}, but the process group is started already, with {found} for {device}."
        fix = "Remove it, or start the group with it: torch.distributed.init_process_group(BACKEND) before install()."
        raise SpecError([Problem(code="FSDP-E612", message=message, fix=fix, origin=Origin(source=source))])


def _remove_index_of_cpu(state: Any) -> None:
    """Make the device of a CPU rank ``cpu``. Accelerate sets ``cpu:0``, which FSDP1 treats as another device."""
    device = getattr(state, "device", None)
    if device is not None and device.type == "cpu":
        state.device = torch.device("cpu")


def init_accelerator_state(original: Callable[..., None], state: Any, *args: Any, **kwargs: Any) -> None:
    """Use FSDP on CPU ranks too. Raises ``SpecError`` for a process without a process group."""
    plugin = kwargs.get("fsdp_plugin")
    if not isinstance(plugin, PlannedFsdpPlugin):
        original(*args, **kwargs)
        return
    if _is_cpu_rank(plugin.spec):
        kwargs["cpu"] = True
        private.reset_single_process_state(state)
    original(*args, **kwargs)
    if state.distributed_type == DistributedType.NO:
        message = "FSDP is configured, but this is a single process without a process group."
        fix = (
            "Start the script with `hf-fsdp launch`, `accelerate launch` or `torchrun`, or as several tasks of `srun`. "
            "Use `--num_processes 1` for a single rank."
        )
        raise SpecError([Problem(code="FSDP-E601", message=message, fix=fix)])
    if state.distributed_type in (DistributedType.MULTI_CPU, DistributedType.FSDP):
        _remove_index_of_cpu(state)  # PartialState may have been created before it was hooked
        private.set_fsdp(state)
        state.fsdp_plugin = plugin


def _is_cpu_rank(spec: FsdpSpec) -> bool:
    """Return whether a launcher started this process as a rank on the CPU. Starts the process group of a single rank.

    Accelerate treats a CPU rank as a process without a launcher unless ``cpu`` is set, and ``accelerate launch`` sets
    neither rank nor address for a single rank.
    """
    if accelerator_type() != "cpu" and not spec.launch.use_cpu:
        return False
    if "RANK" not in os.environ:
        if spec.launch.num_processes != 1 or "ACCELERATE_USE_CPU" not in os.environ:
            return False
        set_variables(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    if os.environ.get("WORLD_SIZE") == "1" and not dist.is_initialized():
        if "LOCAL_RANK" not in os.environ:
            set_variables(LOCAL_RANK="0")
        dist.init_process_group(DEVICES["cpu"].process_group_backend, store=dist.HashStore(), rank=0, world_size=1)
    return True
