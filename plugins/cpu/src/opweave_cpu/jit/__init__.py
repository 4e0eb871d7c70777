"""Machine code for chains of pointwise steps and for operations on rows, by LLVM, where llvmlite is installed.

NumPy makes a pass over memory for each elementary operation; compiled code makes one for all. Formulas are Python
functions of vectors (`vectors`, `functions`, `formulas`), from which `writer` makes a function in LLVM IR, and
`compiler` machine code. Only `compiler`, `stream` and `supported` may be imported without llvmlite.
"""
