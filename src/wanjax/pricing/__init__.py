# SPDX-License-Identifier: Apache-2.0
"""Prices of programs on TPUs that need not be present: compile for a described chip, then read memory and time.

    x = jax.ShapeDtypeStruct((8192, 8192), "bfloat16")
    print(Pricer().price(jnp.matmul, x, x, chip="v6e-1").seconds)

prices any function of JAX (`priced.py`). In parts: `chips.described` makes a mesh of chips that need not be present, on
which programs are traced; `compile.compile_program` compiles one, and `costs.price_compiled` prices each of its
operations. Nothing here knows what the programs are for: a `Pricer` is told the names of kernels and scopes.

The compiler is libtpu's own (the extra `plan`), which needs no chip. It runs in processes of its own, which are given
bytes, and its dumps are deleted once they are read. Prices are estimates, not measurements: docs/performance.md
compares the two.
"""
