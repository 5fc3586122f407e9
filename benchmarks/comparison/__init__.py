# SPDX-License-Identifier: Apache-2.0
"""The stages of each family in both libraries, for `benchmarks.against_diffusers`."""
