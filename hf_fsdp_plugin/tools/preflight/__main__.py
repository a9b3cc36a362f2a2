"""A rank of a preflight. It begins before Transformers is imported: a failed import fails the stage ``start``."""

from __future__ import annotations

from hf_fsdp_plugin.hangs.process_end import is_failure
from hf_fsdp_plugin.tools.preflight.stages import preflight


def main() -> None:
    preflight().begin_in_rank()
    try:
        from hf_fsdp_plugin.tools.preflight.training import train

        train()
    except BaseException as error:
        preflight().end(error if is_failure(error) else None)
        # A run that has ended at what only a GPU can run has no failed stage.
        if preflight().record.failed or not is_failure(error):
            raise
    preflight().end()


if __name__ == "__main__":
    main()
