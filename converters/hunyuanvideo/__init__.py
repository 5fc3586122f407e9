# SPDX-License-Identifier: Apache-2.0
"""Conversion tables of HunyuanVideo."""
