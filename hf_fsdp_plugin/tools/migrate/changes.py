"""What changes in the behavior of a run with the other FSDP version, computed from the two specs.

The texts are in ``changes.yaml``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.text import format_value
from hf_fsdp_plugin.vocabulary import BY_NAME

_IN_TABLE: Final = ("fsdp.version", "params.use_orig", "prefetch.limit_all_gathers")
"""Settings whose effects the table describes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BehaviorChange:
    """One difference between two configs.

    Attributes:
        setting: canonical name of the setting that it depends on.
        what: what changes.
        was, becomes: the behavior with the old and with the new config.
        verify: the command that shows it. NEW is the migrated config, OLD the other one.
        stock: whether only stock ``accelerate launch`` has the difference.
    """

    setting: str
    what: str
    was: str
    becomes: str
    verify: str
    stock: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def behavior_changes(old: FsdpSpec, new: FsdpSpec) -> list[BehaviorChange]:
    """Return the differences in behavior: of settings with other values, then of the versions with these settings."""
    table = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    of_fsdp1 = old if old.fsdp.version == 1 else new
    conditions, words = _conditions(of_fsdp1), _words(of_fsdp1)
    found = list(_other_values(old, new))
    for row in (row for row in table if conditions[row.pop("when", "always")]):
        texts = {1: row.pop("fsdp1").format_map(words), 2: row.pop("fsdp2").format_map(words)}
        found.append(BehaviorChange(**row, was=texts[old.fsdp.version], becomes=texts[new.fsdp.version]))
    return found


def _other_values(old: FsdpSpec, new: FsdpSpec) -> Iterator[BehaviorChange]:
    """Yield settings with another value, such as a default that depends on the version."""
    for name, value, _ in old.settings():
        is_unused = name in _IN_TABLE or name.startswith("mesh.") or (name == "fp8.all_gather" and not old.uses_fp8)
        if not is_unused and new.get(name) != value:
            key = BY_NAME[name].key
            was, becomes = (
                format_value(spec.get(name)) + ("" if spec.asked(name) else f" (default of FSDP{spec.fsdp.version})")
                for spec in (old, new)
            )
            verify = f"hf-fsdp check NEW; {key} in the config sets it"
            yield BehaviorChange(setting=name, what=key, was=was, becomes=becomes, verify=verify)


def _conditions(spec: FsdpSpec) -> Mapping[str, bool]:
    """Return the conditions of the rows, from the settings under FSDP1."""
    strategy, precision = STRATEGIES[spec.sharding.strategy], spec.precision
    is_wrapped, is_mixed = spec.wrap.policy != "none", precision.param in ("bf16", "fp16")
    return {
        "always": True,
        "flat": not spec.params.use_orig,
        "unlimited": not spec.prefetch.limit_all_gathers,
        "wrapped": is_wrapped,
        "wrapped_and_resharded": is_wrapped and strategy.reshards_after_forward,
        "by_size": spec.wrap.policy == "size",
        "sharded": strategy.is_sharded,
        "unsharded": not strategy.is_sharded,
        "mixed": is_mixed,
        "reduced_in_another_dtype": is_mixed and precision.reduce not in (precision.param, "auto"),
        "default_state_dict": not spec.asked("checkpoint.state_dict"),
        "offloaded": spec.offload.params,
        "offloaded_activations": spec.activation.offload,
    }


def _words(spec: FsdpSpec) -> Mapping[str, str]:
    """Return the words that the texts contain."""
    by_size = f"modules of at least {spec.wrap.min_num_params:,} parameters"
    return {
        "layers": by_size if spec.wrap.policy == "size" else "each layer",
        "param": spec.precision.param,
        "reduce": spec.precision.reduce,
        "pinned": "pinned" if spec.offload.pin_memory else "not pinned",
    }
