"""GPU kernels in Triton for the operations of `common.engine.backend`. Each is tested against torch's implementation.

On a machine without a GPU, tests run them in Triton's interpreter (`TRITON_INTERPRET=1`, set before this is imported).
Parameters in capitals are constants for which a kernel is compiled.
"""

import os

# Make a multiplication and an addition one instruction, whatever the version of Triton does by default.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
