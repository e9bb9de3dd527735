"""A run's data as three Parquet datasets, for any program that reads Parquet: `calls`, `rollouts`, `samples`.

schema.py      the columns, with their texts, and the version
calls.py       Call <-> row, prompts as differences
rollouts.py    RolloutRecord <-> row, with what is known of where it came from
location.py    where the files are: a directory or any pyarrow file system
writer.py      append-only: whole files under new names
reader.py      StoreReader: calls, records, tables, Ray Datasets
"""
