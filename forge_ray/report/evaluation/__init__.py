"""What an evaluation says: how often tasks are solved, how sure that is, and whether one evaluation is better than another.

`passes` has the estimates from counts per task, `comparison` the paired test of two evaluations, `summary`
puts them together per harness and kind of task. All are functions of `{task: [passed, …]}`.
"""
