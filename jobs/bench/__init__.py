"""`make bench`: how fast, as ratios of things run side by side.

A time by itself means nothing on a shared machine, so each figure of ours stands beside that of a
straightforward reference in the style of the papers' public code, on the same samples, in the same
run.
"""
