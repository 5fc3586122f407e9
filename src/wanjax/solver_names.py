# SPDX-License-Identifier: Apache-2.0
"""Names that ComfyUI and diffusers give to solvers, and the names of the same or similar solvers in wanjax.

This module does not import JAX, so that an error appears at once.
"""

COMFY_SOLVERS = {
    "uni_pc": "unipc",
    "uni_pc_bh2": "unipc",
    "euler": "euler",
    "dpmpp_2m": "dpm++",
    "lcm": "consistency",
}
OTHER_NAMES = COMFY_SOLVERS | {
    "UniPCMultistepScheduler": "unipc",
    "DPMSolverMultistepScheduler": "dpm++",
    "FlowMatchEulerDiscreteScheduler": "euler",
    "FlowMatchLCMScheduler": "consistency",
    "CogVideoXDDIMScheduler": "ddim",
    "CogVideoXDPMScheduler": "dpm",
}
