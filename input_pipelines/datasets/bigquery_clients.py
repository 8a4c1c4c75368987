"""Google's clients for BigQuery, which are made once, and clear messages for their errors."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from tftpu import installation
from tftpu.errors import UserError


@dataclasses.dataclass(frozen=True)
class Clients:
    """Google's clients: one for tables and queries, one for rows."""

    tables: Any
    rows: Any


@functools.cache
def connect() -> Clients:
    """Returns the clients, with the credentials and the project of this machine.

    Raises:
        UserError: the clients are not installed, or there is no project.
    """
    try:
        from google.cloud import bigquery
        from google.cloud.bigquery_storage_v1 import BigQueryReadClient
    except ImportError as error:
        raise UserError(
            f"The clients of BigQuery are not installed: run `{installation.command('bigquery')}`."
        ) from error
    try:
        return Clients(bigquery.Client(), BigQueryReadClient())
    except OSError as error:  # the client raises no more specific error for a missing project
        raise UserError(
            "BigQuery needs a Google Cloud project to bill: set GOOGLE_CLOUD_PROJECT."
        ) from error


@contextlib.contextmanager
def explained(what: str, action: str = "read") -> Iterator[None]:
    """Turns errors of Google's clients in the `with` block into `UserError`s.

    Args:
        what: the table or query.
        action: "read" or "write".
    """
    from google.api_core import exceptions
    from google.auth import exceptions as auth_exceptions

    login = "run `gcloud auth application-default login`"
    try:
        yield
    except auth_exceptions.GoogleAuthError:
        raise UserError(f"There are no valid Google Cloud credentials: {login}.") from None
    except exceptions.NotFound:
        raise UserError(f"BigQuery has no {what}.") from None
    except (exceptions.Forbidden, exceptions.Unauthorized):
        roles = "dataViewer and roles/bigquery.readSessionUser"
        roles = roles if action == "read" else "dataEditor and roles/bigquery.jobUser"
        raise UserError(
            f"BigQuery does not let you {action} {what}: ask its owner for roles/bigquery.{roles}, "
            f"or {login}."
        ) from None
    except exceptions.GoogleAPICallError as error:
        raise UserError(f"BigQuery fails to {action} {what}: {error.message}") from None
    except (exceptions.RetryError, ConnectionError):
        raise UserError(f"BigQuery does not answer about {what}. Is the network up?") from None
