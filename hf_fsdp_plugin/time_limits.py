"""The times of a run that belong together, in seconds: who waits for what, in ranks and between machines.

Limits that users set are in ``rank_variables`` (hangs, threads at the exit) and in the flags of ``hf-fsdp launch``.

A rank, and the ranks of its machine (``hangs``, ``integrations``):

====================  =====  ==========================================================================================
``TURN``                0.5  the watching thread of a rank, between two looks
``FIRST_TURN``          0.1  the same before the process group exists: a rank may be stopped right after it
``FRESH``               5.0  the next rank, for the heartbeat of the one that watches the machine
``MISSING``            60.0  the watching rank, for ranks that have not registered after the process group has started
``SAMPLE``              1.0  the watching rank, between two measurements of processor time; shorter for short limits
``STACK``               0.2  the watching rank, for the stacks of all ranks
``ONE_STACK``          0.05  a launcher or a failed rank, for the stacks of others: ``faulthandler`` takes milliseconds
``FAILED``             30.0  the search for hangs, after an exception of a rank: the others exit soon
``CAUSE``               2.0  a rank or a machine that has only lost a connection, for the cause of that on others
``LEAD``                1.0  ranks after a hang, for the one that has reported it: launchers report what exits first
``FLIGHT_RECORD``       5.0  a rank that ends, for torch's flight record: the device may not answer
``FLUSH``               1.0  a rank that ends, for its output: a thread that has stopped may hold the stream
``STOP``               10.0  a rank that ends, for the watching thread and its request to the store
``EXIT_NOTICE``         5.0  the interpreter at its exit, for threads, until they are named
``RANK_0_LEAD``        10.0  other ranks, for local rank 0, which prints an error that all ranks have
====================  =====  ==========================================================================================

Between machines, over the store of the ranks or of the launchers (``hangs.hang_queries``, ``launcher``):

====================  =====  ==========================================================================================
``LOOK``                1.0  a machine, between two looks for questions and announcements of others
``POLL``                0.1  a machine, between two requests to the store while it waits for others
``REQUEST``            10.0  a rank, for the store
``ANSWER``             10.0  a machine that has found a hang, for the records and stacks of the others
``MEET``              600.0  launchers that meet; as in torchrun
``VERDICT``            60.0  other launchers, for its account of the attempt: the saves of its ranks get ``SAVE``
``LEAVE``               5.0  the launcher with the store, for others that may still read it
====================  =====  ==========================================================================================

The launcher and its ranks (``launcher``):

====================  =====  ==========================================================================================
``WATCH``              0.05  the launcher, between two looks at its ranks
``SETTLE``              2.0  from the first failure to SIGTERM: ranks that wait for the failed one often fail meanwhile
``TEARDOWN``           10.0  a rank, from its exception to its exit
``TERM``                5.0  from SIGTERM to SIGKILL after a failure
``SAVE``               25.0  the same for a rank that writes a checkpoint, whose handler of SIGTERM waits 20 seconds
``GRACE``              30.0  from a signal to the launcher to SIGKILL for its ranks (``--grace``)
``OUTPUT``              0.1  a thread that shows the output of a rank, between two looks at its file
====================  =====  ==========================================================================================
"""

from __future__ import annotations

from typing import Final

TURN: Final = 0.5
FIRST_TURN: Final = 0.1
FRESH: Final = 5.0
MISSING: Final = 60.0
SAMPLE: Final = 1.0
STACK: Final = 0.2
ONE_STACK: Final = 0.05
FAILED: Final = 30.0
CAUSE: Final = 2.0
LEAD: Final = 1.0
FLIGHT_RECORD: Final = 5.0
FLUSH: Final = 1.0
STOP: Final = 10.0
EXIT_NOTICE: Final = 5.0
RANK_0_LEAD: Final = 10.0

LOOK: Final = 1.0
POLL: Final = 0.1
REQUEST: Final = 10.0
ANSWER: Final = 10.0
MEET: Final = 600.0
VERDICT: Final = 60.0
LEAVE: Final = 5.0

WATCH: Final = 0.05
SETTLE: Final = 2.0
TEARDOWN: Final = 10.0
TERM: Final = 5.0
SAVE: Final = 25.0
GRACE: Final = 30.0
OUTPUT: Final = 0.1
