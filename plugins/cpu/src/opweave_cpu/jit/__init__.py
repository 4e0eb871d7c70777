"""Machine code for chains of pointwise steps and for operations on rows, by LLVM, where llvmlite is installed.

NumPy makes a pass over memory for each elementary operation; these make one for all. Formulas are Python functions of
vectors (`vectors`, `functions`, `formulas`), which `writer` makes into the text of a function, and `compiler` into
machine code. Only `compiler` and `stream` may be imported without llvmlite.
"""
