"""Loads Parquet files from a bucket into a BigQuery table, by a job that runs only once.

The job's name is a hash of the files and the table, so a repeated command finds the first job:
BigQuery never runs two jobs with the same name. If that job failed, a new one is started.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from tftpu.errors import UserError
from tftpu.input_pipelines.datasets import bigquery_clients as clients

MOST = 10_000  # maximum number of files that BigQuery loads in one job
_ATTEMPTS = 100


def load(uris: Sequence[str], table: str, identity: str) -> str:
    """Loads files into an empty table, unless they were already loaded; returns the job's name.

    Args:
        uris: gs://BUCKET/NAME of each file.
        table: project.dataset.table; created if it does not exist.
        identity: a string that changes with the content of the files.

    Raises:
        UserError: the table has other rows, or BigQuery rejects the request or fails to load.
    """
    from google.api_core import exceptions
    from google.cloud import bigquery

    lists = bigquery.ParquetOptions()
    lists.enable_list_inference = True  # without it, BigQuery reads a list as a record of records
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
    """Waits for the end of an earlier job, and returns whether it failed."""
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
