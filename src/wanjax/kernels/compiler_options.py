# SPDX-License-Identifier: Apache-2.0
"""XLA options for each kind of program, and named sets of options. The options are for the argument `compiler_options`
of `jax.jit`.

The set `safe` has options that are in wide use. The set `fast` adds options that make programs faster by the compiler's
own estimate, but that were not yet used on a chip. With `fast`, an autoencoder takes longer to compile.
docs/performance.md has the estimates for both sets. The sets differ only on TPUs.

XLA rejects options of other platforms. Functions that return options therefore take the target of the program as an
argument. None means the current target. `save_option_set` and `saved_option_set` store and return the set that is
faster on this machine.
"""

import jax

from wanjax.errors import WanjaxError
from wanjax.kernels.target import Target, target
from wanjax.sharding import device_platform
from wanjax.stores.results import ResultCache

SAFE_SET, FAST_SET = OPTION_SETS = ("safe", "fast")
FASTER_SET_KIND = "compiler"  # the kind of results under which `ResultCache` stores the faster set
XLA_LEVEL_O1, XLA_LEVEL_O2 = 19, 29  # XLA's numbers for its optimization levels; O2 is the default
KINDS_WITHOUT_SPARSE_CORES = ("TPU v5 lite", "TPU v5e")
LARGE_VMEM_KINDS = ("TPU v6 lite", "TPU v6e")
SPARSE_CORE_OPTIONS = {
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": "true",
    "xla_tpu_enable_sparse_core_collective_offload_dense_all_to_all": "true",
    "xla_tpu_use_tc_device_shape_on_sc": "true",
}
VMEM_LIMIT_OPTION = "xla_tpu_scoped_vmem_limit_kib"  # VMEM that one operation may use
SAFE_VMEM_KIB, FAST_VMEM_KIB = 64 << 10, 96 << 10  # of v6e's 128 MiB


def scan_options(program_target: Target | None = None) -> dict[str, str]:
    """Return the options of a program that scans over the blocks of a network.

    On CPUs, XLA would cast the half-precision weights of all blocks to float32 before the loop, which needs three times
    as much memory. An option makes XLA cast one block at a time. On TPUs, options make all-to-alls and all-gathers
    asynchronous, so that they overlap with other work. Ring attention sends keys, values and the matrices of a block at
    the same time. For this, an option allows more than the five concurrent permutes that are XLA's default.
    """
    options = {
        "cpu": {"xla_disable_hlo_passes": "while-loop-invariant-code-motion"},
        "tpu": {
            "xla_tpu_enable_async_all_to_all": "true",
            "xla_enable_async_all_gather": "true",
            "xla_max_concurrent_async_collective_permutes": "16",
        },
    }
    return options.get((program_target or target()).platform, {})


def random_options(program_target: Target | None = None) -> dict[str, str]:
    """Return the options of a program that draws random numbers. Such a program runs only once for a video.

    On CPUs, XLA's default optimization level takes four times as long to compile the generator, and the program is no
    faster.
    """
    return (
        {"xla_backend_optimization_level": "2"}
        if (program_target or target()).platform == "cpu"
        else scan_options(program_target)
    )


def matmul_options(program_target: Target | None = None) -> dict[str, str]:
    """Return the options of a program that scans over blocks and spends its time in matrix products.

    On v6e one operation may take half of the VMEM, which allows larger tiles.
    """
    program_target = program_target or target()
    return scan_options(program_target) | (
        {VMEM_LIMIT_OPTION: str(SAFE_VMEM_KIB)} if program_target.device_kind in LARGE_VMEM_KINDS else {}
    )


def fast_matmul_options(program_target: Target | None = None) -> dict[str, str]:
    """Return the options that the set `fast` adds to `matmul_options`.

    TPUs other than v5e offload collectives to their SparseCores, and on v6e one operation may take three quarters of
    the VMEM.
    """
    program_target = program_target or target()
    options = (
        dict(SPARSE_CORE_OPTIONS)
        if program_target.platform == "tpu" and program_target.device_kind not in KINDS_WITHOUT_SPARSE_CORES
        else {}
    )
    return options | ({VMEM_LIMIT_OPTION: str(FAST_VMEM_KIB)} if program_target.device_kind in LARGE_VMEM_KINDS else {})


def offload_options(program_target: Target | None = None) -> dict[str, bool]:
    """Return the options of a program whose blocks are copied from the host's memory.

    By default, XLA starts such a copy late on a card, just before the copy's result is needed. On TPUs, XLA starts it
    as early as possible.
    """
    is_gpu = (program_target or target()).platform == "gpu"
    return {"xla_gpu_enable_latency_hiding_scheduler": True} if is_gpu else {}


def conv_options(program_target: Target | None = None) -> dict[str, int]:
    """Return the options of a program that spends its time in convolutions.

    For TPUs, XLA's default optimization level searches for the best tiles of each convolution. The search takes four
    fifths of the compile time and saves a quarter of the run time (docs/performance.md). Only the set `fast` has this
    search.
    """
    return {"optimization_level": XLA_LEVEL_O1} if (program_target or target()).platform == "tpu" else {}


def fast_conv_options(program_target: Target | None = None) -> dict[str, int]:
    """Return the option that the set `fast` adds to `conv_options`: XLA's default optimization level."""
    return {"optimization_level": XLA_LEVEL_O2} if (program_target or target()).platform == "tpu" else {}


def check_option_set(name: str) -> None:
    """Raise WanjaxError unless a set of options has this name."""
    if name not in OPTION_SETS:
        raise WanjaxError(f"no set of compiler options is named {name!r}: there are {' and '.join(OPTION_SETS)}")


def saved_option_set() -> str:
    """Return the name of the set that `save_option_set` stored for these devices and this compiler, or `safe` if none
    is stored."""
    option_set = ResultCache().get(FASTER_SET_KIND, _machine_key())
    return option_set if option_set in OPTION_SETS else SAFE_SET


def save_option_set(option_set: str) -> None:
    """Store the name of the set that is faster on these devices."""
    ResultCache().put(FASTER_SET_KIND, _machine_key(), option_set)


def _machine_key() -> dict[str, str]:
    """Return the number and the kind of the devices, and the versions of their compiler and of JAX."""
    device_platform()  # raises WanjaxError if there are no devices
    devices = jax.devices()
    kind = f"{len(devices)} x {devices[0].device_kind}"
    return {"devices": kind, "platform": devices[0].client.platform_version, "jax": jax.__version__}
