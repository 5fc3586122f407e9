# SPDX-License-Identifier: Apache-2.0
"""Price programs on TPUs that are absent: compile them for the chip, then read memory and time from the result.

    x = jax.ShapeDtypeStruct((8192, 8192), "bfloat16")
    print(Pricer().price(jnp.matmul, x, x, chip="v6e-1").seconds)

prices any JAX function (`pricer.py`). A price takes three steps: trace the function on `chips.abstract_mesh`, compile
it with `compile.compile_program`, and price each of its operations with `costs.price_compiled`. This package is not
specific to video models. The names of scopes and kernels are arguments of `Pricer`.

The compiler is libtpu (the extra `plan`), which needs no chip. It runs in separate processes, which receive programs as
bytes. The dumps of the compiler are deleted after they are read. Prices are estimates, not measurements:
docs/performance.md compares the two.
"""
