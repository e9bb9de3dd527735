"""A run's data as Parquet datasets, for any program that reads Parquet: `calls`, `upstream`, `rollouts`, `samples`, `rescores`,
`ratings`.

schema.py      the columns, with their texts, and the version
calls.py       Call <-> row, prompts as differences
upstream.py    calls that another model answered, as text
rollouts.py    RolloutRecord <-> row, with what is known of where it came from
location.py    where the files are: a directory or any pyarrow file system
rescores.py    later verdicts
ratings.py     a teacher's log-probabilities
writer.py      append-only: whole files under new names
reader.py      StoreReader: calls, records, tables, Ray Datasets
"""
