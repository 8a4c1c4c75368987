"""Parquet files in a bucket as rows of a BigQuery table: one load job, which runs once.

The job's name follows from the files and the table, so that a command given again finds the job of
the first time: BigQuery runs no two jobs of one name. One that failed is tried again by another.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from tftpu.errors import UserError
from tftpu.input_pipelines.datasets import bigquery_clients as clients

MOST = 10_000  # files of one job
_ATTEMPTS = 100


def load(uris: Sequence[str], table: str, identity: str) -> str:
    """Loads files into a table that has no rows yet, unless that was done; returns the job's name.

    Args:
        uris: gs://BUCKET/NAME of each file.
        table: project.dataset.table; created if it does not exist.
        identity: a text that is another one for other files.

    Raises:
        UserError: the table has rows of something else, or there is no permission.
    """
    from google.api_core import exceptions
    from google.cloud import bigquery

    lists = bigquery.ParquetOptions()
    lists.enable_list_inference = True  # else a list becomes a record of records
    options = bigquery.LoadJobConfig(
        parquet_options=lists,
        source_format=bigquery.SourceFormat.PARQUET,
        write_disposition=bigquery.WriteDisposition.WRITE_EMPTY,
    )
    key = hashlib.blake2b(json.dumps([table, identity]).encode(), digest_size=16).hexdigest()
    client = clients.connect().tables
    with clients.explained(table, "write"):
        place = client.get_dataset(table.rpartition(".")[0]).location
    for attempt in range(_ATTEMPTS):
        name = f"tftpu-predict-{key}-{attempt}"
        with clients.explained(table, "write"):
            try:
                job = client.load_table_from_uri(
                    list(uris), table, name, location=place, job_config=options
                )
            except exceptions.Conflict:
                job = client.get_job(name, location=place)
                if _has_failed(job):
                    continue
            _wait_for_job(job, table)
        return name
    raise UserError(f"Loading into {table} has failed {_ATTEMPTS} times: see its jobs in BigQuery.")


def _has_failed(job: Any) -> bool:
    """Returns whether a job of an earlier time has failed, once it is over."""
    from google.api_core import exceptions

    try:
        job.result()
    except exceptions.GoogleAPICallError:
        return True
    return False


def _wait_for_job(job: Any, table: str) -> None:
    from google.api_core import exceptions

    try:
        job.result()
    except exceptions.Conflict as error:
        raise UserError(
            f"{table} has rows already: name a new table, or empty that one."
        ) from error
