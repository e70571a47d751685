"""`make bench`: speed, as ratios to reference implementations measured in the same run.

Absolute times vary on a shared machine. Each measurement is therefore compared with a
straightforward reference implementation, in the style of the papers' public code, on the same
samples.
"""
