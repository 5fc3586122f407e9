# SPDX-License-Identifier: Apache-2.0
"""Plans: estimate the memory and the time of a video or of a training step, without running it."""
