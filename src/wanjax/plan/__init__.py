# SPDX-License-Identifier: Apache-2.0
"""Plans: the making of a video, or a step of training, traced and priced."""
