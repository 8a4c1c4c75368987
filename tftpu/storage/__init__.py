"""Files on local disk and in buckets."""
