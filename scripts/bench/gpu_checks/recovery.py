"""What goes wrong beside the plain step: errors in a backward, forwards between backward and step."""

from __future__ import annotations

from typing import Any

from scripts.bench.gpu_checks.base import Case, Run, check, expect, local

_NUM_STEPS = 3


@check(seconds=8)
def memory_error(case: Case) -> Case:
    """Catch an out-of-memory error of a forward and of a backward, and train on: losses as without it, or a refusal.

    ``find_executable_batch_size`` and ``auto_find_batch_size`` train on after such an error.
    """
    from hf_fsdp_plugin.problems import SpecError

    expected, found = Run(case), {}
    losses = [expected.step() for _ in range(2 + _NUM_STEPS)]
    for place in ("forward", "backward"):
        run = Run(case)
        before = [run.step() for _ in range(2)]
        _fail_once(run, place)
        run.optimizer.zero_grad()
        try:
            after = [run.step() for _ in range(_NUM_STEPS)]
        except SpecError as error:
            expect(case["version"] == 1, f"FSDP2 refuses to train on: {error}")
            found[place] = f"refused with {error.problems[0].code}"
            continue
        difference = max(abs(a / b - 1) for a, b in zip(before + after, losses, strict=True))
        expect(difference < 1e-3, f"after an error in the {place}: losses {after}, without it {losses[2:]}")
        found[place] = f"differ by {difference:.0e}"
    return {"text": f"losses after an error: {found}", "after": found}


def _fail_once(run: Run, place: str) -> None:
    import torch

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("out of memory, raised by this check")

    layer = run.accelerator.unwrap_model(run.model).model.layers[2]
    module = next(module for name, module in layer.named_modules() if name.endswith("mlp"))
    if place == "forward":
        hook = module.register_forward_pre_hook(fail)
    else:
        hook = module.register_full_backward_pre_hook(fail)
    try:
        run.backward()
    except torch.OutOfMemoryError:
        return
    finally:
        hook.remove()
    raise RuntimeError("the error was not raised")


@check(seconds=6)
def extra_forward(case: Case) -> Case:
    """Call the model between backward and step, and change weights after an evaluation: both must be seen by training.

    With offload, copies of the shards to the device may still run while the optimizer updates them on the CPU.
    """
    import torch

    losses = {}
    for name in ("plain", "extra"):
        run = Run(case)
        losses[name] = []
        for number in range(6):
            loss = run.backward()
            if name == "extra":
                with torch.no_grad():
                    run.model(**run.batch)
            run.optimizer.step()
            run.optimizer.zero_grad()
            if number == 2:
                if name == "extra":
                    with torch.no_grad():
                        run.model(**run.batch)
                with torch.no_grad():
                    for parameter in run.model.parameters():
                        local(parameter).mul_(0.9)
            losses[name].append(loss)
    difference = max(abs(a / b - 1) for a, b in zip(losses["extra"], losses["plain"], strict=True))
    expect(difference < 1e-3, f"losses {losses}")
    return {"text": f"losses with further forwards differ by {difference:.0e}", "relative_difference": difference}
