"""Python imports this file at the start of every process of a suite: pytest, launchers and ranks."""

import os
import traceback

if os.environ.get("PEERS_WITH_PLUGIN"):
    try:
        import hf_fsdp_plugin

        hf_fsdp_plugin.install()
    except BaseException:
        # Python only prints what this file raises. A process that runs without the plugin would compare it with itself.
        traceback.print_exc()
        os._exit(70)
