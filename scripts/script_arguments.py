"""What becomes of each argument that a script can pass in Python, under FSDP: for ``docs/settings.md`` and its test.

The arguments that are noted or refused when an object is created are rows of the package
(``hf_fsdp_plugin/integrations/script_arguments.py``). The others are here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import yaml

from hf_fsdp_plugin.integrations.script_arguments import ROWS as CHECKED

Verdict = Literal["applied", "library", "note", "refused"]
"""Whether this package applies an argument, leaves it to the library, notes that it has no meaning, or refuses it."""


@dataclass(frozen=True, slots=True)
class DocumentedRow:
    """Arguments of one class that have the same verdict for the same reason.

    Attributes:
        elsewhere: whether the package reads the argument as a setting, and reports it if needed, in another place.
    """

    owner: str
    verdict: Verdict
    written: str
    about: str
    code: str = ""
    fix: str = ""
    elsewhere: bool = False

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.written.split())


_MSAMP_NAMES: Final = {
    "MSAMPRecipeKwargs": "opt_level",
    "FP8RecipeKwargs": "opt_level use_autocast_during_eval margin interval fp8_format amax_history_len "
    "amax_compute_algo override_linear_precision use_mxfp8_block_scaling backend",
}
"""Class of which every argument is refused -> its arguments."""

_ROWS: Final = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
ROWS: Final = (
    *(DocumentedRow(**row) for row in _ROWS),
    *(
        DocumentedRow(
            row.owner,
            "refused" if row.code.startswith("FSDP-E") else "note",
            _MSAMP_NAMES[row.owner] if row.written == "*" else row.written,
            row.about,
            "" if row.code == "FSDP-N613" else row.code,
            row.fix,
        )
        for row in CHECKED
    ),
)
