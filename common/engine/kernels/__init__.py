"""The kernels of a GPU, in Triton: what `common.engine.backend` asks for, each tested against torch's way of doing it.

On a machine without a GPU they run in Triton's interpreter (`TRITON_INTERPRET=1`, set before this is imported), for
tests. Sizes that a kernel is compiled for are in capitals.
"""

import os

# A multiplication and an addition are one instruction, whatever the version of Triton does if it is not told.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
