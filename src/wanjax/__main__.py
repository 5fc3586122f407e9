# SPDX-License-Identifier: Apache-2.0
"""`python -m wanjax` is `wanjax`."""

from wanjax.cli import main

main(prog_name="wanjax")
