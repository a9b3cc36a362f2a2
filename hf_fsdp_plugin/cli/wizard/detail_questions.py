"""The questions that are asked only after ``details`` is answered with yes, or answered by an option."""

from __future__ import annotations

from hf_fsdp_plugin.cli.wizard.question import YES_NO, Choice, Default, Question, State


def _is_fsdp1(state: State) -> bool:
    return state.version == 1


def _backward_prefetch(state: State) -> Default:
    reason = "the next unit is gathered while gradients are computed"
    return Default(value="pre", reason=reason if state.version == 1 else f"{reason}, as FSDP2 always does by default")


QUESTIONS = (
    Question(
        name="backward_prefetch",
        text="Backward prefetch",
        help="when the next unit is gathered in backward: pre, post or none",
        setting="prefetch.backward",
        default=_backward_prefetch,
        choices=lambda state: (
            Choice(value="pre", label="pre", about="gathers the next unit while gradients are computed: fastest"),
            Choice(value="post", label="post", about="gathers the next unit after the gradients: less memory"),
            Choice(value="none", label="none", about="gathers a unit when it is needed: least memory"),
        ),
        detail=True,
    ),
    Question(
        name="forward_prefetch",
        text="Forward prefetch",
        help="gather the next unit during the forward of the current one: yes or no",
        setting="prefetch.forward",
        default=lambda state: Default(value=False, reason="helps only if the CPU is slower than the GPU"),
        choices=lambda state: YES_NO,
        detail=True,
        about="the next unit is gathered during the forward of the current one",
    ),
    Question(
        name="limit_all_gathers",
        text="Limit the all-gathers in flight",
        help="FSDP1: limit the number of all-gathers in flight: yes or no",
        setting="prefetch.limit_all_gathers",
        default=lambda state: Default(value=True, reason="at most two units are gathered at a time"),
        choices=lambda state: YES_NO,
        asked=_is_fsdp1,
        detail=True,
        about="more memory: the CPU may start any number of all-gathers",
    ),
    Question(
        name="use_orig_params",
        text="Keep the original parameters (use_orig_params)",
        help="FSDP1: keep the original parameters instead of flat ones: yes or no",
        setting="params.use_orig",
        default=lambda state: Default(value=True, reason="for frozen parameters, parameter groups and torch.compile"),
        choices=lambda state: YES_NO,
        asked=_is_fsdp1,
        detail=True,
        about="the optimizer sees one flat parameter per unit",
    ),
    Question(
        name="sync_module_states",
        text="Broadcast the weights of rank 0 before sharding",
        help="FSDP1: broadcast the weights of rank 0 before sharding: yes or no",
        setting="loading.sync_module_states",
        default=lambda state: Default(value=True, reason="all ranks begin with the weights of rank 0"),
        choices=lambda state: YES_NO,
        asked=lambda state: state.version == 1 and not state.answers["ram_efficient_loading"],
        detail=True,
        about="every rank must load the same weights",
    ),
    Question(
        name="pin_memory",
        text="Pin the CPU memory of offloaded parameters",
        help="pin the CPU memory of offloaded parameters: yes or no",
        setting="offload.pin_memory",
        default=lambda state: Default(value=True, reason="copies overlap with computation"),
        choices=lambda state: YES_NO,
        asked=lambda state: bool(state.answers["offload"]),
        detail=True,
        about="for machines with little CPU memory",
    ),
    Question(
        name="async_save",
        text="Write checkpoints in the background",
        help="write checkpoints in the background: yes or no",
        setting="checkpoint.asynchronous",
        default=lambda state: Default(value=False, reason="needs a copy of the shards in CPU memory"),
        choices=lambda state: YES_NO,
        detail=True,
        about="training pauses only for the copy to CPU memory",
    ),
)
