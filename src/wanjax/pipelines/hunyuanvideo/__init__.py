# SPDX-License-Identifier: Apache-2.0
"""HunyuanVideo-1.5: https://github.com/Tencent-Hunyuan/HunyuanVideo-1.5, text and image to video."""
