# SPDX-License-Identifier: Apache-2.0
"""Tokenizers, and the kinds of encoders that families share."""
