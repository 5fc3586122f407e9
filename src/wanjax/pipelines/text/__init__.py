# SPDX-License-Identifier: Apache-2.0
"""Tokenizers, and the programs of text encoders."""
