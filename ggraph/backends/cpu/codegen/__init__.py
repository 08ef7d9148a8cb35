"""How kernels are written, in Python that emits LLVM IR, and become machine code that is kept."""
