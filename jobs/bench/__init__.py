"""`make bench`: speed, as ratios to reference implementations measured in the same run.

A time alone means little on a shared machine. Each figure is therefore compared with a
straightforward reference, in the style of the papers' public code, on the same samples.
"""
