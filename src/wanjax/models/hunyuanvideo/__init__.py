# SPDX-License-Identifier: Apache-2.0
"""HunyuanVideo's networks, from version 1.5 on."""
