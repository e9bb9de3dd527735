"""What a person sees of a run: live progress, metrics, statistics, the summary, the HTML report, pictures, printed trajectories.

Everything but the live progress is a function of the files of one run directory, so that a report can be made again later.
"""
