"""
What sqlguard costs, as ratios to doing the same without it. `python -m benchmarks`, or `make bench`.

A single time says something about the machine; a ratio of two times taken one right after the other says something
about the code. So every figure is the median of ratios of paired slices, whose order alternates (`measure`).
"""
