# SPDX-License-Identifier: Apache-2.0
"""Makes `src/wanjax/selftest/golden.json` anew, from what this machine computes: `python -m tests.support.golden`.

It is to be run where a change of the numbers was meant, on a CPU, after the tests of parity passed.
"""

import json

from wanjax.selftest.checks import GOLDEN, compute_golden

if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(compute_golden(), indent=1) + "\n")
