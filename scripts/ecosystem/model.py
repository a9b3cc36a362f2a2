"""What a case of the suite is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

ONE_PROCESS = "one process"  # without FSDP, with twice the batch of a rank
TWO_PROCESSES = "two unsharded processes"  # DistributedDataParallel: for what a rank samples or pairs within its batch
OWN_CHECKS = "its own assertions"  # the script compares by itself
VERSIONS = (1, 2)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A script with its arguments, and what is expected of it under both FSDP versions."""

    name: str
    """Unique name: the script and its variant."""
    package: str
    """The package that the script belongs to. The case is skipped if it is missing."""
    script: str
    """``-m MODULE``, or a path that begins with ``{here}``, ``{transformers}`` or ``{accelerate}``."""
    arguments: str = ""
    """Arguments; ``{batch}`` is the batch size per process."""
    batch: int = 2
    """Batch size of a rank. One process takes twice as much."""
    alone: str = ""
    """Further arguments of the unsharded run."""
    before: str | None = None
    """Arguments of a run before it, under FSDP, in the same folder: for resuming."""
    uninterrupted: str | None = None
    """Arguments of the unsharded run, if they are others: of the whole run, for resuming."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Keys of ``fsdp_config`` for both versions."""
    settings_1: Mapping[str, object] = field(default_factory=dict)
    settings_2: Mapping[str, object] = field(default_factory=dict)
    versions: tuple[int, ...] = VERSIONS
    """The FSDP versions under which the script makes sense."""
    top: Mapping[str, object] = field(default_factory=dict)
    """Keys at the top level of the config file, such as ``mixed_precision``."""
    needs: tuple[str, ...] = ()
    """Further packages."""
    environ: Mapping[str, str] = field(default_factory=dict)
    compared: str = ONE_PROCESS
    """What the run is compared with."""
    model: str = ""
    """How the saved model is loaded: a key of ``checks.LOADERS``. Empty: the script saves no model."""
    saved: str = "out"
    """The folder that the script saves the model to."""
    start: str = ""
    """The folder of the initial weights, below ``models``."""
    sharded: bool = True
    """Whether a report with a sharded model is expected."""
    tolerance: float = 1e-4
    """Largest relative difference of losses."""
    weights: float = 2e-2
    """Largest difference of the saved weights, relative to the change by the training (L2)."""
    refused: Mapping[int, str] = field(default_factory=dict)
    """FSDP version -> the problem code with which the plugin is expected to refuse the script."""
    note: str = ""
    """A sentence for the table."""

    @property
    def packages(self) -> tuple[str, ...]:
        return (self.package, *self.needs)
