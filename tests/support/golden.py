# SPDX-License-Identifier: Apache-2.0
"""Writes `src/wanjax/selftest/golden.json` from what this machine computes: `python -m tests.support.golden`.

Run it on a CPU after an intended change of the numbers, when the tests of parity pass.
"""

import json

from wanjax.selftest.checks import GOLDEN, compute_golden

if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(compute_golden(), indent=1) + "\n")
