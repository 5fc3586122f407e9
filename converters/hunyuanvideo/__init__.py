# SPDX-License-Identifier: Apache-2.0
"""Conversion rules for HunyuanVideo."""
