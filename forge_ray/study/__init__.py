"""Studies: several runs of one config that are compared in one table.

A study is a directory of *cells*. Each cell is a command of `forge-ray` in a process of its own, with one file that exists once it is
done: so a study that was interrupted goes on where it was, and a cell that was cut short is resumed. `cells` says what a cell's command
is, `command` runs one, `study` keeps the directory; `ablation` and `transfer` say which cells there are and what their table is.
"""
