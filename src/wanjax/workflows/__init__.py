# SPDX-License-Identifier: Apache-2.0
"""Read workflows of ComfyUI as requests. Nodes are data: no node runs."""
